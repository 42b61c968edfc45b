"""The GPU benchmarks at toy shapes on a CPU: every section runs, stores its results and renders its part of the page."""

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu import head as gpu_head
from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu import numerics as gpu_numerics
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu import saved as gpu_saved
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work as gpu_work
from benchmarks.gpu.__main__ import parts_of
from benchmarks.gpu.figures import figures
from benchmarks.gpu.measure import Bench, Document, run_parts
from benchmarks.gpu.targets import targets


@pytest.fixture
def bench() -> Bench:
    settings = Bench(device=torch.device("cpu"), tiny=True, deadline=time.monotonic() + 600)
    settings.ceilings = {"tflops": 1e-3, "terabytes_per_second": 1e-3}
    return settings


# The fewest parts of each section: one of ours, and a peer that needs no package.
PARTS = {
    "B1": (gpu_head.size_name(gpu_head.BOLD) + ", temperature 1",),
    "B2": (gpu_head.size_name(gpu_head.BOLD),),
    "B3": ("active",),
    "B4": ("0.6B Legato", "0.6B Legato, packing off", "0.6B Legato, gradient checkpointing"),
    "B5": ("prompt 512, group 8",),
    "B6": ("clipped 0.3, one pass", "clipped 0.3, two passes", "silent 0.6, one pass"),
    "B7": ("0.6B fixed Legato, shared prompts", "0.6B fixed generate, dynamic"),
    "B8": ("Legato",),
    "B10": ("Legato",),
    "B11": ("Legato",),
    "B12": ("0.6B fixed Legato",),
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return Document(tmp_path_factory.mktemp("gpu") / "gpu.json")


@pytest.mark.parametrize("section", PARTS)
def test_a_section_runs_and_makes_its_table(section: str, bench: Bench, document: Document) -> None:
    parts = {name: parts_of(section)[name] for name in PARTS[section]}
    run_parts(bench, document, section, parts, ())
    stored = json.loads(document.path.read_text())["sections"][section]
    for name in PARTS[section]:
        assert "error" not in stored["parts"][name]
    if "heads" in stored["parts"][PARTS[section][0]]:
        assert "error" not in stored["parts"][PARTS[section][0]]["heads"]["Legato"]
    table = gpu_page.section_table(section, stored)
    assert gpu_page.TITLES[section] in table and "|---|" in table


def test_page_and_figures_are_built_from_partial_results(bench: Bench, document: Document) -> None:
    run_parts(bench, document, "B7", {name: parts_of("B7")[name] for name in PARTS["B7"]}, ())
    page = gpu_page.gpu_section(document.content)
    assert "Toy shapes" in page and "not measured" in page
    # No cell contains a bar.
    for line in page.splitlines():
        if line.startswith("| B"):
            assert line.count("|") == 6, line
    for text in figures(document.content["sections"]).values():
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_failing_part_is_stored_and_the_others_are_measured(bench: Bench, tmp_path: Path) -> None:
    def broken(_: Bench) -> dict[str, Any]:
        raise RuntimeError("no such\nkernel")

    parts = {"first": broken, "second": lambda _: {"seconds": 1.0}}
    document = Document(tmp_path / "gpu.json")
    run_parts(bench, document, "B1", parts, ())
    stored = Document(document.path).content["sections"]["B1"]["parts"]
    assert stored["first"]["error"] == "RuntimeError: no such kernel"
    assert stored["second"]["seconds"] == 1.0


def test_a_command_replaces_only_the_named_parts(bench: Bench, tmp_path: Path) -> None:
    document = Document(tmp_path / "gpu.json")
    for value in (1, 2):
        parts = {name: lambda _, value=value: {"value": value} for name in ("ours", "theirs")}
        run_parts(bench, document, "B1", parts, () if value == 1 else ("theirs",))
    run_parts(bench, document, "B2", {"ours": lambda _: {"value": 3}}, ())
    sections = Document(document.path).content["sections"]
    values = {name: [part["value"] for part in section["parts"].values()] for name, section in sections.items()}
    assert values == {"B1": [1, 2], "B2": [3]}
    assert sections["B1"]["earlier"]["theirs"]["value"] == 1, "that of the command which measured ours"
    assert "ours" not in sections["B1"]["earlier"] and "earlier" not in sections["B2"]
    document.store("B1", "theirs", {"error": "no"})
    document.store("B1", "theirs", {"value": 4})
    assert document.content["sections"]["B1"]["earlier"]["theirs"]["value"] == 2
    run_parts(bench, document, "B1", {"ours": lambda _: {"value": 5}}, ())
    assert "earlier" not in document.content["sections"]["B1"], "all parts are of one command"


def test_no_part_starts_after_the_deadline(bench: Bench, tmp_path: Path) -> None:
    bench.deadline = time.monotonic() - 1
    document = Document(tmp_path / "gpu.json")
    run_parts(bench, document, "B1", {"late": lambda _: {"value": 1}}, ())
    assert "time of the command was up" in document.content["sections"]["B1"]["parts"]["late"]["error"]


def test_a_peer_that_fails_is_left_out_of_the_rounds(bench: Bench) -> None:
    calls = {"count": 0}

    def failing() -> None:
        calls["count"] += 1
        raise ValueError("cannot")

    results = bench.time_interleaved({"good": lambda: None, "bad": failing}, warm=1, samples=4, seconds=60)
    assert results["good"]["count"] == 4
    assert results["bad"] == {"error": "ValueError: cannot"} and calls["count"] == 1


def test_stored_lengths_match_their_seed() -> None:
    lengths = json.loads(gpu_work.LENGTHS.read_text())
    assert lengths == gpu_work.make_lengths()
    assert sum(lengths["head"]) == 16384
    responses = [length for row in lengths["responses"] for length in row]
    assert len(responses) == 256 and max(responses) == 1024 and 390 <= sum(responses) / 256 <= 410


@pytest.mark.parametrize("silent", [0.0, 0.4])
def test_reward_table_has_the_requested_share_of_silent_groups(silent: float) -> None:
    table = gpu_work.reward_table(32, 8, silent)
    alike = sum(min(row) == max(row) for row in table)
    assert alike == round(32 * silent)


def test_flops_match_a_count_by_hand(bench: Bench) -> None:
    """Two prompts of 3 and 5 tokens, responses of 2 and 4, each prompt once: 8 + 1 + 3 tokens, by hand."""
    tokens, pairs = gpu_work.pack_size([3, 5], [1, 3], [0, 1], shared=True)
    assert tokens == 12
    assert pairs == (6 + 15) + (3 + 1) + (15 + 6)
    model = gpu_work.make_model(bench, "0.6B")
    flops = gpu_work.Flops.of(model)
    sizes, heads = gpu_work.TINY, gpu_work.TINY_HEADS
    width, keys = heads["num_attention_heads"] * heads["head_dim"], heads["num_key_value_heads"] * heads["head_dim"]
    layer = sizes["hidden_size"] * (2 * width + 2 * keys + 3 * sizes["intermediate_size"])
    assert flops.body == sizes["num_hidden_layers"] * layer
    flops.add(tokens, 6, pairs, learning=True)
    once = 2 * (flops.body * tokens + flops.head * 6) + 4 * width * sizes["num_hidden_layers"] * pairs
    assert flops.total == pytest.approx(3 * once)


@pytest.mark.parametrize("shape", gpu_work.SHAPES)
def test_flops_of_a_shape_equal_those_of_the_model(shape: str) -> None:
    meta = Bench(device=torch.device("meta"), tiny=False, deadline=0.0)
    with torch.device("meta"):
        assert gpu_work.Flops.of(gpu_work.make_model(meta, shape)) == gpu_work.Flops.of_shape(shape)


def test_possible_gain_is_smaller_than_the_token_ratio() -> None:
    """Without a prompt there is no gain. With one it is below r, because the head is not shared. By hand for two rows."""
    assert gpu_work.possible_gain(0, 256, 8) == 1.0
    assert 1.0 < gpu_work.possible_gain(512, 256, 8) < 8 * 768 / (512 + 8 * 256)
    flops = gpu_work.Flops.of_shape("0.6B")
    prompt, looked_at = 3 * 4 / 2, 2 * (2 * 3 + 2 * 3 / 2)
    apart = 2 * (flops.body * 2 * (3 + 2) + flops.head * 4) + flops.attention * (2 * prompt + looked_at)
    shared = 2 * (flops.body * (3 + 4) + flops.head * 4) + flops.attention * (prompt + looked_at)
    assert gpu_work.possible_gain(3, 2, 2) == pytest.approx(apart / shared, rel=1e-12)


def test_the_roofline_reads_a_shared_prompt_once_per_group(bench: Bench) -> None:
    model = gpu_work.make_model(bench, "0.6B")
    count, samples, prompt, new = gpu_decode.sizes(bench)
    lengths = [new] * (count * samples)
    apart, shared = (gpu_decode.floor_seconds(bench, model, lengths, shared=shared) for shared in (False, True))
    saved = new * prompt * count * (samples - 1)
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
    assert apart - shared == pytest.approx(saved * per_token / 1e9)


def test_only_the_forced_rows_are_clipped(bench: Bench) -> None:
    result = gpu_saved.clipped_part(0.45, "two passes")(bench)
    rows = len(gpu_work.fixed_work(tiny=True).prompts) * 4
    assert result["clipped"] == pytest.approx(round(0.45 * rows) / rows, abs=1 / rows)
    assert result["skipped_rows"] == result["clipped"]


def test_factor_restores_the_trainer(bench: Bench) -> None:
    setup = gpu_update.ours(bench, "0.6B", 0.0)
    settings = setup.trainer.settings
    for name in ("packing off", "one pass", "gradient checkpointing"):
        with gpu_update.factor(setup.trainer, name):
            pass
    assert setup.trainer.settings == settings and setup.trainer.policy.packing
    assert not setup.trainer.policy.model.is_gradient_checkpointing


def test_rounded_logits_enlarge_the_gap_to_the_engine(bench: Bench) -> None:
    gaps = gpu_numerics.numerics_part(bench)["lengths"]["16"]
    assert gaps["same path"]["max"] == 0.0
    assert gaps["16-bit logits, engine"]["max"] > 100 * gaps["engine"]["max"]


def test_prompts_of_the_step_have_one_length(bench: Bench) -> None:
    workload = gpu_step.step_work(bench)
    assert {len(prompt) for prompt in workload.prompts} == {gpu_decode.sizes(bench)[2]}


def test_a_target_is_met_missed_or_not_measured() -> None:
    assert {target.met for target in targets({})} == {None}
    step = {"Legato": {"seconds": {"step": 1.0}, "weight_sync_seconds": 0.0}, "TRL defaults": {"seconds": {"step": 4.0}}}
    by_name = {target.title: target for target in targets({"B8": {"parts": step}}) if target.section == "B8"}
    assert by_name["whole step, against TRL defaults"].met is False
    assert by_name["whole step, against TRL defaults"].measured == "4.0x"
    assert by_name["weights copied from trainer to engine (they are the same tensors)"].met is True


def test_spread_returns_median_and_percentiles() -> None:
    result = gpu_measure.spread([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (result["seconds"], result["p20"], result["p80"], result["count"]) == (3.5, 2.0, 5.0, 6)
