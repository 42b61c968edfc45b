"""`policy.gradient_checkpointing = "auto"`: decided by the memory model, shown, stored, and decided again on resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from legato.config.load import load
from legato.core.world import OneProcess
from legato.errors import InputError
from legato.policy.model.load import load_policy, recompute_layers
from legato.run import memory
from legato.run.train import resume
from legato.run.wire import PythonObjects, policy_of
from legato.training.memory import available as machine
from legato.training.memory.available import available
from legato.training.memory.fit import least_bytes
from legato.training.memory.model import Demand, Memory
from legato.training.memory.shape import Shape
from legato.training.memory.sharding import KEPT
from tests.proof.pages import numbers
from tests.proof.runs import SMALL, Listener, cut_run, differences, outcome, records, run_small

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("lightly")


def set_available_memory(patch: pytest.MonkeyPatch, size: int | None) -> None:
    """Pretend that the machine has `size` bytes of memory; None: unknown."""
    patch.setattr(memory, "available", lambda device, processes=1: size if size is None else size // processes)


def decide(options: dict[str, Any] | None = None) -> tuple[bool, list[str]]:
    """Whether layers are recomputed, and the notes about the decision."""
    resolved = load([], (), {**SMALL, **(options or {})})
    policy = policy_of(resolved, PythonObjects())
    before = len(policy.notes)
    memory.decide_checkpointing(resolved, policy)
    assert policy.model.training is policy.body.is_gradient_checkpointing
    return policy.body.is_gradient_checkpointing, policy.notes[before:]


def memory_needed(options: dict[str, Any] | None = None) -> tuple[Memory, Memory]:
    """Memory of an update without and with checkpointing."""
    resolved = load([], (), {**SMALL, **(options or {})})
    demand = memory.demand_of(resolved, policy_of(resolved, PythonObjects()))
    return demand.memory(checkpointing=False), demand.memory(checkpointing=True)


def scarce_memory() -> int:
    """Bytes that suffice for a small run only with checkpointing."""
    return memory_needed()[0].total - 1


LARGE = {"policy.tiny.layers": 6, "rollouts.max_response_tokens": 64}
"""A model and a pack whose activations matter."""


def test_checkpointing_is_off_if_everything_fits_and_the_note_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_memory(monkeypatch, 32 * 10**9)
    on, notes = decide(LARGE)
    assert not on and len(notes) == 1
    assert "checkpointing is off" in notes[0] and numbers(notes[0])[0] < 1 and numbers(notes[0])[-1] == 32.0


def test_checkpointing_is_on_exactly_if_the_pack_does_not_fit_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, less = memory_needed(LARGE)
    assert less.total < plain.total
    set_available_memory(monkeypatch, plain.total)
    assert not decide(LARGE)[0]
    set_available_memory(monkeypatch, plain.total - 1)
    on, notes = decide(LARGE)
    assert on and "checkpointing is on" in notes[0] and "tokens_per_pack" not in notes[0]
    set_available_memory(monkeypatch, less.total - 1)
    on, notes = decide(LARGE)
    assert on and "training.tokens_per_pack=" in notes[0]


@pytest.mark.parametrize("setting", ["auto", True, False])
def test_a_model_that_cannot_fit_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, setting: object) -> None:
    options = {**LARGE, "policy.gradient_checkpointing": setting}
    demand = memory.demand_of(resolved := load([], (), {**SMALL, **options}), policy_of(resolved, PythonObjects()))
    longest = resolved.config.policy.max_prompt_tokens + resolved.config.rollouts.max_response_tokens
    least = least_bytes(demand, longest)
    needed = demand.memory(checkpointing=True)
    assert needed.weights + needed.gradients + needed.moments < least < needed.total
    set_available_memory(monkeypatch, least - 1)
    # Adapters of rank 16 are larger than this model is.
    with pytest.raises(InputError, match="a smaller model"):
        decide(options)
    set_available_memory(monkeypatch, least)
    on, notes = decide(options)
    assert on is (setting is not False)
    if setting == "auto":
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
        memory.refuse_if_too_large(demand, 149 * 10**9, 4096, "8B", on_gpu=True)
    for setting in ("policy.lora.rank=16 (", "training.optimizer=adamw-8bit (", "training.offload_optimizer=true ("):
        assert setting in str(refusal.value)
    memory.refuse_if_too_large(replace(demand, offload=True), 149 * 10**9, 4096, "8B", on_gpu=True)


def test_the_suggested_tokens_per_pack_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_memory(monkeypatch, memory_needed(LARGE)[1].total - 1)
    suggested = int(decide(LARGE)[1][0].split("training.tokens_per_pack=")[1].split()[0])
    assert "tokens_per_pack" not in decide({**LARGE, "training.tokens_per_pack": suggested})[1][0]


@pytest.mark.parametrize("setting", [True, False])
def test_an_explicit_choice_is_followed_whatever_the_memory(setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_memory(monkeypatch, 10**15 if setting else scarce_memory())
    assert decide({"policy.gradient_checkpointing": setting}) == (setting, [])


def test_checkpointing_is_off_where_the_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_memory(monkeypatch, None)
    on, notes = decide()
    assert not on and "does not say" in notes[0]


def test_checkpointing_is_off_where_the_model_cannot_be_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(config: Any) -> Shape:
        raise InputError("the configuration Strange has no hidden_size; memory cannot be estimated")

    monkeypatch.setattr("legato.run.wire.check_weights", lambda resolved: None)
    monkeypatch.setattr(Shape, "from_config", strange)
    set_available_memory(monkeypatch, 1)
    on, notes = decide()
    assert not on and "Strange" in notes[0]


def test_a_model_without_checkpointing_gets_a_note_and_refuses_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.supports_gradient_checkpointing", False)
    set_available_memory(monkeypatch, scarce_memory())
    on, notes = decide()
    assert not on and "does not support" in notes[0]
    with pytest.raises(ValueError, match=r"policy\.gradient_checkpointing = true"):
        decide({"policy.gradient_checkpointing": True})


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
    for name, size in (("off", 10**12), ("on", scarce_memory())):
        set_available_memory(monkeypatch, size)
        folders.append(run_small(tmp_path / name, {"training.steps": 2}, watcher=listener).directory)
        (start,) = [record for record in records(folders[-1]) if record["kind"] == "start"]
        (line,) = [note for note in start["notes"] if note.startswith(f"gradient checkpointing is {name}: ")]
        assert line in listener.messages
    outcomes = [outcome(folder) for folder in folders]
    for each in outcomes:
        each["metrics"] = [record for record in each["metrics"] if record["kind"] != "start"]
    assert not differences(*outcomes)


def test_a_resumed_run_chooses_anew_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_memory(monkeypatch, 10**12)
    straight = run_small(tmp_path / "straight", {"training.steps": 2}).directory
    resumed = cut_run(straight, tmp_path / "cut", 1)
    set_available_memory(monkeypatch, scarce_memory())
    listener = Listener()
    assert resume(resumed, watcher=listener).exit_code == 0
    assert "gradient checkpointing is on" in listener.said
    assert not differences(outcome(straight), outcome(resumed))


def test_the_demand_counts_no_more_tokens_than_a_step_has() -> None:
    resolved = load([], (), SMALL)
    policy = policy_of(resolved, PythonObjects())
    demand = memory.demand_of(resolved, policy)
    # 2 groups an update, each a prompt of at most 16 tokens and 4 responses of at most 3.
    assert demand.tokens_per_pack == 2 * (16 + 4 * 3)
    assert demand.trained == demand.parameters == demand.shape.parameters
    assert not demand.reference and not demand.value_head and demand.tables
    small_packs = load([], (), {**SMALL, "training.tokens_per_pack": 1})
    assert memory.demand_of(small_packs, policy).tokens_per_pack == 16 + 3


def test_the_demand_of_adapters_and_of_a_reference_and_a_value_head() -> None:
    lora = load([], (), {**SMALL, "policy.lora.rank": 2})
    demand = memory.demand_of(lora, policy_of(lora, PythonObjects()))
    assert demand.trained == demand.shape.adapters(2) and demand.parameters == demand.shape.parameters
    with_reference = load([], (), {**SMALL, "algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1})
    assert memory.demand_of(with_reference, policy_of(with_reference, PythonObjects())).reference
    with_values = load([], (), {**SMALL, "algorithm": "ppo"})
    assert memory.demand_of(with_values, policy_of(with_values, PythonObjects())).value_head


def test_the_memory_of_this_machine_is_constant() -> None:
    size = available(CPU)
    assert size is None or (size > 10**8 and size == available(CPU))


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMITS", (str(limit), str(tmp_path / "absent")))
    whole = available(CPU)
    limit.write_text("max\n")
    assert available(CPU) == whole
    limit.write_text("123456789\n")
    assert available(CPU) == 123456789
    assert available(CPU, 4) == 123456789 // 4, "the processes of a run on one machine share it"


def test_loading_a_policy_alone_decides_nothing() -> None:
    assert not load_policy("tiny", load([], (), SMALL).config.policy).body.is_gradient_checkpointing


def test_checkpointing_takes_the_name_that_the_installed_transformers_has() -> None:
    """transformers 5.23 has a new name and warns of the old one, on the terminal of every run."""
    policy = load_policy("tiny", load([], (), SMALL).config.policy)
    calls: list[dict[str, Any]] = []
    policy.model.activation_checkpointing_enable = lambda **arguments: calls.append(arguments)
    recompute_layers(policy)
    assert calls == [{"activation_checkpointing_kwargs": {"use_reentrant": False}}]


class Ranks(OneProcess):
    """Two ranks, of which the other chooses `other`."""

    size = 2

    def __init__(self, other: int = 0) -> None:
        self.other = other

    def agree(self, choice: int) -> int:
        return max(choice, self.other)


def decide_kept(size: int | None, other: int = 0, **options: Any) -> tuple[str, str]:
    """What divided layers keep whole where this rank has `size` bytes, and the note about it."""
    resolved = load([], (), {**SMALL, "training.shard": "layers", **options})
    policy = policy_of(resolved, PythonObjects())
    with pytest.MonkeyPatch.context() as patch:
        set_available_memory(patch, size)
        kept = memory.decide_kept(resolved, policy, Ranks(other))
    return kept, policy.notes[-1]


def test_divided_layers_are_kept_as_far_as_there_is_memory() -> None:
    resolved = load([], (), {**SMALL, **LARGE, "training.shard": "layers"})
    demand = memory.demand_of(resolved, policy_of(resolved, PythonObjects()), 2)
    needed = {
        kept: replace(demand, sharding=replace(demand.sharding, kept=kept)).memory(checkpointing=False).total
        for kept in KEPT
    }
    assert needed["nothing"] < needed["weights"] < needed["gradients"]
    for kept in KEPT:
        assert decide_kept(needed[kept], **LARGE)[0] == kept
    assert decide_kept(needed["gradients"] - 1, **LARGE)[0] == "weights" and decide_kept(1)[0] == "nothing"
    assert decide_kept(None)[0] == "nothing", "nothing is kept where the system does not tell"


def test_the_rank_with_the_least_memory_decides_what_is_kept() -> None:
    assert decide_kept(10**12)[0] == "gradients"
    assert decide_kept(10**12, 1)[0] == "weights" and decide_kept(10**12, 2)[0] == "nothing"


def test_what_is_kept_may_be_chosen_and_is_told() -> None:
    kept, note = decide_kept(10**12, **{"training.keep_layers": "weights"})
    assert kept == "weights" and "training.keep_layers = 'weights'" in note
    assert decide_kept(1, **{"training.keep_layers": "gradients"})[0] == "gradients"
    _, note = decide_kept(10**12, **{"policy.lora.rank": 2})
    assert "layers stay gathered" in note and "gradients stay" not in note, "adapters alone have gradients"
    resolved = load([], (), {**SMALL, "training.shard": "layers", "training.keep_layers": "gradients"})
    assert memory.demand_of(resolved, policy_of(resolved, PythonObjects()), 2).sharding.kept == "gradients"


def test_recomputed_layers_leave_room_to_keep_more() -> None:
    resolved = load([], (), {**SMALL, **LARGE, "training.shard": "layers"})
    policy = policy_of(resolved, PythonObjects())
    demand = memory.demand_of(resolved, policy, 2)
    whole = replace(demand, sharding=replace(demand.sharding, kept="gradients"))
    enough = whole.memory(checkpointing=True).total
    assert enough < whole.memory(checkpointing=False).total
    assert decide_kept(enough, **LARGE)[0] != "gradients"
    assert decide_kept(enough, **LARGE, **{"policy.gradient_checkpointing": True})[0] == "gradients"
