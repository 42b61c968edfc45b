"""From logits to a token: temperature, truncation, and the log-probs that training needs of the choice."""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.fields import integer, number
from legato.core.settings import settings
from legato.errors import InputError

HIGHEST_TEMPERATURE = 100.0
"""Above it every token of a vocabulary is about as likely as any other."""
LOWEST_TEMPERATURE = 1e-4
"""Below it logits that are divided by the temperature lose their digits, and in the end overflow. 0 is greedy."""


@settings()
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy and for evaluation only: no ratio can be taken to it."""

    temperature: float = number(
        default=1.0, says="The temperature of sampling and of all log-probs.", minimum=0.0, maximum=HIGHEST_TEMPERATURE
    )
    top_p: float = number(
        default=1.0,
        says="Keeps the likeliest tokens that hold this probability together; 1: all.",
        above=0.0,
        maximum=1.0,
    )
    top_k: int = integer(default=0, says="Keeps this many tokens; 0: all.", minimum=0)
    min_p: float = number(
        default=0.0,
        says="Keeps tokens at least this likely, relative to the likeliest; 0: all.",
        minimum=0.0,
        below=1.0,
    )

    def check(self) -> None:
        """InputError for a temperature that is neither 0 nor large enough to divide by."""
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise InputError(
                f"temperature: expected 0 (greedy) or at least {LOWEST_TEMPERATURE:g}, got {self.temperature:g}"
            )

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The sampled tokens; [n] each. Log-probs are of softmax(z / temperature) before truncation; `kept_logmass` is the
    log of the probability mass that truncation kept."""

    tokens: Tensor
    logprobs: Tensor
    kept_logmass: Tensor | None


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Choice:
    """Sample one token per row of logits [n, V] by inverting the cumulative distribution at `uniform` [n] in [0, 1)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = exact if sampling.temperature in (0.0, 1.0) else exact / sampling.temperature
    # The sum of a softmax over a long vocabulary may differ from 1 by more than rounding, so it is computed and divided out.
    probabilities = scaled.softmax(1)
    if sampling.temperature == 0:
        tokens, kept_mass = exact.argmax(1), None
        total = probabilities.sum(1)
    elif not sampling.truncates:
        tokens, total = _inverse(probabilities, uniform)
        kept_mass = None
    else:
        total = probabilities.sum(1)
        ordered, order = probabilities.sort(1, descending=True)
        places, kept_mass = _inverse(torch.where(_kept_mask(ordered, sampling), ordered, 0.0), uniform)
        tokens = _gather_columns(order, places)
    return Choice(
        tokens=tokens,
        logprobs=(_gather_columns(probabilities, tokens) / total).log().clamp(max=0.0).to(exact.dtype),
        kept_logmass=None if kept_mass is None else (kept_mass / total).log().clamp(max=0.0).to(exact.dtype),
    )


def _kept_mask(ordered: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens truncation keeps, sorted likeliest first; the likeliest always stays."""
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    if sampling.min_p > 0.0:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    if sampling.top_p < 1.0:
        # Top-p applies to the renormalised rest of the other two: the mass before a token must be below p.
        left = torch.where(keep, ordered, 0.0).double()
        keep &= left.cumsum(1) - left < sampling.top_p * left.sum(1, keepdim=True)
    keep[:, 0] = True
    return keep


def _inverse(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """[n] each: the place where the cumulative weight passes `share` of the total, and the total, in float64.

    In two levels, so that only one chunk is summed up token by token. Inside it the share is of the chunk's own tokens,
    summed in float64: every token has its weight to the last digits, however rare it is.
    """
    rows, count = weights.shape
    if count <= _CHUNK:
        up_to = weights.double().cumsum(1)
        return _first_above(up_to, share.unsqueeze(1) * up_to[:, -1:]).squeeze(1), up_to[:, -1]
    if count % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -count % _CHUNK))
    chunks = weights.reshape(rows, -1, _CHUNK)
    up_to = chunks.sum(2).double().cumsum(1)
    target = share.unsqueeze(1) * up_to[:, -1:]
    chunk = _first_above(up_to, target)
    from_zero = torch.nn.functional.pad(up_to, (1, 0))
    before = from_zero.gather(1, chunk)
    inner_share = (target - before) / (from_zero.gather(1, chunk + 1) - before)
    inside, _ = _inverse(chunks[torch.arange(rows, device=chunk.device), chunk.squeeze(1)], inner_share.squeeze(1))
    return chunk.squeeze(1) * _CHUNK + inside, up_to[:, -1]


_CHUNK = 256


def _first_above(up_to: Tensor, target: Tensor) -> Tensor:
    """[n, 1]: the first place whose cumulative probability is above the target.

    Rounding may carry the target onto the total; then it is the last place at which the total still grew.
    """
    place = torch.searchsorted(up_to, target, right=True)
    return torch.minimum(place, torch.searchsorted(up_to, up_to[:, -1:].contiguous()))


def _gather_columns(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(1, index.unsqueeze(1)).squeeze(1)
