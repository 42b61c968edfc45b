"""Log-probs and entropies of sampled tokens from logits, in float32 or better.

Logits are not shifted here: `packs.py` reads them at the token before the one they predict.

    logprob = z_y / tau - lse(z / tau)        entropy = lse(z / tau) - sum_v p_v z_v / tau
    d logprob / d z_v = (1[v = y] - p_v) / tau
    d entropy / d z_v = -p_v (log p_v + entropy) / tau
The backward writes its result into the memory of the scaled logits, which nothing else reads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        inverse = temperature.to(exact).reciprocal().unsqueeze(1)
        scaled = logits.to(exact) * inverse
        normaliser = scaled.logsumexp(1, keepdim=True)
        scaled -= normaliser
        logprobs = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
        entropy = torch.zeros_like(logprobs)
        if with_entropy:
            # p log p is 0 where p is 0, also where log p is minus infinity.
            entropy = -(scaled.exp() * scaled.clamp(min=torch.finfo(exact).min)).sum(1)
        ctx.save_for_backward(scaled, targets, inverse, entropy)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        scaled, targets, inverse, entropy = ctx.saved_tensors
        to_logprobs, to_entropy = gradients
        to_logprobs = torch.zeros_like(entropy) if to_logprobs is None else to_logprobs
        factor = -to_logprobs.unsqueeze(1)
        if to_entropy is not None:
            finite = scaled.clamp(min=torch.finfo(scaled.dtype).min)
            to_logits = (factor - to_entropy.unsqueeze(1) * (finite + entropy.unsqueeze(1))) * scaled.exp()
        else:
            to_logits = scaled.exp_().mul_(factor)
        to_logits.scatter_add_(1, targets.unsqueeze(1), to_logprobs.unsqueeze(1))
        return to_logits.mul_(inverse).to(ctx.dtype), None, None, None


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """[K] log-probs of `targets` and entropies (0 unless `with_entropy`) of softmax(logits / temperature), `logits` [K, V].

    Only one backward per forward: it overwrites the saved logits.
    """
    both: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets, temperature, with_entropy)  # type: ignore[no-untyped-call]
    return both
