"""The scored rollouts of a step as tables: a row per rollout (or several: `Rollout.earlier`), `[B, T]` per token, padded at
the end; on the host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from legato.core.rollout import START_STATE, TRUNCATED, Group, Rollout, Routes, Row, Score, Scored
from legato.core.texts import Texts
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The texts of a step with the engine's log-probs and the rewards."""

    texts: Texts
    turn: Tensor
    version: Tensor
    sampler_logprobs: Tensor
    kept_logmass: Tensor | None
    rewards: Tensor
    """[B] float64"""
    accuracy: Tensor
    components: Mapping[str, Tensor]
    """Name -> [B] float64, sorted by name; NaN where the reward does not apply to a rollout (it returned None)."""
    truncated: Tensor
    rollout_id: Tensor
    turn_rewards: Tensor | None = None
    """[B, U] float64, a column per turn, 0 after a rollout's last turn; None if no score has turn rewards."""
    turn_states: Tensor | None = None
    """[B, U] integers: equal ids within a group are one state of the environment; None if no rollout has states."""
    routes: Routes | None = None
    """The engine's routes: prompts [G, P] flattened, then responses [B, T]; None if no rollout has any."""
    pieces: tuple[int, ...] | None = None
    """How many rows each rollout has, in order; None: one each. All columns by rollout above are repeated for each row."""

    def __len__(self) -> int:
        return len(self.texts)


def collate(groups: Sequence[Group], dtype: torch.dtype = torch.float32) -> Batch:
    """The batch of some groups. Values are checked once, here, so that an update need not wait for checks."""
    scored = [(number, member) for number, group in enumerate(groups) for member in group.members]
    members, rows = scored, list[Row | Rollout]([member.rollout for _, member in scored])
    several = max([len(member.rollout.earlier) for _, member in scored], default=0) > 0
    if several:
        members = [(number, member) for number, member in scored for _ in member.rollout.rows]
        rows = [row for _, member in scored for row in member.rollout.rows]
    rollouts = [member.rollout for _, member in members]
    scores = [member.score for _, member in members]
    prompts, places, problem = _prompts([number for number, _ in members], rows, len(groups))
    truncation = [row.kept_logmass for row in rows]
    kept_logmass = None
    if _any_present(truncation):
        masses = zip(truncation, rows, strict=True)
        kept_logmass = _table([torch.zeros_like(r.sampler_logprobs) if mass is None else mass for mass, r in masses]).to(
            dtype
        )
    mask, logprobs = (_table([getattr(row, name) for row in rows]) for name in ("mask", "sampler_logprobs"))
    _check(rollouts, mask, logprobs)
    return Batch(
        texts=Texts(
            prompts=_table(prompts),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            tokens=_table([row.tokens for row in rows]),
            lengths=torch.tensor([len(row.tokens) for row in rows]),
            mask=mask,
            group=torch.tensor(places),
            temperature=torch.tensor([rollout.temperature for rollout in rollouts], dtype=dtype),
            problem=problem,
        ),
        turn=_table([row.turn for row in rows], padding=-1),
        version=_table([row.version for row in rows]),
        sampler_logprobs=logprobs.to(dtype),
        kept_logmass=kept_logmass,
        rewards=torch.tensor([score.reward for score in scores], dtype=torch.float64),
        accuracy=torch.tensor([score.accuracy for score in scores], dtype=torch.float64),
        components=_components(scores),
        truncated=torch.tensor([rollout.stop in TRUNCATED for rollout in rollouts]),
        rollout_id=torch.tensor([rollout.rollout_id for rollout in rollouts]),
        turn_rewards=_turn_rewards([member for _, member in members]),
        turn_states=_turn_states(rollouts),
        routes=_routes(rows, places, prompts, rollouts),
        pieces=tuple([len(member.rollout.rows) for _, member in scored]) if several else None,
    )


def _prompts(
    numbers: Sequence[int], rows: Sequence[Row | Rollout], groups: int
) -> tuple[list[Tensor], list[int], Tensor | None]:
    """The prompts, the prompt of each row, and the problem of each prompt (None: one prompt for each problem).

    The first prompt of a problem is that of its first row. Rows with another prompt have one of their own.
    """
    prompts: dict[int, Tensor] = {}
    places, more, owners = list[int](), list[Tensor](), list[int]()
    for number, row in zip(numbers, rows, strict=True):
        first = prompts.setdefault(number, row.prompt_tokens)
        if first is row.prompt_tokens or torch.equal(first, row.prompt_tokens):
            places.append(number)
        else:
            places.append(groups + len(more))
            more.append(row.prompt_tokens)
            owners.append(number)
    listed = [prompts[number] for number in range(groups)]
    return listed + more, places, torch.tensor([*range(groups), *owners]) if more else None


def _components(scores: Sequence[Score]) -> dict[str, Tensor]:
    """A column per component, also for one that applies to no rollout. A part that a breakdown leaves out is 0."""
    names = {name for score in scores for name in score.components}
    for reward in {name for score in scores for name in score.absent}:
        if not any(_belongs(name, reward) for name in names):
            names.add(reward)

    def default(score: Score, name: str) -> float:
        return math.nan if any(_belongs(name, reward) for reward in score.absent) else 0.0

    def column(name: str) -> list[float]:
        return [score.components[name] if name in score.components else default(score, name) for score in scores]

    return {name: torch.tensor(column(name), dtype=torch.float64) for name in sorted(names)}


def _belongs(component: str, reward: str) -> bool:
    """Whether a component is a reward's value, or a part of its breakdown."""
    return component == reward or component.startswith(f"{reward}/")


def _turn_rewards(members: Sequence[Scored]) -> Tensor | None:
    """[B, U]; a score without turn rewards has its whole reward at the last turn."""
    if not _any_present([member.score.turn_rewards for member in members]):
        return None
    rows = []
    for member in members:
        turns = int(member.rollout.turn.max()) + 1
        whole = (*(0.0,) * (turns - 1), member.score.reward)
        rewards = whole if member.score.turn_rewards is None else member.score.turn_rewards
        if len(rewards) != turns:
            raise InputError(
                f"expected a reward for each of the {turns} turns, got {len(rewards)}"
                f" (rollout {member.rollout.rollout_id} of {member.rollout.problem.key})"
            )
        rows.append(torch.tensor(rewards, dtype=torch.float64))
    return _table(rows)


def _turn_states(rollouts: Sequence[Rollout]) -> Tensor | None:
    if not _any_present([rollout.turn_states for rollout in rollouts]):
        return None
    return _table([torch.tensor(rollout.turn_states or (START_STATE,)) for rollout in rollouts])


def _routes(
    rows: Sequence[Row | Rollout], group: Sequence[int], prompts: Sequence[Tensor], rollouts: Sequence[Rollout]
) -> Routes | None:
    """The engine's routes as one table; those of a prompt come from its first response that has any."""
    recorded = [row.routes for row in rows if row.routes is not None]
    if not recorded:
        return None
    wide, deep = max(map(len, prompts)), max(len(row.tokens) for row in rows)
    first, places = len(prompts) * wide, len(prompts) * wide + len(rows) * deep
    kinds = {(*routes.experts.shape[1:], routes.count) for routes in recorded}
    if len(kinds) > 1:
        raise InputError(f"the engine's records differ in (layers, active experts, experts): {sorted(kinds)}")
    tokens = torch.full((places,), -1)
    experts = recorded[0].experts.new_zeros(places, *recorded[0].experts.shape[1:])
    for number, row in enumerate(rows):
        if row.routes is None:
            continue
        _check_routes(row, row.routes, rollouts[number])
        length, start = len(row.prompt_tokens), first + number * deep
        head, tail = group[number] * wide, slice(start, start + len(row.tokens) - 1)
        new = int(tokens[head]) < 0
        for table, values in ((tokens, row.routes.tokens), (experts, row.routes.experts)):
            if new:
                table[head : head + length] = values[:length]
            table[tail] = values[length:]
    return Routes(tokens=tokens, experts=experts, count=recorded[0].count)


def _check_routes(row: Row | Rollout, routes: Routes, rollout: Rollout) -> None:
    read = torch.cat([row.prompt_tokens, row.tokens])[:-1]
    if len(routes.tokens) != len(read) or not torch.equal(routes.tokens, read):
        raise InputError(
            f"rollout {rollout.rollout_id} of {rollout.problem.key}: the engine's record of experts speaks of other tokens"
            f" ({len(routes.tokens)} of them) than the {len(read)} that prompt and response have without the last;"
            " was the text tokenised again?"
        )


def _any_present(values: Sequence[object]) -> bool:
    """Whether any value is not None; compared by identity, since tensors do not work with `in`."""
    return any(map(partial(is_not, None), values))


def _table(rows: Sequence[Tensor], padding: int = 0) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=padding)


def _check(rollouts: Sequence[Rollout], mask: Tensor, logprobs: Tensor) -> None:
    """Check that the engine's log-probs and temperatures can be trained on; InputError names the rollout."""
    wrong = (mask & ~(logprobs <= 0).logical_and(logprobs.isfinite())).any(1).tolist()
    for rollout, unusable in zip(rollouts, wrong, strict=True):
        if unusable or rollout.temperature <= 0:
            where = f"rollout {rollout.rollout_id} of {rollout.problem.key}"
            if unusable:
                raise InputError(f"{where}: expected finite log-probs of at most 0 from the engine, got another")
            raise InputError(f"{where}: expected a temperature above 0 for training, got {rollout.temperature:g}")
