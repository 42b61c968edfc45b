"""The figures of token ratios and of several runs, against plain computations of what they show."""

import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from legato.pages.report import write_report
from legato.pages.several import _label_arms, arms, write_several
from legato.pages.token_figures import measured_responses, token_figures
from legato.pages.traces import Figure, line, logarithmic
from legato.pages.traces import figure as make_figure
from legato.records.directory import RunDirectory
from tests.dashboard.synthetic import synthetic_run

BAND = {"kind": "step", "step": 1, "clip/band_low": 3e-4, "clip/band_high": 4e-4}


def response(log_ratios: list[float], update: int | None = 1, **more: Any) -> dict[str, Any]:
    count = len(log_ratios)
    details = {"pieces": [f"<t{n}>" for n in range(count)], "logprobs": [-1.0] * count, "log_ratios": log_ratios}
    details |= {"advantages": None, "coefficients": [0.0 if n == 1 else 0.1 for n in range(count)], "update": update}
    return {
        "prompt": "p",
        "text": "t",
        "reward": 1.0,
        "tokens": count,
        "advantage": 1.0,
        "group": 0,
        "details": details,
    } | more


def write_run(parent: Path, rows: list[dict[str, Any]], name: str = "run") -> RunDirectory:
    directory = RunDirectory.create(parent, name)
    directory.write_config("")
    directory.append_metrics(BAND)
    directory.write_rollouts(1, rows)
    return directory


def figures(directory: RunDirectory) -> dict[str, Figure]:
    return {each.title: each for each in token_figures(directory, [BAND])}


def test_only_responses_that_had_moved_are_measured(tmp_path: Path) -> None:
    rows = [
        response([0.1, 0.2]),
        response([0.1, 0.2], update=0),
        response([0.1, 0.2], update=None),
        response([0.0, 0.0]),
        response([0.1, 0.2], tokens=9),
        {"prompt": "held out"},
    ]
    assert [each.log_s for each in measured_responses(write_run(tmp_path, rows))] == pytest.approx([0.15])


def test_variance_against_length_has_slope_minus_one_for_independent_tokens(tmp_path: Path) -> None:
    """Independent tokens: Var(log s) = sigma^2 / L, slope -1, on the dashed line."""
    chance, sigma = random.Random(0), 0.01
    rows = [response([chance.gauss(0, sigma) for _ in range(length)]) for length in (4, 16, 64, 256) for _ in range(300)]
    figure = figures(write_run(tmp_path, rows))["Variance against length"]
    measured, independent = figure.data
    assert measured["x"] == [4, 16, 64, 256]
    moved = [(r["tokens"], statistics.fmean(r["details"]["log_ratios"])) for r in rows]
    middle = statistics.fmean(log_s for _, log_s in moved)
    # All are of one update of 1,200 responses, whose mean takes 1/1200 of a degree of freedom from each.
    plain = [sum((log_s - middle) ** 2 for n, log_s in moved if n == length) / (300 - 0.25) for length in measured["x"]]
    assert measured["y"] == pytest.approx(plain, rel=1e-4)
    assert measured["y"] == pytest.approx([sigma**2 / length for length in measured["x"]], rel=0.25)
    assert independent["y"] == pytest.approx([sigma**2 / length for length in measured["x"]], rel=0.02)
    slope = re.search(r"slope (-?[\d.]+)", measured["name"])
    assert slope and float(slope.group(1)) == pytest.approx(-1, abs=0.06)


def test_drift_between_responses_flattens_the_slope(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = []
    for length in (4, 16, 64, 256):
        for _ in range(100):
            drift = chance.gauss(0, 0.01)
            rows.append(response([drift + chance.gauss(0, 0.01) for _ in range(length)]))
    slope = re.search(r"slope (-?[\d.]+)", figures(write_run(tmp_path, rows))["Variance against length"].data[0]["name"])
    assert slope and float(slope.group(1)) > -0.2


def test_the_mean_move_of_an_update_is_not_counted_as_spread(tmp_path: Path) -> None:
    chance, rows = random.Random(0), []
    for length in (4, 16, 64):
        for _ in range(100):
            update = chance.randrange(1, 4)
            rows.append(response([0.05 * update + chance.gauss(0, 0.01) for _ in range(length)], update=update))
    measured = figures(write_run(tmp_path, rows))["Variance against length"].data[0]
    assert measured["y"] == pytest.approx([1e-4 / length for length in (4, 16, 64)], rel=0.35)


def test_histograms_hold_every_token_and_every_response(tmp_path: Path) -> None:
    chance = random.Random(1)
    rows = [response([chance.gauss(0, 0.1) for _ in range(50)]) for _ in range(200)]
    figure = figures(write_run(tmp_path, rows))["Ratios of tokens and of responses"]
    tokens, responses = figure.data
    for trace, sizes in (
        (tokens, [abs(value) for row in rows for value in row["details"]["log_ratios"]]),
        (responses, [abs(statistics.fmean(row["details"]["log_ratios"])) for row in rows]),
    ):
        assert sum(trace["y"]) == pytest.approx(1, abs=1e-3)
        middle = math.exp(sum(share * math.log(x) for x, share in zip(trace["x"], trace["y"], strict=True)))
        assert middle == pytest.approx(statistics.geometric_mean(sizes), rel=0.1)
    edges = sorted(shape["x0"] for shape in figure.layout["shapes"])
    assert edges == pytest.approx([-math.log1p(-3e-4), math.log1p(4e-4)])


def test_the_strip_shows_a_response_token_by_token(tmp_path: Path) -> None:
    figure = figures(write_run(tmp_path, [response([0.5, -0.25, 0.0])]))["One response, token by token"]
    free, silent, whole = figure.data
    assert (free["x"], free["y"], silent["x"], silent["y"]) == ([1, 3], [0.5, 0.0], [2], [-0.25])
    assert whole["y"] == pytest.approx([0.25 / 3] * 2, rel=1e-5)
    assert figure.layout["xaxis"]["ticktext"] == ["&lt;t0&gt;", "&lt;t1&gt;", "&lt;t2&gt;"]
    assert [shape["y0"] for shape in figure.layout["shapes"]] == pytest.approx([math.log1p(-3e-4), math.log1p(4e-4)])


def test_the_report_has_the_token_figures_and_damaged_rollouts_do_not_stop_it(tmp_path: Path) -> None:
    directory = synthetic_run(tmp_path, steps=30)
    rows = [response([0.01 * n, -0.02, 0.001 * n] * (1 + n % 3)) for n in range(1, 60)]
    directory.write_rollouts(30, rows)
    titles = [each["title"] for each in read_figures(write_report(directory))]
    for title in (
        "Clip fraction, logarithmic axis",
        "Ratios of tokens and of responses",
        "Variance against length",
        "One response, token by token",
    ):
        assert title in titles
    directory.rollouts_path(30).write_bytes(b"torn")
    assert "One response, token by token" not in [each["title"] for each in read_figures(write_report(directory))]


def read_figures(page: Path) -> list[dict[str, Any]]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match
    figures: list[dict[str, Any]] = json.loads(match.group(1))
    return figures


def test_seeds_are_one_arm_with_a_band_and_arms_have_cost_bars(tmp_path: Path) -> None:
    directories = []
    for name, replay, seed, height in (("a", "off", 0, 1.0), ("b", "off", 1, 2.0), ("c", "R2", 0, 5.0)):
        directory = RunDirectory.create(tmp_path, name)
        text = f'[algorithm]\nname = "grpo"\n[training]\nseed = {seed}\nrouting_replay = "{replay}"\n'
        directory.write_config(text + f'[output]\nname = "{name}"\n')
        for step in range(1, 4):
            times = {f"time/{phase}_seconds": height * step for phase in ("rollouts", "anchor", "update")}
            directory.append_metrics({"kind": "step", "step": step, "reward/mean": height, "clip/tokens": 0.0, **times})
        directories.append(directory)
    by_title = {each["title"]: each for each in read_figures(write_several(directories, tmp_path / "page.html"))}
    assert set(by_title) == {"Reward", "Clipped tokens", "Cost of a step"}
    assert "type" not in by_title["Clipped tokens"]["layout"]["yaxis"], (
        "nothing is clipped: a logarithmic axis would be empty"
    )
    assert "axis is linear" in (tmp_path / "page.html").read_text()
    low, high, mean, other = by_title["Reward"]["data"]
    # Student's t over the seeds 1 and 2: 12.7062 (from a table) times the standard error of 0.5.
    assert (low["y"], high["y"]) == (pytest.approx([-4.8531] * 3), pytest.approx([7.8531] * 3))
    assert (mean["y"], other["y"]) == ([1.5] * 3, [5.0] * 3)
    label = "grpo, training.routing_replay=off, 2 seeds"
    assert (mean["name"], other["name"]) == (label, "c"), "the legend names runs"
    (arm,) = re.findall(f"<b>{label}</b>(.*?)<", (tmp_path / "page.html").read_text())
    assert "grpo" in arm and "training.routing_replay=off" in arm and arm.endswith("a, b")
    # Steps 2 and 3 of seeds 1 and 2: (2.5 + 5) / 2; the first step sets things up.
    assert [trace["y"] for trace in by_title["Cost of a step"]["data"]] == [[3.75, 12.5]] * 3


def test_an_arm_is_labelled_by_what_the_names_of_its_runs_share(tmp_path: Path) -> None:
    runs = {
        name: RunDirectory(tmp_path / name) for name in ("grpo-seed0", "grpo-seed1", "sum-gspo-seed0-1", "sum-gspo-seed1-2")
    }
    groups = {"grpo": ["grpo-seed0", "grpo-seed1"], "gspo": ["sum-gspo-seed0-1", "sum-gspo-seed1-2"]}
    assert list(_label_arms(groups, runs)) == ["grpo, 2 seeds", "sum-gspo, 2 seeds"]
    again = {"one": ["grpo-seed0"], "same": ["grpo-seed0"], **groups}
    assert list(_label_arms(again, runs))[:3] == ["grpo-seed0", "grpo-seed0 (2)", "grpo, 2 seeds"]


def seeds_of(parent: Path, arms: dict[str, list[list[dict[str, Any]]]]) -> list[RunDirectory]:
    """Runs by value of routing_replay, a seed each, with the given steps."""
    directories = []
    for replay, seeds in arms.items():
        for seed, steps in enumerate(seeds):
            directories.append(RunDirectory.create(parent, f"{replay}-{seed}"))
            text = f'[algorithm]\nname = "grpo"\n[training]\nseed = {seed}\nrouting_replay = "{replay}"\n'
            directories[-1].write_config(text)
            for number, step in enumerate(steps, start=1):
                directories[-1].append_metrics({"kind": "step", "step": number, **step})
    return directories


def test_seeds_that_clip_nothing_count_in_a_mean_on_a_logarithmic_axis(tmp_path: Path) -> None:
    shares = [[0.0, 0.02, 0.0], [0.0, 0.0, 0.04]]
    runs = seeds_of(tmp_path, {"off": [[{"clip/tokens": share} for share in seed] for seed in shares]})
    by_title = {each["title"]: each for each in read_figures(write_several(runs, tmp_path / "page.html"))}
    low, high, mean = by_title["Clipped tokens"]["data"]
    assert mean["y"] == [None, 0.01, 0.02]
    # 0.01 + 12.7062 * 0.01 and 0.02 + 12.7062 * 0.02; the lower ends are below 0 and stop at the least value of the axis.
    assert low["y"] == [0.01, 0.01, 0.01] and high["y"] == pytest.approx([0.01, 0.137062, 0.274124])


def test_a_point_between_gaps_of_a_logarithmic_axis_has_a_marker() -> None:
    y = [0.0, 0.1, 0.0, 0.2, 0.3]
    drawn = make_figure("clipped", "", [line([1, 2, 3, 4, 5], y, "a", "#000000")], logarithmic("share"))
    assert drawn is not None
    assert drawn.data[0]["y"] == [None, 0.1, None, 0.2, 0.3] and drawn.data[0]["mode"] == "lines+markers"
    assert make_figure("clipped", "", [line([1, 2], [None, None], "a", "#000000")], logarithmic("share")) is None


def test_curves_of_an_arm_have_its_last_step_in_every_figure(tmp_path: Path) -> None:
    """An axis of shares divides by it, so that a short run is as wide as a long one."""
    runs = seeds_of(tmp_path, {"off": [[{"reward/mean": 0.5}] * 40], "R2": [[{"reward/mean": 0.5}] * 4]})
    runs[0].append_metrics({"kind": "evaluation", "step": 30, "eval/accuracy_sampled": 0.5})
    drawn = read_figures(write_several(runs, tmp_path / "page.html"))
    lasts = {each["title"]: [trace["meta"]["last"] for trace in each["data"]] for each in drawn}
    assert lasts == {"Held-out accuracy": [40], "Reward": [40, 4]}


def test_mixtures_have_the_cost_of_routing_for_as_many_tokens(tmp_path: Path) -> None:
    def step(seconds: float, tokens: float, silent: float) -> dict[str, float]:
        times = {f"time/{phase}_seconds": seconds for phase in ("rollouts", "anchor", "update")}
        return times | {"tokens/response": tokens, "update/silent_rows": silent, "router/flip_mean": 0.02}

    setting_up = step(100.0, 1.0, 0.0)
    # R2 takes 1.5 times as long for half as many tokens, of which it trains on a quarter: for as many it costs more.
    arms = {"off": [[setting_up, step(2.0, 2000, 0.0)]], "R2": [[setting_up, step(3.0, 1000, 0.75), step(3.0, 1000, 1.0)]]}
    runs = seeds_of(tmp_path, arms)
    by_title = {each["title"]: each for each in read_figures(write_several(runs, tmp_path / "page.html"))}
    bars = {trace["name"]: trace["y"] for trace in by_title["Cost of routing"]["data"]}
    assert bars == {"rollouts": [1.0, 3.0], "anchor": [1.0, 12.0], "update": [1.0, 12.0]}
    assert by_title["Cost of routing"]["data"][0]["x"][1] == "R2-0"


def test_an_arm_is_called_by_what_sets_it_apart() -> None:
    options = {
        "one": {"algorithm.name": "gspo", "training.seed": 0, "training.lr": 1e-3, "algorithm.objective.x": 1},
        "two": {"algorithm.name": "gspo", "training.seed": 1, "training.lr": 1e-3, "algorithm.objective.x": 1},
        "three": {"algorithm.name": "grpo", "training.seed": 0, "training.lr": 1e-4, "algorithm.objective.x": 2},
        "four": {"algorithm.name": "grpo", "training.seed": 0, "training.lr": 1e-4, "algorithm.objective.x": 3},
    }
    assert arms(options) == {
        "gspo, training.lr=0.001": ["one", "two"],
        "grpo, training.lr=0.0001": ["three"],
        "grpo, training.lr=0.0001 (four)": ["four"],
    }
