"""docs/migrating.md is followed as it stands: its files are written, its scripts and commands run, on a small scale."""

import json
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from legato.config.load import load
from legato.core.rollout import Problem
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.records.directory import RunDirectory
from legato.rewards.scoring import judge_all
from legato.run import wire
from legato.run.from_trl import resolve_trl
from legato.run.train import _as_problems as problems_of
from tests.proof.command import Command
from tests.proof.responses import response

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migrating.md").read_text()
FIELDS = json.loads((ROOT / "tests/config/data/trl_fields.json").read_text())["GRPOConfig"]
SMALLER = {
    "Qwen/Qwen3-0.6B": "small-model",
    "max_steps=400": "max_steps=4",
    "max_completion_length=256": "max_completion_length=8",
    "range(300)": "range(40)",
}


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every block of the page, in order."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(text)) for _, language, text in found]


def write_files(folder: Path) -> None:
    """Write every block that begins with the name of a file, smaller."""
    for language, text in blocks():
        name = re.match(r"# (\S+\.(?:py|toml))\n", text)
        assert (name is not None) is (language in ("python", "toml")), text
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        if name is not None:
            (folder / name[1]).write_text(text)


def commands() -> list[list[str]]:
    lines = [line for language, text in blocks() if not language for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("legato ")]


def fake_trl() -> ModuleType:
    """TRL's two classes: a GRPOConfig with every field of TRL 1.16.0, and a trainer that trains nothing."""
    module: Any = ModuleType("trl")
    config = make_dataclass("GRPOConfig", [(name, Any, None) for name in FIELDS])

    def make(**settings: Any) -> Any:
        made = config(**{**FIELDS, **settings})
        made.generation_batch_size = made.per_device_train_batch_size * made.steps_per_generation
        made.to_json_string = lambda: json.dumps({name: getattr(made, name) for name in FIELDS}, indent=2)
        return made

    class Trainer:
        def __init__(self, model: str, reward_funcs: list[Any], args: Any, train_dataset: Any) -> None:
            assert len(reward_funcs) == len(args.reward_weights) and "answer" in train_dataset.column_names

        def train(self) -> None:
            pass

    module.GRPOConfig, module.GRPOTrainer = make, Trainer
    return module


def fake_datasets() -> ModuleType:
    """`load_dataset` for a JSON file, without its cache in the home directory."""
    module: Any = ModuleType("datasets")

    class Data(list[dict[str, Any]]):
        column_names: property = property(lambda self: list(self[0]))

        def map(self, function: Any) -> "Data":
            return Data({**row, **function(row)} for row in self)

    def load_dataset(kind: str, *, data_files: str, split: str) -> Any:
        assert (kind, split) == ("json", "train")
        return Data(json.loads(line) for line in Path(data_files).read_text().splitlines())

    module.load_dataset = load_dataset
    return module


def write_logs(folder: Path) -> None:
    """Small logs with the columns that TRL and verl write."""
    rows = [
        {"step": n, "loss": 0.01, "grad_norm": 0.4, "learning_rate": 1e-6, "reward": 0.3 + n / 100, "reward_std": 0.4}
        | {"frac_reward_zero_std": 0.2, "completions/mean_length": 180.0, "entropy": 0.4, "clip_ratio/region_mean": 0.0}
        for n in range(1, 31)
    ]
    (folder / "outputs/trl-run/checkpoint-30").mkdir(parents=True)
    state = {"global_step": 30, "log_history": [*rows, {"step": 30, "train_runtime": 10.0}]}
    (folder / "outputs/trl-run/checkpoint-30/trainer_state.json").write_text(json.dumps(state))
    verl = [
        {"critic/score/mean": 0.3 + n / 100, "actor/entropy": 0.4, "actor/pg_clipfrac": 0.1, "actor/grad_norm": 0.4}
        | {"actor/pg_loss": 0.01, "actor/lr": 1e-6, "response_length/mean": 180.0, "response_length/clip_ratio": 0.0}
        for n in range(1, 31)
    ]
    (folder / "verl").mkdir()
    lines = [json.dumps({"step": n, "data": row}) for n, row in enumerate(verl, start=1)]
    (folder / "verl/gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    printed = [" - ".join([f"step:{n}", *(f"{k}:{v}" for k, v in row.items())]) for n, row in enumerate(verl, start=1)]
    (folder / "console.log").write_text("\n".join(["INFO starting", *printed]))


def write_model(folder: Path) -> None:
    """A tiny model whose tokenizer has a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant: "
    tiny_model(TinyShape(hidden=32, layers=1, heads=2), vocabulary=len(tokenizer), seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, in which its scripts can run."""
    for old in SMALLER:
        assert old in PAGE
    write_files(tmp_path)
    write_model(tmp_path / "small-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "trl", fake_trl())
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets())
    yield tmp_path
    sys.modules.pop("rewards", None)


def test_the_page_is_followed_from_its_script_to_the_doctor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legato = Command(monkeypatch, capsys)
    runpy.run_path("make_data.py")
    runpy.run_path("train_trl.py")
    write_logs(folder)
    outcomes = {}
    for words in commands():
        code, text, error = legato(*words)
        refused = "importance_sampling_level=sequence" in words and words[0] == "train"
        assert code == (2 if refused else 0), (words, error)
        outcomes[" ".join(words)] = text + error
    recipe = outcomes["train --from-trl trl.json --print-recipe"]
    assert 'name = "gspo"  # importance_sampling_level, loss_type' in recipe
    record = RunDirectory.open(folder / "outputs/sums").metrics()[0]
    assert any("from trl.json: TRL shuffles the responses" in note for note in record["notes"])
    assert any("'short' has TRL's signature" in note for note in record["notes"])
    config = load([folder / "outputs/sums/config.toml"]).config
    assert (config.training.steps, config.training.updates_per_step, config.training.prompts_per_step) == (1, 4, 16)
    assert config.training.seed == 1 and config.policy.chat == "auto"
    (refusal,) = [text for words, text in outcomes.items() if "clip_ratio_low=0.0003 importance" in words]
    assert "did you mean 'algorithm.objective.trust.clip.low'?" in refusal and "algorithm=gspo" in refusal
    (lora,) = [text for words, text in outcomes.items() if "use_peft" in words]
    assert "LoRA with a learning rate" in " ".join(lora.split())


def test_the_python_script_of_the_page_trains_with_both_rewards(folder: Path) -> None:
    runpy.run_path("make_data.py")
    runpy.run_path("train_trl.py")
    names = runpy.run_path("train_legato.py")
    run = names["run"]
    assert (run.directory.parent.name, run.directory.name) == ("outputs", "sums-python")
    assert 0 <= run.accuracy <= 1
    metrics = [record for record in RunDirectory.open(run.directory).metrics() if record["kind"] == "step"]
    assert len(metrics) == 1 and {"reward/right", "reward/short"} <= set(metrics[0])


def test_a_script_with_mapped_messages_and_adapters_trains(folder: Path) -> None:
    pytest.importorskip("peft")
    runpy.run_path("make_data.py")
    runpy.run_path("train_trl.py")
    run = runpy.run_path("train_lora.py")["run"]
    directory = RunDirectory.open(run.directory)
    adapter = json.loads((run.model_folder / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (8, 32)
    assert {name.rpartition(".")[2] for name in adapter["target_modules"]} == {"q_proj", "v_proj"}
    (rollout, *_) = directory.read_rollouts(1)
    assert rollout["prompt"].startswith("system: Think first")


def test_a_data_set_of_the_library_is_a_list_of_problems() -> None:
    """`train_dataset` is passed as it is: rows, columns and messages arrive."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": n + 1, "level": n % 2} for n in range(4)]
    (first, *_) = problems_of(datasets.Dataset.from_list(rows))
    assert (first.prompt, first.answer, first.fields) == (rows[0]["prompt"], "1", {"answer": 1, "level": 0})


def test_the_recipe_and_the_reward_of_the_verl_script_load(folder: Path) -> None:
    config = load([folder / "gspo.toml"]).config
    reward = wire.reward_of(config, wire.PythonObjects()).components["reward"].reward
    problem = Problem(prompt="2+3=", fields={"data_source": "sums", "reward_model": {"ground_truth": "5"}})
    assert judge_all(reward, [response(problem, " 5"), response(problem, "6")]) == [{"": 1.0}, {"": 0.0}]


def test_epochs_and_plain_text_are_read_from_the_data(folder: Path) -> None:
    from legato.config.from_trl import translate

    problems = [Problem(prompt=f"{n}+1=", answer=str(n + 1)) for n in range(50)]
    given = wire.PythonObjects(problems=problems, reward=lambda rollout: 0.0)
    translation = translate({"num_train_epochs": 2, "model_name_or_path": "tiny"})
    resolved, notes = resolve_trl(translation, [], [], None, given)
    size = wire.source_of(resolved.config, given).size
    assert resolved.config.training.steps == 2 * size and resolved.config.policy.chat == "never"
    assert not any("once the data is known" in note for note in notes)
    fixed, _ = resolve_trl(translation, [], ["training.steps=3", "policy.chat=auto"], None, given)
    assert (fixed.config.training.steps, fixed.config.policy.chat) == (3, "auto")
