"""The passes over float32 logits of the head: one to find log-probs and entropies, one to turn them into their gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _statistics(logits, targets, inverse, normaliser_out, logprob_out, entropy_out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    scale = tl.load(inverse + row)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    moment = tl.zeros([], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < V, other=float("-inf")) * scale
        higher = tl.maximum(best, tl.max(z, 0))
        shrink = tl.exp(best - higher)
        each = tl.exp(z - higher)
        # sum of e^(z - m) (z - m); what is minus infinity has no part in it
        lifted = tl.sum(tl.where(each > 0, each * (z - higher), 0.0), 0)
        moment = tl.where(total > 0, (moment + total * (best - higher)) * shrink, 0.0) + lifted
        total = total * shrink + tl.sum(each, 0)
        best = higher
    normaliser = best + tl.log(total)
    chosen = tl.load(base + tl.load(targets + row)) * scale
    tl.store(normaliser_out + row, normaliser)
    tl.store(logprob_out + row, chosen - normaliser)
    # entropy = lse - E[z] = (m + log l) - (m + moment / l)
    tl.store(entropy_out + row, tl.log(total) - moment / total)


@triton.jit
def _slope(logits, targets, inverse, normaliser, entropy, towards, towards_entropy, out, V, BLOCK: tl.constexpr,
           WITH_ENTROPY: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * V + columns
    scale = tl.load(inverse + row)
    logp = tl.load(logits + place, mask=columns < V, other=float("-inf")) * scale - tl.load(normaliser + row)
    p = tl.exp(logp)
    pull = tl.load(towards + row)
    slope = tl.where(columns == tl.load(targets + row), pull, 0.0) - pull * p
    if WITH_ENTROPY:
        steer = tl.load(towards_entropy + row)
        slope -= tl.where(p > 0, steer * p * (logp + tl.load(entropy + row)), 0.0)
    tl.store(out + place, (slope * scale).to(out.dtype.element_ty), mask=columns < V)


def statistics(logits: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normaliser, log-prob of the target and entropy [K] of softmax(logits * inverse), logits [K, V] float32, read once."""
    rows, vocabulary = logits.shape
    found = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    if rows:
        _statistics[(rows,)](logits, targets, inverse, *found, vocabulary, BLOCK=4096, num_warps=8)
    return found[0], found[1], found[2]


def slope(
    logits: Tensor,
    targets: Tensor,
    inverse: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    towards: Tensor,
    towards_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[K, V] in `dtype`: the gradient at the logits for the gradients at log-probs and entropies."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    steer = towards if towards_entropy is None else towards_entropy
    if rows:
        _slope[(rows, triton.cdiv(vocabulary, 4096))](
            logits, targets, inverse, normaliser, entropy, towards.contiguous(), steer.contiguous(), out, vocabulary,
            BLOCK=4096, WITH_ENTROPY=towards_entropy is not None, num_warps=8,
        )  # fmt: skip
    return out
