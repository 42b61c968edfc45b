"""Stored studies: their pages, figures and claims say what the files hold; two runs of each are made again."""

import hashlib
import json
import math
import random
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import claims, provenance, rates, recipes, repeat, studies
from benchmarks.readings import READINGS
from legato.compare.analysis import analyse
from legato.compare.jobs import points
from legato.compare.processes import Machine
from legato.compare.registration import read_study
from legato.compare.study import describe
from legato.diagnostics.statistics.paired import compare_pairs
from legato.pages.drawing import draw_svg
from legato.pages.study_figures import study_figures
from legato.policy.model.load import choose_dtype

ROOT = Path(__file__).parents[2]
STORED = studies.load_results()


@pytest.mark.parametrize("name", STORED)
def test_a_stored_study_is_that_of_its_registration_and_its_comparisons_follow_from_its_runs(name: str) -> None:
    results = STORED[name]
    file = ROOT / "studies" / f"{name}.toml"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == results["registration"]["sha256"]
    assert results["complete"] and not results["pilot"] and results["registration"]["registered"] is not None
    study = read_study(file)
    assert results["seeds"] == list(study.definition.seeds)
    again = analyse(study, results["runs"], study.definition.seeds)
    assert again["verdict"] == results["verdict"]
    for new, old in zip(again["comparisons"], results["comparisons"], strict=True):
        assert (new["name"], new["finding"]) == (old["name"], old["finding"])
        assert new["interval"] == pytest.approx(old["interval"], rel=1e-9)


@pytest.mark.parametrize("name", STORED)
def test_every_study_has_a_reading_with_the_opposite_case_and_figures(name: str) -> None:
    page = studies.experiment_page(STORED[name])
    assert "The opposite case" in page and "## Registered comparisons" in page
    for picture in re.findall(r"\.\./(figures/study-\S+\.svg)", page):
        assert (ROOT / "docs" / picture).is_file()
    assert "figures/study-" in page


def synthetic_frontier() -> dict[str, Any]:
    """A complete frontier study: sequence-narrow survives three rates more than token-wide; nothing survives for one arm."""
    values = [1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4]
    survived = {"token-wide": 1, "sequence-narrow": 4, "token-narrow": 2, "sequence-wide": 0}
    runs = [
        {
            "bed": bed,
            "arm": arm,
            "seed": seed,
            "point": {"training.lr": rate},
            "status": "done" if place < count + (seed % 2 if count else 0) else "collapsed",
            "start": 0.1,
            "score": 0.4 if place < count else 0.0,
        }
        for bed in ("mixture", "dense")
        for arm, count in survived.items()
        for seed in (200, 201, 202, 203)
        for place, rate in enumerate(values)
    ]
    return {
        "complete": True,
        "endpoint": {"kind": "frontier", "axis": "training.lr"},
        "beds": {"mixture": [], "dense": []},
        "arms": {
            arm: {f"algorithm.objective.trust.clip.{end}": limit for end, limit in zip(("low", "high"), limits, strict=True)}
            for arm in survived
            for limits in [(0.2, 0.27) if "wide" in arm else (3e-4, 4e-4)]
        },
        "seeds": [200, 201, 202, 203],
        "sweep": {"training.lr": values},
        "runs": runs,
    }


def test_the_frontier_and_the_two_by_two_show_means_and_intervals_of_the_seeds() -> None:
    drawn = study_figures(synthetic_frontier())
    beds = ("mixture", "dense")
    assert set(drawn) == {"frontier", *(f"{part}-{bed}" for part in ("unit-and-band", "accuracy") for bed in beds)}
    layout, (_, mixture, _, dense) = drawn["frontier"].layout, drawn["frontier"].data
    shown = ["token-wide (GRPO)", "sequence-narrow (GSPO)", "token-narrow", "sequence-wide"]
    assert layout["xaxis"]["ticktext"] == shown
    by_arm = dict(zip(synthetic_frontier()["arms"], mixture["y"], strict=True))
    # Beds that agree stand beside each other, and arms beyond the sweep are marked.
    assert dense["y"] == mixture["y"] and not {*dense["x"]} & {*mixture["x"]}
    assert mixture["marker"]["symbol"] == ["circle", "triangle-up", "circle", "triangle-down"]
    # Seeds that agree are still known to one step of the grid only.
    assert mixture["error_y"]["array"][3] > 0
    # Seeds survive 1, 2, 1, 2 rates: the geometric mean of 1e-5 and 2e-5. Where nothing survives: half the least rate.
    assert by_arm["token-wide"] == pytest.approx(1e-5 * 2**0.5) and by_arm["sequence-wide"] == pytest.approx(5e-6)
    _, token, _, sequence = drawn["unit-and-band-mixture"].data
    assert token["y"] == pytest.approx([by_arm["token-wide"], by_arm["token-narrow"]])
    assert sequence["y"] == pytest.approx([by_arm["sequence-wide"], by_arm["sequence-narrow"]])
    assert all(up > 0 for up in token["error_y"]["array"])
    bands = drawn["unit-and-band-mixture"].layout["xaxis"]["ticktext"]
    assert bands == ["wide clip band (0.2 / 0.27)", "narrow clip band (3e-4 / 4e-4)"]
    accuracy = drawn["accuracy-mixture"]
    assert accuracy.data[1]["y"] == [0.4, 0.4, 0.4, 0.4, 0.0] and accuracy.layout["shapes"][0]["y0"] == pytest.approx(0.1)
    assert "Not registered" in accuracy.caption
    svg = draw_svg(drawn["frontier"])
    assert svg.count("<circle") == 2 * (2 + 4 * 4) and svg.count("<polygon") == 4
    assert "&lt; 1e-5" in svg and ">step<" not in svg
    assert study_figures({**synthetic_frontier(), "complete": False}) == {}


def synthetic_scores(kind: str, beds: list[str], sweep: dict[str, list[float]]) -> dict[str, Any]:
    """A complete study of accuracies: 20 % for one arm and 40 % for the other on the first bed, twice that on the second."""
    runs = [
        {
            "bed": bed,
            "arm": arm,
            "seed": seed,
            "point": point,
            "status": "done",
            "score": (place + 1) * share + seed / 1e4,
            "evaluations": [{"step": 0, "sampled": 0.1, "tokens": 0}, {"step": 5, "sampled": share, "tokens": 2_000_000}],
        }
        for place, bed in enumerate(beds)
        for arm, share in (("grpo", 0.2), ("gspo", 0.4))
        for seed in (200, 201, 202)
        for point in ([{axis: value} for axis, values in sweep.items() for value in values] or [{}])
    ]
    return {
        "complete": True,
        "endpoint": {"kind": kind, "axis": None},
        "beds": {bed: [] for bed in beds},
        "arms": {"grpo": {}, "gspo": {}},
        "seeds": [200, 201, 202],
        "sweep": sweep,
        "runs": runs,
    }


def test_accuracies_are_drawn_bed_by_bed() -> None:
    drawn = study_figures(synthetic_scores("score", ["exact", "bf16"], {}))
    assert set(drawn) == {"accuracy"}
    grpo, gspo = drawn["accuracy"].data
    assert grpo["y"] == pytest.approx([0.2201, 0.4201]) and gspo["y"] == pytest.approx([0.4201, 0.8201])
    assert drawn["accuracy"].layout["xaxis"]["ticktext"] == ["exact", "bf16"]
    # Two arms on a single bed: the seeds, each with its line from arm to arm, and where training began.
    results = synthetic_scores("score", ["exact"], {})
    single = study_figures(results | {"runs": [run | {"start": 0.1} for run in results["runs"]]})["accuracy"]
    *seeds, means = single.data
    assert [trace["y"] for trace in seeds] == [
        pytest.approx([0.2 + seed / 1e4, 0.4 + seed / 1e4]) for seed in (200, 201, 202)
    ]
    assert means["y"] == pytest.approx([0.2201, 0.4201]) and single.layout["shapes"][0]["y0"] == pytest.approx(0.1)
    assert "dotted" in draw_svg(single)
    assert "shapes" not in study_figures(results)["accuracy"].layout  # runs of old versions do not say where they began
    swept = study_figures(synthetic_scores("score", ["short", "long"], {"training.lr": [3e-5, 1e-4, 3e-4]}))
    assert set(swept) == {"accuracy-short", "survival-short", "accuracy-long", "survival-long"}
    assert [trace["y"][0] for trace in swept["accuracy-long"].data] == pytest.approx([0.4201, 0.8201])
    assert "3e-4" in draw_svg(swept["accuracy-long"])


def test_losses_are_drawn_seed_by_seed_from_the_bed_that_all_comparisons_share() -> None:
    results = synthetic_scores("score", ["exact", "bf16", "stale"], {})
    for run in results["runs"]:
        run["score"] += (run["bed"] == "bf16") * (run["seed"] - 200) / 100  # the seeds differ in what they lose
    terms = [
        [{"arm": "grpo", "bed": one}, {"arm": "gspo", "bed": other}]
        for one, other in (("exact", "bf16"), ("stale", "exact"))
    ]
    drawn = study_figures(results | {"comparisons": [{"terms": each} for each in terms]})
    assert set(drawn) == {"accuracy", "loss"}
    grpo_seeds, grpo, _, gspo = drawn["loss"].data
    # 20 points for each bed further on: a loss below 0 is a gain.
    assert grpo["y"] == pytest.approx([-21, -40]) and gspo["y"] == pytest.approx([-41, -80])
    assert grpo_seeds["y"] == pytest.approx([-20, -21, -22, -40, -40, -40])
    assert drawn["loss"].layout["xaxis"]["ticktext"] == ["bf16", "stale"] and "lost beside exact" in draw_svg(drawn["loss"])
    # Without a bed that all comparisons share there is nothing to lose from.
    apart = [{"terms": [{"arm": "grpo", "bed": bed}, {"arm": "gspo", "bed": bed}]} for bed in ("bf16", "stale")]
    assert set(study_figures(results | {"comparisons": apart})) == {"accuracy"}


def test_the_page_of_a_study_takes_the_place_of_no_other() -> None:
    names = [studies.page_name(name) for name in STORED]
    assert len({*names}) == len(names) and not {*names} & {*claims.PAGES.values()}
    assert "experiments/mismatch-study.md); 80 runs" in claims.page()


def test_a_study_of_efficiency_shows_accuracy_over_tokens() -> None:
    drawn = study_figures(synthetic_scores("area", ["mixture"], {}))
    assert "Not registered" in drawn["accuracy"].caption
    assert set(drawn) == {"curves", "accuracy"}
    grpo, gspo = drawn["curves"].data
    assert grpo["x"] == pytest.approx([0.0, 2.0], abs=0.02) and {*grpo["x"]}.isdisjoint(gspo["x"])
    assert grpo["y"] == pytest.approx([0.1, 0.2]) and gspo["y"][1] == pytest.approx(0.4)


@pytest.mark.parametrize("name", STORED)
def test_a_figure_says_without_its_caption_of_how_many_seeds_it_is_and_what_its_bars_are(name: str) -> None:
    for drawing in study_figures(STORED[name]).values():
        title = drawing.layout["xaxis"]["title"]["text"]
        assert f"{len(STORED[name]['seeds'])} " in title and "bars: " in title and "95 %" in title


def test_arms_stand_beside_each_other_at_every_dose() -> None:
    drawn = study_figures(STORED["dose"])
    for part in ("accuracy", "survival"):
        rows = [trace["x"] for trace in drawn[part].data]
        for at in zip(*rows, strict=True):
            gaps = [two - one for one, two in pairwise(at)]
            assert gaps == pytest.approx([gaps[0]] * len(gaps)) and 0 < gaps[0] < 0.005
    assert drawn["survival"].data[0]["x"][-1] == pytest.approx(0.183, abs=0.003)


def test_the_rate_of_an_arm_is_the_best_of_those_that_are_stable_with_room() -> None:
    results = synthetic_frontier()
    for run in results["runs"]:
        # The larger the rate, the more is learned before a collapse.
        end = 1e3 * run["point"]["training.lr"]
        run["evaluations"] = [{"sampled": 0.0, "tokens": 0}, {"sampled": end, "tokens": 10}]
    # Seeds of sequence-narrow survive 4 or 5 of the 5 rates: the third has a stable double.
    assert rates.best_rate(results, "sequence-narrow")[0] == 4e-5
    assert list(rates.best_rate(results, "sequence-narrow")[1]) == [1e-5, 2e-5, 4e-5]
    assert rates.best_rate(results, "sequence-wide")[0] == 1e-5  # nothing is stable: the lowest


REGISTERED = sorted(path.stem for path in (ROOT / "studies").glob("*.toml"))


@pytest.mark.parametrize("name", [name for name in REGISTERED if name not in STORED])
def test_a_registered_study_has_its_reading_before_its_results(name: str) -> None:
    """With made-up results: numbers and the case for the opposite, so that nobody argues backwards from the data."""
    study = read_study(ROOT / "studies" / f"{name}.toml")
    generator = random.Random(3)
    runs = [
        {
            "name": f"run {seed}",
            "bed": bed,
            "arm": arm,
            "seed": seed,
            "point": point,
            "status": "done" if generator.random() < 0.8 else "collapsed",
            "score": generator.random(),
            "start": 0.25,
            "problems": 256,
            "clip_mean": 0.4,
            "flip_mean": 0.03,
            "reason": None,
            "evaluations": [
                {"step": 0, "sampled": 0.25, "tokens": 0},
                {"step": 9, "sampled": generator.random(), "tokens": 900},
            ],
        }
        for seed in study.definition.seeds
        for bed, options in study.definition.beds.items()
        for arm in study.definition.arms
        if options.arms is None or arm in options.arms
        for point in points(study.definition)
    ]
    registered = {"commit": "0" * 40, "date": "2026-11-18T00:00:00+00:00"}
    results = describe(study, runs, Machine(), pilot=False, seeds=study.definition.seeds, registered=registered)
    page = studies.experiment_page(results)
    assert "The opposite case" in page and "With the measured spread the power" in page
    for comparison in study.comparisons:
        assert comparison.name[1:] in page
    for part in study_figures(results):
        assert f"figures/study-{name}-{part}.svg" in page


def test_the_reading_of_the_real_model_takes_the_results_of_both_its_registrations() -> None:
    results = STORED["real-model"]
    runs = {(run["arm"], run["seed"]): run for run in results["runs"]}
    pairs = [(runs["gspo", seed]["greedy"], runs["grpo", seed]["greedy"]) for seed in results["seeds"]]
    lead = 100 * sum(gspo - grpo for gspo, grpo in pairs) / len(pairs)
    page = studies.experiment_page(results)
    assert f"above in {sum(gspo > grpo for gspo, grpo in pairs)} of 3**, by {lead:+.1f} (" in page
    assert f"in its {results['runs'][0]['steps']} steps" in page
    # The registration of 18 November had two learning rates and a second comparison.
    swept = [run | {"point": {"training.lr": lr}} for lr in (1e-5, 3e-5) for run in results["runs"]]
    earlier = results | {"sweep": {"training.lr": [1e-5, 3e-5]}, "runs": swept, "comparisons": 2 * results["comparisons"]}
    reading = "\n".join(READINGS["real-model"](earlier))
    assert (
        "at training.lr = 3e-05 grpo 30.7 %" in reading and "The opposite case" in reading and "Exploratory" not in reading
    )
    for text, t in ((page, 4.303), (reading, 6.205)):  # of two degrees of freedom, for one comparison or two
        assert f"an interval of {100 * t * math.sqrt(2 / 4 / 128 / 3):.0f} points to either side" in text


def test_every_verdict_of_the_ledger_has_a_stored_file_and_a_command() -> None:
    page = claims.page()
    for each in claims.load_claims():
        assert each["verdict"] in claims.VERDICTS and each["why"] and each["claim"] in page
        assert all(command in page for command in claims.as_list(each["command"]))
    # A stored comparison is evidence for a claim, so its command stands in the ledger.
    for file in (ROOT / "recipes" / "compare").glob("*.toml"):
        if file.name != "tiny.toml":  # the example of docs/compare.md, of which nothing is stored
            assert f"`legato compare recipes/compare/{file.name}" in page, file.name
    assert page.count("Command, never run: ") == 1
    for name, entry in recipes.record().items():
        assert (f"- `{name}`" in page) is not bool(entry["stored"])
    # Figures in circulation that are wrong.
    assert not any(wrong in page for wrong in ("0.99946", "77.1", "35.0"))


def test_a_verdict_without_a_stored_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "claims.toml"
    file.write_text('[[claims]]\nclaim = "c"\npublished = "p"\nverdict = "reproduced"\nwhy = "w"\nresults = "nothing"\n')
    monkeypatch.setattr(claims, "FILE", file)
    with pytest.raises(SystemExit, match="stored result"):
        claims.load_claims()


def test_the_commits_of_results_are_recorded() -> None:
    recorded = json.loads(provenance.FILE.read_text())
    stored = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    stored |= {f"studies/{name}" for name in STORED}
    assert stored <= set(recorded)
    page = claims.page()
    for name in stored:
        file = f"studies/results/{name.removeprefix('studies/')}" if "/" in name else f"benchmarks/results/{name}"
        assert f"| `{file}.json` | {recorded[name]['date']} | {recorded[name]['commit']} |" in page
    for name, results in STORED.items():
        entry = recorded[f"studies/{name}"]
        assert f"stored on {entry['date']} by commit {entry['commit']}" in studies.experiment_page(results)


def test_every_recorded_commit_is_one_that_changed_its_file() -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    try:
        if git("rev-parse", "--is-shallow-repository").strip() != "false":
            pytest.skip("the history is cut off")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history: not a clone")
    for name, entry in json.loads(provenance.FILE.read_text()).items():
        folder, file = ("studies", name.removeprefix("studies/")) if "/" in name else ("benchmarks", name)
        commits = git("log", "--format=%H", "--", f"{folder}/results/{file}.json").split()
        assert any(commit.startswith(entry["commit"]) for commit in commits), f"{name}: run python -m benchmarks.provenance"


STORED_RUN = {
    "status": "done",
    "problems": 48,
    "steps": 25,
    "updates": 400,
    "origin": {"weights": "a", "problems": "b"},
    "evaluations": [{"step": step, "sampled": share, "tokens": step} for step, share in ((0, 0.2), (5, 0.3), (25, 0.5))],
}


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({}, []),
        ({"status": "collapsed"}, ["collapsed"]),
        ({5: 0.35, 25: 0.6}, []),  # within three errors of 48 problems
        ({0: 0.6}, ["step 0: 0.600 in place of 0.200"]),
        ({25: 0.0}, ["step 25: 0.000 in place of 0.500"]),
    ],
    ids=["the same", "another ending", "near", "another start", "another end"],
)
def test_a_run_made_again_on_a_gpu_agrees_within_its_error(changes: dict[Any, Any], fragments: list[str]) -> None:
    again = STORED_RUN | {key: value for key, value in changes.items() if isinstance(key, str)}
    again["evaluations"] = [{**each, "sampled": changes.get(each["step"], each["sampled"])} for each in again["evaluations"]]
    found = repeat.disagreements(STORED_RUN, again, exact=False)
    assert len(found) == len(fragments) and all(part in text for part, text in zip(fragments, found, strict=True))
    assert bool(repeat.disagreements(STORED_RUN, again, exact=True)) == (STORED_RUN["evaluations"] != again["evaluations"])


def test_the_page_of_a_study_shows_the_runs_that_were_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {"name": "one", "stored": [0.2, 0.5], "again": [0.25, 0.5], "disagreements": []},
        {"name": "other", "stored": [0.2, 0.5], "again": [0.2, 0.0], "disagreements": ["step 25: too far"]},
        {"name": "equal", "stored": [0.2, 0.5], "again": [0.2, 0.5], "disagreements": []},
    ]
    content = {"study": "dose", "exact": False, "date": "2026-11-18", "device": "NVIDIA H200", "commit": "abc", "runs": runs}
    (tmp_path / "dose.json").write_text(json.dumps(content))
    monkeypatch.setattr(repeat, "REPEATS", tmp_path)
    page = studies.experiment_page(STORED["dose"])
    assert "made again on 2026-11-18 (NVIDIA H200" in page and "`other` does not agree: step 25: too far" in page
    assert "`equal` agrees to the last digit stored" in page and "of all pairs of different runs" in page
    assert "`one` agrees within 3 standard errors" in page and "25.0, 50.0 %; stored 20.0, 50.0 %" in page


def test_every_recipe_that_a_stored_file_names_counts_as_run() -> None:
    recorded = recipes.record()
    assert recorded["recipes/tiny-maze.toml"]["stored"] == ["benchmarks/results/credit.json"]
    assert "studies/results/frontier.json" in recorded["recipes/tiny-dense-long.toml"]["stored"]
    assert recorded["recipes/qwen3-30b-a3b.toml"]["stored"] == []
    nested = {"comparisons": {"one": {"recipes": ["a.toml"], "runs": []}}, "two": {"recipes": ["b.toml"]}}
    assert list(recipes.recipes_of_comparisons(nested)) == ["a.toml", "b.toml"]


def test_a_claim_shows_the_comparisons_that_bear_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[claims]]\nclaim = "c"\npublished = "p"\nverdict = "partly"\nwhy = "w"\nresults = "moe"\ncommand = "x"\n'
    text += 'study = ["frontier", "dose"]\n'
    file = tmp_path / "claims.toml"
    monkeypatch.setattr(claims, "FILE", file)
    file.write_text(text + 'shows.frontier = ["that gap, mixture minus dense"]\nshows.dose = []\n')
    page = claims.page()
    assert page.count("- Measured: ") == 3 and "that gap, mixture minus dense: " in page
    assert "GSPO beside GRPO" not in page and "harm to GRPO" not in page
    file.write_text(text + 'shows.frontier = ["another gap"]\n')
    with pytest.raises(SystemExit, match="another gap"):
        claims.page()


def test_the_runs_made_again_are_one_of_each_ending_where_endings_differ() -> None:
    survivor, other = repeat.chosen_runs("frontier")
    assert (survivor["status"], other["status"]) == ("done", "collapsed")
    first, second = repeat.chosen_runs("dose")
    assert first["status"] == second["status"] == "done" and first["name"] != second["name"]


def test_the_page_says_how_the_runs_made_again_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "REPEATS", tmp_path)
    content = {"exact": False, "date": "2026-11-18", "device": "NVIDIA H200", "commit": "abc", "runs": []}
    for name, divided in (("frontier", True), ("dose", False)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content | {"study": name}))
        assert ("one that survived and one that did not" in repeat.sentences(name)[0]) is divided


def test_tables_and_headings_of_a_reading_stand_apart_from_its_sentences() -> None:
    page = studies.experiment_page(STORED["frontier"])
    assert "\n\n### Exploratory: not registered\n\n- " in page
    assert ":\n\n| a run is stable if it | mixture | dense |\n|---|---|---|\n| registered" in page
    # The table of rules has the registered comparison in its first row.
    first = STORED["frontier"]["comparisons"][0]
    low, high = first["interval"]
    assert f"| registered: did not collapse | {first['mean']:+.2f} ({low:+.2f} to {high:+.2f}) |" in page
    # What was not registered comes after what was, and the figures between them.
    order = [
        "The power was lower",
        "study-frontier-frontier.svg",
        "### Exploratory",
        "At 2.4e-4 GSPO ends higher",
        "### The opposite",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)
    assert STORED["frontier"]["runs"][0]["ratio/token_log_std"] > 0


def test_the_reading_of_the_dose_study_says_what_its_runs_did() -> None:
    """Words of the reading that are not numbers, against the stored runs."""
    results, page = STORED["dose"], studies.experiment_page(STORED["dose"])
    doses = results["sweep"]["training.router_noise"]
    scores = {(run["arm"], run["point"]["training.router_noise"], run["seed"]): run["score"] for run in results["runs"]}
    by_arm = {
        arm: [sum(scores[arm, dose, seed] for seed in results["seeds"]) for dose in doses]
        for arm in ("grpo", "grpo+R2", "gspo")
    }
    assert (
        by_arm["grpo"][2] > by_arm["grpo"][3] > by_arm["grpo"][4]
        and by_arm["gspo"][2] < by_arm["gspo"][3] < by_arm["gspo"][4]
    )
    ahead = sum(scores["gspo", doses[-1], seed] > scores["grpo", doses[-1], seed] for seed in results["seeds"])
    assert ahead == 10 and "above it in 10 of 10 seeds" in page and "all 10 seeds have GSPO ahead" in page
    lost = {arm: (each[0] - each[-1]) / len(results["seeds"]) for arm, each in by_arm.items()}
    assert 0 < lost["grpo+R2"] < lost["grpo"] < 1.5 * lost["grpo+R2"] and "Routing Replay loses about as much" in page
    assert f"Routing Replay loses about as much**: {100 * lost['grpo+R2']:+.1f} (" in page
    # The power that was registered could not be had with so few held-out problems.
    assert all(each["spread"] > 0.08 and each["power_at_measured_spread"] < 0.8 for each in results["comparisons"])
    order = [
        "study-dose-survival.svg",
        "### Exploratory",
        "GSPO ends higher with noise",
        "### The opposite",
        "That the rules moved",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)


def test_the_reading_of_the_bias_study_says_what_its_worlds_did() -> None:
    results, page = STORED["bias"], studies.experiment_page(STORED["bias"])
    means: dict[Any, float] = {}
    for run in results["runs"]:
        place = (run["arm"], run["point"]["length"], run["point"]["drift"])
        means[place] = means.get(place, 0.0) + run["value"] / len(results["seeds"])
    assert all(means["sequence", *at] < means["token", *at] < means["none", *at] for _, *at in means)
    for arm in ("token", "sequence"):  # nearer and nearer to no weight
        shares = [means[arm, length, 0.1] / means["none", length, 0.1] for length in (2, 4, 6, 8)]
        assert shares == sorted(shares) and ", ".join(f"{share:.0%}" for share in shares) in page


def test_the_reading_of_the_second_study_of_the_exponent_says_what_its_runs_did() -> None:
    results, page = STORED["exponent-2"], studies.experiment_page(STORED["exponent-2"])
    ends: dict[str, dict[int, float]] = {}
    for run in results["runs"]:
        assert run["status"] == "done" and run["score"] > run["start"] + 0.15, "every arm learned, and none collapsed"
        ends.setdefault(run["arm"], {})[run["seed"]] = run["score"]
    assert min(ends, key=lambda arm: sum(ends[arm].values())) == "a1" and "`a1` has the lowest mean" in page
    for arm, scores in ends.items():
        lower = sum(ends["a1"][seed] < score for seed, score in scores.items())
        assert arm == "a1" or f"{arm} in {lower}" in page
    # By the registered analysis nothing of this is a difference, and a large lead of 1 / L is excluded.
    assert results["verdict"] == "undecided" and not any(
        each["finding"] in ("above", "below") for each in results["comparisons"]
    )
    assert max(each["interval"][1] for each in results["comparisons"]) < 0.05
    for each in results["comparisons"]:
        alone = compare_pairs(each["differences"], comparisons=4, margin=each["margin"])
        assert (alone.high < 0) == ("band" not in each["name"]) and "by seeds alone the three intervals lie below 0" in page
    order = [
        "## Reading",
        "study-exponent-2-accuracy.svg",
        "### Exploratory",
        "written after the results",
        "The opposite case",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)


def test_the_reading_of_the_efficiency_study_says_what_its_runs_did() -> None:
    """Words of the reading that are not numbers, against the stored runs."""
    results = STORED["efficiency"]
    page = studies.experiment_page(results)
    (only,) = results["comparisons"]
    assert (
        results["verdict"] == "refuted"
        and only["finding"] == "equivalent"
        and only["interval"][0] < -0.03 < 0.03 < only["interval"][1]
    )
    assert {run["status"] for run in results["runs"]} == {"done"} and "All 16 runs survived" in page
    runs = {(run["arm"], run["seed"]): run for run in results["runs"]}
    leads = [
        sum(
            runs["gspo", seed]["evaluations"][place]["sampled"] - runs["grpo", seed]["evaluations"][place]["sampled"]
            for seed in results["seeds"]
        )
        for place in range(11)
    ]
    assert max(leads) == leads[5] and all(lead > 0 for lead in leads[2:6]) and all(lead < 0 for lead in leads[6:])
    assert (
        all(runs["gspo", seed]["greedy"] < runs["grpo", seed]["greedy"] for seed in results["seeds"])
        and "8 of 8 seeds" in page
    )
    # GSPO at GRPO's learning rate, from another study of the same bed.
    beds = [read_study(ROOT / "studies" / f"{name}.toml").definition for name in ("efficiency", "mismatch")]
    options = [dict(each.options) for each in beds]
    for each in options:
        for path in ("training.steps", "training.accept_unsafe_anchor", "training.lr"):
            each.pop(path, None)
    assert options[0] == options[1]
    ends = {(run["arm"], run["seed"]): run["score"] for run in STORED["mismatch"]["runs"] if run["bed"] == "recomputed"}
    seeds = STORED["mismatch"]["seeds"]
    lead = 100 * sum(ends["gspo", seed] - ends["grpo", seed] for seed in seeds) / len(seeds)
    assert f"There GSPO ended {lead:+.1f} (" in page and lead < 0
    order = [
        "Refuted by the registered",
        "study-efficiency-curves.svg",
        "### Exploratory",
        "may lead in the first half",
        "### The opposite",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)


def test_the_reading_of_the_mismatch_study_says_what_its_runs_did() -> None:
    """Words of the reading that are not numbers, against the stored runs."""
    results = STORED["mismatch"]
    page = studies.experiment_page(results)
    assert [each["finding"] for each in results["comparisons"]] == ["equivalent", "above", "undecided"]
    assert [each["refutes"] for each in results["comparisons"]] == [True, False, False] and results["verdict"] == "refuted"
    collapsed = {(run["bed"], run["arm"]) for run in results["runs"] if run["status"] != "done"}
    assert collapsed == {("fp8-like", "grpo")} and "6 of 10 survived" in page
    by_arm = {
        arm: [run for run in results["runs"] if (run["bed"], run["arm"]) == ("fp8-like", arm)] for arm in ("grpo", "gspo")
    }
    falls = {
        arm: sum(run["evaluations"][2]["sampled"] < run["evaluations"][1]["sampled"] for run in runs)
        for arm, runs in by_arm.items()
    }
    assert falls == {"grpo": 10, "gspo": 0}
    # The table of losses: what was registered is the difference of its columns.
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if re.match(r"\| (bf16|fp8-like|stale) \|", line)}
    for name, each in zip(("bf16", "fp8-like", "stale"), results["comparisons"], strict=True):
        grpo, gspo = (float(value) for value in re.findall(r"\| ([+-][\d.]+) \(", rows[f"| {name}"]))
        assert grpo - gspo == pytest.approx(100 * each["mean"], abs=0.11)
    (greedy,) = re.findall(r"at the level of the table: (.*)\. What seeds alone", page)
    intervals = {name: (float(low), float(high)) for name, low, high in re.findall(r"(\S+) \S+ \((\S+) to (\S+)\)", greedy)}
    assert intervals["fp8-like"][0] > 0 and intervals["stale"][0] < 0 < intervals["stale"][1]
    order = ["by one of its conditions only", "study-mismatch-loss.svg", "### Exploratory", "### The opposite"]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)


def test_the_reading_of_training_to_600_tokens_says_what_its_runs_did() -> None:
    """Words of the reading that are not numbers, against the stored runs."""
    results, page = STORED["length-trained"], studies.experiment_page(STORED["length-trained"])
    runs = {(run["bed"], run["arm"], run["seed"]): run for run in results["runs"]}
    leads = {
        key: {
            bed: [runs[bed, "gspo", seed][key] - runs[bed, "grpo", seed][key] for seed in results["seeds"]]
            for bed in ("short", "long")
        }
        for key in ("score", "greedy")
    }
    growth = {
        key: [long - short for long, short in zip(each["long"], each["short"], strict=True)] for key, each in leads.items()
    }
    (only,) = results["comparisons"]
    assert results["verdict"] == "confirmed" and growth["score"] == pytest.approx(only["differences"])
    assert f"above 0 in {sum(each > 0 for each in growth['score'])} of 12" in page
    for place in range(12):  # no seed decides, by seeds alone
        rest = growth["score"][:place] + growth["score"][place + 1 :]
        assert compare_pairs(rest, comparisons=1, margin=only["margin"]).low > 0
    greedy = compare_pairs(growth["greedy"], comparisons=1, margin=only["margin"])
    assert greedy.low < 0 < greedy.high and "By greedy accuracy the growth is not shown" in page
    gains = [runs["long", "grpo", seed]["score"] - runs["long", "grpo", seed]["start"] for seed in results["seeds"]]
    learned = compare_pairs(gains, comparisons=1, margin=only["margin"])
    assert learned.low < 0 < learned.high and "GRPO did not learn from long answers" in page
    assert max(leads["score"]["long"][:6]) < min(leads["score"]["long"][6:]) and "in 1 of 462 cases" in page
    # The short bed and two seeds of the long one were made on a CPU, and float32 is the default there.
    on_cpu = sum(each["runs"] for each in results["made"] if "NVIDIA" not in each["device"])
    on_gpu = sum(each["runs"] for each in results["made"] if "NVIDIA" in each["device"])
    assert (on_cpu, on_gpu) == (24 + 4, 20) and "bfloat16 in all seeds but two" in page
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert choose_dtype("auto", torch.device(device)) is dtype
    definition = read_study(ROOT / "studies" / "length-trained.toml").definition
    options = [*definition.options, *(path for bed in definition.beds.values() for path in bed.options)]
    assert not any("dtype" in path for path in options)
    order = [
        "Where it ran",
        "study-length-trained-accuracy.svg",
        "### Exploratory",
        "written after the results",
        "### The opposite",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STORED)
def test_two_runs_of_each_study_give_the_stored_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit on the kind of CPU that made them, else within the error that `benchmarks.repeat` states."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if repeat.made_on_gpu(STORED[name]):
        pytest.skip(f"made on a GPU: `python -m benchmarks.repeat {name}` makes two runs again")
    again = repeat.repeat(name, Machine())
    assert [run["disagreements"] for run in again["runs"]] == [[], []]
    assert not any(again.get("own_code", {"disagreements": {}})["disagreements"].values())


def test_bits_are_expected_of_the_same_processor_and_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat.torch.cuda, "is_available", lambda: False)
    here = {"device": "Some CPU, model 1, AVX512", "torch": "2.13.0+cpu"}
    made = {**here, "date": "2026-11-19"}
    assert repeat.same_bits_expected({"made": [made, made]}, here)
    assert not repeat.same_bits_expected({"made": [made, {**made, "device": "x86_64"}]}, here)
    assert not repeat.same_bits_expected({"made": [{**made, "torch": "2.12.0+cpu"}]}, here)
    assert not repeat.same_bits_expected({"machine": {}}, here)  # a file that does not say where


def test_a_run_with_other_problems_or_another_number_of_updates_does_not_agree() -> None:
    stored = STORED["exponent"]["runs"][0]
    origin = {**stored["origin"], "problems": "0" * 32}
    assert repeat.disagreements(stored, stored, exact=False) == []
    for change in ({"origin": origin}, {"updates": stored["updates"] - 1}, {"problems": 39}, {"status": "collapsed"}):
        (only,) = repeat.disagreements(stored, {**stored, **change}, exact=False)
        assert "in place of" in only


def test_the_page_says_how_many_different_runs_the_rule_would_take_for_equal() -> None:
    def run(accuracy: float, status: str = "done") -> dict[str, Any]:
        return {"status": status, "problems": 100, "evaluations": [{"step": 0, "sampled": accuracy}]}

    assert repeat.share_of_strangers([run(0.2), run(0.25), run(0.9), run(0.2, "collapsed")]) == pytest.approx(1 / 3)


def test_a_measured_number_made_again_agrees_to_the_bit_or_within_its_tolerance() -> None:
    stored = {"name": "one", "seed": 200, "value": 1.5, "variance": 30.0}
    near, far = {**stored, "value": 1.5 + 4e-6}, {**stored, "variance": 31.0}
    assert repeat.disagreements(stored, stored, exact=True) == []
    assert repeat.disagreements(stored, near, exact=False) == []
    assert repeat.disagreements(stored, near, exact=True) == ["value: 1.500004 in place of 1.5"]
    assert repeat.disagreements(stored, far, exact=False) == ["variance: 31.0 in place of 30.0"]
    assert repeat.disagreements(stored, {"name": "one"}, exact=False) != []


def test_a_study_in_two_precisions_says_so_on_its_page_and_in_its_figure() -> None:
    """The figure is quoted without its page, and length and precision are one in this study."""
    results = STORED["length-trained"]
    one = results | {"precision": {"float32": 48}}
    assert "20 runs in bfloat16, 28 runs in float32" in studies.experiment_page(results)
    assert "Precision" not in studies.experiment_page(one).partition("## Reading")[0]
    (mixed,), (pure,) = (list(study_figures(each).values()) for each in (results, one))
    assert "runs in bfloat16 and float32" in mixed.layout["xaxis"]["title"]["text"]
    assert "float32" not in pure.layout["xaxis"]["title"]["text"]
