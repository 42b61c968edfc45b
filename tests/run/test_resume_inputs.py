"""What a resumed run reads beside its checkpoint is hashed and checked: configuration, files, base weights, reference."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.records.directory import RunDirectory
from legato.run.export import export
from legato.run.target import find
from legato.run.train import resume, train
from legato.training import checkpoint
from tests.proof import verdicts
from tests.proof.runs import SMALL, Listener, cut_run, differences, outcome, records, run_small

EARLY = f"{verdicts.__file__}:early"
KL = {"algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1}
SHORT = {"training.steps": 2, "evaluation.every_steps": 0, "output.rollouts_every_steps": 0, "reward.kind": EARLY}

pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps without adapters, KL term or files."""
    return run_small(tmp_path_factory.mktemp("plain"), SHORT).directory


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    return Path(shutil.copytree(plain / "checkpoints/step-000001/model", tmp_path / "model"))


def flip_signs(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


class Killed(BaseException):
    """Stands for a killed process."""


def killed(report: Any) -> None:
    raise Killed


# The configuration


@pytest.mark.parametrize(("section", "name", "value"), [("training", "lr", "0.5"), ("rollouts", "temperature", "0.7")])
def test_an_edited_config_needs_allow_changes_once(section: str, name: str, value: str, plain: Path, tmp_path: Path) -> None:
    run, option = cut_run(plain, tmp_path, 1), f"{section}.{name}"
    head, table, rest = (run / "config.toml").read_text().partition(f"\n[{section}]\n")
    edited, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", rest, count=1)
    assert count == 1
    (run / "config.toml").write_text(head + table + edited)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(InputError, match=rf"{option} = .*was.*--allow-changes"):
        resume(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before
    listener = Listener()
    with pytest.raises(Killed):
        resume(run, allow_changes=True, watcher=listener, callback=killed)
    assert f"changed: {option} = " in listener.said
    # The permission is part of the checkpoint: a supervisor that starts the run again needs no flag.
    assert resume(run).exit_code == 0


def test_a_comment_in_the_config_changes_nothing(plain: Path, tmp_path: Path) -> None:
    run = cut_run(plain, tmp_path, 1)
    (run / "config.toml").write_text("# my run\n" + (run / "config.toml").read_text())
    listener = Listener()
    resume(run, watcher=listener)
    assert "changed" not in listener.said
    assert differences(outcome(plain), outcome(run)) == []


def test_a_deleted_config_comes_back_from_the_checkpoint(plain: Path, tmp_path: Path) -> None:
    run = cut_run(plain, tmp_path, 1)
    text = (run / "config.toml").read_text()
    (run / "config.toml").unlink()
    assert find(str(run)).resolved.config.training.steps == 2
    listener = Listener()
    resume(run, watcher=listener)
    assert "config.toml was missing" in listener.said
    assert (run / "config.toml").read_text() == text
    assert differences(outcome(plain), outcome(run)) == []


# Files of the user


def test_an_edited_reward_file_or_data_file_needs_allow_changes(tmp_path: Path) -> None:
    """A field of a problem is no part of the fingerprint of the problems, but a reward may read it."""
    reward, data = tmp_path / "mine.py", tmp_path / "data.jsonl"
    reward.write_text("def mine(rollout):\n    return float(len(rollout.tokens) % 2)\n")
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1), "hint": "a"} for n in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {**SHORT, "task.kind": "jsonl", "task.path": str(data), "reward.kind": f"{reward}:mine"}
    small = {**SMALL, "output.directory": str(tmp_path), **options}
    run = train(**{option: value for option, value in small.items() if option != "task.left_digits"}).directory
    for path, old, new, name in ((reward, "% 2", "% 3", "mine.py:mine"), (data, '"a"', '"b"', "task.path")):
        before = path.read_text()
        path.write_text(before.replace(old, new))
        with pytest.raises(InputError, match=rf"changes in .*{name}.*--allow-changes"):
            resume(run, ["training.steps=3"])
        path.write_text(before)
    assert resume(run, ["training.steps=3"]).exit_code == 0


def test_an_edited_module_that_the_reward_imports_needs_allow_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward, helper = tmp_path / "scores.py", tmp_path / "helper_of_scores.py"
    reward.write_text("from helper_of_scores import odd\n\ndef score(rollout):\n    return odd(rollout.tokens)\n")
    helper.write_text("def odd(tokens):\n    return float(len(tokens) % 2)\n")
    run = run_small(tmp_path, {**SHORT, "reward.kind": f"{reward}:score"}).directory
    helper.write_text("def odd(tokens):\n    return float(len(tokens) % 3)\n")
    for name in [name for name in sys.modules if "_of_scores" in name or "own_scores" in name]:
        del sys.modules[name]  # as in a new process
    with pytest.raises(InputError, match=r"changes in the module helper_of_scores .*--allow-changes"):
        resume(run, ["training.steps=3"])
    listener = Listener()
    resume(run, ["training.steps=3"], allow_changes=True, watcher=listener)
    assert "changed: the file of the module helper_of_scores" in listener.said


def test_the_date_that_a_template_writes_stays_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ messages[0].content }}"
    days = iter(["2020-02-03", "2021-03-04"])
    strftime = time.strftime
    monkeypatch.setattr(time, "strftime", lambda form, *rest: next(days) if form == "%Y-%m-%d" else strftime(form, *rest))
    listener = Listener()
    run = run_small(tmp_path, SHORT, tokenizer=tokenizer, watcher=listener).directory
    note = "the chat template writes the date into prompts: it is 2020-02-03"
    assert note in listener.said
    assert find(str(run)).date == "2020-02-03"
    listener = Listener()
    resume(run, ["training.steps=3"], watcher=listener)
    assert note in listener.said
    assert find(str(run)).date == "2020-02-03"


# The model that a resumed run reads again


@pytest.mark.parametrize("options", [{"policy.lora.rank": 2}, KL], ids=["lora", "kl"])
def test_a_replaced_model_folder_is_noticed(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(model, tmp_path / "whole"))
    run = run_small(tmp_path, {**SHORT, **options, "policy.model": str(model)}).directory
    flip_signs(model)
    with pytest.raises(InputError, match=r"got other weights \(policy\.model.*--allow-changes"):
        resume(run, ["training.steps=3"])
    if "policy.lora.rank" in options:
        with pytest.raises(InputError, match="got other weights"):
            export(find(str(run)), tmp_path / "exported")
    shutil.rmtree(model)
    shutil.copytree(whole, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(InputError, match=r"got other config\.json"):
        resume(run, ["training.steps=3"])
    listener = Listener()
    resume(run, ["training.steps=3"], allow_changes=True, watcher=listener)
    assert "changed: config.json of the model" in listener.said


def replace_all(folder: Path) -> None:
    """Other weights with a manifest that fits them."""
    flip_signs(folder)
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder)


@pytest.mark.parametrize("damage", [flip_signs, replace_all, shutil.rmtree], ids=["flipped", "replaced", "deleted"])
def test_a_damaged_or_deleted_reference_is_refused(damage: Callable[[Path], None], kl_run: Path, tmp_path: Path) -> None:
    run = cut_run(kl_run, tmp_path, 1)
    damage(run / "reference")
    with pytest.raises(InputError, match="the model that the KL term compares with"):
        resume(run)


@pytest.fixture(scope="module")
def kl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up = {"policy.warm_up": {"steps": 2, "examples_per_step": 8}}
    return run_small(tmp_path_factory.mktemp("kl"), {**SHORT, **KL, **warm_up}).directory


# Threads


def test_another_number_of_threads_is_said_and_recorded(plain: Path, tmp_path: Path) -> None:
    run = cut_run(plain, tmp_path, 1)
    threads = torch.get_num_threads()
    state = json.loads((run / "checkpoints/step-000001/trainer.json").read_text())
    assert state["threads"] == RunDirectory.open(run).environment()["threads"] == threads
    listener = Listener()
    torch.set_num_threads(threads + 1)
    try:
        resume(run, watcher=listener)
    finally:
        torch.set_num_threads(threads)
    assert f"{threads + 1} threads" in listener.said and f"OMP_NUM_THREADS={threads}" in listener.said
    assert any(record["kind"] == "note" and "threads" in record["text"] for record in records(run))
    state = json.loads((run / "checkpoints/step-000002/trainer.json").read_text())
    assert state["threads"] == threads + 1
