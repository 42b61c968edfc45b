"""From logits to a token: temperature, truncation, and the log-probs that training needs of the choice."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy and for evaluation only: no ratio can be taken to it."""

    temperature: float = 1.0
    top_p: float = 1.0
    """The smallest set of likeliest tokens that holds this much probability."""
    top_k: int = 0
    """The so many likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Tokens at least this likely beside the likeliest one."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """[n] each. Log-probs are of softmax(z / temperature) before truncation; the kept mass is what truncation left of it."""

    tokens: Tensor
    logprobs: Tensor
    kept_logmass: Tensor | None


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Choice:
    """One token per row of logits [n, V], by one number in [0, 1) per row: the inverse of the cumulative distribution."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        tokens = exact.argmax(1)
        return Choice(tokens=tokens, logprobs=_at(exact.log_softmax(1), tokens), kept_logmass=None)
    scaled = exact if sampling.temperature == 1.0 else exact / sampling.temperature
    normaliser = scaled.logsumexp(1, keepdim=True)
    if not sampling.truncates:
        # The vocabulary is long: it is read for the normaliser, once more for the probabilities, and no table is kept.
        tokens = _inverse((scaled - normaliser).exp_(), uniform)
        return Choice(tokens=tokens, logprobs=_at(scaled, tokens) - normaliser.squeeze(1), kept_logmass=None)
    logprobs = scaled - normaliser
    ordered, order = logprobs.exp().sort(1, descending=True)
    kept = torch.where(_kept(ordered, sampling), ordered, 0.0)
    tokens = _at(order, _inverse(kept, uniform))
    return Choice(tokens=tokens, logprobs=_at(logprobs, tokens), kept_logmass=kept.sum(1).log().clamp(max=0.0))


def _kept(ordered: Tensor, sampling: Sampling) -> Tensor:
    """Which of the tokens, likeliest first, stay; the likeliest always does."""
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    if sampling.min_p > 0.0:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    if sampling.top_p < 1.0:
        # Top-p speaks of what the other two left, renormalised: the mass before a token must be below p.
        left = torch.where(keep, ordered, 0.0).double()
        keep &= left.cumsum(1) - left < sampling.top_p * left.sum(1, keepdim=True)
    keep[:, 0] = True
    return keep


def _inverse(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability passes `uniform` of its total; float64, so that rare tokens count."""
    rows, count = probabilities.shape
    # In chunks, so that only one of them is summed up token by token.
    chunks = torch.nn.functional.pad(probabilities, (0, -count % _CHUNK)).reshape(rows, -1, _CHUNK)
    up_to = chunks.sum(2, dtype=torch.float64).cumsum(1)
    target = uniform.unsqueeze(1) * up_to[:, -1:]
    chunk = _reached(up_to, target)
    before = torch.where(chunk > 0, up_to.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1).double().cumsum(1) + before
    return (chunk * _CHUNK + _reached(inside, target)).squeeze(1)


_CHUNK = 256


def _reached(up_to: Tensor, target: Tensor) -> Tensor:
    """[n, 1]: the first place whose cumulative probability is above the target.

    Rounding may carry the target onto the total; then it is the last place at which the total still grew.
    """
    found = torch.searchsorted(up_to, target, right=True)
    return torch.minimum(found, torch.searchsorted(up_to, up_to[:, -1:].contiguous()))


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(1, index.unsqueeze(1)).squeeze(1)
