"""Times: FLOPs and bytes by hand, the measured step, what grows with what."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import factors
from benchmarks.gpu.plan_page import measured_step
from benchmarks.gpu.work import Flops, causal_pairs, pack_size
from legato.capacity.links import traffic_of
from legato.capacity.measured import Factor, at_size, measured
from legato.capacity.planning import plan_setup
from legato.capacity.work import decode_floor, packs_of, pass_over_groups, pieces_of, read_weights
from legato.core.texts import Texts
from legato.training.plan import deal, micro_batches
from tests.capacity.setups import model, setup
from tests.ranks.test_dealing import texts_of


def test_the_flops_of_a_pass_are_those_that_the_benchmarks_count() -> None:
    counted = Flops.of_shape("1.7B")
    tokens, pairs = pack_size([256], [400] * 8, [0] * 8, shared=True)
    counted.add(5 * tokens, 5 * 8 * 400, 5 * pairs, learning=True)
    computed = pass_over_groups(factors.dense_shape("1.7B"), 5, 256, 8, 400)
    assert computed.forward == pytest.approx(counted.forward)
    assert computed.training(frozen=False, recomputed=False) == pytest.approx(counted.total)
    assert pairs == causal_pairs(0, 256) + 8 * causal_pairs(256, 400)
    # Frozen weights need no gradient: a third of the products is left out. Recomputed layers are one forward more.
    frozen, again = computed.training(frozen=True, recomputed=False), computed.training(frozen=False, recomputed=True)
    assert counted.total - frozen == pytest.approx(computed.body + computed.head)
    assert again - counted.total == pytest.approx(computed.body + computed.attention)


def test_a_mixture_computes_its_active_experts_and_reads_those_that_some_row_chooses() -> None:
    shape = model("qwen3-30b-a3b").shape
    assert pass_over_groups(shape, 1, 1, 0, 1).body / 2 == pytest.approx(2.73e9, rel=0.01)
    one, many = read_weights(shape, 1), read_weights(shape, 4096)
    assert one == pytest.approx(3.04e9, rel=0.01) and many == pytest.approx(30.2e9, rel=0.01)
    assert read_weights(shape, 16) < many


def equal_texts(groups: int, prompt: int, samples: int, response: int) -> Texts:
    rows = groups * samples
    return Texts(
        prompts=torch.zeros(groups, prompt, dtype=torch.int64),
        prompt_lengths=torch.full((groups,), prompt),
        tokens=torch.zeros(rows, response, dtype=torch.int64),
        lengths=torch.full((rows,), response),
        mask=torch.ones(rows, response, dtype=torch.bool),
        group=torch.arange(groups).repeat_interleave(samples),
        temperature=torch.ones(rows),
    )


@pytest.mark.parametrize(
    ("groups", "prompt", "samples", "response", "tokens"),
    [
        (16, 20, 4, 30, 1000),
        (8, 20, 4, 30, 260),
        (7, 50, 8, 13, 512),
        (3, 10, 8, 100, 256),
        (5, 5, 2, 9, 10_000),
        (4, 30, 8, 50, 100),
    ],
)
def test_packs_are_counted_as_the_trainer_cuts_them(
    groups: int, prompt: int, samples: int, response: int, tokens: int
) -> None:
    # The last token of a response is not read, so that texts of one token more fill the same packs.
    texts = equal_texts(groups, prompt, samples, response + 1)
    assert len(micro_batches(texts, range(groups), tokens)) == packs_of(groups, prompt, samples, response, tokens)


def test_a_group_that_is_split_computes_its_prompt_again() -> None:
    assert (pieces_of(512, 8, 1024, 16384), pieces_of(512, 8, 1024, 4096)) == (1, 3)
    whole, split = (plan_setup(setup("qwen3-8b", 8, f"training.tokens_per_pack={each}")) for each in (16384, 4096))
    assert split.times.seconds("old log-probs") > whole.times.seconds("old log-probs")


def test_the_step_that_was_measured_is_calculated_within_20_percent() -> None:
    seconds = factors.load("gpu.json")["sections"]["B8"]["parts"]["Legato"]["seconds"]
    times = plan_setup(measured_step()).times
    assert times.seconds("sampling") == pytest.approx(seconds["rollouts"], rel=0.1)
    assert times.seconds("old log-probs") == pytest.approx(seconds["anchor"], rel=0.2)
    assert times.seconds("updates") + times.seconds("optimizer") == pytest.approx(seconds["update"], rel=0.15)
    assert times.step == pytest.approx(seconds["step"], rel=0.12)


def test_decoding_of_the_8b_shape_takes_the_measured_time() -> None:
    large, shape = factors.load("large.json"), model("qwen3-8b").shape
    gpu, stored = setup().hardware, measured()
    floor = decode_floor(shape, 2, rows=256, samples=8, prompt=256, response=512, matmul=gpu.matmul, bandwidth=gpu.bandwidth)
    seconds = floor / stored.decoding_share(setup()) + 512 * stored.decoding_seconds_per_step(setup())
    assert 256 * 512 / seconds == pytest.approx(large["sampling only"]["tokens_per_second"], rel=0.01)
    # The roofline by hand: products of 256 rows take longer than reading the weights; keys of 32 prompts and 256 rows.
    step = 2 * 7_568_097_280 * 256 / gpu.matmul + (32 * 256 + 256 * 255.5) * 147_456 / gpu.bandwidth
    assert floor == pytest.approx(512 * step, rel=1e-4)


def test_the_efficiency_is_interpolated_between_measured_sizes_and_held_beyond() -> None:
    points = [
        Factor(value=each, source="", date="", machine="", weights=size) for each, size in ((0.5, 10**9), (0.7, 4 * 10**9))
    ]
    assert [at_size(points, size) for size in (10**8, 10**9, 2 * 10**9, 4 * 10**9, 10**12)] == pytest.approx(
        [0.5, 0.5, 0.6, 0.7, 0.7]
    )


def test_the_traffic_of_both_ways_by_hand() -> None:
    count, outside = model("qwen3-8b").parameters, 2 * 151936 * 4096 + 4096
    inside = count - outside
    by_state = traffic_of(setup(gpus=8), scoring_packs=5, training_packs=7)
    assert by_state.bytes == pytest.approx(7 / 8 * 4 * 6 * count) and by_state.overlapping == 0
    assert by_state.seconds == pytest.approx(by_state.bytes / 450e9)
    layers = setup(gpus=64, shard="layers")
    by_layers = traffic_of(layers, scoring_packs=5, training_packs=7)
    packs = 7 * 8 * inside + 5 * 2 * inside
    assert by_layers.bytes == pytest.approx(63 / 64 * (packs + 4 * 6 * outside + 2 * inside))
    assert by_layers.overlapping == pytest.approx(63 / 64 * packs / 400e9)
    # Kept weights are gathered at the start and after 4 updates; kept gradients are added up once an update.
    whole = {kept: traffic_of(layers, scoring_packs=5, training_packs=7, kept=kept) for kept in ("weights", "gradients")}
    once = 4 * 6 * outside + 2 * inside + 5 * 2 * inside
    assert whole["weights"].bytes == pytest.approx(63 / 64 * (7 * 4 * inside + once))
    assert whole["weights"].overlapping == pytest.approx(63 / 64 * 7 * 4 * inside / 400e9)
    assert (
        whole["gradients"].bytes == pytest.approx(63 / 64 * (4 * 4 * inside + once)) and not whole["gradients"].overlapping
    )
    elsewhere = traffic_of(replace(layers, servers=True), scoring_packs=5, training_packs=7)
    assert by_layers.bytes - elsewhere.bytes == pytest.approx(63 / 64 * 2 * inside)
    adapters = traffic_of(setup("qwen3-8b", 8, "policy.lora.rank=16"), scoring_packs=5, training_packs=7)
    assert adapters.bytes == pytest.approx(7 / 8 * 4 * 8 * model("qwen3-8b").shape.adapters(16))
    # Adapters of divided layers are whole on every rank, and exchanged once an update.
    both = traffic_of(setup("qwen3-8b", 8, "policy.lora.rank=16", shard="layers"), scoring_packs=5, training_packs=7)
    assert both.bytes - adapters.bytes == pytest.approx(7 / 8 * inside * (7 * 4 + 5 * 2 + 2))
    assert traffic_of(setup(), scoring_packs=5, training_packs=7).bytes == 0


def test_exchanges_hide_behind_computing_and_no_further() -> None:
    plan = plan_setup(setup("qwen3-8b", 8, shard="layers"))
    traffic = plan.times.traffic
    exposed = plan.times.seconds("communication")
    assert traffic.seconds - traffic.overlapping <= exposed + 1e-9 and exposed < traffic.seconds
    slow = replace(plan.setup, hardware=replace(plan.setup.hardware, nvlink=1e9))
    stalled = plan_setup(slow).times
    computing = stalled.seconds("updates") + stalled.seconds("old log-probs")
    assert stalled.seconds("communication") == pytest.approx(stalled.traffic.seconds - computing)


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        (["rollouts.max_response_tokens=2048"], "sampling"),
        (["rollouts.samples_per_prompt=16"], "updates"),
        (["training.epochs_per_step=2"], "updates"),
        (["training.update_passes=two"], "updates"),
        (["policy.gradient_checkpointing=true"], "updates"),
        (["training.offload_optimizer=true"], "optimizer"),
        (["training.updates_per_step=8"], "optimizer"),
        (["rollouts.rows_at_once=64"], "sampling"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_more_work_takes_more_time(words: list[str], phase: str) -> None:
    base = ("rollouts.rows_at_once=128",)
    before, after = (plan_setup(setup("qwen3-1.7b", 1, *base, *each)).times.seconds(phase) for each in ([], words))
    assert after > 1.05 * before


def test_the_cores_of_a_plan_are_those_of_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = plan_setup(setup("qwen3-8b", 1, "training.offload_optimizer=true"))
    assert any("measured with 16 cores for a GPU" in line for line in offloaded.remarks())
    other = replace(measured(), host_bytes_per_second=replace(measured().host_bytes_per_second, cores=24))
    monkeypatch.setattr("legato.capacity.planning.measured", lambda: other)
    assert any("measured with 24 cores for a GPU" in line for line in offloaded.remarks())


def test_an_offloaded_optimizer_takes_the_time_of_its_bytes_by_hand() -> None:
    words = ("training.offload_optimizer=true", "training.updates_per_step=2")
    alone = setup("qwen3-8b", 1, *words)
    gpu, weights = alone.hardware, alone.model.parameters
    # Gradients of 4 bytes come, weights of 2 go. Gradient, master and two moments are read, all but the gradient written.
    # Then the masters are read and 16-bit weights written.
    link, host, speed = 4 + 2, 4 * 4 + 3 * 4 + 4 + 2, measured().host_bytes_per_second.value
    assert plan_setup(alone).times.seconds("optimizer") == pytest.approx(2 * weights * (link / gpu.pcie + host / speed))
    # Eight GPUs of a machine have an eighth of the weights each, and an eighth of its memory's speed, which is less.
    eight = plan_setup(setup("qwen3-8b", 8, "training.shard=optimizer", *words))
    assert gpu.host < speed < gpu.host * gpu.gpus_per_node
    shared = 2 * weights / 8 * (link / gpu.pcie + host / gpu.host)
    assert eight.times.seconds("optimizer") == pytest.approx(shared)


def test_old_log_probs_are_scored_only_where_they_are_needed() -> None:
    times = [plan_setup(setup("qwen3-8b", 1, *words)).times for words in ((), ("training.anchor=sampler",))]
    assert times[0].seconds("old log-probs") > 0 == times[1].seconds("old log-probs")
    assert setup().scored_share == 0.75 and setup("qwen3-8b", 1, "training.updates_per_step=1").scored_share == 0


def test_more_gpus_take_less_time_until_rows_run_out() -> None:
    """An update has 16 groups of 8; groups are cut for updates, so that 64 GPUs all have something to do."""
    plans = {gpus: plan_setup(setup("qwen3-8b", gpus)) for gpus in (2, 4, 8, 16, 64, 256)}
    steps = [plans[gpus].times.step for gpus in (2, 4, 8, 16, 64)]
    assert steps == sorted(steps, reverse=True)
    assert plans[64].times.seconds("updates") < 0.5 * plans[16].times.seconds("updates")
    assert not any("GPUs have no" in line for line in plans[64].remarks())
    idle = [line.partition(":")[0] for line in plans[256].remarks() if "GPUs have no" in line]
    assert idle == ["192 of 256 GPUs have no group to sample", "128 of 256 GPUs have no row in an update"]


@pytest.mark.parametrize(
    ("gpus", "prompts", "samples", "tokens"),
    [
        *((8, 64, 8, 10**9), (3, 20, 8, 10**9), (64, 64, 8, 10**9), (5, 16, 6, 10**9), (48, 64, 16, 10**9)),
        # Packs that hold four, two and one of the responses, and none.
        *((8, 64, 8, 144), (3, 20, 8, 90), (64, 16, 16, 48), (64, 16, 16, 32), (5, 16, 6, 10)),
        # Pieces of different sizes: seven and one, three and two, five and one.
        *((8, 64, 8, 240), (2, 64, 8, 112), (5, 32, 8, 112), (7, 44, 16, 176), (7, 4, 16, 176)),
    ],
)
def test_the_busiest_gpu_has_what_is_dealt_to_it(gpus: int, prompts: int, samples: int, tokens: int) -> None:
    """Calculated for equal groups, against the deal of a run."""
    planned = replace(setup("qwen3-8b", gpus), prompts=prompts, samples=samples, mean_prompt=16, mean_response=33)
    share = replace(planned, tokens_per_pack=tokens).share_of_update(16, 32)
    texts = texts_of([16] * (prompts // 4), [[33] * samples] * (prompts // 4))  # the last token is not read
    dealt = deal(texts, range(prompts // 4), tokens, gpus)
    assert share.idle_gpus == sum(not batches for batches in dealt)
    rows = max(sum(len(rows) for rows in batches) for batches in dealt)
    assert share.responses == rows


def test_a_shorter_mean_changes_times_and_not_memory() -> None:
    plans = [plan_setup(setup(mean_response=each)) for each in (1024, 300)]
    assert plans[0].need.memory == plans[1].need.memory and plans[1].times.step < plans[0].times.step
