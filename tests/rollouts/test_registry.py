"""Engines by name and by file, the options they receive, and settings that an engine cannot serve."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Engine, QueuedEngine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.mismatch import Mismatch, MismatchedEngine
from legato.rollouts.registry import EngineOptions, build_engine
from legato.run import wire
from legato.training.memory.training_bytes import training_bytes
from tests.rollouts.families import make_policy

FILE = """
from legato.rollouts.engine import Capabilities, QueuedEngine

class Plain(QueuedEngine):
    name = "plain"
    capabilities = Capabilities(truncation=False, logprobs_at_temperature=False)

class Mine:
    def build(self, policy, options):
        engine = Plain()
        engine.options = options
        return engine

class NoEngine:
    def build(self, policy, options):
        return 7

class NoBuild:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine_of_mine.py"
    path.write_text(FILE)
    return path


def test_the_local_engine_is_built_by_name_with_its_options() -> None:
    engine = build_engine("local", make_policy("qwen3"), EngineOptions(rows_at_once=7))
    assert isinstance(engine, LocalEngine) and engine.rows_at_once == 7
    different = build_engine("local", make_policy("qwen3"), EngineOptions(mismatch=Mismatch(kind="int8")))
    assert isinstance(different, MismatchedEngine) and different.capabilities.holds_weights


def test_an_engine_is_built_from_a_file_path_and_class(file: Path) -> None:
    options = EngineOptions(rows_at_once=3, run_seed=5)
    engine: Any = build_engine(f"{file}:Mine", make_policy("qwen3"), options)
    assert isinstance(engine, QueuedEngine) and engine.options is options


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lokal", r"unknown engine 'lokal'; did you mean 'local'\?"),
        ("{file}:NoEngine", r"expected a legato\.rollouts\.engine\.Engine .* got int \(rollouts\.engine\)"),
        ("{file}:NoBuild", r"expected a class with build\(policy, options\), got .*NoBuild' \(rollouts\.engine\)"),
        ("{file}:Nobody", r"has no 'Nobody'"),
    ],
)
def test_names_and_classes_that_are_no_engine_are_refused(name: str, words: str, file: Path) -> None:
    with pytest.raises(InputError, match=words):
        build_engine(name.format(file=file), make_policy("qwen3"), EngineOptions())


def engines_from(
    options: dict[str, Any], policy: Policy | None = None, *, trains: bool = True
) -> tuple[Engine, Engine | None]:
    resolved = load([], (), {"policy.device": "cpu", **options})
    return wire._engines(resolved.config, policy or make_policy("qwen3"), trains=trains)


def test_settings_an_engine_cannot_serve_are_refused_before_a_run(file: Path) -> None:
    mine = {"rollouts.engine": f"{file}:Mine"}
    assert engines_from(mine)[0].name == "plain"
    settings = {
        "rollouts.top_p": (0.9, "truncation"),
        "rollouts.top_k": (5, "truncation"),
        "rollouts.min_p": (0.1, "truncation"),
        "training.anchor": ("sampler", "logprobs_at_temperature"),
    }
    for setting, (value, capability) in settings.items():
        with pytest.raises(InputError, match=rf"'{capability}' for {setting} = .*got 'plain' \(rollouts\.engine = "):
            engines_from({**mine, setting: value})
        assert engines_from({setting: value})[0].name == "local"


@pytest.mark.parametrize("setting", [{"training.routing_replay": "R3"}, {"rollouts.record_routes": True}])
def test_replaying_or_recording_routes_needs_an_engine_with_routes(setting: dict[str, Any], file: Path) -> None:
    experts = make_policy("qwen3-moe")
    assert engines_from(setting, experts)[0].capabilities.routes
    with pytest.raises(InputError, match=r"'routes' for .*got 'plain'"):
        engines_from({**setting, "rollouts.engine": f"{file}:Mine"}, experts)


def test_a_mismatch_needs_the_local_engine(file: Path) -> None:
    with pytest.raises(
        InputError, match=r"expected rollouts\.engine = 'local' where rollouts\.mismatch\.kind = 'int8', got"
    ):
        engines_from({"rollouts.engine": f"{file}:Mine", "rollouts.mismatch.kind": "int8"})


def test_the_routes_capability_is_set_exactly_when_routes_are_recorded() -> None:
    recorded = LocalEngine(make_policy("qwen3-moe"), record_routes=True)
    assert recorded.capabilities == Capabilities(routes=True)
    assert not LocalEngine(make_policy("qwen3-moe")).capabilities.routes
    assert not LocalEngine(make_policy("qwen3"), record_routes=True).capabilities.routes
    assert not LocalEngine(make_policy("qwen3-moe"), way="recomputed", record_routes=True).capabilities.routes


def test_training_bytes_count_gradients_masters_and_moments() -> None:
    sixteen, exact = torch.zeros(10, 10, dtype=torch.bfloat16), torch.zeros(7)
    # A float32 gradient, a float32 master copy of 16-bit weights, and two moments.
    assert training_bytes({"a": sixteen, "b": exact}, eight_bit=False, offload=False) == 100 * 16 + 7 * 12
    assert training_bytes({"a": sixteen, "b": exact}, eight_bit=False, offload=True) == 107 * 4
    assert training_bytes({"a": sixteen}, eight_bit=True, offload=False) == pytest.approx(100 * 10, rel=0.01)


def test_a_run_reserves_training_bytes_and_an_evaluation_none(file: Path) -> None:
    mine = {"rollouts.engine": f"{file}:Mine"}
    policy = make_policy("qwen3")
    trained: Any = engines_from(mine, policy)[0]
    evaluated: Any = engines_from(mine, policy, trains=False)[0]
    assert trained.options.training_bytes == 12 * sum(weight.numel() for weight in policy.model.parameters())
    assert evaluated.options.training_bytes == 0
    for weight in policy.model.parameters():
        weight.requires_grad_(False)
    policy.model.model.norm.weight.requires_grad_(True)
    partly: Any = engines_from(mine, policy)[0]
    assert partly.options.training_bytes == 12 * policy.model.model.norm.weight.numel()
