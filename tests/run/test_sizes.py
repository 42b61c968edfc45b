"""Sizes that no memory can hold are refused by arithmetic, before anything is made."""

import json
from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.errors import InputError
from legato.policy.model.load import Loading, load_policy
from legato.run import sizes
from legato.run.sizes import check_sizes, check_weights
from legato.run.train import train
from legato.tasks.procedural import Arithmetic
from legato.tasks.task import Split
from tests.proof.runs import SMALL

HUGE = 10**9


@pytest.fixture(autouse=True)
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available", lambda device: 8 * 10**9)

    def make(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was made before the sizes were checked")

    for name in ("policy_of", "source_of", "reward_of"):
        monkeypatch.setattr(f"legato.run.wire.{name}", make)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy.tiny.hidden": 10**6}, "policy.tiny.hidden = 1000000"),
        ({"policy.tiny.layers": HUGE}, "policy.tiny.layers = 1000000000"),
        ({"policy.tiny.heads": 2**40, "policy.tiny.hidden": 2**40}, "policy.tiny.heads = 1099511627776"),
        ({"policy.tiny.feed_forward": HUGE}, "policy.tiny.feed_forward"),
        ({"policy.model": "tiny-moe", "policy.tiny.experts": HUGE}, "policy.tiny.experts = 1000000000"),
        ({"policy.upcycle.experts": HUGE}, "policy.upcycle.experts = 1000000000"),
        ({"policy.lora.rank": HUGE}, "fits in 8.0 GB.*would fit: policy.lora.rank=16"),
        ({"rollouts.mismatch.kind": "stale", "rollouts.mismatch.updates": HUGE}, "copies of it for rollouts.mismatch"),
        (
            {"rollouts.max_response_tokens": HUGE},
            r"fits in 8.0 GB.*would fit: .*texts of \d+ tokens \(.*max_response_tokens",
        ),
        ({"policy.max_prompt_tokens": HUGE}, r"fits in 8.0 GB.*would fit: .*texts of \d+ tokens \(policy.max_prompt_tokens"),
        ({"training.prompts_per_step": HUGE}, r"training.prompts_per_step = 1000000000 \(override"),
        ({"rollouts.samples_per_prompt": HUGE}, "rollouts.samples_per_prompt = 1000000000"),
        ({"training.epochs_per_step": HUGE}, "training.epochs_per_step = 1000000000"),
        ({"task.held_out": HUGE}, "held-out problems that fit in 8.0 GB, got task.held_out = 1000000000"),
        ({"evaluation.samples_per_problem": HUGE}, "evaluation.samples_per_problem = 1000000000"),
        ({"task.problems_per_epoch": HUGE}, "task.problems_per_epoch = 1000000000"),
        ({"policy.warm_up.examples_per_step": HUGE}, "policy.warm_up.examples_per_step = 1000000000"),
        ({"task.left_digits": HUGE}, "task.left_digits: expected a whole number >= 1 and <= 1000"),
        ({"task.kind": "countdown", "task.count": 12}, "task.count: expected a whole number >= 2 and <= 9"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_an_absurd_size_is_refused_before_anything_is_made(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    small = {path: value for path, value in SMALL.items() if not (path.startswith("task.") and "task.kind" in options)}
    with pytest.raises(InputError, match=words):
        train(**{**small, "output.directory": str(tmp_path), **options})
    assert not list(tmp_path.iterdir())


def test_problems_of_a_data_set_are_limited_by_the_data() -> None:
    check_sizes(load([], (), {"task.held_out": HUGE}), own_problems=True)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_weights_counted_before_a_model_exists_are_those_it_has(model: str) -> None:
    described = sizes._describe_model(load([], (), {"policy.model": model}))
    policy = load_policy(model, Loading(device="cpu"))
    assert described is not None and described.parameters == sum(weight.numel() for weight in policy.model.parameters())


def test_a_model_folder_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    config = {"hidden_size": 10**5, "num_hidden_layers": HUGE, "num_attention_heads": 8, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(InputError, match=r"config.json belongs to another model"):
        check_weights(load([], (), {"policy.model": str(tmp_path)}))


def test_a_task_with_few_problems_says_so_soon() -> None:
    split = Split(task=Arithmetic(left_digits=1), share=0.2)
    with pytest.raises(InputError, match="held_out = 1000000 is more than the task has"):
        split.held_out(10**6)
