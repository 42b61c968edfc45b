"""Runs that sample ahead of training at servers: a thread samples while the policy trains."""

from pathlib import Path

import legato
from legato.records.directory import RunDirectory
from tests.fleet.serving import servers
from tests.fleet.test_training import at, count_digits, options, records, tiny_policies


def test_a_run_samples_one_step_ahead_at_servers(tmp_path: Path) -> None:
    with servers(tiny_policies(2)) as (started, plans):
        more = {**at(started), "rollouts.ahead": 1, "training.steps": 4}
        run = legato.train(progress=False, reward=count_digits, **options(tmp_path, "ahead", more))
        shares = [sum(path == "/inference/v1/generate" for path, _ in plan.requests) for plan in plans]
    assert run.exit_code == 0 and min(shares) > 10
    steps = records(run.directory, "step")
    assert len(steps) == 4
    # The first step can only be of the first weights; later ones are at most one version old.
    assert steps[0]["lag/max"] == 0 and max(each["lag/max"] for each in steps) == 1
    assert {"mismatch/server/0/k3", "mismatch/server/1/k3"} <= steps[1].keys()
    assert all(abs(each["mismatch/k3"]) < 0.1 for each in steps)
    # The fleet is opened, says what it does and is closed, as without the thread.
    assert {each["servers/answering"] for each in steps} == {2.0}
    assert not (run.directory / "servers" / "weights").exists()
    # The problems are those of the run that waits for every step, in the same order.
    waiting = legato.train(progress=False, reward=count_digits, **options(tmp_path, "waiting", {"training.steps": 4}))
    for step in range(1, 5):
        here, there = (
            [each["prompt"] for each in RunDirectory(each.directory).read_rollouts(step)] for each in (waiting, run)
        )
        assert here == there


def test_a_run_at_servers_with_ahead_0_is_the_run_without(tmp_path: Path) -> None:
    with servers(tiny_policies(1)) as (started, _):
        plain = legato.train(progress=False, reward=count_digits, **options(tmp_path, "plain", at(started)))
        none = legato.train(
            progress=False, reward=count_digits, **options(tmp_path, "zero", {**at(started), "rollouts.ahead": 0})
        )
    one, other = records(plain.directory, "step"), records(none.directory, "step")
    for left, right in zip(one, other, strict=True):
        assert left["reward/mean"] == right["reward/mean"] and left["gradient/norm"] == right["gradient/norm"]
