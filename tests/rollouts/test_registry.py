"""Engines by name and by file, what they are told, and settings that need more than an engine can do."""

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
from tests.rollouts.families import policy

FILE = """
from legato.rollouts.engine import Capabilities, QueuedEngine

class Plain(QueuedEngine):
    name = "plain"
    capabilities = Capabilities(truncation=False, logprobs_at_temperature=False)

class Mine:
    def build(self, policy, options):
        engine = Plain()
        engine.told = options
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


def test_the_local_engine_is_found_by_name_and_told_its_options() -> None:
    engine = build_engine("local", policy("qwen3"), EngineOptions(rows_at_once=7))
    assert isinstance(engine, LocalEngine) and engine.rows_at_once == 7
    different = build_engine("local", policy("qwen3"), EngineOptions(mismatch=Mismatch(kind="int8")))
    assert isinstance(different, MismatchedEngine) and different.capabilities.holds_weights


def test_an_engine_of_a_file_is_one_file(file: Path) -> None:
    options = EngineOptions(rows_at_once=3, run_seed=5)
    engine: Any = build_engine(f"{file}:Mine", policy("qwen3"), options)
    assert isinstance(engine, QueuedEngine) and engine.told is options


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lokal", r"unknown engine 'lokal'; did you mean 'local'\?"),
        ("{file}:NoEngine", r"expected a legato\.rollouts\.engine\.Engine .* got int \(rollouts\.engine\)"),
        ("{file}:NoBuild", r"expected a class with build\(policy, options\), got .*NoBuild' \(rollouts\.engine\)"),
        ("{file}:Nobody", r"has no 'Nobody'"),
    ],
)
def test_what_is_no_engine_is_refused(name: str, words: str, file: Path) -> None:
    with pytest.raises(InputError, match=words):
        build_engine(name.format(file=file), policy("qwen3"), EngineOptions())


def wired(options: dict[str, Any], made: Policy | None = None, *, trains: bool = True) -> tuple[Engine, Engine | None]:
    resolved = load([], (), {"policy.device": "cpu", **options})
    return wire._engines(resolved.config, made or policy("qwen3"), trains=trains)


def test_settings_an_engine_cannot_serve_are_refused_before_a_run(file: Path) -> None:
    mine = {"rollouts.engine": f"{file}:Mine"}
    assert wired(mine)[0].name == "plain"
    settings = {
        "rollouts.top_p": (0.9, "truncation"),
        "rollouts.top_k": (5, "truncation"),
        "rollouts.min_p": (0.1, "truncation"),
        "training.anchor": ("sampler", "logprobs_at_temperature"),
    }
    for setting, (value, capability) in settings.items():
        with pytest.raises(InputError, match=rf"'{capability}' for {setting} = .*got 'plain' \(rollouts\.engine = "):
            wired({**mine, setting: value})
        assert wired({setting: value})[0].name == "local"


@pytest.mark.parametrize("setting", [{"training.routing_replay": "R3"}, {"rollouts.record_routes": True}])
def test_routes_are_needed_where_they_are_replayed_or_asked_for(setting: dict[str, Any], file: Path) -> None:
    experts = policy("qwen3-moe")
    assert wired(setting, experts)[0].capabilities.routes
    with pytest.raises(InputError, match=r"'routes' for .*got 'plain'"):
        wired({**setting, "rollouts.engine": f"{file}:Mine"}, experts)


def test_only_the_local_engine_differs_on_purpose(file: Path) -> None:
    with pytest.raises(
        InputError, match=r"expected rollouts\.engine = 'local' where rollouts\.mismatch\.kind = 'int8', got"
    ):
        wired({"rollouts.engine": f"{file}:Mine", "rollouts.mismatch.kind": "int8"})


def test_routes_are_reported_where_they_are_recorded_and_said_to_be() -> None:
    recorded = LocalEngine(policy("qwen3-moe"), record_routes=True)
    assert recorded.capabilities == Capabilities(routes=True)
    assert not LocalEngine(policy("qwen3-moe")).capabilities.routes
    assert not LocalEngine(policy("qwen3"), record_routes=True).capabilities.routes
    assert not LocalEngine(policy("qwen3-moe"), way="recomputed", record_routes=True).capabilities.routes


def test_only_what_will_be_trained_is_kept_back() -> None:
    sixteen, exact = torch.zeros(10, 10, dtype=torch.bfloat16), torch.zeros(7)
    # A float32 gradient, a float32 master of 16 bits, and two moments.
    assert training_bytes([sixteen, exact], eight_bit=False, offload=False) == 100 * 16 + 7 * 12
    assert training_bytes([sixteen, exact], eight_bit=False, offload=True) == 107 * 4
    assert training_bytes([sixteen], eight_bit=True, offload=False) == pytest.approx(100 * 10, rel=0.01)


def test_a_run_keeps_back_what_training_needs_and_an_evaluation_nothing(file: Path) -> None:
    mine = {"rollouts.engine": f"{file}:Mine"}
    made = policy("qwen3")
    trained: Any = wired(mine, made)[0]
    evaluated: Any = wired(mine, made, trains=False)[0]
    assert trained.told.training_bytes == 12 * sum(weight.numel() for weight in made.model.parameters())
    assert evaluated.told.training_bytes == 0
    for weight in made.model.parameters():
        weight.requires_grad_(False)
    made.model.model.norm.weight.requires_grad_(True)
    partly: Any = wired(mine, made)[0]
    assert partly.told.training_bytes == 12 * made.model.model.norm.weight.numel()
