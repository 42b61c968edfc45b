"""`policy.gradient_checkpointing = "auto"`: decided by the memory model, told, stored, and made anew when resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from legato.config.load import load
from legato.errors import InputError
from legato.policy.model.load import load_policy
from legato.run import memory
from legato.run.train import resume
from legato.run.wire import Given, policy_of
from legato.training.memory import available as machine
from legato.training.memory.available import available
from legato.training.memory.model import Demand, Memory
from legato.training.memory.shape import Shape
from tests.proof.pages import numbers
from tests.proof.runs import SMALL, Listener, cut, differences, outcome, records, small

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("lightly")


def having(patch: pytest.MonkeyPatch, size: int | None) -> None:
    """A machine with so much memory."""
    patch.setattr(memory, "available", lambda device: size)


def decided(options: dict[str, Any] | None = None) -> tuple[bool, list[str]]:
    """Whether layers are recomputed after the choice, and what was said."""
    resolved = load([], (), {**SMALL, **(options or {})})
    policy = policy_of(resolved, Given())
    before = len(policy.notes)
    memory.decide_checkpointing(resolved, policy)
    assert policy.model.training is policy.body.is_gradient_checkpointing
    return policy.body.is_gradient_checkpointing, policy.notes[before:]


def needed(options: dict[str, Any] | None = None) -> tuple[Memory, Memory]:
    """Without and with checkpointing."""
    resolved = load([], (), {**SMALL, **(options or {})})
    demand = memory.demand_of(resolved, policy_of(resolved, Given()))
    return demand.memory(checkpointing=False), demand.memory(checkpointing=True)


def scarce() -> int:
    """Bytes that suffice for a small run with checkpointing, not without."""
    return needed()[0].total - 1


LARGE = {"policy.tiny.layers": 6, "rollouts.max_response_tokens": 64}
"""A model and a pack whose activations matter."""


def test_checkpointing_is_off_where_everything_fits_and_the_note_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, 32 * 10**9)
    on, notes = decided(LARGE)
    assert not on and len(notes) == 1
    assert "checkpointing is off" in notes[0] and numbers(notes[0])[0] < 1 and numbers(notes[0])[-1] == 32.0


def test_checkpointing_is_switched_on_exactly_where_the_pack_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, less = needed(LARGE)
    assert less.total < plain.total
    having(monkeypatch, plain.total)
    assert not decided(LARGE)[0]
    having(monkeypatch, plain.total - 1)
    on, notes = decided(LARGE)
    assert on and "checkpointing is on" in notes[0] and "tokens_per_pack" not in notes[0]
    having(monkeypatch, less.total - 1)
    on, notes = decided(LARGE)
    assert on and "training.tokens_per_pack=" in notes[0]


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_a_model_that_cannot_fit_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, asked: object) -> None:
    options = {**LARGE, "policy.gradient_checkpointing": asked}
    demand = memory.demand_of(resolved := load([], (), {**SMALL, **options}), policy_of(resolved, Given()))
    longest = resolved.config.policy.max_prompt_tokens + resolved.config.rollouts.max_response_tokens
    least = memory._least(demand, longest)
    held = demand.memory(checkpointing=True)
    assert held.weights + held.gradients + held.moments < least < held.total
    having(monkeypatch, least - 1)
    # Adapters of rank 16 are larger than this model is.
    with pytest.raises(InputError, match="a smaller model"):
        decided(options)
    having(monkeypatch, least)
    on, notes = decided(options)
    assert on is (asked is not False)
    if asked == "auto":
        assert "no pack fits" in notes[0]


def test_a_model_too_large_is_refused_with_every_setting_that_would_fit() -> None:
    """8.2 billion weights in 16 bits: 147 GB without any activation, on a GPU of 149 GB."""
    shape = Shape.from_config(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=12288,
            tie_word_embeddings=False,
        )
    )
    demand = Demand(
        shape=shape, size=2, tokens_per_pack=16384, head_tokens=3500, logit_bytes=2, cached_tokens=10**6, fused=True
    )
    with pytest.raises(InputError) as refusal:
        memory.refuse_what_cannot_fit(demand, 149 * 10**9, 4096, "8B", on_gpu=True)
    for setting in ("policy.lora.rank=16 (", "training.optimizer=adamw-8bit (", "training.offload_optimizer=true ("):
        assert setting in str(refusal.value)
    memory.refuse_what_cannot_fit(replace(demand, offload=True), 149 * 10**9, 4096, "8B", on_gpu=True)


def test_the_suggested_tokens_per_pack_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, needed(LARGE)[1].total - 1)
    named = int(decided(LARGE)[1][0].split("training.tokens_per_pack=")[1].split()[0])
    assert "tokens_per_pack" not in decided({**LARGE, "training.tokens_per_pack": named})[1][0]


@pytest.mark.parametrize("said", [True, False])
def test_an_explicit_choice_is_followed_whatever_the_memory(said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, 10**15 if said else scarce())
    assert decided({"policy.gradient_checkpointing": said}) == (said, [])


def test_checkpointing_is_off_where_the_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, None)
    on, notes = decided()
    assert not on and "does not say" in notes[0]


def test_checkpointing_is_off_where_the_model_cannot_be_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(config: Any) -> Shape:
        raise InputError("the configuration Strange has no hidden_size; memory cannot be estimated")

    monkeypatch.setattr(Shape, "from_config", strange)
    having(monkeypatch, 1)
    on, notes = decided()
    assert not on and "Strange" in notes[0]


def test_a_model_without_checkpointing_gets_a_note_and_refuses_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.supports_gradient_checkpointing", False)
    having(monkeypatch, scarce())
    on, notes = decided()
    assert not on and "does not support" in notes[0]
    with pytest.raises(ValueError, match=r"policy\.gradient_checkpointing = true"):
        decided({"policy.gradient_checkpointing": True})


@pytest.mark.parametrize("word", ["auto", "true", "false"])
def test_auto_true_and_false_are_read_from_words_and_files(word: str, tmp_path: Path) -> None:
    wanted = {"auto": "auto", "true": True, "false": False}[word]
    written = f'"{word}"' if word == "auto" else word
    (tmp_path / "recipe.toml").write_text(f"[policy]\ngradient_checkpointing = {written}\n")
    for resolved in (load([], [f"policy.gradient_checkpointing={word}"]), load([tmp_path / "recipe.toml"])):
        assert resolved.config.policy.gradient_checkpointing == wanted


@pytest.mark.parametrize("word", ["on", "1", "0.5", "'true'"])
def test_any_other_checkpointing_value_is_refused_with_the_allowed_ones(word: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.gradient_checkpointing.*true.*false.*auto"):
        load([], [f"policy.gradient_checkpointing={word}"])


def test_a_run_prints_and_stores_the_choice_and_is_the_same_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, folders = Listener(), []
    for name, size in (("off", 10**12), ("on", scarce())):
        having(monkeypatch, size)
        folders.append(small(tmp_path / name, {"training.steps": 2}, watcher=listener).directory)
        (start,) = [record for record in records(folders[-1]) if record["kind"] == "start"]
        (line,) = [note for note in start["notes"] if note.startswith(f"gradient checkpointing is {name}: ")]
        assert line in listener.messages
    found = [outcome(folder) for folder in folders]
    for each in found:
        each["metrics"] = [record for record in each["metrics"] if record["kind"] != "start"]
    assert not differences(*found)


def test_a_resumed_run_chooses_anew_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, 10**12)
    straight = small(tmp_path / "straight", {"training.steps": 2}).directory
    resumed = cut(straight, tmp_path / "cut", 1)
    having(monkeypatch, scarce())
    listener = Listener()
    assert resume(resumed, watcher=listener).exit_code == 0
    assert "gradient checkpointing is on" in listener.said
    assert not differences(outcome(straight), outcome(resumed))


def test_the_demand_is_of_what_a_step_can_fill() -> None:
    resolved = load([], (), SMALL)
    policy = policy_of(resolved, Given())
    demand = memory.demand_of(resolved, policy)
    # 2 groups an update, each a prompt of at most 16 tokens and 4 responses of at most 3.
    assert demand.tokens_per_pack == 2 * (16 + 4 * 3)
    assert demand.trained == demand.parameters == demand.shape.parameters
    assert not demand.reference and not demand.value_head and demand.tables
    small_packs = load([], (), {**SMALL, "training.tokens_per_pack": 1})
    assert memory.demand_of(small_packs, policy).tokens_per_pack == 16 + 3


def test_the_demand_of_adapters_and_of_a_reference_and_a_value_head() -> None:
    lora = load([], (), {**SMALL, "policy.lora.rank": 2})
    demand = memory.demand_of(lora, policy_of(lora, Given()))
    assert demand.trained == demand.shape.adapters(2) and demand.parameters == demand.shape.parameters
    leashed = load([], (), {**SMALL, "algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1})
    assert memory.demand_of(leashed, policy_of(leashed, Given())).reference
    valued = load([], (), {**SMALL, "algorithm": "ppo"})
    assert memory.demand_of(valued, policy_of(valued, Given())).value_head


def test_the_memory_of_this_machine_is_a_whole_number_that_stays() -> None:
    found = available(CPU)
    assert found is None or (found > 10**8 and found == available(CPU))


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMITS", (str(limit), str(tmp_path / "absent")))
    whole = available(CPU)
    limit.write_text("max\n")
    assert available(CPU) == whole
    limit.write_text("123456789\n")
    assert available(CPU) == 123456789


def test_a_policy_given_directly_is_not_decided_for() -> None:
    assert not load_policy("tiny", load([], (), SMALL).config.policy).body.is_gradient_checkpointing
