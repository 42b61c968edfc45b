"""The engine in another process trains a tiny model, and follows what is trained."""

import gc
from pathlib import Path

import pytest
import torch

import legato
from legato.errors import InputError
from legato.policy.model.adapters import Lora, with_lora
from legato.policy.model.load import Loading, load_policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.registry import EngineOptions, build_engine
from legato.rollouts.sampling import Sampling
from tests.proof import verdicts
from tests.proof.runs import SMALL, records

NAME = f"{Path(__file__).parents[2] / 'examples' / 'piped_engine.py'}:PipedEngine"


def test_two_steps_are_trained_with_the_engine_of_a_file(tmp_path: Path) -> None:
    options = {
        **SMALL,
        "reward.kind": f"{verdicts.__file__}:early",
        "training.steps": 2,
        "training.lr": 1e-2,
        "training.anchor": "recompute",
        "rollouts.engine": NAME,
    }
    run = legato.train(**{**options, "output.directory": str(tmp_path)})
    steps = [record for record in records(run.directory) if record["kind"] == "step"]
    assert len(steps) == 2 and all(step["update/applied"] == 1 for step in steps)
    # Both steps were sampled with the weights that were to be trained: an engine left behind would be off by tenths.
    assert max(step["mismatch/max"] for step in steps) < 1e-4


def test_a_response_across_a_publish_has_two_versions() -> None:
    policy = load_policy("tiny", Loading(device="cpu", dtype="float32"))
    engine = build_engine(NAME, policy, EngineOptions())
    prompt = torch.tensor([5, 6, 7])
    quick, slow = (Limits(max_response_tokens=count, end_tokens=()) for count in (2, 400))
    engine.submit([Request(prompt=prompt, seeds=(1,))], Sampling(), slow)
    engine.submit([Request(prompt=prompt, seeds=(2,))], Sampling(), quick)
    (first,) = engine.poll()
    engine.publish(policy.model.named_parameters(), 5)
    (last,) = engine.poll()
    assert first.responses[0].version.tolist() == [0, 0]
    versions = last.responses[0].version.tolist()
    assert versions == sorted(versions) and set(versions) == {0, 5}


def test_the_process_ends_with_the_engine_and_its_death_is_reported() -> None:
    policy = load_policy("tiny", Loading(device="cpu", dtype="float32"))
    engine = build_engine(NAME, policy, EngineOptions())
    process = engine.process  # type: ignore[attr-defined]
    del engine
    gc.collect()
    assert process.returncode == 0
    engine = build_engine(NAME, policy, EngineOptions())
    engine.process.kill()  # type: ignore[attr-defined]
    engine.process.wait()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        engine.generate(
            [Request(prompt=torch.tensor([5]), seeds=(1,))], Sampling(), Limits(max_response_tokens=2, end_tokens=())
        )


def test_adapters_are_refused() -> None:
    policy = load_policy("tiny", Loading(device="cpu", dtype="float32"))
    policy.model = with_lora(policy.model, Lora(rank=2))
    with pytest.raises(InputError, match=r"got one with adapters \(policy\.lora\)"):
        build_engine(NAME, policy, EngineOptions())
