"""The benchmark of the health watch: a quick run, the effect of every fault, and the page from hand-written results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.health import __main__ as health
from benchmarks.health import page as health_page
from benchmarks.health.faults import FAULTS
from legato.run.train import train
from tests.proof import verdicts
from tests.proof.effects import Bench
from tests.proof.runs import SMALL, light

TINY = {
    **{key: value for key, value in SMALL.items() if not key.startswith(("output", "evaluation"))},
    "policy.warm_up.steps": 2,
    "policy.warm_up.examples_per_step": 8,
    "training.warm_up_updates": 0,
    "task.held_out": 4,
}


def test_an_interrupted_benchmark_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "FIRST", 2)
    options = {path: value for path, value in TINY.items() if path != "training.steps"}
    with light():
        health.run_arms(tmp_path, ["collapse", "fault: log-prob shift"], [3], options, 4)
        assert capsys.readouterr().out.count("seed 3") == 2
        health.run_arms(tmp_path, ["collapse", "fault: log-prob shift"], [3], options, 4)
    assert capsys.readouterr().out == ""
    results = health.gather(tmp_path)
    assert [run["arm"] for run in results["runs"]] == ["collapse", "fault: log-prob shift"]
    assert all(len(run["rewards"]) == 4 and run["exit_code"] == 0 for run in results["runs"])
    assert results["runs"][0]["rewards"][:2] == results["runs"][1]["rewards"][:2]


def test_an_early_arm_begins_with_its_learning_rate(tmp_path: Path) -> None:
    options = {path: value for path, value in TINY.items() if path != "training.steps"}
    with light():
        health.run_arms(tmp_path, ["early: learning rate x 20"], [3], options, 2)
    (run,) = health.gather(tmp_path)["runs"]
    assert len(run["rewards"]) == 2 and not (tmp_path / "base").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["optimizer/lr"] for line in lines if line["kind"] == "step"]
    assert max(rates) == pytest.approx(20 * health.recipe_lr())


def test_a_result_of_other_thresholds_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "collapse-0.json").write_text(json.dumps({"thresholds": "others"}))
    assert health.gather(tmp_path)["runs"] == []


FAULT_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "learning rate x 5": lambda usual, faulty: faulty["optimizer/lr"] == 5 * usual["optimizer/lr"],
    "learning rate x 100": lambda usual, faulty: faulty["optimizer/lr"] == 100 * usual["optimizer/lr"],
    "stale weights": lambda usual, faulty: faulty["clip/outside_sequences@0"] > 0.5,
    "adapter not applied": lambda usual, faulty: faulty["clip/outside_sequences@0"] > 0.5,
    "log-prob shift": lambda usual, faulty: faulty["clip/outside_sequences@0"] == 1,
    "temperature mismatch": lambda usual, faulty: faulty["clip/outside_sequences@0"] > 0.5,
    "advantage sign": lambda usual, faulty: faulty["clip/tokens"] >= 0,
    "clip off": lambda usual, faulty: "clip/tokens" not in faulty,
    "reward constant": lambda usual, faulty: faulty["groups/zero_variance"] == 1 and faulty["reward/mean"] == 0.5,
    "reward inverted": lambda usual, faulty: faulty["reward/mean"] == pytest.approx(1 - faulty["reward/early"]),
    "phantom shaped reward": lambda usual, faulty: faulty["reward/mean"] >= faulty["accuracy/mean"],
    "length-hack reward": lambda usual, faulty: faulty["reward/mean"] == pytest.approx(faulty["length/mean"] / 6),
    "entropy bonus, wrong sign": lambda usual, faulty: faulty["loss/entropy"] > 0,
    "one prompt": lambda usual, faulty: True,
}
"""A check per fault: how it shows in the metrics of its step."""


def test_every_fault_changes_its_step_and_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FAULT_SIGNS} == {*FAULTS}
    options = {"reward.kind": f"{verdicts.__file__}:early", "training.anchor": "sampler", "training.lr": 1e-2}
    warm = {"policy.warm_up.steps": 1, "policy.warm_up.examples_per_step": 8}
    with light():
        start = train(**{**SMALL, **options, **warm, "training.steps": 1, "output.directory": str(tmp_path)}).directory
    trainer = Bench(folder=tmp_path, patch=monkeypatch).build_run(options).trainer
    usual = trainer.step().metrics
    # Learning-rate faults come last, because they destroy the policy.
    for name in sorted(FAULTS, key=lambda name: name.startswith("learning rate")):
        broken = FAULTS[name].make(start)
        if name == "learning rate x 5":
            again = trainer.step()
            assert again.metrics["clip/outside_sequences@0"] == 0
            assert len({group.problem.key for group in again.groups}) > 1
        for _ in range(2 if "weights" in name else 1):
            with broken(trainer):
                report = trainer.step()
        assert FAULT_SIGNS[name](usual, report.metrics), name
        if name == "one prompt":
            assert len({group.problem.key for group in report.groups}) == 1
    assert trainer.step().metrics["optimizer/lr"] == usual["optimizer/lr"]


def make_run(arm: str, seed: int, rewards: list[float], findings: list[tuple[int, str, str]], **rest: Any) -> dict[str, Any]:
    records = [
        {"step": s, "rule": rule, "level": level, "since": s, "value": 1.0, "usual": 0.1} for s, rule, level in findings
    ]
    return {"arm": arm, "seed": seed, "rewards": rewards, "findings": records, "recoveries": [], "exit_code": 0, **rest}


def page_text(results: dict[str, Any]) -> str:
    """The text of the page, with each paragraph on one line."""
    return "\n".join(" ".join(part.split("\n")) if "|" not in part else part for part in _parts(results))


def _parts(results: dict[str, Any]) -> list[str]:
    return health_page.experiment_page(results).split("\n\n")


def test_the_page_shows_the_results() -> None:
    healthy, fallen = [0.5] * 50, [0.45, 0.4, 0.3, 0.2, 0.1, *[0.01] * 65]
    recovery = {"from": 52, "step": 45, "lr_scale": 0.5}
    runs = [
        make_run("verify", 100, [*healthy, *fallen], [(52, "drift", "alarm")]),
        make_run("collapse", 0, [*healthy, *fallen], [(52, "drift", "alarm"), (54, "collapse", "alarm")]),
        make_run("collapse", 1, [*healthy, *fallen], [(55, "reward-lost", "alarm")]),
        make_run("recover", 0, [*healthy, *[0.6] * 60], [(52, "drift", "alarm")], recoveries=[recovery]),
        make_run("recover", 1, [*healthy, *[0.4] * 60], [(52, "drift", "alarm")], exit_code=3),
        make_run("rollback", 0, [*healthy, *fallen], [(52, "drift", "alarm")], recoveries=[recovery] * 3, exit_code=3),
        make_run("healthy", 0, healthy * 4, [(70, "drift", "alarm"), (90, "entropy-rise", "warning")]),
        make_run("early: learning rate x 10", 0, [0.4, *[0.02] * 59], [(14, "reward-below-start", "alarm")]),
        make_run("early: learning rate x 10", 1, [0.4, *[0.02] * 59], [(30, "nothing-to-compare", "warning")]),
        make_run("fault: clip off", 0, [*healthy, *[0.6] * 60], []),
        make_run("fault: one prompt", 0, [*healthy, *[0.3] * 60], [(58, "nothing-to-learn", "alarm")]),
    ]
    page = page_text({"first": 50, "lr": 2e-4, "thresholds": "abc", "machine": "m", "runs": runs})
    assert "**1 of 2** fresh seeds (wanted: 9 of 10); before the mean of five steps was below half: 2 of 2" in page
    assert "| 0 | 0.50 | 52 (drift) | 54 | 0.01 |" in page
    assert "**1 of 2** fresh seeds (wanted: 8 of 10)" in page and "52 to 45, lr x 0.5" in page
    assert "3 recoveries and exit code 3" in page
    assert "**1 false alarm in 200 healthy steps**" in page and "`drift` at step 70 of seed 0" in page
    assert "| no trust region | 0 of 1 | - | - | - | 0.50 to 0.60 |" in page
    assert "3 of 4 faulty runs raised an alarm" in page
    assert "| x 10 | 1 of 2 | 14 | reward-below-start | 0.40 to 0.02 |" in page


def test_the_page_without_results_says_not_measured() -> None:
    assert "Not measured yet" in health_page.experiment_page({})
