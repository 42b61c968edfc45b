"""Rollouts from traces: an agent owned its loop, asked a server for completions, and what was sampled was recorded.

The fields are those of OpenEnv's TrainingTrace, version 1. A trace is one completion:

    node_id                 a name; traces of one episode are given in order
    prompt_token_ids        what the model read
    completion_token_ids    what it sampled
    per_token_logps         log-probs of the sampled tokens, of softmax(z / temperature)
    loss_mask               0 at tokens of the completion that are not trained on; absent: all are
    kept_logmass            not OpenEnv's: the log of the probability that top-p, top-k or min-p left; absent: 0

A prompt that begins with all tokens so far continues the row: what stands between is the environment's. Any other prompt
starts a new row of the same rollout. `legato serve` answers with these tokens and log-probs (`trace_of_answer`), so that
nothing is tokenised again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from legato.core.rollout import START_STATE, Author, Problem, Rollout, Row, StopReason
from legato.errors import InputError
from legato.rollouts.randomness import seed_of


def rollout_of_traces(
    traces: Sequence[Mapping[str, Any]],
    *,
    problem: Problem,
    rollout_id: int,
    rewards: Sequence[float] | float | None = None,
    temperature: float = 1.0,
    version: int = 0,
    stop: StopReason = StopReason.ENVIRONMENT,
    tokenizer: Any = None,
    turn_texts: Sequence[str] | None = None,
) -> Rollout:
    """The rollout of an episode from its traces, a turn each. A single reward is that of the last turn.

    With a tokenizer the rollout has texts, which rewards read; `turn_texts` are those of the turns, where they are known.
    """
    if not traces:
        raise InputError("expected at least one trace of the episode, got none")
    turns = [_read(trace, place) for place, trace in enumerate(traces)]
    rows: list[_Row] = []
    kept = any(trace.get("kept_logmass") is not None for trace in traces)
    for number, (prompt, tokens, logprobs, mask, logmass) in enumerate(turns):
        if not rows or prompt[: len(rows[-1].whole)] != rows[-1].whole:
            rows.append(_Row(prompt, kept))
        rows[-1].add(number, prompt, tokens, logprobs, mask, logmass, version)
    *earlier, last = [row.fields() for row in rows]
    texts = _texts(rows, tokenizer)
    if turn_texts is not None and tokenizer is not None:
        texts[::2] = turn_texts
    return Rollout(
        problem=problem,
        rollout_id=rollout_id,
        text=texts[-1],
        stop=stop,
        temperature=temperature,
        turn_rewards=_rewards(rewards, len(turns)),
        turn_states=(START_STATE, *(seed_of("state", rollout_id, turn) for turn in range(1, len(turns)))),
        dialogue=tuple(texts) if tokenizer is not None and len(turns) > 1 else None,
        earlier=tuple([Row(**fields) for fields in earlier]),
        **last,
    )


def trace_of_answer(answer: Mapping[str, Any], node_id: str = "") -> dict[str, Any]:
    """The trace of an answer of /v1/chat/completions that was asked for with return_token_ids and logprobs."""
    try:
        choice = answer["choices"][0]
        return {
            "node_id": node_id or str(answer.get("id", "")),
            "prompt_token_ids": list(answer["prompt_token_ids"]),
            "completion_token_ids": list(choice["token_ids"]),
            "per_token_logps": [each["logprob"] for each in choice["logprobs"]["content"]],
        }
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"expected an answer with token ids and log-probs, got one without {error}; ask for it with"
            " return_token_ids = true and logprobs = true"
        ) from None


def _read(trace: Mapping[str, Any], place: int) -> tuple[list[int], list[int], list[float], list[bool], list[float]]:
    """(prompt, tokens, log-probs, mask, log-mass) of a trace; InputError names it and the field."""
    name = f"trace {trace.get('node_id') or place!r}"

    def numbers(field: str) -> list[Any]:
        values = trace.get(field)
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise InputError(f"expected a list, got {values!r:.80} ({name}: {field})")
        return list(values)

    prompt, tokens = numbers("prompt_token_ids"), numbers("completion_token_ids")
    for field, values in (("prompt_token_ids", prompt), ("completion_token_ids", tokens)):
        if not values or not all(type(each) is int and each >= 0 for each in values):
            raise InputError(f"expected token ids, at least one, got {values!r:.80} ({name}: {field})")
    logprobs = numbers("per_token_logps")
    mask = [True] * len(tokens) if trace.get("loss_mask") is None else [bool(each) for each in numbers("loss_mask")]
    kept = [0.0] * len(tokens) if trace.get("kept_logmass") is None else numbers("kept_logmass")
    for field, count in (("per_token_logps", len(logprobs)), ("loss_mask", len(mask)), ("kept_logmass", len(kept))):
        if count != len(tokens):
            raise InputError(f"expected {len(tokens)} values, one for each sampled token, got {count} ({name}: {field})")
    wrong = [each for each, own in zip(logprobs, mask, strict=True) if own and not _is_logprob(each)]
    if wrong:
        raise InputError(f"expected finite log-probs of at most 0, got {wrong[0]!r:.80} ({name}: per_token_logps)")
    wrong = [each for each in kept if not _is_logprob(each)]
    if wrong:
        raise InputError(f"expected finite logs of probabilities, got {wrong[0]!r:.80} ({name}: kept_logmass)")
    return prompt, tokens, [float(each) if _is_logprob(each) else 0.0 for each in logprobs], mask, kept


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value <= 0


def _rewards(rewards: Sequence[float] | float | None, turns: int) -> tuple[float, ...] | None:
    if rewards is None:
        return None
    if isinstance(rewards, int | float):
        return (*(0.0,) * (turns - 1), float(rewards))
    if len(rewards) != turns:
        raise InputError(f"expected a reward for each of the {turns} traces, got {len(rewards)}")
    return tuple([float(each) for each in rewards])


class _Row:
    """A row while it grows."""

    def __init__(self, prompt: list[int], kept: bool = False) -> None:
        """`kept`: whether it has `kept_logmass`."""
        self.prompt, self.whole, self.kept = prompt, list(prompt), kept
        self.logprobs: list[float] = []
        self.logmass: list[float] = []
        self.version: list[int] = []
        self.mask: list[bool] = []
        self.turn: list[int] = []
        self.author: list[int] = []
        self.said: list[tuple[list[int], list[int]]] = []
        """For each turn, what the environment wrote before it, and the turn."""

    def add(
        self,
        turn: int,
        prompt: list[int],
        tokens: list[int],
        logprobs: list[float],
        mask: list[bool],
        logmass: list[float],
        version: int,
    ) -> None:
        """Append what the environment wrote since the last turn, and the turn."""
        between = prompt[len(self.whole) :]
        self.logmass += [0.0] * len(between) + logmass
        self.said.append((between, tokens))
        self._add(between, [0.0] * len(between), [False] * len(between), -1, -1, Author.TOOL)
        self._add(tokens, logprobs, mask, turn, version, Author.POLICY)

    def _add(
        self, tokens: list[int], logprobs: list[float], mask: list[bool], turn: int, version: int, author: Author
    ) -> None:
        self.whole += tokens
        self.logprobs += logprobs
        self.mask += mask
        self.turn += [turn if own else -1 for own in mask]
        self.version += [version if own else -1 for own in mask]
        self.author += [author.value] * len(tokens)

    def fields(self) -> dict[str, Any]:
        kept = {"kept_logmass": torch.tensor(self.logmass, dtype=torch.float32)} if self.kept else {}
        return kept | {
            "prompt_tokens": torch.tensor(self.prompt),
            "tokens": torch.tensor(self.whole[len(self.prompt) :]),
            "sampler_logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
            "version": torch.tensor(self.version),
            "mask": torch.tensor(self.mask),
            "turn": torch.tensor(self.turn),
            "author": torch.tensor(self.author),
        }


def _texts(rows: Sequence[_Row], tokenizer: Any) -> list[str]:
    """What policy and environment said in turn; [""] without a tokenizer. A new row holds no reply of its own."""
    if tokenizer is None:
        return [""]
    texts: list[str] = []
    for row in rows:
        for place, (between, tokens) in enumerate(row.said):
            if texts:
                texts.append(tokenizer.decode(between, skip_special_tokens=True) if place and between else "")
            texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts
