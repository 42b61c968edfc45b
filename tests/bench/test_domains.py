"""Kinds of text for the laboratory: recipes that load, a coin that the text decides, and the lines of the page."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import domains
from legato.config.load import load


@pytest.mark.parametrize("domain", domains.PROMPTS)
def test_the_recipe_of_a_kind_of_text_loads_with_different_prompts(domain: str, tmp_path: Path) -> None:
    recipe = domains.write_recipe(tmp_path, domain, "tiny")
    config = load([recipe]).config
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert config.task.kind == "jsonl" and len({*rows}) == len(rows) == 40
    assert len(rows) * 0.8 > config.training.prompts_per_step


def test_the_coin_is_decided_by_the_text_and_fair() -> None:
    coins = [domains.coin(cast(Any, SimpleNamespace(text=f"text {number}"))) for number in range(400)]
    assert {*coins} == {0.0, 1.0} and 160 < sum(coins) < 240
    assert domains.coin(cast(Any, SimpleNamespace(text="text 7"))) == coins[7]


def test_the_page_shows_what_was_measured_and_before_that_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domains, "RESULTS", tmp_path / "lab-domains.json")
    assert "Not measured yet" in domains.section()[-1]
    found = {"prose": {"variance": ["1,536 responses."], "equivalence": ["It held."]}}
    made = {"date": "2026-11-19", "commit": "fa44311bddd7", "device": "NVIDIA H200"}
    domains.RESULTS.write_text(json.dumps({"made": made, "domains": found}))
    assert "on 2026-11-19 at commit fa44311bddd7 (NVIDIA H200)" in domains.section()[3]
    assert domains.section()[-4:] == ["**Prose.**", "", "- variance: 1,536 responses.", "- equivalence: It held."]
