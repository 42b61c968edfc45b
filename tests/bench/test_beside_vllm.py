"""B12 without vLLM: the requests of both sides, the process of vLLM's side, and the table."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import beside_vllm
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.measure import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench(device=torch.device("cpu"), tiny=False, deadline=time.monotonic() + 60)


def test_the_first_repeat_of_nano_has_the_tokens_of_nano_vllms_script(bench: Bench) -> None:
    asked = beside_vllm.make_requests("nano", 1, bench, 151936)
    source = random.Random(0)
    first = [source.randint(0, 10000) for _ in range(source.randint(100, 1024))]
    assert asked[0].prompt == first
    # The totals that are quoted for that benchmark.
    assert (sum(len(each.prompt) for each in asked), sum(each.tokens for each in asked)) == (142_827, 133_966)


@pytest.mark.parametrize("kind", beside_vllm.KINDS["0.6B"])
def test_both_sides_are_asked_for_the_same_tokens(kind: str, bench: Bench) -> None:
    asked = beside_vllm.make_requests(kind, 2, bench, 151936)
    requests, lengths = beside_vllm.our_requests(asked)
    assert sum(lengths) == sum(each.samples * each.tokens for each in asked)
    assert [seed for request in requests for seed in request.seeds] == list(range(len(lengths)))
    assert len(requests) == (256 if kind == "nano" else 32)
    again = beside_vllm.make_requests(kind, 3, bench, 151936)
    assert again[0].prompt != asked[0].prompt


FAKE = """
import json, sys
works = json.loads(open(sys.argv[1]).read())["works"]
result = {"version": "0.0", "settings": "none", "works": {}}
for name, repeats in works.items():
    tokens = sum(each["samples"] * each["tokens"] for each in repeats[-1])
    result["works"][f"{name} with log-probs"] = {"tokens": tokens, "first_seconds": 9.0, "samples": [2.0, 4.0]}
    open(sys.argv[2], "w").write(json.dumps(result))
    if name == "ragged":
        sys.exit("killed before nano")
"""


def test_works_measured_before_a_failure_are_kept(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "side.py").write_text(FAKE)
    monkeypatch.setattr(beside_vllm, "SIDE", tmp_path / "side.py")
    part = beside_vllm.vllm_part("0.6B")(bench)
    assert part["works"].keys() == {"fixed with log-probs", "ragged with log-probs"}
    assert part["works"]["fixed with log-probs"]["tokens_per_second"] == 32 * 8 * 512 / 2.0
    ours = {"side": "Legato", "shape": "0.6B", "kind": "fixed", **beside_vllm.rates(100, [3.0, 1.0])}
    table = gpu_page.section_table("B12", {"parts": {"a": {**ours, "run": "now"}, "b": {**part, "run": "now"}}})
    assert "| 0.6B | fixed | 100 | 65,536 | - | 0.00x | 1 |" in table and "vLLM 0.0" in table


def test_a_side_that_measures_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "side.py").write_text("raise SystemExit('no GPU here')")
    (tmp_path / "work.json").write_text(json.dumps({}))
    monkeypatch.setattr(beside_vllm, "SIDE", tmp_path / "side.py")
    with pytest.raises(RuntimeError, match="no GPU here"):
        beside_vllm.run_side(tmp_path)
