"""A table of functions that show the effect of each option; test_options.py runs all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.run import wire
from tests.proof.responses import response
from tests.proof.runs import SMALL, run_small, steps

EFFECTS: dict[str, Callable[["Bench"], None]] = {}


def effect(*paths: str) -> Callable[[Callable[["Bench"], None]], Callable[["Bench"], None]]:
    """Register a function that shows the effect of these options."""

    def register(shows: Callable[["Bench"], None]) -> Callable[["Bench"], None]:
        for path in paths:
            assert path not in EFFECTS
            EFFECTS[path] = shows
        return shows

    return register


@dataclass
class Bench:
    """A folder to try options in."""

    folder: Path
    patch: pytest.MonkeyPatch
    runs: int = 0

    def build_run(self, options: dict[str, Any] | None = None, given: wire.PythonObjects | None = None) -> SimpleNamespace:
        """The objects of a run, which is not started."""
        chosen = {**SMALL, **(options or {})}
        resolved = load([], (), {path: value for path, value in chosen.items() if value is not None})
        given = given or wire.PythonObjects()
        policy, source = wire.policy_of(resolved, given), wire.source_of(resolved.config, given)
        reward = wire.reward_of(resolved.config, given)
        collector = wire.collector_of(resolved.config, policy, source, reward)
        trainer = wire.trainer_of(resolved, policy, collector, None)
        return SimpleNamespace(
            config=resolved.config, policy=policy, source=source, reward=reward, collector=collector, trainer=trainer
        )

    def run(self, options: dict[str, Any] | None = None, **arguments: Any) -> SimpleNamespace:
        """Run one step; returns the run, its reports and its records."""
        self.runs += 1
        reports: list[Any] = []
        base = {"training.steps": 1, "evaluation.every_steps": 0, "output.checkpoint_every_steps": 0}
        place = self.folder / str(self.runs)
        run = run_small(place, {**base, **(options or {})}, callback=reports.append, **arguments)
        return SimpleNamespace(
            run=run, folder=run.directory, reports=reports, steps=steps(run.directory), metrics=_metrics(run.directory)
        )

    def forwards(self, options: dict[str, Any] | None = None) -> list[tuple[int, int, bool]]:
        """(rows, width, with gradient) of every forward of the body in one step."""
        calls: list[tuple[int, int, bool]] = []
        from transformers import Qwen3Model

        forward = Qwen3Model.forward

        def watched(body: Any, *args: Any, **kwargs: Any) -> Any:
            rows, width = kwargs["input_ids"].shape
            calls.append((rows, width, torch.is_grad_enabled()))
            return forward(body, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Qwen3Model, "forward", watched)
            self.run(options)
        return calls

    def weights(self, options: dict[str, Any] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        folder = self.run(options, **arguments).run.model_folder
        return load_file(folder / "model.safetensors")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    from legato.records.directory import RunDirectory

    return RunDirectory.open(folder).metrics()


def rollout(text: str, answer: str = "42", length: int = 3) -> Rollout:
    """A finished response of `length` tokens."""
    return response(Problem(prompt="?", answer=answer), text, length)


def score_text(bench: Bench, text: str, options: dict[str, Any], length: int = 3) -> Score:
    """The score of a response under the configured reward."""
    score = wire.reward_of(load([], (), {**SMALL, **options}).config, wire.PythonObjects()).score(
        rollout(text, length=length)
    )
    assert not isinstance(score, Unscorable)
    return score
