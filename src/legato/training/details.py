"""What was measured at each token of a step's first rollouts, for whoever looks at them later.

An update leaves its tables where they are, on the device; they are fetched once, after the last update of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.outcome import Outcome
from legato.core.signals import Signals
from legato.training.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What an update saw at the tokens of its rows: [rows, T], on the device."""

    rows: Tensor
    """On the host."""
    coefficients: Tensor
    log_ratio: Tensor | None
    """New - old; None where the objective has no old policy."""

    @classmethod
    def of(cls, rows: Tensor, signals: Signals, outcome: Outcome) -> "Marks":
        log_ratio = None if signals.old_logprobs is None else signals.log_ratio("old").detach()
        return cls(rows=rows, coefficients=outcome.coefficients.detach(), log_ratio=log_ratio)


def details(tables: Tables, marks: Sequence[tuple[int, Marks]], tokenizer: Any, most: int) -> tuple[dict[str, Any], ...]:
    """Of every row the advantage; of the first `most` tokens of the step, in order, also what stands at each of them.

    `marks` are those of the updates with their number in the step: a row trained several times shows the last.
    """
    assert tables.advantages is not None
    batch, advantages = tables.batch, tables.advantages.cpu()
    texts = batch.texts
    lengths = texts.lengths.tolist()
    shown = [max(0, min(length, most - before)) for length, before in zip(lengths, _before(lengths), strict=True)]
    asked = sum(count > 0 for count in shown)
    found: list[dict[str, Any]] = [
        {"advantage": _short(_mean(advantages[row], texts.mask[row]))} for row in range(len(lengths))
    ]
    seen = _fetched(marks, asked)
    for row in range(asked):
        here = slice(0, shown[row])
        inside = texts.mask[row, here]
        index, coefficients, log_ratio = seen.get(row, (None, None, None))
        found[row]["details"] = {
            "pieces": pieces(texts.tokens[row, here].tolist(), tokenizer),
            "logprobs": _numbers(batch.sampler_logprobs[row, here], inside),
            "log_ratios": None if log_ratio is None else _numbers(log_ratio[here], inside),
            "advantages": None if advantages.shape[1] == 1 else _numbers(advantages[row, here], inside),
            "coefficients": None if coefficients is None else _numbers(coefficients[here], inside),
            "update": index,
        }
    return tuple(found)


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token. Where several make one character, the last of them has it and the others are empty."""
    alone = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(tokens)}
    # Tokenizers in the manner of SentencePiece drop the space in front of a token that stands alone.
    spaced = {token for token in alone if str(tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")}
    found, held = list[str](), list[int]()
    for token in tokens:
        held.append(token)
        text = alone[token] if len(held) == 1 else tokenizer.decode(held, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(held) < 4:
            found.append("")
            continue
        found.append(f" {text}" if held[0] in spaced and not text.startswith(" ") else text)
        held = []
    if held:
        found[-1] = tokenizer.decode(held, skip_special_tokens=False)
    return found


def _before(lengths: Sequence[int]) -> list[int]:
    found, total = [], 0
    for length in lengths:
        found.append(total)
        total += length
    return found


def _fetched(marks: Sequence[tuple[int, Marks]], asked: int) -> dict[int, tuple[int, Tensor, Tensor | None]]:
    """By row: the update it was last in, and its coefficients and log-ratios on the host."""
    found = {}
    for index, mark in marks:
        chosen = (mark.rows < asked).nonzero().squeeze(1)
        place = chosen.to(mark.coefficients.device)
        coefficients = mark.coefficients[place].cpu()
        log_ratio = None if mark.log_ratio is None else mark.log_ratio[place].cpu()
        for number, row in enumerate(mark.rows[chosen].tolist()):
            found[row] = (index, coefficients[number], None if log_ratio is None else log_ratio[number])
    return found


def _mean(values: Tensor, inside: Tensor) -> float:
    return float(values[0] if len(values) == 1 else values[inside[: len(values)]].mean())


def _numbers(values: Tensor, inside: Tensor) -> list[float | None]:
    """None where the policy did not write the token. Values end where the widest response ends; so do all of theirs."""
    whole = torch.nn.functional.pad(values, (0, len(inside) - len(values))).tolist()
    return [_short(value) if own else None for value, own in zip(whole, inside.tolist(), strict=True)]


def _short(value: float) -> float:
    """Five digits: a file of many tokens stays small."""
    return float(f"{value:.5g}")
