"""Whole runs whose responses come from servers."""

import json
from pathlib import Path
from typing import Any

import pytest

import legato
from legato.errors import InputError
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.records.directory import RunDirectory
from tests.fleet.serving import servers
from tests.serve.running import RunningServer

SHAPE = {"policy.tiny.hidden": 32, "policy.tiny.heads": 2}


def options(folder: Path, name: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "output.directory": str(folder),
        "output.name": name,
        "training.steps": 2,
        "training.prompts_per_step": 4,
        "training.updates_per_step": 2,
        "training.lr": 1e-3,
        "training.warm_up_updates": 0,
        "rollouts.samples_per_prompt": 4,
        "rollouts.max_response_tokens": 6,
        "policy.max_prompt_tokens": 24,
        "policy.dtype": "float32",
        "policy.device": "cpu",
        "task.held_out": 4,
        "evaluation.every_steps": 0,
        "output.rollouts_every_steps": 1,
        **SHAPE,
        **(more or {}),
    }


def count_digits(rollout: Any) -> float:
    """A reward that differs between responses of an untrained model."""
    return sum(letter.isdigit() for letter in rollout.text) / 6


def train(*arguments: Any, **more: Any) -> Any:
    return legato.train(progress=False, reward=count_digits, **options(*arguments), **more)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def tiny_policies(count: int) -> list[Any]:
    loading = Loading(device="cpu", dtype="float32", tiny=TinyShape(hidden=32, heads=2))
    return [load_policy("tiny", loading, seed=7 + number) for number in range(count)]


def at(started: list[RunningServer]) -> dict[str, Any]:
    return {"rollouts.engine": "legato", "rollouts.servers.urls": [server.url for server in started]}


def test_a_run_at_two_servers_is_the_local_run(tmp_path: Path) -> None:
    """The same seeds give the same responses, so the same rewards; log-probs agree to rounding."""
    local = train(tmp_path, "local")
    with servers(tiny_policies(2)) as (started, plans):
        there = train(tmp_path, "servers", at(started))
        shares = [sum(path == "/inference/v1/generate" for path, _ in plan.requests) for plan in plans]
    assert min(shares) > 10, "both servers sampled"
    here, steps = records(local.directory, "step"), records(there.directory, "step")
    assert len(steps) == 2
    for one, other in zip(here, steps, strict=True):
        assert one["reward/mean"] == other["reward/mean"] and one["tokens/response"] == other["tokens/response"]
        assert abs(one["gradient/norm"] - other["gradient/norm"]) <= 1e-3 * one["gradient/norm"]
    assert {each["servers/answering"] for each in steps} == {2.0} and steps[0]["servers/probe_gap"] < 1e-4
    assert sum(steps[0][f"servers/{number}/tokens"] for number in range(2)) >= steps[0]["tokens/response"]
    for step in (1, 2):
        texts = [[each["text"] for each in RunDirectory(run.directory).read_rollouts(step)] for run in (local, there)]
        assert texts[0] == texts[1]
    assert not (there.directory / "servers" / "weights").exists(), "published weights are removed at the end"


def test_a_server_that_keeps_old_weights_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    with servers(tiny_policies(2)) as (started, plans):
        # The first publish is taken; the one after step 1 answers 200 and changes nothing.
        plans[1].add("stale", after=1, times=100)
        with pytest.raises(InputError, match="the server did not take the weights") as error:
            train(tmp_path, "stale", at(started))
    assert "version 1" in str(error.value) and "the state after step 1 is saved" in "".join(error.value.__notes__)
    assert (tmp_path / "stale" / "checkpoints" / "step-000001").is_dir() or list(
        (tmp_path / "stale" / "checkpoints").iterdir()
    )


def test_too_few_servers_pause_the_run_and_end_it_with_its_state_saved(tmp_path: Path) -> None:
    with servers(tiny_policies(2)) as (started, _):

        def stop_one(report: Any) -> None:
            if report.step == 1:
                started[1].stop(hard=True)

        with pytest.raises(InputError, match=r"expected servers to sample at, got too few for \d+ s: 1 of 2 servers"):
            limits = {"rollouts.servers.quorum": 2, "rollouts.servers.pause_seconds": 1.0}
            train(tmp_path, "pause", {**at(started), **limits}, callback=stop_one)
    notes = [each["text"] for each in records(tmp_path / "pause", "note")]
    assert any("is dropped" in note for note in notes) and any(note.startswith("paused: 1 of 2") for note in notes)
    assert records(tmp_path / "pause", "end") and list((tmp_path / "pause" / "checkpoints").iterdir())


def test_a_run_resumes_at_servers(tmp_path: Path) -> None:
    with servers(tiny_policies(1)) as (started, _):
        whole = train(tmp_path, "whole", at(started))
        train(tmp_path, "parts", {**at(started), "training.steps": 1})
        again = train(tmp_path, "parts", at(started), resume_if_exists=True)
    one, other = records(whole.directory, "step"), records(again.directory, "step")
    assert [each["reward/mean"] for each in one] == [each["reward/mean"] for each in other]


def test_servers_that_cannot_be_used_are_refused_before_the_run_begins(tmp_path: Path) -> None:
    with servers(tiny_policies(1), context_tokens=20) as (started, _):
        with pytest.raises(InputError, match="expected a server with a context of 30 tokens"):
            train(tmp_path, "x", at(started))
        with pytest.raises(InputError, match=r"expected vLLM at .*, got legato"):
            train(tmp_path, "x", {**at(started), "rollouts.engine": "vllm"})
    with pytest.raises(InputError, match=r"expected at least 1 of 1 servers .*; .* or start the servers with legato serve"):
        train(tmp_path, "x", {"rollouts.engine": "legato", "rollouts.servers.urls": ["http://127.0.0.1:9"]})
    assert not (tmp_path / "x").exists()


def test_plans_of_faults_are_used(tmp_path: Path) -> None:
    """A run goes on over passing faults, and counts them."""
    with servers(tiny_policies(2)) as (started, plans):
        for plan, kinds in zip(plans, (("status", "lost"), ("truncated", "nan")), strict=True):
            for place, kind in enumerate(kinds):
                plan.add(kind, after=8 * (1 - place))
        run = train(tmp_path, "faults", at(started))
        done = [kind for plan in plans for kind in plan.done]
    assert sorted(done) == ["lost", "nan", "status", "truncated"]
    assert sum(each["servers/retries"] for each in records(run.directory, "step")) >= 2
