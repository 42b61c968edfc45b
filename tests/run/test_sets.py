"""Evaluation sets: measured beside training without changing it, shown, resumed, and printed for two checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.config.resolved import dump
from legato.core.rollout import Rollout
from legato.errors import InputError
from legato.pages.report import write_report
from legato.pages.summary import set_courses
from legato.records.directory import RunDirectory
from legato.run.train import resume, train
from legato.training import checkpoint
from legato.training.evaluate import pass_at
from tests.proof.command import Command
from tests.proof.published import ROWS, TABLE, small_table, write_rows
from tests.proof.runs import SMALL, Listener, differences, outcome, records, run_small

pytestmark = pytest.mark.usefixtures("lightly")
ROOT = Path(__file__).parents[2]


def first_is_right(rollout: Rollout) -> float:
    """Right where the first token is even: about half of the samples of any model."""
    return float(int(rollout.tokens[0]) % 2 == 0)


def sets(folder: Path) -> list[dict[str, Any]]:
    file = write_rows(folder / "aime.jsonl", [{"problem": f"{n}+1=", "answer": n + 1} for n in range(5)])
    return [
        {
            "name": "aime",
            "task": {"kind": "aime-24", "path": str(file), "instruction": False},
            "reward": f"{__file__}:first_is_right",
            "samples_per_problem": 4,
            "every_steps": 1,
            "max_response_tokens": 5,
        },
        {"name": "reversed", "task": {"kind": "reversal", "length": 2}, "reward": "exact", "problems": 3},
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, lightly: None) -> tuple[Path, Path, Listener]:
    """A run without sets, the same with two, and what the second said."""
    folder, said = tmp_path_factory.mktemp("sets"), Listener()
    options = {"evaluation.sets": sets(folder), "evaluation.best_metric": "eval/aime/pass@2", "output.keep_last": 1}
    plain = run_small(folder / "plain", {"training.steps": 3, "output.keep_last": 1})
    with_sets = run_small(folder / "sets", {"training.steps": 3, **options}, watcher=said)
    return plain.directory, with_sets.directory, said


def evaluations(run: Path, name: str) -> dict[int, dict[str, Any]]:
    key = f"eval/{name}/problems"
    return {record["step"]: record for record in records(run) if record["kind"] == "evaluation" and key in record}


def test_sets_change_no_bit_of_the_training(both: tuple[Path, Path, Listener]) -> None:
    plain, with_sets, _ = both
    changed = differences(outcome(plain), outcome(with_sets))
    assert [name for name in changed if not name.startswith("trainer.json/")] == ["metrics"]
    assert {"trainer.json/best_metric", "trainer.json/latest", "trainer.json/sets_evaluated_at"} <= set(changed)
    assert not {"trainer.json/trainer", "trainer.json/generators", "trainer.json/optimizer"} & set(changed)
    own = [record for record in records(with_sets) if not any(key.count("/") == 2 for key in record)]
    kinds = ("step", "probe", "evaluation")
    assert [r for r in own if r["kind"] in kinds] == [r for r in records(plain) if r["kind"] in kinds]


def test_each_set_has_its_own_schedule_and_measures(both: tuple[Path, Path, Listener]) -> None:
    _, run, _ = both
    assert list(evaluations(run, "aime")) == [0, 1, 2, 3] and list(evaluations(run, "reversed")) == [0, 2, 3]
    record = evaluations(run, "aime")[3]
    for measure in ("avg@4", "pass@2", "pass@4"):
        low, value, high = (record[f"eval/aime/{measure}{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= value <= high <= 1
    assert record["eval/aime/avg@4"] <= record["eval/aime/pass@2"] <= record["eval/aime/pass@4"]
    assert (record["eval/aime/problems"], record["eval/aime/length"] > 3) == (5, True)
    assert {key.rpartition("/")[2] for key in evaluations(run, "reversed")[0] if "reversed/" in key and "@" in key} == {
        "avg@1",
        "avg@1_low",
        "avg@1_high",
    }


def test_the_best_checkpoint_follows_the_metric_that_was_named(both: tuple[Path, Path, Listener]) -> None:
    _, run, said = both
    course = {step: record["eval/aime/pass@2"] for step, record in evaluations(run, "aime").items() if step > 0}
    best = max(course, key=lambda step: course[step])
    folders = RunDirectory.open(run).checkpoint_steps()
    assert sorted({best, 3}) == folders
    end = records(run)[-1]["best"]
    assert end == {"checkpoint": checkpoint.name_of(best), "metric": "eval/aime/pass@2", "value": course[best]}
    assert f"the best checkpoint is {end['checkpoint']}: eval/aime/pass@2 = {course[best]:.1%}" in said.said


def test_a_resumed_run_evaluates_its_sets_as_the_straight_one_did(both: tuple[Path, Path, Listener], tmp_path: Path) -> None:
    _, run, _ = both
    folder = tmp_path / "sets"
    options = {"evaluation.sets": sets(run.parent.parent), "evaluation.best_metric": "eval/aime/pass@2"}
    short = run_small(folder, {"training.steps": 2, "output.keep_last": 1, **options})
    resumed = resume(short.directory, ["training.steps=3"])
    assert evaluations(resumed.directory, "aime")[3] == evaluations(run, "aime")[3]
    # Sets are free to change; the best value of another metric is not carried over.
    again = resume(
        short.directory, ["training.steps=4", "evaluation.sets.aime.problems=2", "evaluation.best_metric=eval/aime/avg@4"]
    )
    assert evaluations(again.directory, "aime")[4]["eval/aime/problems"] == 2
    assert records(again.directory)[-1]["best"]["metric"] == "eval/aime/avg@4"


def test_the_report_and_the_summary_show_the_sets(both: tuple[Path, Path, Listener]) -> None:
    _, run, _ = both
    text = write_report(RunDirectory.open(run)).read_text()
    assert "Evaluation sets" in text and "pass@4" in text and "reversed" in text
    course = next(each for each in set_courses(RunDirectory.open(run).metrics()) if each.measure == "avg@4")
    assert [step for step, _ in course.points] == [0, 1, 2, 3] and course.problems == 5


def test_pass_at_k_of_a_set_is_the_unbiased_estimate(both: tuple[Path, Path, Listener]) -> None:
    from legato.run.evaluate import evaluate
    from legato.run.target import find

    result = next(each for each in evaluate(find(str(both[1])), samples=0).sets if each.name == "aime")
    record = evaluations(both[1], "aime")[3]
    rows = {row.name: row for row in result.rows}
    # The checkpoint and the seeds are those of the last evaluation of the run.
    assert rows["avg@4"].value == record["eval/aime/avg@4"]
    expected = [pass_at(round(4 * mean), 4, 2) for mean in result.values["avg@4"]]
    assert math.isclose(rows["pass@2"].value, sum(expected) / 5) and list(result.values["pass@2"]) == expected


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_the_table_of_two_checkpoints(legato: Command, both: tuple[Path, Path, Listener], tmp_path: Path) -> None:
    plain, run, _ = both
    model, output = plain / "checkpoints/step-000003/model", tmp_path / "table.json"
    words = [str(run), str(model), "--sets", str(ROOT / "recipes/math-table.toml"), *small_table(tmp_path)]
    code, out, error = legato("eval", *words, "--output", str(output))
    assert code == 0, error
    assert all(name in out for name in TABLE) and "avg@2" in out and "difference" in out and "aime " not in out
    record = json.loads(output.read_text())
    assert list(record) == [str(run), str(model)]
    for measured in record.values():
        assert list(measured) == list(TABLE)
        assert all(each["problems"] == len(ROWS[TABLE[name]]) for name, each in measured.items())
    # The weights are equal to the bit, so are the answers.
    assert record[str(run)] == record[str(model)]


def test_sets_by_name_need_no_recipe(legato: Command, both: tuple[Path, Path, Listener], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS["aime-25"])
    path = f"evaluation.sets.aime-25.task.path={file}"
    words = ["policy.max_prompt_tokens=128", "evaluation.sets.aime-25.samples_per_problem=2"]
    code, out, error = legato("eval", str(both[1]), "--sets", "aime-25", path, *words)
    assert code == 0, error
    assert "aime-25" in out and "pass@2" in out and "reversed" not in out
    code, _, error = legato("eval", str(both[0]), str(both[1]))
    assert code == 2 and "name them with --sets" in error


BAD = {
    "evaluation.sets.aime.samples_per_problem=0": "evaluation.sets.aime.samples_per_problem: expected a whole number >= 1",
    "evaluation.sets.aime.task.pth=1": "is no option of task 'aime-24'; did you mean 'path'?",
    "evaluation.sets.aime.sample=1": "evaluation.sets.aime.sample (word 1",
    "evaluation.sets.other.problems=2": "evaluation.sets.other.task: expected the name of a task or a table with its kind",
    "evaluation.sets=[{task='gsm8k'}]": "evaluation.sets[0]: expected a table with a name",
    "evaluation.sets=['gsm8k', 'gsm8k']": "evaluation.sets[1]: expected a name of its own, got 'gsm8k' again",
    "evaluation.sets.aime.task=aime-2024": "unknown task 'aime-2024'; did you mean 'aime-24'?",
    "evaluation.sets.aime.reward=nummer": "evaluation.sets.aime.reward.kind",
    "evaluation.sets.a/b.task=gsm8k": "expected a name of letters, digits, - and _, got 'a/b'",
    "evaluation.best_metric=eval/aime/avg@8": "did you mean 'eval/aime/avg@16'?",
}


@pytest.mark.parametrize("word", BAD)
def test_faults_of_a_set_name_the_set_and_the_option(word: str, tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text('[[evaluation.sets]]\nname = "aime"\ntask = "aime-24"\n')
    with pytest.raises(InputError) as refusal:
        load([recipe], [word])
    assert BAD[word] in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_fault_in_a_recipe_has_the_line_of_its_own_set(tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    sets = (
        '[[evaluation.sets]]\nname = "one"\ntask = "aime-24"\n[[evaluation.sets]]\nname = "two"\ntask = {kind = "jsonl"}\n'
    )
    recipe.write_text(sets + "[evaluation.sets.reward]\nkind = 'number'\ntolerance = -1\n")
    with pytest.raises(InputError) as refusal:
        load([recipe])
    assert f"evaluation.sets.two.task ({recipe}:6): expected the option 'path'" in str(refusal.value)
    assert f"evaluation.sets.two.reward.tolerance: expected a finite number >= 0, got -1 ({recipe}:9)" in str(refusal.value)


def test_sets_merge_by_name_are_written_and_read_again(tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text('[[evaluation.sets]]\nname = "a"\ntask = "aime-24"\n[[evaluation.sets]]\nname = "b"\ntask = "gsm8k"\n')
    resolved = load([recipe], ["evaluation.sets.a.samples_per_problem=2", "evaluation.sets.b=false"])
    [(name, only)] = resolved.config.evaluation.sets.items()
    assert (name, only.task.kind, only.samples_per_problem) == ("a", "aime-24", 2)
    (tmp_path / "b.toml").write_text(dump(resolved))
    assert load([tmp_path / "b.toml"]).config == resolved.config
    gsm8k = load([recipe]).config.evaluation.sets["b"].task.options
    assert (gsm8k["split"], "boxed" in gsm8k["instruction"]) == ("test", True)
    assert load([], ["evaluation.sets=['gsm8k']", "evaluation.sets=false"]).config.evaluation.sets == {}


def test_a_file_of_a_set_that_lacks_a_column_gives_the_fix_for_that_set(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"question": "1+1=", "answer": "2"}])
    with pytest.raises(InputError, match=r"evaluation.sets.mine: .*; set evaluation.sets.mine.task.prompt=question"):
        run_small(tmp_path, {"evaluation.sets": [{"name": "mine", "task": {"kind": "jsonl", "path": str(file)}}]})


def test_problems_without_answers_need_a_reward_that_reads_none(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "solution": str(n + 1)} for n in range(20)]
    data = {"task.kind": "jsonl", "task.path": str(write_rows(tmp_path / "a.jsonl", rows)), "training.steps": 1}
    small = {path: value for path, value in SMALL.items() if path != "task.left_digits"} | data
    with pytest.raises(InputError, match=r"the reward 'number' compares with.*'solution'\); set task.answer=COLUMN"):
        train(**small, **{"output.directory": str(tmp_path)})
    own = {"output.directory": str(tmp_path / "own"), "reward.kind": f"{__file__}:first_is_right"}
    assert train(**small, **own).exit_code == 0


def test_a_refused_resume_changes_nothing_of_the_run_and_code_of_sets_is_hashed(tmp_path: Path) -> None:
    code = tmp_path / "judge.py"
    code.write_text("def judge(rollout):\n    return 1.0\n")
    options = {
        "training.steps": 2,
        "output.checkpoint_every_steps": 1,
        "evaluation.sets": [
            {"name": "mine", "task": {"kind": "reversal", "length": 2}, "reward": f"{code}:judge", "problems": 2}
        ],
    }
    run = run_small(tmp_path / "runs", options).directory
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    code.write_text("def judge(rollout):\n    return 0.0\n")
    with pytest.raises(InputError, match=r"changes in .*judge.py:judge"):
        resume(run, step=1)
    with pytest.raises(InputError, match="nothing"):
        resume(run, ["evaluation.sets.mine.task={kind = 'jsonl', path = 'nothing.jsonl'}"], step=1, allow_changes=True)
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_task_of_a_set_may_raise_anything(tmp_path: Path) -> None:
    code = tmp_path / "leaving.py"
    code.write_text("import sys\n\n\nclass Leaving:\n    def load(self):\n        sys.exit(0)\n")
    with pytest.raises(InputError, match=r"evaluation\.sets\.mine.*SystemExit"):
        run_small(tmp_path, {"evaluation.sets": [{"name": "mine", "task": f"{code}:Leaving"}]})
