"""Remedies really fit when they are fed back, are accepted by the schema, and come in the order of their price."""

import shlex
from dataclasses import replace

import pytest

from legato.capacity.planning import Plan, plan_setup
from legato.capacity.remedies import Remedy, faster, fit_without_other_results, remedies
from legato.capacity.table import GPUS, table_of
from legato.config.load import load
from tests.capacity.setups import RECIPE, setup

CASES = [
    ("qwen3-8b", 1),
    ("qwen3-32b", 8),
    ("qwen3-30b-a3b", 1),
    ("gpt-oss-20b", 8),
    ("llama-3.1-70b", 64),
    ("qwen3-235b-a22b", 64),
]


def feed_back(name: str, gpus: int, remedy: Remedy) -> Plan:
    """The plan of the same run with the options of a remedy typed on the command line."""
    ways = [word.removeprefix("training.shard=") for word in remedy.options if word.startswith("training.shard=")]
    words = [word for word in remedy.options if not word.startswith("training.shard=")]
    changed = setup(name, remedy.gpus or gpus, *words, shard=ways[0] if ways else None)
    return plan_setup(replace(changed, servers=remedy.servers))


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_a_remedy_fits_when_it_is_fed_back(name: str, gpus: int) -> None:
    plan = plan_setup(setup(name, gpus))
    found = remedies(plan)
    assert not plan.fits and found
    for remedy in found:
        again = feed_back(name, gpus, remedy)
        assert again.fits, remedy.words()
        assert again.need == remedy.plan.need and again.times.step == pytest.approx(remedy.plan.times.step)


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_the_schema_accepts_every_option(name: str, gpus: int) -> None:
    for remedy in remedies(plan_setup(setup(name, gpus))):
        words = [word for word in remedy.options if word not in ("training.shard=layers", "training.shard=optimizer")]
        load([RECIPE], words)
        assert all(word.partition("=")[0].count(".") >= 1 for word in remedy.options)


def test_the_words_for_servers_are_options_that_a_run_takes() -> None:
    plan = plan_setup(setup("qwen3-8b"))
    remedy = Remedy(
        price="needs other machines for sampling", plan=plan, options=("training.epochs_per_step=1",), servers=True
    )
    rollouts = load([RECIPE], shlex.split(remedy.words())).config.rollouts
    assert rollouts.engine == "vllm" and list(rollouts.servers.urls) == ["http://HOST:8000"]


def test_8b_on_one_gpu_has_a_remedy_of_every_price() -> None:
    found = remedies(plan_setup(setup("qwen3-8b")))
    prices = ["changes no result", "moments of 8 bits, needs bitsandbytes", "trains adapters only", "more GPUs"]
    assert [remedy.price for remedy in found] == prices
    assert "training.offload_optimizer=true" in found[0].options and "training.optimizer=adamw-8bit" in found[1].options
    assert "policy.lora.rank=16" in found[2].options and found[3].gpus == 2 and found[3].words().startswith("--gpus 2")
    assert not any("offload" in word for word in found[1].options), "the 8-bit optimizer runs on the GPU"


def test_the_first_remedy_is_the_fastest_of_those_that_change_no_result() -> None:
    plan = plan_setup(setup("qwen3-8b"))
    best = remedies(plan)[0]
    for pack in (2048, 4096, 8192, 16384, 32768):
        for rows in (128, 256, 512):
            words = [f"training.tokens_per_pack={pack}", f"rollouts.rows_at_once={rows}", "training.offload_optimizer=true"]
            other = plan_setup(setup("qwen3-8b", 1, *words))
            assert not other.fits or best.plan.times.step <= 1.07 * other.times.step


def test_more_gpus_are_as_few_as_fit() -> None:
    found = remedies(plan_setup(setup("qwen3-30b-a3b")))
    more = next(remedy for remedy in found if remedy.gpus)
    assert more.gpus is not None and "training.shard=layers" in more.options
    fewer = plan_setup(setup("qwen3-30b-a3b").on(more.gpus // 2))
    assert all(
        remedy.gpus or remedy.servers or "policy.lora" in remedy.words() or "8bit" in remedy.words()
        for remedy in remedies(fewer)
    )


def test_sharded_layers_are_named_exactly_as_the_option() -> None:
    found = remedies(plan_setup(setup("qwen3-32b", 8)))
    assert "training.shard=layers" in found[0].options


def test_what_fits_needs_no_remedy_and_may_have_a_faster_way() -> None:
    fitting = plan_setup(setup("qwen3-1.7b"))
    assert fitting.fits and remedies(fitting) == []
    recomputing = plan_setup(setup("qwen3-8b", 8, "training.prompts_per_step=512"))
    better = faster(recomputing)
    assert recomputing.fits and recomputing.need.checkpointing and better is not None
    assert better.plan.fits and better.plan.times.step < 0.95 * recomputing.times.step
    assert faster(plan_setup(setup("qwen3-8b"))) is None, "it does not fit"


def test_nothing_helps_a_model_whose_smallest_part_does_not_fit() -> None:
    small = setup("llama-3.1-70b")
    tiny = replace(small, hardware=replace(small.hardware, memory=10**9))
    assert remedies(plan_setup(tiny)) == [] and fit_without_other_results(tiny) is None


def test_the_table_has_the_same_load_on_each_gpu() -> None:
    (dense, large, mixture) = table_of([setup(name) for name in ("qwen3-0.6b", "llama-3.1-70b", "qwen3-235b-a22b")])
    assert [cell.gpus for cell in dense] == list(GPUS) == [1, 8, 64, 512]
    plans = [cell.plan for cell in dense]
    assert all(plan is not None and plan.fits and plan.setup.prompts == 64 * plan.setup.gpus for plan in plans)
    # No more than communication is lost.
    rates = [plan.tokens_per_second / plan.setup.gpus for plan in plans if plan is not None and plan.tokens_per_second]
    assert len(rates) == 4 and min(rates) > 0.9 * max(rates)
    assert [cell.plan is None for cell in (large[0], *mixture[:2])] == [True] * 3
    assert all(
        cell.plan is not None and cell.plan.setup.servers and cell.plan.tokens_per_second is None
        for cell in (*large[1:], *mixture[2:])
    )
