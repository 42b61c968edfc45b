"""Log-probs of given texts under the policy, with the likeliest tokens in each place: for servers and probes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.policy.policy import Policy

TOKENS_AT_ONCE = 16384
"""Token budget of one forward pass, padding included. A longer text is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores:
    """Scores of all tokens of a text but the first, which nothing predicts. Tensors are on the host."""

    logprobs: Tensor
    """[T - 1] float32."""
    ranks: Tensor
    """[T - 1]: 1 for the likeliest token of the vocabulary."""
    top: Tensor
    """[T - 1, count] token ids, the likeliest first."""
    top_logprobs: Tensor
    """[T - 1, count] float32."""


def score_texts(
    policy: Policy, texts: Sequence[Tensor], temperatures: Sequence[float] | None = None, count: int = 0
) -> list[TextScores]:
    """The scores of each text [T], at its temperature or at 1, with the `count` likeliest tokens in each place."""
    temperatures = [1.0] * len(texts) if temperatures is None else temperatures
    scores: dict[int, TextScores] = {}
    for places in _batches([len(text) for text in texts]):
        batch = [(texts[place], temperatures[place]) for place in places]
        with policy.serving():
            result = policy.score_with_top(_table(batch), torch.arange(len(batch)), count)
        start = 0
        for place, length in zip(places, result.counts, strict=True):
            here = slice(start, start + length)
            scores[place] = TextScores(
                logprobs=result.logprobs[here].float(),
                ranks=result.ranks[here],
                top=result.top[here],
                top_logprobs=result.top_logprobs[here].float(),
            )
            start += length
    nothing = torch.zeros(0)
    empty = TextScores(logprobs=nothing, ranks=nothing.long(), top=nothing.long(), top_logprobs=nothing)
    return [scores.get(place, empty) for place in range(len(texts))]


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts with at least two tokens, in batches of similar length within the token budget."""
    batch: list[int] = []
    for place in sorted((place for place, length in enumerate(lengths) if length > 1), key=lambda place: lengths[place]):
        if batch and (len(batch) + 1) * lengths[place] > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _table(batch: Sequence[tuple[Tensor, float]]) -> Texts:
    """Texts as rows whose prompt is the first token."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([text[1:] for text, _ in batch], batch_first=True)
    lengths = torch.tensor([len(text) - 1 for text, _ in batch])
    return Texts(
        prompts=torch.stack([text[:1] for text, _ in batch]),
        prompt_lengths=torch.ones(len(batch), dtype=torch.int64),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=torch.arange(len(batch)),
        temperature=torch.tensor([temperature for _, temperature in batch]),
    )
