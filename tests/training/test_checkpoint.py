"""Checkpoints are complete or absent. If one is damaged, the previous one is used. A crash while saving loses nothing."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.config.load import load
from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.run.train import resume
from legato.training import checkpoint
from tests.proof.runs import Listener, alter_tensors, cut_run, differences, outcome, rewrite_manifest, run_small

TORN = 1 / 2


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a value head, so that every kind of file is there."""
    options = {"algorithm": "ppo", "training.steps": 3, "evaluation.every_steps": 0}
    return run_small(tmp_path_factory.mktemp("straight"), options).directory


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A copy of the run to damage, with complete checkpoints of steps 1, 2 and 3."""
    return cut_run(straight, tmp_path, 3)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000003"


# What is in one


def test_a_checkpoint_holds_safetensors_json_and_a_tokenizer_and_nothing_pickled(straight: Path) -> None:
    names = files(newest(straight))
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".jinja", ".txt", ".model", ".toml"}
    assert {"manifest.json", "trainer.json", "optimizer.safetensors", "random.safetensors", "value_head.safetensors"} <= {
        *names
    }
    for name in names:
        head = (newest(straight) / name).read_bytes()[:4]
        assert not head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")), name


def test_the_manifest_knows_the_size_and_hash_of_every_file(straight: Path) -> None:
    record = json.loads((newest(straight) / "manifest.json").read_text())
    assert sorted([*record["files"], "manifest.json"]) == files(newest(straight))
    assert all(set(known) >= {"bytes", "sha256"} and len(known["sha256"]) == 64 for known in record["files"].values())


def test_the_model_is_a_folder_that_transformers_loads(straight: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(newest(straight) / "model")
    saved = load_file(newest(straight) / "model" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    assert AutoTokenizer.from_pretrained(newest(straight) / "model")("2+3=")["input_ids"]


def test_generators_of_every_kind_come_back(straight: Path, tmp_path: Path) -> None:
    resolved = load([straight / "config.toml"])
    folder = newest(straight)
    policy = wire.policy_of(resolved, wire.PythonObjects(), folder / "model")
    memory = checkpoint.read_state(folder)
    source = wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    trainer = wire.trainer_of(resolved, policy, collector, None)
    checkpoint.restore(folder, policy, trainer.optimizer, memory)
    place = tmp_path / "checkpoints" / "step-000009"
    random.seed(4)
    numpy.random.seed(4)
    torch.manual_seed(4)
    random.gauss(0, 1)
    numpy.random.normal()
    checkpoint.save(place, policy, trainer.optimizer, {})
    expected = random.random(), random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    checkpoint.restore(place, policy, trainer.optimizer, checkpoint.read_state(place))
    assert (random.random(), random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()) == expected


# Damage


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(len(data) * place))] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero_a_block(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = len(data) // 2
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def of_the_step_before(path: Path) -> None:
    """Replace a file by that of the previous checkpoint: undamaged, but of another step."""
    shutil.copy(str(path).replace("step-000003", "step-000002"), path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit at the start": lambda path: flip(path, 0.0),
    "a bit in the middle": lambda path: flip(path, 0.5),
    "a bit at the end": lambda path: flip(path, 1.0),
    "cut": truncate,
    "empty": empty,
    "longer": lengthen,
    "a block of zeros": zero_a_block,
    "missing": remove,
}
NAMES = [
    "manifest.json",
    "config.toml",
    "trainer.json",
    "optimizer.safetensors",
    "random.safetensors",
    "value_head.safetensors",
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
]


def test_the_damage_tests_cover_every_file_of_a_checkpoint(straight: Path) -> None:
    assert files(newest(straight)) == sorted(NAMES)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_detected_and_the_previous_checkpoint_is_used(damage: str, run: Path, straight: Path) -> None:
    for name in NAMES:
        path = newest(run) / name
        before = path.read_bytes()
        DAMAGES[damage](path)
        folder, warnings = checkpoint.latest(run / "checkpoints")
        assert folder.name == "step-000002", (name, damage)
        assert len(warnings) == 1
        assert "step-000003 is damaged" in warnings[0]
        assert name.split("/")[-1] in warnings[0]
        path.write_bytes(before)
    assert checkpoint.latest(run / "checkpoints") == (newest(run), [])


@pytest.mark.parametrize("name", ["trainer.json", "optimizer.safetensors", "model/model.safetensors"])
def test_a_file_of_another_checkpoint_is_damage(name: str, run: Path) -> None:
    of_the_step_before(newest(run) / name)
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert folder.name == "step-000002"
    assert name.split("/")[-1] in warnings[0]


def test_two_swapped_files_are_damage(run: Path) -> None:
    one, other = newest(run) / "random.safetensors", newest(run) / "value_head.safetensors"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert checkpoint.latest(run / "checkpoints")[0].name == "step-000002"


@pytest.mark.parametrize("name", ["sampler.safetensors", "model/pytorch_model.bin", "model/evil.py"])
def test_an_extra_file_that_would_be_read_is_damage(name: str, run: Path) -> None:
    (newest(run) / name).write_bytes(b"x")
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert folder.name == "step-000002"
    assert Path(name).name in warnings[0] and warnings[0].endswith("step-000002 is used instead")


def test_extra_files_that_nothing_reads_are_no_damage(run: Path) -> None:
    for name in (".DS_Store", "model/.DS_Store", "model/._config.json", "notes.txt", "extra.bin", "model/README.md"):
        (newest(run) / name).write_bytes(b"x")
    assert checkpoint.latest(run / "checkpoints") == (newest(run), [])


def test_a_checkpoint_left_between_two_renames_is_reported(run: Path) -> None:
    newest(run).rename(run / "checkpoints" / ".step-000003.before.partial")
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert folder.name == "step-000002"
    assert "step-000003" in warnings[0] and "interrupted" in warnings[0]


def test_bits_flipped_at_random_are_all_damage(run: Path) -> None:
    draw = random.Random(7)
    for _ in range(60):
        path = newest(run) / draw.choice(NAMES)
        before = path.read_bytes()
        data = bytearray(before)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        # A flip inside the manifest's white space changes nothing that counts; the files must then be whole.
        folder, _ = checkpoint.latest(run / "checkpoints")
        if folder == newest(run):
            assert path.name == "manifest.json"
            known, now = json.loads(before), json.loads(data)
            assert known["files"] == now["files"]
        path.write_bytes(before)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"text"',
        "{}",
        '{"format": 1}',
        '{"format": 2, "files": {}}',
        '{"format": 1, "files": []}',
        '{"format": 1, "files": {}}',
        '{"format": 1, "files": null}',
        '{"format": 1, "files": {"trainer.json": null}}',
        '{"format": 1, "files": {"trainer.json": {"bytes": 1}}}',
        '{"format": 1, "files": {"../../config.toml": {"bytes": 1, "sha256": "0"}}}',
        '{"format": 1, "files": {"trainer.json": {"bytes": Infinity, "sha256": "0"}}}',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "[" * 100_000,
    ],
    ids=lambda text: text[:60] or "empty",
)
def test_a_malformed_manifest_counts_as_damage(text: str, run: Path) -> None:
    (newest(run) / "manifest.json").write_text(text, encoding="latin-1")
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert folder.name == "step-000002"
    assert "step-000003 is damaged" in warnings[0]


def test_a_resumed_run_names_the_damaged_checkpoint_and_equals_an_uninterrupted_one(run: Path, straight: Path) -> None:
    flip(newest(run) / "optimizer.safetensors", 0.5)
    listener = Listener()
    resume(run, watcher=listener)
    assert "step-000003 is damaged" in listener.said
    assert "optimizer.safetensors" in listener.said
    (title,) = listener.titles
    assert "step 2" in title and "step-000002" in title
    assert differences(outcome(straight), outcome(run)) == []
    assert checkpoint.latest(run / "checkpoints") == (newest(run), [])


def test_two_damaged_checkpoints_are_reported_and_the_third_is_used(run: Path) -> None:
    truncate(newest(run) / "trainer.json")
    remove(run / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert folder.name == "step-000001"
    assert ["step-000003" in warnings[0], "step-000002" in warnings[1]] == [True, True]


def test_if_all_checkpoints_are_damaged_nothing_is_resumed_or_changed(run: Path) -> None:
    for step in (1, 2, 3):
        flip(run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors", TORN)
    before = {name: (run / name).read_bytes() for name in files(run) if name != ".lock"}
    with pytest.raises(ValueError, match="no whole checkpoint") as raised:
        resume(run)
    assert all(f"step-{step:06d}" in str(raised.value) for step in (1, 2, 3))
    assert {name: (run / name).read_bytes() for name in files(run) if name != ".lock"} == before


def test_the_newest_is_the_one_of_the_largest_step(run: Path) -> None:
    """A million steps have seven digits."""
    newest(run).rename(run / "checkpoints" / "step-1000000")
    (run / "checkpoints" / "step-000002").rename(run / "checkpoints" / "step-999999")
    assert checkpoint.latest(run / "checkpoints")[0].name == "step-1000000"
    checkpoint.purge(run / "checkpoints", 1, ())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1000000"]


def test_a_folder_that_a_crash_left_half_written_is_no_checkpoint(run: Path) -> None:
    shutil.copytree(newest(run), run / "checkpoints" / ".step-000004.partial")
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert (folder, warnings) == (newest(run), [])
    assert RunDirectory.open(run).checkpoint_steps() == [1, 2, 3]


def test_weights_of_another_shape_are_refused(run: Path) -> None:
    """A checkpoint of another model, sealed as if it were of this run."""
    config = newest(run) / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 48}))
    rewrite_manifest(newest(run))
    with pytest.raises(ValueError):
        resume(run)


def test_a_checkpoint_that_lacks_a_moment_is_refused(run: Path) -> None:
    alter_tensors(newest(run), "optimizer.safetensors", lambda tensors: tensors.pop(next(iter(tensors))))
    with pytest.raises(ValueError, match="optimizer"):
        resume(run, ["training.steps=4"])


def forge_state(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "trainer.json").write_text(text)


def leave_out(*path: str) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        state = table = json.loads((folder / "trainer.json").read_text())
        for key in path[:-1]:
            table = table[key]
        table.pop(path[-1])
        (folder / "trainer.json").write_text(json.dumps(state))

    return forge


def put(value: object, *path: str) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        state = table = json.loads((folder / "trainer.json").read_text())
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value
        (folder / "trainer.json").write_text(json.dumps(state))

    return forge


def empty_tensors(name: str) -> Callable[[Path], None]:
    return lambda folder: save_file({}, folder / name)


FORGERIES: dict[str, Callable[[Path], None]] = {
    "an empty object": forge_state("{}"),
    "no given": leave_out("made_of", "given"),
    "code is a list": put([], "made_of", "code"),
    "no collector": leave_out("trainer", "collector"),
    "position is text": put("text", "metrics_position"),
    "health is a number": put(3, "health"),
    "no random state": empty_tensors("random.safetensors"),
    "no optimizer file": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "no model": lambda folder: shutil.rmtree(folder / "model"),
}


def test_forged_checkpoints_with_a_fitting_manifest_are_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000001")
    shutil.rmtree(run / "checkpoints" / "step-000002")
    whole = tmp_path / "whole"
    shutil.copytree(newest(run), whole)
    for name, forge in FORGERIES.items():
        forge(newest(run))
        rewrite_manifest(newest(run))
        with pytest.raises(InputError) as raised:
            resume(run, ["training.steps=4"])
        assert "step-000003" in str(raised.value), name
        shutil.rmtree(newest(run))
        shutil.copytree(whole, newest(run))
    assert resume(run, ["training.steps=4"]).exit_code == 0
