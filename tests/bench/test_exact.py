"""The experiment on equal bits: its kernels in the interpreter and under the compiler, and the rule that decides."""

import copy
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.exact import all as everything
from benchmarks.gpu.exact import engine, page, run_at_zero, trial
from benchmarks.gpu.exact.verdict import decide
from benchmarks.gpu.measure import Bench
from tests.policy import fused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]

LAB = trial.Lab(device=torch.device("cpu"))


@pytest.fixture
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.sum_in_order(monkeypatch)


@pytest.mark.usefixtures("sums_in_one_order")
def test_the_chained_attention_has_the_bits_of_training_in_every_layout() -> None:
    measured = trial.attention(LAB, trial.TINY)
    layouts = {name for name in measured if name != "today"}
    assert len(layouts) == len(trial.LAYOUTS)
    assert {name: sum(each["unequal"] for each in measured[name].values()) for name in layouts} == dict.fromkeys(layouts, 0)
    # Today's decode kernel adds up in another order: a comparison that could not fail would not show that.
    assert any(each["unequal"] for each in measured["today"].values())


def test_the_chained_attention_is_attention() -> None:
    rows = trial.make_rows(LAB, trial.TINY, 9, 150)
    repeat = trial.TINY.heads // trial.TINY.key_heads
    for row, owner in enumerate(rows.owners):
        count, own = int(rows.prompt_length[owner]), int(rows.length[row])
        for head in range(trial.TINY.heads):
            key = head // repeat
            keys = torch.cat([rows.prompt_keys[owner, key, :count], rows.keys[row, key, :own]]).double()
            values = torch.cat([rows.prompt_values[owner, key, :count], rows.values[row, key, :own]]).double()
            weights = torch.softmax(keys @ rows.query[row, head].double() * trial.TINY.width**-0.5, 0)
            assert torch.allclose(rows.trained[row, head].double(), weights @ values, atol=1e-5)


@pytest.mark.usefixtures("sums_in_one_order")
def test_small_batches_of_trainings_kernels_have_the_bits_of_a_pack() -> None:
    rotated, projected = trial.heads(LAB, trial.TINY), trial.head(LAB, trial.TINY)
    assert all(each["unequal"] == 0 for each in rotated["training's kernel"].values())
    for temperature in projected.values():
        assert all(each["unequal"] == 0 for each in temperature["training's projection"].values())
        # So do the engine's own log-probs of today.
        assert any(each["unequal"] for each in temperature["today"].values())


def test_a_product_that_depends_on_the_batch_is_counted() -> None:
    def shifted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight) + (0.5 if len(x) == 8 else 0.0)

    x, weight = LAB.random(100, 32, seed=0), LAB.random(16, 32, seed=1)
    assert trial._unequal_rows(shifted, x, weight, 8) > 0
    assert trial._unequal_rows(torch.nn.functional.linear, x, weight, 8) == 0


def result(
    *, unequal_at: int = 0, product_ratio: float = 1.1, attention_ratio: float = 1.1, attention_unequal: int = 0
) -> Any:
    sizes = {"1": 5, "8": 0, "256": 0} | ({str(unequal_at): 3} if unequal_at else {})
    return {
        "0.6B": {
            "products": {
                "q: default": {"unequal": {"8": 9}, "seconds": {"8": 1.0, "64": 2.0}},
                "q: lt": {"unequal": sizes, "seconds": {"8": product_ratio, "64": 2.0}},
            },
            "attention": {
                "today": {"8": {"unequal": 4, "seconds": 1.0}},
                "16 queries": {"8": {"unequal": attention_unequal, "seconds": attention_ratio}},
            },
        }
    }


def test_the_rule_says_go_only_where_bits_and_times_hold() -> None:
    verdict = decide(result())
    assert verdict["go"] and verdict["good products"] == ["lt"] and verdict["good attention"] == ["16 queries"]
    assert verdict["products"]["lt"]["0.6B"]["unequal at"] == [1]  # fewer than eight rows can be padded
    assert not decide(result(unequal_at=256))["go"]
    assert not decide(result(product_ratio=1.16))["go"]
    assert not decide(result(attention_ratio=1.21))["go"]
    assert not decide(result(attention_unequal=1))["go"]


def test_a_result_without_times_is_no_go() -> None:
    untimed = result()
    untimed["0.6B"]["products"]["q: lt"]["seconds"] = {"8": None}
    assert not decide(untimed)["go"]


def test_a_run_counts_the_ratios_that_are_not_one() -> None:
    # On a CPU the engine is not exact: in float32 some log-probs differ in their last bits, which the count must see.
    bench = Bench(device=torch.device("cpu"), tiny=True, deadline=float("inf"))
    result = run_at_zero.run(bench, 0.0, exact="off", steps=1, new=5)
    counts = run_at_zero.summarise(result)
    assert counts["first"]["updates"] == 1 and counts["later"]["updates"] == 3
    assert 0 < counts["first"]["unequal"] < counts["first"]["tokens"] == 15
    assert result["anchor"] == "sampler" and all(each["anchor unequal"] == 0 for each in result["updates"])
    assert 0 < max(each["largest"] for each in result["updates"]) < 1e-5
    table = page.runs_table({"date": "today", "learning rate 0": {**result, "summary": counts}})
    assert f"| learning rate 0 | 1 (first of a step) | 15 | {counts['first']['unequal']} | 0 % |" in table


def test_new_results_replace_those_of_the_same_name_and_no_others() -> None:
    document = json.loads(engine.RESULTS.read_text())
    before = copy.deepcopy(document)
    case = {"tokens": 300, "unequal": {"packs": 0}, "largest": 0.0}
    shapes = {
        "1.7B": {"bits": {"one row": case}, "least rows": {"q_proj": 1}},
        "Mistral-7B, 4 layers": {"bits": {"one row": case}, "least rows": {}, "times": {"8": {"off": 2.0}}},
    }
    engine.merge_results(document, {"date": "2030-01-01", "shapes": shapes})
    bits = document["shapes"]["1.7B"]["bits"]
    assert bits["one row"] == {**case, "date": "2030-01-01"}
    assert bits["3 rows"] == before["shapes"]["1.7B"]["bits"]["3 rows"]
    assert document["shapes"]["1.7B"]["times"] == before["shapes"]["1.7B"]["times"]
    assert document["shapes"]["Mistral-7B, 4 layers"]["times"] == {"8": {"off": 2.0}}
    engine.merge_results(
        document, {"sections": {"B8": {"parts": {"Legato": {"seconds": 1}, "Legato exact": {"seconds": 2}}}}}
    )
    assert document["step"] == {"off": {"seconds": 1}, "on": {"seconds": 2}}
    with pytest.raises(SystemExit, match=r"1\.7B failed"):
        engine.merge_results(document, {"date": "", "shapes": {"1.7B": {"error": "exit code 1"}}})


def test_all_parts_are_gathered_and_a_part_beyond_its_limit_is_killed(tmp_path: Path) -> None:
    sleep = ["timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"]
    slow = everything.Part(name="slow", command=sleep, seconds=1, shape="1.7B")
    quick = everything.Part(name="quick", command=["json.tool", str(engine.RESULTS), "OUT"], seconds=60, shape="0.6B")
    late = everything.Part(name="late", command=["json.tool", str(engine.RESULTS), "OUT"], seconds=60, shape="Llama-1B")
    started = time.monotonic()
    everything.run_parts([slow], [quick], tmp_path, started + 60)
    everything.run_parts([], [late], tmp_path, started)
    assert time.monotonic() - started < 30
    assert slow.process.poll() is not None and "killed at its time limit" in slow.ended
    document = everything.gather([slow, quick, late], tmp_path, "abc")
    assert list(document["shapes"]) == ["0.6B"] and document["parts"]["late"] == "not started: no time left"
    together, alone = everything.gpu_parts()
    modules = {part.command[0] for part in [*together, *alone]}
    assert all(find_spec(f"{name}.__main__" if name == "benchmarks.gpu" else name) is not None for name in modules)
    for part in [*together, *alone]:
        if part.shape is not None:
            assert part.command[part.command.index("--child") + 1] == part.shape in engine.CONFIGS


def test_joined_projections_are_shown_where_they_were_timed() -> None:
    times = {"8": {"off": 1.0, "on": 1.0, "slower": 1.0}}
    assert "Not measured yet" in page.joined_table({"shapes": {"0.6B": {"times": times}}})
    times["64"] = {"separate": 1000.0, "off": 1100.0, "on": 1050.0, "slower": 1.05}
    table = page.joined_table({"shapes": {"0.6B": {"times": times}}})
    assert "| 0.6B | 64 | 1,000 | 1,100 | +10.0 % |" in table and "| 8 |" not in table
