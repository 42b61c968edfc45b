"""`legato plan`: what it prints, its JSON, its table, and what it refuses."""

import json
from pathlib import Path

import pytest

from legato.capacity.model import shipped_names, shipped_record
from legato.config.load import load
from tests.proof.command import Command, assert_refused

RECIPE = "recipes/qwen3-0.6b-gsm8k.toml"


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(Path(__file__).parents[2])
    return Command(monkeypatch, capfd)


def test_a_plan_names_every_part_of_memory_and_every_phase(legato: Command) -> None:
    code, text, error = legato("plan", "qwen3-8b", RECIPE, "--gpus", "8")
    assert code == 0, error
    for part in ("weights", "gradients", "float32 masters", "moments", "activations", "KV cache", "total"):
        assert f"\n  {part} " in text
    for phase in ("sampling", "old log-probs", "updates", "optimizer", "communication", "step"):
        assert f"\n  {phase} " in text
    assert "8,190,735,360 weights" in text and "fits: 149.3 GB are there" in text
    assert "response tokens a second" in text and "training.shard=optimizer" in text


def test_calculated_and_measured_figures_stand_apart(legato: Command) -> None:
    _, text, _ = legato("plan", "qwen3-0.6b")
    calculated, measured = text.split("\nmeasured, with the loads named\n")
    assert "memory per GPU at the longest lengths, calculated" in calculated
    assert "time of a step, calculated" in calculated
    assert "4.18 s  32 prompts x 8" in measured and "2026-11-16" in measured and "NVIDIA H200" in measured
    assert "calculated" not in measured


def test_what_does_not_fit_is_answered_with_options_that_do(legato: Command) -> None:
    _, text, _ = legato("plan", "qwen3-8b")
    assert "does not fit: 149.3 GB are there" in text
    lines = text[text.index("what would fit") :].splitlines()
    words = lines[1].split()
    assert "training.offload_optimizer=true" in words
    code, again, error = legato("plan", "qwen3-8b", RECIPE, *words)
    assert code == 0 and "  fits: " in again, error


def test_the_json_holds_both_kinds_under_their_own_keys(legato: Command) -> None:
    _, text, _ = legato("plan", "qwen3-14b", "--gpus", "8", "--json", "training.shard=layers", "--response-tokens", "400")
    record = json.loads(text)
    assert record["settings"]["shard"] == "layers" and record["settings"]["mean_response"] == 400
    calculated = record["calculated"]
    assert sum(calculated["memory_bytes"].values()) == calculated["total_bytes"]
    assert sum(phase["seconds"] for phase in calculated["phases"]) == pytest.approx(calculated["step_seconds"])
    assert record["model"]["parameters"] == 14_768_307_200 and record["hardware"]["gpus"] == 8
    assert record["measured"]["results"] == [] and "training_efficiency" in record["measured"]["factors"]


def test_the_table_has_every_shipped_model_on_four_numbers_of_gpus(legato: Command) -> None:
    _, text, _ = legato("plan", "--table", "--json")
    cells = json.loads(text)
    assert [cell["model"] for cell in cells[::4]] == shipped_names()
    assert {cell["gpus"] for cell in cells} == {1, 8, 64, 512} and len(cells) == 4 * 14
    assert all(cell["calculated"] is None or cell["calculated"]["fits"] for cell in cells)
    code, text, _ = legato("plan", "--table")
    assert code == 0 and "qwen3-235b-a22b" in text and "N times its prompts" in text


def test_the_model_comes_from_the_recipe_or_from_a_folder(legato: Command, tmp_path: Path) -> None:
    _, text, _ = legato("plan", "recipes/qwen3-8b-lora.toml")
    assert text.startswith("qwen3-8b on 1 x NVIDIA H200") and "layers are recomputed" in text
    (tmp_path / "config.json").write_text(json.dumps(shipped_record("llama-3.2-1b")["config"]))
    _, text, _ = legato("plan", str(tmp_path), "--hardware", "a100", "--memory", "39")
    assert "1,235,814,400 weights" in text and "data sheet times the shares" in text and "41.9 GB are there" in text


@pytest.mark.parametrize(
    "recipe", ["recipes/qwen3-8b-lora.toml", "recipes/qwen3-8b-offload.toml", "recipes/qwen3-8b-8bit.toml"]
)
def test_the_8b_recipes_fit_by_calculation_and_are_marked_as_never_run(legato: Command, recipe: str) -> None:
    _, text, _ = legato("plan", recipe, "--json")
    assert json.loads(text)["calculated"]["fits"]
    assert (
        f"no run of {recipe} is stored: what it reaches is not known (docs/claims.md has the list)"
        in load([Path(recipe)]).notes
    )


def test_mistakes_are_refused_in_one_line(legato: Command) -> None:
    assert_refused(legato("plan", "qwen3-9b"), "got 'qwen3-9b'", "did you mean 'qwen3-8b'")
    assert_refused(legato("plan", "qwen3-8b", "--hardware", "h300"), "--hardware", "h200")
    assert_refused(legato("plan", "qwen3-8b", "qwen3-4b"), "expected one model, got qwen3-8b and qwen3-4b")
    assert_refused(legato("plan", "qwen3-8b", "--table"), "expected no model beside --table")
    assert_refused(legato("plan", "qwen3-8b", "training.shard=rows", "--gpus", "8"), "training.shard", "'rows'")
    assert_refused(legato("plan", "qwen3-8b", "training.lrr=1"), "lrr")
    assert_refused(legato("plan", "qwen3-8b", "--response-tokens", "5000"), "--response-tokens")
