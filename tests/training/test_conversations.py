"""Rollouts of several rows: estimators and ratios see one rollout, and the gradient is that of the objective on all rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import legato
from legato.algorithms.override import override
from legato.config.load import load
from legato.core.batch import collate
from legato.core.rollout import Author, Group, Problem, Rollout, Row, Score, Scored, StopReason
from legato.run import wire
from legato.training.plan import plan
from legato.training.tables import Tables
from legato.training.update import Look
from tests.proof import turns
from tests.training.test_turns import OPTIONS

FORGETFUL = (
    "{% for m in messages %}({{ m.role }}){% if m.role == 'assistant' and not loop.last %}.{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)


def row(prompt: list[int], tokens: list[int], turn: list[int], **more: Any) -> dict[str, Any]:
    length = len(tokens)
    numbers = torch.tensor(turn)
    return {
        "prompt_tokens": torch.tensor(prompt),
        "tokens": torch.tensor(tokens),
        "sampler_logprobs": torch.linspace(-1.0, -0.1, length),
        "version": torch.zeros(length, dtype=torch.int64),
        "mask": numbers >= 0,
        "turn": numbers,
        "author": torch.where(numbers >= 0, Author.POLICY.value, Author.TOOL.value),
        **more,
    }


def rollout(number: int, rows: list[dict[str, Any]]) -> Rollout:
    *earlier, last = rows
    return Rollout(
        problem=Problem(prompt="x"), rollout_id=number, text="", stop=StopReason.END_TOKEN, temperature=1.0,
        earlier=tuple(Row(**each) for each in earlier), **last,
    )  # fmt: skip


def groups() -> list[Group]:
    """Two problems; the first rollout of the first lies in three rows, the turns of which are those of its sibling."""
    broken = rollout(0, [row([1, 2], [5, 6], [0, 0]), row([1, 3], [7], [1]), row([1, 4], [8, 9], [2, 2])])
    whole = rollout(1, [row([1, 2], [5, 5, 3, 7, 3, 9], [0, 0, -1, 1, -1, 2])])
    third = rollout(2, [row([1, 2], [6], [0])])
    other = [rollout(3 + k, [row([2], [4, k], [0, 0])]) for k in range(2)]

    def scored(each: Rollout, *rewards: float) -> Scored:
        return Scored(rollout=each, score=Score(reward=sum(rewards), accuracy=0.0, turn_rewards=rewards))

    first = (scored(broken, 0.2, 0.0, 1.0), scored(whole, 0.0, 0.2, 0.0), scored(third, 0.4))
    return [
        Group(problem=broken.problem, members=first),
        Group(problem=broken.problem, members=(scored(other[0], 1.0), scored(other[1], 0.0))),
    ]


def test_the_rows_of_a_batch() -> None:
    batch = collate(groups())
    texts = batch.texts
    assert len(batch) == 7 and batch.pieces == (3, 1, 1, 1, 1) and batch.rollout_id.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert texts.group.tolist() == [0, 2, 3, 0, 0, 1, 1] and texts.siblings.tolist() == [0] * 5 + [1] * 2
    assert [texts.prompts[g, : texts.prompt_lengths[g]].tolist() for g in texts.group.tolist()] == [
        [1, 2], [1, 3], [1, 4], [1, 2], [1, 2], [2], [2],
    ]  # fmt: skip


def test_siblings_stay_in_one_update() -> None:
    texts = collate(groups()).texts
    for update in plan(texts, updates=2, epochs=1, tokens_per_pack=4, seed=0, packing=True):
        assert len(set(texts.siblings[update.rows].tolist())) == 1
    assert sorted(len(u.rows) for u in plan(texts, updates=2, epochs=1, tokens_per_pack=99, seed=0, packing=True)) == [2, 5]


@pytest.mark.parametrize("advantage", ["group-z", "turn-return", "leave-one-out"])
def test_a_baseline_counts_a_rollout_once(advantage: str) -> None:
    algorithm = override(legato.algorithm("gspo-token"), {"advantage": advantage})
    tables = Tables.from_batch(collate(groups()), torch.device("cpu")).with_advantages(algorithm)
    joined = [
        Group(problem=group.problem, members=tuple(replace(m, rollout=in_one_row(m.rollout)) for m in group.members))
        for group in groups()
    ]
    expected = Tables.from_batch(collate(joined), torch.device("cpu")).with_advantages(algorithm).advantages
    assert tables.advantages is not None and expected is not None
    if tables.advantages.shape[1] == 1:
        assert torch.equal(tables.advantages.squeeze(1), expected.squeeze(1)[[0, 0, 0, 1, 2, 3, 4]])
        return
    mask = tables.texts.mask
    assert tables.advantages[mask].tolist() == expected[collate(joined).texts.mask].tolist()
    assert (tables.advantages[~mask] == 0).all() and len(set(tables.advantages[:3][mask[:3]].tolist())) == 3


def in_one_row(each: Rollout) -> Rollout:
    fields = {name: torch.cat([getattr(r, name) for r in each.rows]) for name in row([1], [1], [0]) if "prompt" not in name}
    return replace(each, earlier=(), **fields)


def test_a_run_whose_template_breaks_conversations_trains_on_all_rows() -> None:
    """The coefficients are those of the public loss with one id for the rows of a rollout."""
    options = {**OPTIONS, "task.environment": f"{turns.__file__}:Early", "policy.warm_up": False, "rollouts.stop": ["e"]}
    options |= {"rollouts.max_response_tokens": 60, "policy.max_prompt_tokens": 40, "training.tokens_per_pack": 60}
    resolved = load([], (), {**options, "algorithm": "turn-gspo", "algorithm.advantage": "turn-return"})
    policy, source = wire.policy_of(resolved, wire.PythonObjects()), wire.source_of(resolved.config, wire.PythonObjects())
    policy.tokenizer.chat_template = FORGETFUL
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    this = wire.trainer_of(resolved, policy, collector, None)
    looks: list[Look] = []
    this.look = looks.append
    report = this.step(detailed=10_000)
    members = [member for group in report.groups for member in group.members]
    broken = [member for member in members if member.rollout.earlier]
    assert len(broken) > 2 and report.metrics["gradient/norm"] > 0
    assert len(report.details) == len(members)
    for member, detail in zip(members, report.details, strict=True):
        assert len(detail["details"]["pieces"]) == member.rollout.length == len(detail["details"]["turns"])
    for look in looks:
        signals = look.signals
        assert signals.rollout is not None and signals.old_logprobs is not None and signals.turn is not None
        assert len(set(signals.rollout.tolist())) < len(signals.rollout)
        outcome = legato.loss(
            this.algorithm, logprobs=signals.logprobs, old_logprobs=signals.old_logprobs, advantages=signals.advantages,
            mask=signals.mask.tokens, turn=signals.turn, rollout=signals.rollout, group=signals.group,
        )  # fmt: skip
        assert torch.allclose(outcome.coefficients, look.outcome.coefficients, rtol=1e-4, atol=1e-9)
