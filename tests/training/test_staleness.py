"""Metrics of responses that are older than the policy: their age, and what the gap alone would clip."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.training.ahead import Ahead
from legato.training.mismatch import score_groups
from legato.training.staleness import staleness
from legato.training.step import Trainer
from tests.training.test_trainer import trainer


def ahead_trainer(k: int, **changes: Any) -> Trainer:
    this = trainer(changes={"objective.corrections": ["tis"]}, **changes)
    collector: Any = this.source
    names = ("source", "runner", "judge", "sampling", "settings", "seed")
    this.source = Ahead(**{name: getattr(collector, name) for name in names}, steps_ahead=k)
    return this


def test_a_synchronous_step_records_no_age() -> None:
    assert not [key for key in trainer().step().metrics if key.startswith("lag/") or key == "mismatch/clipped"]


def test_age_gap_and_clipped_share_are_those_of_the_tables() -> None:
    this = ahead_trainer(2, prompts_per_step=3, updates_per_step=1)
    reports = [this.step() for _ in range(4)]
    assert [report.metrics["lag/mean"] for report in reports] == [0, 1, 2, 2]
    assert reports[0].metrics["mismatch/clipped"] == 0.0 and reports[0].metrics["mismatch/k3"] < 1e-12
    last = reports[-1]
    mask = last.tensors["mask"]
    gap = torch.where(mask, last.tensors["old_logprobs"] - last.tensors["sampler_logprobs"], 0.0).double()
    mean = gap.sum(1) / mask.sum(1)
    outside = (mean < math.log1p(-3e-4)) | (mean > math.log1p(4e-4))
    assert last.metrics["mismatch/clipped"] == float(outside.double().mean()) > 0
    assert last.metrics["weight/mean"] != 1.0 and reports[0].metrics["weight/mean"] == pytest.approx(1, abs=1e-6)


def test_servers_and_ages_are_told_apart() -> None:
    """Two servers, one of which is a version behind: the figures of each are those of its own responses."""
    this = trainer()
    groups, _ = this.source.next(4)
    named = []
    for place, group in enumerate(groups):
        members = []
        for each in group.members:
            shift = 0.5 * (place % 2)
            rollout = replace(
                each.rollout,
                server="ab"[place % 2],
                version=each.rollout.version + 1 - place % 2,
                sampler_logprobs=each.rollout.sampler_logprobs - shift,
            )
            members.append(replace(each, rollout=rollout))
        named.append(replace(group, members=tuple(members)))
    metrics = staleness(this.algorithm, score_groups(this.policy, named, 60), named, 1, this.state)
    assert 0 < metrics["lag/mean"] < metrics["lag/max"] == 1
    k3 = math.expm1(0.5) - 0.5
    for key in ("mismatch/lag_1/k3", "mismatch/server/b/k3"):
        assert metrics[key] == pytest.approx(k3, abs=1e-5)
    for key in ("mismatch/lag_0/k3", "mismatch/server/a/k3"):
        assert metrics[key] == pytest.approx(0, abs=1e-9)
    assert metrics["mismatch/lag_1/clipped"] == 1.0 and metrics["mismatch/server/a/clipped"] == 0.0
    assert metrics["mismatch/clipped"] == 0.5
    assert metrics["mismatch/server_ratio"] == pytest.approx(k3 / 1e-3, rel=1e-4)
    alone = [replace(group, members=tuple(_at_server(each, "a") for each in group.members)) for group in groups]
    of_one = staleness(this.algorithm, score_groups(this.policy, alone, 60), alone, 1, this.state)
    assert "mismatch/server/a/k3" in of_one and "mismatch/server_ratio" not in of_one


def test_of_many_servers_the_farthest_has_its_figures() -> None:
    """Each response has a server of its own, and the last by name alone differs from the trainer."""
    this = trainer()
    groups, _ = this.source.next(4)
    count, named = sum(len(group.members) for group in groups), []
    names = iter(f"server-{place:02}" for place in range(count))
    for group in groups:
        members = []
        for each in group.members:
            rollout = _at_server(each, next(names)).rollout
            shift = 0.5 * (rollout.server == f"server-{count - 1:02}")
            members.append(replace(each, rollout=replace(rollout, sampler_logprobs=rollout.sampler_logprobs - shift)))
        named.append(replace(group, members=tuple(members)))
    metrics = staleness(this.algorithm, score_groups(this.policy, named, 60), named, 1, this.state)
    shown = {key.split("/")[2] for key in metrics if key.startswith("mismatch/server/")}
    assert count > 9 and shown == {*(f"server-{place:02}" for place in range(8)), f"server-{count - 1:02}"}


def _at_server(member: Any, server: str) -> Any:
    return replace(member, rollout=replace(member.rollout, server=server))
