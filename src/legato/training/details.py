"""Per-token details of a step's first rollouts, for the stored rollouts of a run.

An update leaves its tables on the device; they are fetched once, after the last update of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.outcome import Outcome
from legato.core.signals import Signals
from legato.core.world import World
from legato.training.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Coefficients and log-ratios at the tokens of an update's rows: [rows, T], on the device."""

    rows: Tensor
    """On the host."""
    coefficients: Tensor
    log_ratio: Tensor | None
    """New - old; None where the objective has no old policy."""

    @classmethod
    def from_outcome(cls, rows: Tensor, signals: Signals, outcome: Outcome) -> "Marks":
        log_ratio = None if signals.old_logprobs is None else signals.log_ratio("old").detach()
        return cls(rows=rows, coefficients=outcome.coefficients.detach(), log_ratio=log_ratio)


def spread_marks(marks: Marks | None, tables: Tables, world: World) -> Marks | None:
    """The marks of all rows of an update, from the marks of each rank; None if no rank has any."""
    if world.size == 1:
        return marks
    rows, width = len(tables.batch), tables.texts.tokens.shape[1]
    has_ratio = world.agree(int(marks is not None and marks.log_ratio is not None))
    known = torch.zeros(rows, dtype=torch.bool)
    tables_of_rank = torch.zeros(2, rows, width, dtype=tables.sampler_logprobs.dtype, device=tables.device)
    if marks is not None:
        known[marks.rows] = True
        place = marks.rows.to(tables.device)
        for table, values in zip(tables_of_rank, (marks.coefficients, marks.log_ratio), strict=True):
            if values is not None:
                table[place, : values.shape[1]] = values.to(table.dtype)
    known = world.sum_table(known)
    chosen = known.nonzero().squeeze(1)
    coefficients, log_ratio = world.sum_table(tables_of_rank)[:, chosen.to(tables.device)]
    return Marks(rows=chosen, coefficients=coefficients, log_ratio=log_ratio if has_ratio else None) if len(chosen) else None


def details(tables: Tables, marks: Sequence[tuple[int, Marks]], tokenizer: Any, most: int) -> tuple[dict[str, Any], ...]:
    """One dictionary per rollout with its advantage; those within the first `most` tokens of the step also have "details".

    `marks` are (number of the update in the step, its marks). A row trained several times shows the last update. The rows of
    a rollout stand end to end.
    """
    rows = _details_of_rows(tables, marks, tokenizer, most)
    weights, start, whole = tables.texts.mask.sum(1).tolist(), 0, list[dict[str, Any]]()
    several = bool((tables.batch.turn > 0).any())
    for count in tables.batch.pieces or [1] * len(rows):
        one = rows[start] if count == 1 else _join(rows[start : start + count], weights[start : start + count])
        whole.append(one | _by_turn(tables, range(start, start + count)) if several else one)
        start += count
    return tuple(whole)


def _by_turn(tables: Tables, rows: range) -> dict[str, Any]:
    """The mean advantage of each turn of a rollout that lies in these rows."""
    assert tables.advantages is not None
    sums: dict[int, list[float]] = {}
    for row in rows:
        advantages = tables.advantages[row].cpu()
        turns = tables.batch.turn[row].tolist()
        for place in tables.texts.mask[row].nonzero().flatten().tolist():
            sums.setdefault(turns[place], []).append(float(advantages[place if len(advantages) > 1 else 0]))
    return {"turn_advantages": [_short(sum(sums[turn]) / len(sums[turn])) for turn in sorted(sums)]}


def _join(rows: Sequence[dict[str, Any]], weights: Sequence[int]) -> dict[str, Any]:
    """The dictionary of a rollout from those of its rows; lists are put end to end."""
    total = sum(row["advantage"] * weight for row, weight in zip(rows, weights, strict=True))
    joined: dict[str, Any] = {"advantage": _short(total / max(1, sum(weights)))}
    detailed = [row["details"] for row in rows if "details" in row]
    if detailed:
        joined["details"] = {
            name: None if any(each[name] is None for each in detailed) else [v for each in detailed for v in each[name]]
            for name in detailed[0]
            if name != "update"
        } | {"update": detailed[-1]["update"]}
    return joined


def _details_of_rows(tables: Tables, marks: Sequence[tuple[int, Marks]], tokenizer: Any, most: int) -> list[dict[str, Any]]:
    assert tables.advantages is not None
    batch, advantages = tables.batch, tables.advantages.cpu()
    texts = batch.texts
    lengths = texts.lengths.tolist()
    shown = [max(0, min(length, most - before)) for length, before in zip(lengths, _tokens_before(lengths), strict=True)]
    detailed = sum(count > 0 for count in shown)
    rows: list[dict[str, Any]] = [
        {"advantage": _short(_mean(advantages[row], texts.mask[row]))} for row in range(len(lengths))
    ]
    by_row = _fetch_marks(marks, detailed)
    for row in range(detailed):
        window = slice(0, shown[row])
        inside = texts.mask[row, window]
        index, coefficients, log_ratio = by_row.get(row, (None, None, None))
        rows[row]["details"] = {
            "pieces": pieces(texts.tokens[row, window].tolist(), tokenizer),
            "logprobs": _numbers(batch.sampler_logprobs[row, window], inside),
            "log_ratios": None if log_ratio is None else _numbers(log_ratio[window], inside),
            "advantages": None if advantages.shape[1] == 1 else _numbers(advantages[row, window], inside),
            "coefficients": None if coefficients is None else _numbers(coefficients[window], inside),
            "update": index,
        }
        if batch.turn_rewards is not None or bool((batch.turn > 0).any()):
            rows[row]["details"]["turns"] = batch.turn[row, window].tolist()
    return rows


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token. If several tokens make one character, the last has it and the others are empty."""
    alone = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(tokens)}
    # Tokenizers like SentencePiece drop the space in front of a token that is decoded alone.
    spaced = {token for token in alone if str(tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")}
    texts, pending = list[str](), list[int]()
    for token in tokens:
        pending.append(token)
        text = alone[token] if len(pending) == 1 else tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(f" {text}" if pending[0] in spaced and not text.startswith(" ") else text)
        pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts


def _tokens_before(lengths: Sequence[int]) -> list[int]:
    """For each row, the number of tokens in the rows before it."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


def _fetch_marks(marks: Sequence[tuple[int, Marks]], count: int) -> dict[int, tuple[int, Tensor, Tensor | None]]:
    """For each of the first `count` rows: its last update, and its coefficients and log-ratios on the host."""
    by_row = {}
    for index, mark in marks:
        chosen = (mark.rows < count).nonzero().squeeze(1)
        place = chosen.to(mark.coefficients.device)
        coefficients = mark.coefficients[place].cpu()
        log_ratio = None if mark.log_ratio is None else mark.log_ratio[place].cpu()
        for number, row in enumerate(mark.rows[chosen].tolist()):
            by_row[row] = (index, coefficients[number], None if log_ratio is None else log_ratio[number])
    return by_row


def _mean(values: Tensor, inside: Tensor) -> float:
    return float(values[0] if len(values) == 1 else values[inside[: len(values)]].mean())


def _numbers(values: Tensor, inside: Tensor) -> list[float | None]:
    """The values as numbers, None where the policy did not write the token. Values are padded to the length of `inside`."""
    whole = torch.nn.functional.pad(values, (0, len(inside) - len(values))).tolist()
    return [_short(value) if own else None for value, own in zip(whole, inside.tolist(), strict=True)]


def _short(value: float) -> float:
    """The value rounded to five digits, so that a file of many tokens stays small."""
    return float(f"{value:.5g}")
