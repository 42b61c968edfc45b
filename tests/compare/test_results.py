"""From run directories to numbers: what counts, what is paired, where stability ends. No run is trained here."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legato.compare.compare import Comparison, _tasks, check_equal, compare
from legato.compare.jobs import differences
from legato.compare.processes import Machine
from legato.compare.results import collect
from legato.compare.store import Store
from legato.errors import InputError
from legato.health.explain import STOPPED
from legato.pages.comparison import write_pages
from legato.pages.comparison_tables import sentences, tables
from tests.proof.comparisons import OPTIONS, definition, prepare_comparison, write_run
from tests.proof.pages import assert_page, numbers


def collected(store: Store, jobs: dict[str, Any], comparison: Any) -> dict[str, Any]:
    results = collect(comparison, list(jobs.values()), store, Machine(), [])
    stored: dict[str, Any] = json.loads(json.dumps(results, allow_nan=False))
    write_pages(store.path, stored)
    return stored


def test_scores_are_paired_by_seed(tmp_path: Path) -> None:
    comparison = definition(seeds=(3, 4, 5))
    store, jobs = prepare_comparison(tmp_path, comparison)
    for seed, (grpo, gspo) in {3: (64, 72), 4: (32, 40), 5: (96, 96)}.items():
        write_run(store, jobs[f"grpo-seed{seed}"], [30, grpo])
        write_run(store, jobs[f"gspo-seed{seed}"], [30, gspo])
    point = collected(store, jobs, comparison)["points"][0]
    assert point["seeds"] == [3, 4, 5]
    assert point["arms"]["grpo"]["mean"] == pytest.approx(0.5)
    assert point["arms"]["gspo"]["scores"] == [72 / 128, 40 / 128, 96 / 128]
    pair = point["pairs"]["gspo"]
    assert pair["difference"] == pytest.approx(16 / 3 / 128)
    low, high = by_loops([8 / 128, 8 / 128, 0.0], [each / 128 for each in (64, 32, 96, 72, 40, 96)], 4.30265)
    assert [100 * end for end in pair["difference_interval"]] == pytest.approx([low, high], abs=0.051)
    assert pair["probability_interval"] is None and point["arms"]["gspo"]["iqm_interval"] is None
    assert (pair["better"], pair["worse"]) == (2, 0)
    assert pair["probability"] == pytest.approx((1 + 1 + 0 + 0 + 1 + 0 + 1 + 1 + 0.5) / 9)


def test_changed_experts_are_a_column_for_mixtures_only(tmp_path: Path) -> None:
    arms = {"grpo": {"algorithm": "grpo"}, "grpo+R2": {"algorithm": "grpo", "training.routing_replay": "R2"}}
    comparison = definition(arms=arms, seeds=(0,), options={**OPTIONS, "policy.model": "tiny-moe"})
    store, jobs = prepare_comparison(tmp_path, comparison)
    assert differences(list(jobs.values())) == []
    for number, job in enumerate(jobs.values()):
        write_run(store, job, [30, 64, 80], measured={"router/flip_mean": 0.02 * (1 + number), "router/flip_mean@3": 0.06})
    results = collected(store, jobs, comparison)
    assert [run["routing"]["router/flip_mean@3"] for run in results["runs"]] == [0.06, 0.06]
    costs = next(table for table in tables(results) if table.title == "Cost and stability")
    place = costs.headings.index("experts changed")
    assert {row[0]: row[place] for row in costs.rows} == {"grpo": "2.00%", "grpo+R2": "4.00%"}
    dense = definition(seeds=(0,))
    store, jobs = prepare_comparison(tmp_path / "dense", dense)
    for job in jobs.values():
        write_run(store, job, [30, 64])
    results = collected(store, jobs, dense)
    assert all(run["routing"] == {} for run in results["runs"])
    assert all("experts changed" not in table.headings for table in tables(results))


def test_a_seed_counts_once_every_arm_has_it(tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    for name in ("grpo-seed0", "gspo-seed0", "grpo-seed1"):
        write_run(store, jobs[name], [10, 20])
    write_run(store, jobs["gspo-seed1"], [10], end="stopped by SIGTERM")
    results = collected(store, jobs, comparison)
    assert results["points"][0]["seeds"] == [0]
    assert results["points"][0]["arms"]["gspo"]["mean_interval"] is None
    assert [run["status"] for run in results["runs"]] == ["done", "done", "done", "stopped"]
    lines = sentences(results)
    assert numbers(lines[0]) == [1, 4]
    assert "one seed" in lines[1] and "no intervals" in tables(results)[0].note


def test_a_run_that_the_health_watch_ended_counts_and_does_not_go_on(tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    for name in ("grpo-seed0", "gspo-seed0", "grpo-seed1"):
        write_run(store, jobs[name], [10, 20])
    write_run(store, jobs["gspo-seed1"], [10, 12], end=f"{STOPPED}: the reward fell")
    results = collected(store, jobs, comparison)
    assert [run["status"] for run in results["runs"]] == ["done", "done", "done", "unhealthy"]
    assert results["points"][0]["seeds"] == [0, 1] and results["points"][0]["arms"]["gspo"]["failed"] == 1
    assert _tasks(list(jobs.values()), store) == []
    assert ("gspo-seed1", "unhealthy", f"{STOPPED}: the reward fell") in tables(results)[-1].rows


def test_arms_that_differ_in_what_they_should_share_are_refused(tmp_path: Path) -> None:
    """With one message for comparisons and studies, which differ in how it is allowed."""
    arms = {"gspo": {"algorithm": "gspo"}, "more": {"algorithm": "gspo", "training.prompts_per_step": 8}}
    comparison = definition(arms=arms, seeds=(0,))
    _, jobs = prepare_comparison(tmp_path, comparison)
    with pytest.raises(InputError, match=r"expected arms that share .*prompts_per_step.*for all of them, or so"):
        check_equal(comparison, list(jobs.values()), "or so")
    assert check_equal(replace(comparison, unequal=True), list(jobs.values()), "")


def by_loops(differences: list[float], accuracies: list[float], critical: float) -> tuple[float, float]:
    """Student's t interval in points, with the error of 128 problems as the least spread; `critical` from a table."""
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / (len(differences) - 1))
    shares = [(each * 128 + 1) / 130 for each in accuracies]
    floor = math.sqrt(sum(share * (1 - share) / 128 for share in shares) / len(differences))
    half = critical * max(spread, floor) / math.sqrt(len(differences))
    return round(100 * (mean - half), 1), round(100 * (mean + half), 1)


@pytest.mark.parametrize(
    ("scores", "critical", "words"),
    [
        (((64, 58), (64, 62)), 12.7062, "told apart"),
        (((64, 72), (64, 96), (64, 66)), 4.30265, "told apart"),
        (((64, 62), *[(64, 96)] * 5), 2.57058, "above"),
        (((64, 72),) * 6, 2.57058, "told apart"),  # all agree, but by less than 128 problems can tell
        (((96, 32),) * 4, 3.18245, "below"),
    ],
)
def test_the_sentence_has_the_corrected_interval_of_the_paired_differences(
    scores: tuple[tuple[int, int], ...], critical: float, words: str, tmp_path: Path
) -> None:
    comparison = definition(seeds=tuple(range(len(scores))))
    store, jobs = prepare_comparison(tmp_path, comparison)
    for seed, (grpo, gspo) in enumerate(scores):
        write_run(store, jobs[f"grpo-seed{seed}"], [30, grpo])
        write_run(store, jobs[f"gspo-seed{seed}"], [30, gspo])
    (sentence,) = sentences(collected(store, jobs, comparison))
    low, high = by_loops([(b - a) / 128 for a, b in scores], [each / 128 for pair in scores for each in pair], critical)
    change = round(100 * sum(b - a for a, b in scores) / len(scores) / 128, 1)
    assert words in sentence and numbers(sentence) == pytest.approx([change, 95, low, high, len(scores)], abs=0.051)
    assert sentence in (store.path / "compare.md").read_text()
    assert sentence in (store.path / "compare.html").read_text()


def test_the_intervals_of_several_arms_and_points_are_corrected_for_their_number(tmp_path: Path) -> None:
    arms = {"grpo": {"algorithm": "grpo"}, "gspo": {"algorithm": "gspo"}, "dapo": {"algorithm": "dr-grpo"}}
    comparison = definition(arms=arms, seeds=(0, 1, 2), sweep={"training.lr": (1e-3, 2e-3)}, unequal=True)
    store, jobs = prepare_comparison(tmp_path, comparison)
    for number, job in enumerate(jobs.values()):
        write_run(store, job, [30, 60 + number])
    pair = collected(store, jobs, comparison)["points"][0]["pairs"]["gspo"]
    assert pair["comparisons"] == 4 and pair["level"] == pytest.approx(1 - 0.05 / 4)


def test_a_comparison_with_nothing_finished_has_a_page(tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    results = collected(store, jobs, comparison)
    assert {run["status"] for run in results["runs"]} == {"waiting"}
    assert results["points"][0]["arms"] == {}
    assert numbers(sentences(results)[0]) == [4, 4] and sentences(results)[0] in (store.path / "compare.html").read_text()


def troubled(folder: Path) -> tuple[Store, dict[str, Any]]:
    """Three runs of grpo that ended well; one of gspo that collapsed and two that failed."""
    comparison = definition(seeds=(0, 1, 2))
    store, jobs = prepare_comparison(folder, comparison)
    for seed in range(3):
        write_run(store, jobs[f"grpo-seed{seed}"], [30, 64, 64])
    write_run(store, jobs["gspo-seed0"], [30, 90, 0])
    write_run(store, jobs["gspo-seed1"], [30, 96], end=None)
    store.note_failure(jobs["gspo-seed1"], -9, "killed")
    store.note_failure(jobs["gspo-seed2"], 2, "no such model")
    return store, collected(store, jobs, comparison)


def test_compare_md_is_its_snapshot(tmp_path: Path) -> None:
    """The words of a comparison with trouble; tests/proof/pages.py says how to renew the snapshot."""
    text = (troubled(tmp_path)[0].path / "compare.md").read_text()
    assert_page("compare", re.sub(r"\d+ threads?", "THREADS threads", text))  # the cores of this machine


def test_a_failed_run_counts_with_its_last_accuracy_or_0_and_a_collapsed_one_with_its_end(tmp_path: Path) -> None:
    store, results = troubled(tmp_path)
    runs = {run["name"]: run for run in results["runs"]}
    assert [runs[f"gspo-seed{seed}"]["score"] for seed in range(3)] == [0.0, 0.75, 0.0]
    assert runs["gspo-seed0"]["status"] == "collapsed"
    assert runs["gspo-seed1"]["reason"] == "exit code -9: killed"
    arm = results["points"][0]["arms"]["gspo"]
    assert (arm["mean"], arm["collapsed"], arm["failed"]) == (0.25, 1, 2)
    trouble = tables(results)[-1]
    assert [row[:2] for row in trouble.rows] == [
        ("gspo-seed0", "collapsed"),
        ("gspo-seed1", "failed"),
        ("gspo-seed2", "failed"),
    ]
    assert "no such model" in (store.path / "compare.html").read_text()


def test_costs_are_those_of_the_steps(tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    for job in jobs.values():
        write_run(store, job, [10, 20, 30])
    arm = collected(store, jobs, comparison)["points"][0]["arms"]["gspo"]
    assert (arm["steps"], arm["updates"], arm["tokens"], arm["seconds"]) == (2, 4, 200, 4.0)
    assert arm["clip_mean"] == 0.25


def test_stability_ends_at_the_first_value_that_breaks(tmp_path: Path) -> None:
    comparison = definition(sweep={"training.lr": (1e-2, 1e-4, 1e-3), "training.updates_per_step": (1, 2)})
    store, jobs = prepare_comparison(tmp_path, comparison)
    broken = {("grpo", 1e-3, 1), ("gspo", 1e-2, 1), ("gspo", 1e-4, 2), ("gspo", 1e-3, 2)}
    for job in jobs.values():
        lr, updates = job.point["training.lr"], job.point["training.updates_per_step"]
        # One seed of two is enough to break.
        breaks = (job.arm, lr, updates) in broken and job.seed == 1
        write_run(store, job, [64, 96, 0] if breaks else [64, 80, 90])
    results = collected(store, jobs, comparison)
    assert len(results["points"]) == 6
    limits = {
        (each["arm"], each["axis"], *each["others"].values()): (each["largest"], each["breaks"])
        for each in results["frontier"]
    }
    assert limits["grpo", "training.lr", 1] == (1e-4, 1e-3)
    assert limits["grpo", "training.lr", 2] == (1e-2, None)
    assert limits["gspo", "training.lr", 1] == (1e-3, 1e-2)
    assert limits["gspo", "training.lr", 2] == (None, 1e-4)
    assert limits["gspo", "training.updates_per_step", 1e-2] == (None, 1)
    assert limits["grpo", "training.updates_per_step", 1e-4] == (2, None)
    rows = next(table for table in tables(results) if table.title == "Stability frontier").rows
    assert ("grpo", "training.lr", "training.updates_per_step = 2", "0.01, the largest tried", "-") in rows
    assert ("gspo", "training.lr", "training.updates_per_step = 2", "none", "0.0001") in rows


def test_a_sweep_over_words_has_no_frontier(tmp_path: Path) -> None:
    comparison = definition(sweep={"training.anchor": ("recompute", "sampler")})
    store, jobs = prepare_comparison(tmp_path, comparison)
    for job in jobs.values():
        write_run(store, job, [10, 20])
    results = collected(store, jobs, comparison)
    assert results["frontier"] == []
    assert len(results["points"]) == 2


@pytest.mark.parametrize("what", ["weights", "problems"])
def test_runs_with_other_weights_or_problems_are_refused(what: str, tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    write_run(store, jobs["grpo-seed0"], [10, 20])
    write_run(store, jobs["gspo-seed0"], [10, 20], **{what: "other"})
    with pytest.raises(ValueError, match=rf"gspo-seed0.*{what}.*grpo-seed0"):
        collected(store, jobs, comparison)


def test_a_comparison_whose_runs_are_all_there_runs_nothing(tmp_path: Path) -> None:
    comparison = definition()
    store, jobs = prepare_comparison(tmp_path, comparison)
    for job in jobs.values():
        write_run(store, job, [10, 20])
    messages: list[str] = []
    compared = compare(comparison, folder=store.path, say=messages.append)
    assert isinstance(compared, Comparison) and compared.exit_code == 0
    assert len(messages) == 1 and numbers(messages[0])[:2] == [4, 4]
    assert json.loads((store.path / "compare.json").read_text())["points"][0]["seeds"] == [0, 1]


def test_the_page_shows_what_arms_are_called_and_nothing_that_runs(tmp_path: Path) -> None:
    comparison = definition(options={**definition().options, "policy.model": "tiny"})
    store, jobs = prepare_comparison(tmp_path, comparison)
    for job in jobs.values():
        write_run(store, job, [10, 20])
    store.note_failure(jobs["gspo-seed1"], 1, "<script>alert(1)</script>|")
    collected(store, jobs, comparison)
    page = (store.path / "compare.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "alert(1)</script>\\|" in (store.path / "compare.md").read_text()
