"""Upcycled runs: a dense model folder becomes a mixture of experts, trains, and is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from legato.config.load import load
from legato.core.rollout import Rollout
from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.records.directory import RunDirectory
from legato.run.evaluate import evaluate
from legato.run.export import export
from legato.run.target import find
from tests.proof.pages import numbers
from tests.proof.runs import Listener, light, records, run_small, steps


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dense model."""
    folder = tmp_path_factory.mktemp("dense")
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    automatic: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        automatic.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def early(rollout: Rollout) -> float:
    """A reward that a random model sometimes gets."""
    return float(rollout.text < "5")


OPTIONS = {
    "policy.upcycle": {"experts": 4, "experts_per_token": 2},
    "policy.warm_up": {"steps": 5, "examples_per_step": 8, "lr": 1e-3},
    "training.steps": 2,
}


def test_a_dense_folder_becomes_a_mixture_that_learns(llama: Path, tmp_path: Path) -> None:
    listener = Listener()
    with light():
        run = run_small(tmp_path, {**OPTIONS, "policy.model": str(llama)}, reward=early, watcher=listener)
    (note,) = (line for line in listener.said.splitlines() if "LlamaForCausalLM" in line)
    assert "MixtralForCausalLM" in note and numbers(note)[:2] == [4, 2]  # experts a layer, experts a token
    notes = [message for message in listener.messages if "the warm-up experts are" in message]
    divergences = [float(message.split("experts are ")[1].split("%")[0]) for message in notes]
    assert [message.split()[0] for message in notes] == ["before", "after"]
    assert divergences[0] == 0 and divergences[1] > 1
    assert [record["text"] for record in records(run.directory) if record["kind"] == "note"] == notes
    logged = steps(run.directory)
    assert len(logged) == 2
    assert all(record["gradient/norm"] > 0 for record in logged)
    directory = RunDirectory.open(run.directory)
    kinds = {json.loads((directory.checkpoint_path(s) / "model/config.json").read_text())["model_type"] for s in (0, 1, 2)}
    assert kinds == {"mixtral"}


def test_an_upcycled_mixture_trains_by_rspo_with_replayed_routes(llama: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "policy.model": str(llama), "algorithm": "rspo", "training.routing_replay": "R2"}
    with light():
        more = {"training.updates_per_step": 4, "training.lr": 1e-2, "training.skip_silent_rows": False}
        run = run_small(tmp_path, {**options, **more}, reward=early)
    for record in steps(run.directory):
        assert record["update/applied"] == 1.0 and record["router/replay_missing"] == 0.0
        assert record["router/shift_mean@0"] == 1.0 > record["router/shift_mean@3"] > 0.0
        assert record["router/flip_mean@0"] == 0.0 < record["router/flip_mean@3"]


def test_a_trained_mixture_is_evaluated_and_exported_as_it_is(llama: Path, tmp_path: Path) -> None:
    with light():
        run = run_small(tmp_path, {**OPTIONS, "policy.model": str(llama), "reward.kind": "number"})
    target = find(str(run.directory))
    evaluate(target, samples=2)
    export(target, tmp_path / "exported")
    automatic: Any = AutoModelForCausalLM
    assert run.model_folder is not None
    saved, exported = (automatic.from_pretrained(folder) for folder in (run.model_folder, tmp_path / "exported"))
    assert exported.config.num_local_experts == 4
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in saved.state_dict().items())


def test_the_mixture_of_a_recipe_is_exported_before_it_is_trained(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(f'[policy]\nmodel = "{llama}"\n[policy.upcycle]\nexperts = 3\n')
    export(find(str(recipe)), tmp_path / "mixture")
    automatic: Any = AutoModelForCausalLM
    dense, mixture = (automatic.from_pretrained(folder) for folder in (llama, tmp_path / "mixture"))
    tokens = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        assert float((dense(tokens).logits - mixture(tokens).logits).abs().max()) < 1e-4
    assert mixture.config.num_local_experts == 3


def test_a_run_without_upcycling_shows_no_note_about_experts(tmp_path: Path) -> None:
    listener = Listener()
    with light():
        run_small(tmp_path, {"policy.warm_up": OPTIONS["policy.warm_up"], "training.steps": 1}, watcher=listener)
    assert "experts" not in listener.said


def test_more_experts_a_token_than_a_layer_has_are_refused() -> None:
    for words, fragments in (
        (["policy.upcycle.experts=4", "policy.upcycle.experts_per_token=5"], ["experts = 4", "5", "word 1", "word 2"]),
        (["policy.upcycle.experts_per_token=1"], [">= 2", "1", "word 1"]),
    ):
        with pytest.raises(InputError, match=r"policy\.upcycle\.experts_per_token") as refusal:
            load([], words)
        assert [each for each in fragments if each not in str(refusal.value)] == []
