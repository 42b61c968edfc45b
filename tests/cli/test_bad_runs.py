"""Bad input through the command line: exit code 2, one clear line, no traceback, and no run directory for it."""

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import words


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    tokenizer = character_tokenizer()
    tiny_model(TinyShape(hidden=32, layers=1, heads=2), vocabulary=len(tokenizer), seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model folder for a test to damage."""
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    return copy


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# The model


def test_the_whole_folder_is_accepted(legato: Command, model: Path, tmp_path: Path) -> None:
    code, out, error = legato("train", *words(tmp_path, {"policy.model": str(model), "training.steps": 1}))
    assert code == 0, error
    assert "Traceback" not in out + error
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


def _missing(folder: Path) -> None:
    shutil.rmtree(folder)


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _half_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def _no_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    change_json(folder / "config.json", eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=None)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


def _code_of_its_own(folder: Path) -> None:
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Model: pass\n")


def _tokenizer_code(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def _config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _config_is_binary(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _unknown_kind(folder: Path) -> None:
    change_json(folder / "config.json", model_type="no-such-model", architectures=["NoSuchModel"])


def _not_causal(folder: Path) -> None:
    change_json(folder / "config.json", model_type="t5", architectures=["T5Model"])


def _cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _other_shape(folder: Path) -> None:
    change_json(folder / "config.json", hidden_size=48)


def _missing_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _missing_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _not_finite(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _large_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra {number}>" for number in range(50)])
    tokenizer.save_pretrained(folder)


def _an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "peft_type": "LORA"}')


def _only_an_adapter(folder: Path) -> None:
    _an_adapter(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


BROKEN: dict[Callable[[Path], None], tuple[str, ...]] = {
    _missing: ("there is no such folder",),
    _a_file: ("is a file",),
    _no_weights: ("no weights", "safetensors"),
    _no_tokenizer: ("no tokenizer",),
    _half_a_tokenizer: ("tokenizer",),
    _broken_tokenizer: ("tokenizer",),
    _no_end: ("end token",),
    _pickled: (".bin", "safetensors"),
    _code_of_its_own: ("auto_map", "policy.trust_remote_code"),
    _broken_config: ("config.json",),
    _config_is_a_list: ("config.json",),
    _config_is_binary: ("config.json",),
    _no_config: ("config.json",),
    _unknown_kind: ("no-such-model",),
    _not_causal: ("could not be loaded",),
    _cut_weights: ("could not be loaded",),
    _empty_weights: ("could not be loaded",),
    _other_shape: ("could not be loaded",),
    _missing_weight: ("up_proj",),
    _missing_shard: ("model-00002-of-00002.safetensors",),
    _not_finite: ("finite",),
    _an_adapter: ("got an adapter", "the base 'owner/base'", "load policy.model=owner/base"),
    _only_an_adapter: ("got an adapter", "load policy.model=owner/base"),
    _large_tokenizer: ("expected a tokenizer of at most", "embedding"),
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__.strip("_"))
def test_a_model_folder_that_is_not_whole_is_refused(
    damage: Callable[[Path], None], legato: Command, broken: Path, tmp_path: Path
) -> None:
    damage(broken)
    result = legato("train", *words(tmp_path / "runs", {"policy.model": str(broken), "training.steps": 1}))
    assert_refused(result, *BROKEN[damage])
    assert not (tmp_path / "runs").exists()
    assert not (broken / "ran").exists()


def test_code_that_comes_with_a_tokenizer_is_not_run(legato: Command, broken: Path, tmp_path: Path) -> None:
    _tokenizer_code(broken)
    legato("train", *words(tmp_path / "runs", {"policy.model": str(broken), "training.steps": 1}))
    assert not (broken / "ran").exists()


def test_a_refusal_names_the_folder(legato: Command, tmp_path: Path) -> None:
    assert_refused(legato("train", *words(tmp_path, {"policy.model": str(tmp_path / "none")})), str(tmp_path / "none"))


def test_an_unreachable_hub_name_is_refused(legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(
        legato("train", *words(tmp_path / "runs", {"policy.model": "nobody/nothing"})), "nobody/nothing", "hub name"
    )
    assert not (tmp_path / "runs").exists()


def test_a_hub_name_without_a_network_is_refused_at_once(
    legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.policy.model.load._HUB_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Nothing listens on port 1; the server accepts connections and never answers.
        for port in (1, silent.getsockname()[1]):
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
            begin = time.monotonic()
            result = legato("train", *words(tmp_path / "runs", {"policy.model": "nobody/nothing"}))
            assert_refused(result, "a hub name", "a network", f"http://127.0.0.1:{port}", "give the folder")
            assert time.monotonic() - begin < 5 and len(result[2].strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


# Options that fit no model


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a device that is not there": ({"policy.device": "cuda"}, ("policy.device", "'cuda'", "'cpu' or 'auto'")),
    "adapters on nothing": ({"policy.lora.targets": ["no_such_layer"]}, ("policy.lora", "no_such_layer")),
    "frozen nothing": ({"policy.frozen": ["*no_such_weight*"]}, ("policy.frozen", "*no_such_weight*")),
    "frozen everything": ({"policy.frozen": ["*"]}, ("policy.frozen", "every parameter")),
    "an end token that is none": ({"policy.end_tokens": ["<nothing>"]}, ("policy.end_tokens", "<nothing>")),
    "a chat template that is not there": ({"policy.chat": "always"}, ("policy.chat", "no chat template")),
    "longer than the context": ({"policy.max_prompt_tokens": 4096}, ("policy.max_prompt_tokens", "4096")),
    "every prompt too long": ({"policy.max_prompt_tokens": 2}, ("policy.max_prompt_tokens = 2",)),
    "a prompt too long": (
        {"policy.max_prompt_tokens": 2, "policy.too_long": "error"},
        ("policy.max_prompt_tokens = 2", "policy.too_long"),
    ),
    "more held out than there is": ({"task.held_out": 30}, ("held_out = 30",)),
    "adapters in 8 bits": ({"training.optimizer": "adamw-8bit"}, ("training.optimizer", "bitsandbytes")),
    "no such reward": ({"reward.kind": "nothing"}, ("reward.kind", "'nothing'")),
    "no such reward module": ({"reward.kind": "no_such_module:score"}, ("no_such_module",)),
    "no such reward file": ({"reward.kind": "/no/such/file.py:score"}, ("/no/such/file.py",)),
    "no such function": ({"reward.kind": f"{verdicts.__file__}:odds"}, ("odds", "odd")),
    "a reward that is none": ({"reward.kind": f"{verdicts.__file__}:NOT_CALLABLE"}, ("NOT_CALLABLE", "function")),
    "no such task module": ({"task.kind": "no_such_module:Task", "task.left_digits": None}, ("task", "no_such_module")),
    "a task that is none": ({"task.kind": "json:dumps", "task.left_digits": None}, ("task.kind", "json:dumps")),
    "a timeout of nothing": ({"reward.timeout_seconds": 0.0}, ("timeout_seconds",)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_does_not_fit_is_refused(case: str, legato: Command, tmp_path: Path) -> None:
    changes, wanted = OPTIONS[case]
    arguments = words(tmp_path / "runs", {"training.steps": 1, **changes})
    assert_refused(legato("train", *(word for word in arguments if not word.endswith("=null"))), *wanted)
    assert not (tmp_path / "runs").exists()


def test_a_missing_recipe_is_refused(legato: Command, tmp_path: Path) -> None:
    assert_refused(legato("train", str(tmp_path / "none.toml")), str(tmp_path / "none.toml"), "does not exist")
