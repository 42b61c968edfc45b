"""Whole runs that sample ahead: to the bit after a kill, with evaluations, and the same as ever for ahead = 0."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import legato

OPTIONS: dict[str, Any] = {
    "task.held_out": 2,
    "policy.tiny.hidden": 32,
    "policy.tiny.layers": 1,
    "policy.tiny.heads": 2,
    "evaluation.greedy": False,
    "training.steps": 6,
    "training.prompts_per_step": 2,
    "training.updates_per_step": 1,
    "training.lr": 1e-3,
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 4,
    "evaluation.every_steps": 3,
    "output.checkpoint_every_steps": 2,
    "output.keep_last": 3,
}


def parity(rollout: Any) -> float:
    """A reward that differs within groups of an untrained model."""
    return float(int(rollout.tokens.sum()) % 2)


def run(folder: Path, name: str, callback: Any = None, *, again: bool = False, **options: Any) -> legato.Run:
    values = {**OPTIONS, **options, "output.directory": str(folder), "output.name": name}
    return legato.train("tiny", reward=parity, progress=False, callback=callback, resume_if_exists=again, **values)


def weights(directory: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def steps_of(directory: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def test_the_local_engine_trains_on_responses_that_are_exactly_k_versions_old(tmp_path: Path) -> None:
    done = run(tmp_path, "ahead", **{"rollouts.ahead": 2})
    steps = steps_of(done.directory)
    assert [(step["lag/mean"], step["lag/max"]) for step in steps] == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert steps[0]["mismatch/k3"] < 1e-8 < steps[-1]["mismatch/k3"]
    start, *others = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
    assert any("rollouts.ahead = 2" in note and "tis" in note for note in start["notes"])
    probes = [record["words"] for record in others if record["kind"] == "probe"]
    assert len(probes) == 3, "it probes until responses are as old as they get"
    why = "old log-probs are recomputed: with rollouts.ahead = 2 responses may be older than the policy"
    assert all(why in words and "(responses may be 2 versions old)" in words for words in probes)


def test_ahead_0_is_the_synchronous_run_to_the_bit(tmp_path: Path) -> None:
    """The collector is the same one: no queue, no journal, no correction."""
    plain, zero = run(tmp_path, "plain"), run(tmp_path, "zero", **{"rollouts.ahead": 0})
    assert same(weights(plain.directory), weights(zero.directory)) and not (zero.directory / "journal").exists()


def test_a_run_that_is_resumed_equals_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    """Killed after step 3, one step after a checkpoint: groups in flight and in the journal are used again."""
    whole = run(tmp_path, "whole", **{"rollouts.ahead": 2})

    class Killed(BaseException):
        pass

    def kill(report: Any) -> None:
        if report.step == 3:
            shutil.copytree(tmp_path / "killed", tmp_path / "copy")
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, "killed", kill, **{"rollouts.ahead": 2})
    shutil.rmtree(tmp_path / "killed")
    (tmp_path / "copy").rename(tmp_path / "killed")
    assert list((tmp_path / "killed" / "journal").iterdir())
    resumed = run(tmp_path, "killed", again=True, **{"rollouts.ahead": 2})
    assert not same(weights(whole.directory, 2), weights(whole.directory))
    assert same(weights(whole.directory), weights(resumed.directory))
    keys = ("lag/mean", "mismatch/k3", "reward/mean", "length/mean")
    for one, two in zip(steps_of(whole.directory), steps_of(resumed.directory), strict=True):
        assert [one[key] for key in keys] == [two[key] for key in keys]


@pytest.mark.slow
def test_a_signal_saves_the_groups_that_wait(tmp_path: Path) -> None:
    def interrupt(report: Any) -> None:
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run(tmp_path, "stopped", interrupt, **{"rollouts.ahead": 1})
    assert stopped.exit_code == 128 + signal.SIGTERM
    saved = load_file(stopped.directory / "checkpoints" / "step-000003" / "sampler.safetensors")
    assert len({name.split("/")[1] for name in saved if name.startswith("ahead/")}) >= 2
    resumed = run(tmp_path, "stopped", again=True, **{"rollouts.ahead": 1})
    whole = run(tmp_path, "whole", **{"rollouts.ahead": 1})
    assert same(weights(whole.directory), weights(resumed.directory))
