"""Every kind of task with the rewards that belong to it, and every recipe: one step each."""

import json
from pathlib import Path
from typing import Any

import pytest

from legato.config.kinds import register_all
from legato.config.load import dump, load
from legato.core.parts import names
from legato.run.train import train
from tests.proof.published import ROWS
from tests.proof.runs import SMALL, steps

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

WORDS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
SOLVED = [{"question": f"What is {n}+1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(40)]
BOXED = [{"problem": f"What is {n}+1?", "solution": f"It is \\boxed{{{n + 1}}}."} for n in range(40)]

TASKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "arithmetic": ({"left_digits": 1}, ["number", "exact"]),
    "reversal": ({"length": 3}, ["exact", "number"]),
    "sorting": ({"count": 2}, ["exact"]),
    "counting-down": ({"least": 1, "most": 9}, ["exact"]),
    "letter-counting": ({"length": 4}, ["number", "exact"]),
    "countdown": ({"count": 2}, ["countdown"]),
}
GAMES = {"secret-number": "guess", "maze": "maze", "facts": "search"}
"""Tasks that belong to an environment."""
CASES = [(kind, options, reward) for kind, (options, rewards) in TASKS.items() for reward in rewards]


pytestmark = pytest.mark.usefixtures("lightly")


def train_one_step(folder: Path, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    base = {path: value for path, value in SMALL.items() if not path.startswith("task.")}
    changes = {
        "task.held_out": 2,
        "training.steps": 1,
        "evaluation.every_steps": 0,
        "policy.max_prompt_tokens": 300,
        "rollouts.max_response_tokens": 6,
        "output.directory": str(folder),
    }
    run = train(**arguments, **{**base, **changes, **options})
    assert run.exit_code == 0
    return steps(run.directory)[0]


@pytest.mark.parametrize(("kind", "options", "reward"), CASES, ids=[f"{kind}-{reward}" for kind, _, reward in CASES])
def test_a_task_made_in_code_is_trained_on(kind: str, options: dict[str, Any], reward: str, tmp_path: Path) -> None:
    settings = {"task.kind": kind, "reward.kind": reward, **{f"task.{name}": value for name, value in options.items()}}
    record = train_one_step(tmp_path, settings)
    assert record["rollouts/unscorable"] == 0
    assert record[f"reward/{reward}"] is not None
    assert record["update/applied"] == 1


@pytest.mark.parametrize(("kind", "environment"), GAMES.items())
def test_a_game_is_trained_on(kind: str, environment: str, tmp_path: Path) -> None:
    settings = {"task.kind": kind, "task.environment": environment, "algorithm": "gspo-token", "task.train_on_cut": True}
    record = train_one_step(tmp_path, {**settings, "rollouts.max_response_tokens": 30})
    assert record["rollouts/unscorable"] == 0 and record["reward/environment"] is not None


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "rows", "reward"),
    [("jsonl", WORDS, "number"), ("jsonl", WORDS, "exact"), ("gsm8k", SOLVED, "number"), ("math", BOXED, "exact")],
)
def test_a_file_of_problems_is_trained_on(kind: str, rows: list[dict[str, str]], reward: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    record = train_one_step(tmp_path / "runs", {"task.kind": kind, "task.path": path, "reward.kind": reward})
    assert record["rollouts/unscorable"] == 0


def test_columns_of_a_file_may_have_other_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": row["prompt"], "a": row["answer"], "level": "1"} for row in WORDS])
    options = {"task.kind": "jsonl", "task.path": path, "task.prompt": "q", "task.answer": "a"}
    assert train_one_step(tmp_path / "runs", options)["update/applied"] == 1


def test_a_parquet_file_is_trained_on(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(WORDS), tmp_path / "rows.parquet")
    options = {"task.kind": "parquet", "task.path": str(tmp_path / "rows.parquet")}
    assert train_one_step(tmp_path / "runs", options)["update/applied"] == 1


def test_math_verify_judges_a_run(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = write_rows(tmp_path / "rows.jsonl", BOXED)
    record = train_one_step(tmp_path / "runs", {"task.kind": "math", "task.path": path, "reward.kind": "math-verify"})
    assert record["rollouts/unscorable"] == 0


def test_a_data_set_of_reasoning_gym_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"task.kind": "reasoning-gym", "task.dataset": "basic_arithmetic", "reward.kind": "reasoning-gym"}
    record = train_one_step(tmp_path, options)
    assert record["rollouts/unscorable"] == 0


def test_shaping_is_added_to_an_answer(tmp_path: Path) -> None:
    components = {
        "answer": {"kind": "number"},
        "form": {"kind": "format", "judges": False, "weight": 0.1},
        "size": {"kind": "length", "judges": False, "weight": 0.1},
    }
    record = train_one_step(tmp_path, {"reward.kind": None, "reward.components": components})
    assert {"reward/answer", "reward/form", "reward/size"} <= set(record)


def test_a_users_own_task_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from legato.core.rollout import Problem\n"
        "class Doubling:\n"
        "    def problem(self, random):\n"
        "        number = random.randrange(1000)\n"
        "        return Problem(prompt=f'{number}*2=', answer=str(2 * number))\n"
    )
    (tmp_path / "tasks_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert train_one_step(tmp_path / "runs", {"task.kind": "tasks_of_mine:Doubling"})["update/applied"] == 1


def test_every_task_and_every_reward_is_tested_here() -> None:
    register_all()
    assert {*names("task")} == {*TASKS, *GAMES, "reasoning-gym"}
    # `dataset` needs the network; what it makes of rows is in tests/tasks/test_data.py. Published sets and their reward are
    # in tests/tasks/test_benchmarks.py, tests/rewards/test_answers.py and test_sets.py. `verifiers` needs that package:
    # tests/environments/test_verifiers.py.
    assert {*names("data")} == {"jsonl", "parquet", "gsm8k", "math", "dataset", "verifiers"} | {*ROWS}
    # `judge` asks an endpoint: tests/rewards/test_judge.py.
    used = {reward for _, rewards in TASKS.values() for reward in rewards}
    assert {*names("reward")} == {
        *used,
        "environment",
        "judge",
        "math-answer",
        "math-verify",
        "reasoning-gym",
        "format",
        "length",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dumped_recipe_loads_as_the_same_configuration(path: Path, tmp_path: Path) -> None:
    resolved = load([path])
    (tmp_path / "again.toml").write_text(dump(resolved))
    again = load([tmp_path / "again.toml"])
    assert again.values == resolved.values
    assert again.algorithm == resolved.algorithm


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_recipe_of_this_machine_takes_a_step(name: str, tmp_path: Path) -> None:
    small = {
        "policy.tiny.hidden": 32,
        "policy.tiny.layers": 1,
        "policy.warm_up.steps": 2,
        "policy.warm_up.examples_per_step": 8,
        "task.held_out": 4,
        "training.steps": 1,
        "training.warm_up_updates": 1,
        "training.prompts_per_step": 4,
        "output.directory": str(tmp_path),
    }
    assert train(recipe=ROOT / "recipes" / f"{name}.toml", **small).exit_code == 0
