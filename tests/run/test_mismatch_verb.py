"""`legato mismatch`: all samplers on one model and task, numbers and a page; bad input in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.pages.mismatch import draw_strips, page, short
from legato.run.mismatch import KINDS, Sampler, compare_samplers, parse_samplers
from legato.run.target import Target, find
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import SMALL, run_small

EARLY = f"{verdicts.__file__}:early"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"training.steps": 2, "reward.kind": EARLY, "rollouts.max_response_tokens": 6}
    return run_small(tmp_path_factory.mktemp("run"), options).directory


@pytest.fixture(scope="module")
def comparison(run: Path) -> dict[str, Any]:
    return compare_samplers(find(str(run)), parse_samplers(",".join(KINDS)), prompts=6)


def test_every_kind_is_measured_and_none_is_exact(comparison: dict[str, Any]) -> None:
    samplers = comparison["samplers"]
    assert list(samplers) == [
        *("none", "bf16", "fp16", "int8", "kv-bf16", "kv-int8", "perturbed:0.001", "stale:4", "top-p:0.95")
    ]
    assert samplers["none"]["floor"]["safe"] is True and samplers["none"]["token_size"]["greatest"] < 1e-5
    for name, each in samplers.items():
        assert each["responses"] == 24, name
        if name not in ("none", "top-p:0.95"):
            assert each["token_size"]["greatest"] > 1e-5, name
    assert (
        samplers["stale:4"]["floor"]["safe"] is False and samplers["bf16"]["floor"]["max"] > samplers["fp16"]["floor"]["max"]
    )
    truncated = samplers["top-p:0.95"]
    assert truncated["token_gap"]["mean"] < -1e-3 and truncated["floor"]["safe"] is True


def test_the_weights_are_restored_after_a_stale_sampler(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = find(str(run))
    policy = target.policy()
    before = {name: weight.detach().clone() for name, weight in policy.parameters().items()}
    monkeypatch.setattr(Target, "policy", lambda self: policy)
    result = compare_samplers(target, [Sampler(kind="stale", size=2), Sampler(kind="none")], prompts=4)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.parameters().items())
    assert result["samplers"]["stale:2"]["floor"]["max"] > 1e-3 > 1e-5 > result["samplers"]["none"]["floor"]["max"]


def test_a_recipe_is_warmed_up_first(tmp_path: Path) -> None:
    options = {**SMALL, "policy.warm_up": {"steps": 12, "examples_per_step": 32}}
    lengths = []
    for settings in (SMALL, options):
        target = Target(resolved=load([], (), {**settings, "rollouts.max_response_tokens": 8}), saved=None)
        lengths.append(compare_samplers(target, parse_samplers("none"))["samplers"]["none"]["length"]["mean"])
    assert lengths[0] != lengths[1]


def test_mismatch_prints_and_writes_json_and_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    legato = Command(monkeypatch, capfd)
    code, out, _ = legato(
        "mismatch", str(run), "--kinds", "none,int8", "--prompts", "4", "--output", str(tmp_path / "new/folder")
    )
    assert code == 0
    for word in ('none: anchor = "sampler" is safe', "int8: anchor", "geo rejection", "ESS/N", "mismatch.html"):
        assert word in out
    result = json.loads((tmp_path / "new/folder/mismatch.json").read_text())
    assert list(result["samplers"]) == ["none", "int8"] and result["algorithm"] == "gspo"
    text = (tmp_path / "new/folder/mismatch.html").read_text()
    assert text.count("<svg") == 2 and "<script" not in text and "http-equiv" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("int4", "'int4'"),
        ("int8:3", "'int8' without a size"),
        ("stale:1.5", "whole number"),
        ("stale:0", "whole number"),
        ("top-p:1.2", "a probability"),
        ("perturbed:-1", "a number above 0"),
        ("perturbed:nan", "a number above 0"),
        ("int8,int8", "none of them twice"),
        (" ", "at least one of"),
    ],
)
def test_an_unknown_sampler_is_refused(
    words: str, message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    result = Command(monkeypatch, capfd)("mismatch", str(run), "--kinds", words, "--output", str(tmp_path / "x"))
    assert_refused(result, message)


def test_a_run_whose_problems_came_from_python_asks_for_a_task(tmp_path: Path) -> None:
    problems = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    options = {path: value for path, value in SMALL.items() if not path.startswith("task.left")}
    from legato.run.train import train

    directory = train(
        problems=problems, reward=lambda rollout: 0.0, **{**options, "training.steps": 1, "output.directory": str(tmp_path)}
    ).directory
    with pytest.raises(ValueError, match="problems in Python"):
        compare_samplers(find(str(directory)), parse_samplers("none"))


def test_the_page_shows_every_sampler_and_escapes_names(comparison: dict[str, Any]) -> None:
    text = page({**comparison, "model": "<b>odd</b>"})
    assert "<b>odd" not in text and "&lt;b&gt;odd" in text
    assert all(text.count(f">{name}<") >= 4 for name in comparison["samplers"])
    assert not re.search(r"nan|inf(?!o)", text.split("</style>")[1])


def test_strips_are_drawn_at_their_numbers() -> None:
    sizes = {
        "a": {"p05": 1e-4, "p50": 1e-3, "p95": 1e-2, "greatest": 1e-2},
        "b": {"p05": 0.0, "p50": 0.0, "p95": 0.0, "greatest": 0.0},
    }
    text = draw_strips(sizes, [(1e-3, "band")])
    assert 'cx="510.0"' in text and 'class="bound" x1="510.0"' in text  # the middle of two decades
    assert 'x="130.0" y="39" width="760.0"' in text and ">0<" in text
    assert "no gap" in draw_strips({"b": sizes["b"]}, [])


def test_numbers_are_short() -> None:
    renderers: list[Callable[[], str]] = [
        lambda: short(0.0),
        lambda: short(None),
        lambda: short(float("nan")),
        lambda: short(1.23456e-5),
    ]
    assert [each() for each in renderers] == ["0", "-", "-", "1.2e-05"]
