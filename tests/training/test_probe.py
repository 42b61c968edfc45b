"""The probe measures the noise of log s and decides whether the engine's log-probs may be the anchor."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import legato
from legato.core.batch import Batch
from legato.core.mask import Mask
from legato.core.texts import Texts
from legato.diagnostics.metrics.run import RUN_METRICS
from legato.policy.experts.routing import Directions
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Channels, Forward, Piece, Policy
from legato.training.probe import Floor, Gap, UnsafeAnchorError, band, measure_gap, probe
from legato.training.tables import Tables
from tests.policy.exact import family, policy_of
from tests.proof.pages import numbers
from tests.training.steps import batch_by_hand

CPU = torch.device("cpu")


def tables_with_noise(policy: Policy, noise: Tensor | float, groups: int = 6, each: int = 4) -> Tables:
    """The tables of a batch whose engine reported the trainer's own log-probs plus `noise`."""
    batch = batch_by_hand(groups=groups, each=each)
    exact = policy.score(Tables.from_batch(batch, CPU).texts, torch.arange(len(batch))).logprobs
    return Tables.from_batch(replace(batch, sampler_logprobs=torch.where(batch.texts.mask, exact + noise, torch.nan)), CPU)


@pytest.mark.parametrize(
    ("noise", "safe"),
    [(0.0, True), (1e-5, True), (-1e-5, True), (9e-5, True), (1.1e-4, False), (5e-4, False), (-5e-2, False)],
)
def test_the_engine_is_safe_for_gspo_below_a_third_of_the_published_band(noise: float, safe: bool) -> None:
    policy = policy_of(family("qwen3"))
    floor = probe(policy, legato.algorithm("gspo"), tables_with_noise(policy, noise), 40)
    assert floor.band == 3e-4 and floor.sampler_is_safe is safe
    assert abs(floor.engine.max - abs(noise)) < 1e-9 and floor.engine.rms <= floor.engine.max + 1e-15
    assert floor.packs.max < 1e-12


@pytest.mark.parametrize(("name", "noise", "safe"), [("grpo", 5e-2, True), ("grpo", 7e-2, False), ("luspo", 5e-4, True)])
def test_the_same_noise_is_safe_under_a_wider_band(name: str, noise: float, safe: bool) -> None:
    policy = policy_of(family("qwen3"))
    assert probe(policy, legato.algorithm(name), tables_with_noise(policy, noise), 40).sampler_is_safe is safe


def test_one_response_that_differs_makes_the_engine_unsafe() -> None:
    policy = policy_of(family("qwen3"))
    noise = torch.zeros(24, 1, dtype=torch.float64)
    noise[17] = 0.01
    floor = probe(policy, legato.algorithm("gspo"), tables_with_noise(policy, noise), 40)
    assert abs(floor.engine.max - 0.01) < 1e-9 and not floor.sampler_is_safe
    assert abs(floor.engine.rms - 0.01 / 24**0.5) < 1e-9


def test_noise_that_cancels_within_a_response_is_no_noise_of_log_s() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=6, each=4)
    signs = torch.where(batch.texts.mask, (batch.texts.mask.cumsum(1) % 2 * 2 - 1).double(), 0.0)
    signs = torch.where(batch.texts.mask.sum(1, keepdim=True) % 2 == 0, signs, 0.0)
    floor = probe(policy, legato.algorithm("gspo"), tables_with_noise(policy, 0.02 * signs), 40)
    assert floor.engine.max < 1e-9


def test_noise_that_cancels_within_a_response_is_noise_to_a_ratio_per_token() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=6, each=4)
    signs = torch.where(batch.texts.mask, (batch.texts.mask.cumsum(1) % 2 * 2 - 1).double(), 0.0)
    signs = torch.where(batch.texts.mask.sum(1, keepdim=True) % 2 == 0, signs, 0.0)
    # Every ratio would start 0.18 off, of a band of 0.2.
    assert not probe(policy, legato.algorithm("grpo"), tables_with_noise(policy, 0.18 * signs), 40).sampler_is_safe


def test_an_algorithm_without_a_band_never_trusts_the_engine() -> None:
    policy = policy_of(family("qwen3"))
    value = legato.algorithm("cispo")
    assert band(value) is None and not probe(policy, value, tables_with_noise(policy, 0.0), 40).sampler_is_safe


def test_the_band_is_the_narrower_side_of_the_clip() -> None:
    assert band(legato.algorithm("gspo")) == 3e-4
    assert band(legato.algorithm("gspo", {"objective.trust.clip.high": 1e-4})) == 1e-4
    assert band(legato.algorithm("dapo")) == 0.2 and band(legato.algorithm("gmpo")) == 0.4
    assert band(legato.algorithm("gspo", {"objective.trust": []})) is None


def test_at_most_64_responses_are_scored_again() -> None:
    policy = policy_of(family("qwen3"))
    tables, row_counts = tables_with_noise(policy, 0.0, groups=20, each=6), []

    def far(batch: Batch) -> Batch:
        noise = torch.zeros(len(batch), 1, dtype=torch.float64)
        noise[64:] = 1.0
        return replace(batch, sampler_logprobs=batch.sampler_logprobs + noise)

    original = Policy.score

    def counting(self: Policy, texts: Texts, rows: Tensor, directions: Directions | None = None) -> Channels:
        row_counts.append(len(rows))
        return original(self, texts, rows, directions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "score", counting)
        floor = probe(policy, legato.algorithm("gspo"), Tables.from_batch(far(tables.batch), CPU), 40)
    assert sum(row_counts) == 2 * 64 and floor.engine.max < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_same_pack_with_and_without_a_gradient_is_equal_to_the_bit(
    model: str, dtype: str, checkpointing: bool, packing: bool
) -> None:
    loading = Loading(dtype=dtype, device="cpu", gradient_checkpointing=checkpointing, packing=packing)
    policy = load_policy(model, loading)
    policy.logits_at_once = 40 * policy.vocabulary  # several runs of rows a pack
    batch = batch_by_hand(groups=6, each=4)
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.to(policy.dtype))
    floor = probe(policy, legato.algorithm("gspo"), Tables.from_batch(batch, CPU), 120)
    assert floor.same == Gap(max=0.0, rms=0.0, token_max=0.0, ratio=0.0, bounded=0.0, clipped=0.0)
    assert floor.same_tokens == 0.0
    assert not any("warning" in line for line in floor.lines("recompute"))


def test_the_probe_leaves_no_gradient_behind_and_none_changed() -> None:
    policy = policy_of(family("qwen3"))
    tables = tables_with_noise(policy, 0.0)
    probe(policy, legato.algorithm("gspo"), tables, 40)
    assert all(weight.grad is None for weight in policy.parameters().values())
    generator = torch.Generator().manual_seed(1)
    before = {}
    for name, weight in policy.parameters().items():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        before[name] = weight.grad.clone()
    probe(policy, legato.algorithm("gspo"), tables, 40)
    for name, weight in policy.parameters().items():
        assert weight.grad is not None and torch.equal(weight.grad, before[name])


def alter_pieces(patch: pytest.MonkeyPatch, change: Callable[[Piece], Tensor]) -> None:
    """Replace the log-probs of passes with a gradient by those of `change`."""
    pieces = Forward.pieces

    def altered(self: Forward) -> Iterator[Piece]:
        for piece in pieces(self):
            piece.channels = replace(piece.channels, logprobs=change(piece))
            yield piece

    patch.setattr(Forward, "pieces", altered)


def disturb_path(patch: pytest.MonkeyPatch, where: str, size: float) -> None:
    """Add `size` to every log-prob of one path: 'learn', 'alone' or 'score' (both passes without a gradient)."""
    score = Policy.score

    def scored(self: Policy, texts: Texts, rows: Tensor, directions: Directions | None = None) -> Channels:
        channels = score(self, texts, rows, directions)
        hit = where == "score" or (where == "alone" and len(rows) == 1)
        return replace(channels, logprobs=channels.logprobs + size) if hit else channels

    patch.setattr(Policy, "score", scored)
    if where == "learn":
        alter_pieces(patch, lambda piece: piece.channels.logprobs + size)


@pytest.mark.parametrize(
    ("where", "off"),
    [("learn", {"same"}), ("alone", {"packs"}), ("score", {"same", "engine"})],
)
@pytest.mark.parametrize(("size", "clipped"), [(1e-4, 0.0), (1e-3, 1.0), (-1e-3, 1.0)])
def test_a_disturbance_shows_only_in_the_figures_of_its_path(where: str, off: set[str], size: float, clipped: float) -> None:
    policy = policy_of(family("qwen3"))
    tables = tables_with_noise(policy, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        disturb_path(patch, where, size)
        floor = probe(policy, legato.algorithm("gspo"), tables, 40)
    metrics = floor.metrics()
    for name in ("same", "packs", "engine"):
        wanted = size if name in off else 0.0
        assert metrics[f"noise/{name}_max"] == pytest.approx(abs(wanted), abs=1e-9)
        assert metrics[f"noise/{name}_ratio"] == pytest.approx(abs(wanted), rel=1e-3, abs=1e-9)
        assert metrics[f"noise/{name}_clipped"] == (clipped if name in off else 0.0)
    assert metrics["noise/same_tokens"] == (1.0 if "same" in off else 0.0)
    assert any("warning" in line for line in floor.lines("recompute")) is ("same" in off)


def test_one_token_that_differs_in_one_bit_is_reported() -> None:
    policy = policy_of(family("qwen3"))
    tables = tables_with_noise(policy, 0.0)

    def change(piece: Piece) -> Tensor:
        logprobs = piece.channels.logprobs.clone()
        if 0 in piece.rows:
            row = piece.rows.tolist().index(0)
            column = int(tables.texts.mask[0].nonzero()[0])
            logprobs[row, column] = torch.nextafter(logprobs[row, column], torch.tensor(-9.0, dtype=logprobs.dtype))
        return logprobs

    with pytest.MonkeyPatch.context() as patch:
        alter_pieces(patch, change)
        floor = probe(policy, legato.algorithm("gspo"), tables, 40)
    assert floor.same_tokens == pytest.approx(1 / int(tables.texts.mask.sum()))
    assert 0 < floor.same.max < 1e-14 and floor.same.clipped == 0.0
    assert "warning" in floor.lines("sampler")[-1]


def gap_by_loops(name: str, drift: list[list[float | None]], turns: list[list[int]]) -> tuple[float, float, float]:
    """Largest |r - 1|, largest |log-ratio| that is bounded, and the share outside the band, in loops; None: no token."""
    token_low, token_high, low, high = {
        "gspo": (None, None, math.log(1 - 3e-4), math.log(1 + 4e-4)),
        "gspo-token": (None, None, math.log(1 - 3e-4), math.log(1 + 4e-4)),
        "turn-gspo": (None, None, math.log(1 - 3e-4), math.log(1 + 4e-4)),
        "luspo": (None, None, math.log(1 - 2e-3), math.log(1 + 2.5e-3)),
        "seq-product": (None, None, math.log(0.8), math.log(1.2)),
        "grpo": (None, None, math.log(0.8), math.log(1.2)),
        "dapo": (None, None, math.log(0.8), math.log(1.28)),
        "minirl": (None, None, math.log(0.8), math.log(1.27)),
        "gmpo": (-0.4, 0.4, None, None),
        "gepo": (None, None, math.log(0.8), math.log(1.2)),
    }[name]
    own: list[float] = []
    single = [x for row in drift for x in row if x is not None]
    for row, turn in zip(drift, turns, strict=True):
        values = [x for x in row if x is not None]
        if not values:
            continue
        if name in ("grpo", "dapo", "minirl"):
            own += values
        elif name == "turn-gspo":
            for x, t in zip(row, turn, strict=True):
                members = [y for y, u in zip(row, turn, strict=True) if y is not None and u == t]
                own += [sum(members) / len(members)] if x is not None else []
        else:
            own.append(sum(values) if name == "seq-product" else sum(values) / len(values))
    largest = max(abs(math.exp(x) - 1) for x in own)
    bounded, below, above = (own, low, high) if token_low is None else (single, token_low, token_high)
    return largest, max(map(abs, bounded)), sum(x < below or x > above for x in bounded) / len(bounded)


@pytest.mark.parametrize("size", [3e-4, 3e-3, 0.3])
@pytest.mark.parametrize(
    "name", ["gspo", "gspo-token", "turn-gspo", "luspo", "seq-product", "grpo", "dapo", "minirl", "gmpo", "gepo"]
)
def test_the_spurious_clip_rate_equals_a_slow_loop(name: str, size: float) -> None:
    batch = batch_by_hand(groups=6, each=4)
    generator = torch.Generator().manual_seed(11)
    drift = size * torch.randn(batch.texts.mask.shape, generator=generator, dtype=torch.float64)
    mask = Mask(batch.texts.mask, torch.float64)
    gap = measure_gap(legato.algorithm(name), mask, batch.turn, mask.select(drift))
    listed = [
        [x if inside else None for x, inside in zip(row, insides, strict=True)]
        for row, insides in zip(drift.tolist(), batch.texts.mask.tolist(), strict=True)
    ]
    ratio, bounded, clipped = gap_by_loops(name, listed, batch.turn.tolist())
    assert gap.ratio == pytest.approx(ratio, rel=1e-9)
    assert gap.bounded == pytest.approx(bounded, rel=1e-9)
    assert gap.clipped == pytest.approx(clipped, abs=1e-12)


def test_the_rates_of_the_slow_loop_are_not_all_alike() -> None:
    batch = batch_by_hand(groups=6, each=4)
    generator = torch.Generator().manual_seed(11)
    mask = Mask(batch.texts.mask, torch.float64)
    drift = mask.select(0.3 * torch.randn(batch.texts.mask.shape, generator=generator, dtype=torch.float64))
    rates = {name: measure_gap(legato.algorithm(name), mask, batch.turn, drift).clipped for name in ("gspo", "grpo", "gmpo")}
    assert len(set(rates.values())) == 3 and all(rate is not None and rate > 0 for rate in rates.values())


def test_a_band_that_widens_with_length_is_that_of_each_response() -> None:
    value = legato.algorithm("gspo", {"objective.trust.clip.scale": "sqrt-length"})
    mask = Mask(torch.ones(2, 8, dtype=torch.bool) & (torch.arange(8) < torch.tensor([[8], [2]])), torch.float64)
    wide = [3e-4 * (2048 / length) ** 0.5 for length in (8, 2)]
    turn = torch.zeros(2, 8, dtype=torch.long)
    for drift, share in ((0.9 * wide[0], 0.0), (-1.1 * wide[0], 0.5), (-1.1 * wide[1], 1.0)):
        gap = measure_gap(value, mask, turn, mask.select(torch.full((2, 8), drift, dtype=torch.float64)))
        assert gap.clipped == share


@pytest.mark.parametrize("name", ["cispo", "sapo", "reinforce", "rloo", "vespo", "fspo", "bapo", "dppo"])
def test_without_a_band_there_is_no_rate_and_no_trust_in_the_engine(name: str) -> None:
    policy = policy_of(family("qwen3"))
    floor = probe(policy, legato.algorithm(name), tables_with_noise(policy, 0.0), 40)
    assert floor.band is None and floor.engine.clipped is None and not floor.sampler_is_safe
    assert not any(key.endswith("_clipped") for key in floor.metrics())
    assert "no clip band" in floor.lines("recompute")[1] and "recomputed" in floor.lines("recompute")[1]


def test_a_clip_of_tokens_measures_the_engine_by_tokens() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=6, each=4)
    signs = torch.where(batch.texts.mask, (batch.texts.mask.cumsum(1) % 2 * 2 - 1).double(), 0.0)
    signs = torch.where(batch.texts.mask.sum(1, keepdim=True) % 2 == 0, signs, 0.0)
    floor = probe(policy, legato.algorithm("gmpo"), tables_with_noise(policy, 0.3 * signs), 40)
    assert floor.unit == "tokens" and floor.engine.max < 1e-9 and floor.engine.clipped == 0.0
    assert floor.engine.bounded == pytest.approx(0.3) and not floor.sampler_is_safe


def test_a_product_of_ratios_is_measured_as_the_product() -> None:
    policy = policy_of(family("qwen3"))
    tables = tables_with_noise(policy, 0.02)
    longest = int(tables.texts.mask.sum(1).max())
    floor = probe(policy, legato.algorithm("seq-product"), tables, 40)
    assert floor.engine.bounded == pytest.approx(0.02 * longest, rel=1e-6) and 0.02 < 0.2 / 3 < 0.02 * longest
    assert not floor.sampler_is_safe


def make_floor(**rest: Any) -> Floor:
    nothing = Gap(max=0.0, rms=0.0, token_max=0.0, ratio=0.0, bounded=0.0, clipped=0.0)
    packs = replace(nothing, max=1e-7, rms=1e-8, ratio=1e-7, bounded=1e-7)
    engine = Gap(max=5e-4, rms=1e-4, token_max=1e-3, ratio=5e-4, bounded=5e-4, clipped=0.0156)
    fields: dict[str, Any] = {"same": nothing, "packs": packs, "engine": engine, "same_tokens": 0.0}
    return Floor(**{**fields, "unit": "responses", "band": 3e-4, **rest})


def test_the_lines_of_a_floor_have_every_gap_the_band_and_the_anchor() -> None:
    gaps, clipped, unsafe = make_floor().lines("recompute")
    assert numbers(gaps)[-3:] == [0, 1e-7, 5e-4]  # same path, other packs, engine
    assert numbers(clipped) == [3e-4, 0, 0, 1.56] and "responses" in clipped and "recomputed" in clipped
    assert numbers(unsafe) == [5e-4, 1e-4] and "warning" not in unsafe
    _, clipped, unsafe = make_floor().lines("sampler")
    assert "anchor" in clipped and "recomputed" not in clipped
    assert unsafe.startswith("warning: ") and 5e-4 in numbers(unsafe)
    assert numbers(make_floor(same_tokens=0.125).lines("sampler")[3])[0] == 12.5
    assert len(make_floor(engine=replace(make_floor().engine, bounded=9e-5, clipped=0.0)).lines("sampler")) == 2


def test_the_lines_say_why_and_that_responses_may_be_old() -> None:
    gaps, clipped, unsafe = make_floor(lag=2, reason="of a reason").lines("recompute")
    assert gaps.endswith("5.0e-04 engine against trainer (responses may be 2 versions old)")
    assert clipped.endswith("; old log-probs are recomputed: of a reason") and "(responses may be 2 versions old)" in unsafe
    assert "old)" not in make_floor().lines("recompute")[0] and "1 version old" in make_floor(lag=1).lines("recompute")[0]


def test_the_verdict_says_whether_the_numerics_are_fine() -> None:
    (recomputed,) = make_floor(reason="the engine's own are not exact enough").verdict("recompute")
    assert recomputed.startswith("numerics are fine: ") and "recomputed: the engine's own are not exact enough" in recomputed
    assert not numbers(recomputed.replace("exactly 1", ""))
    exact = make_floor(engine=replace(make_floor().engine, bounded=9e-5, clipped=0.0))
    assert exact.verdict("sampler")[0].startswith("numerics are fine: ") and "recomputed (" in exact.verdict("recompute")[0]
    head, warning = make_floor().verdict("sampler")
    assert head.startswith("numerics are not fine") and warning.startswith("warning: ")
    assert len(make_floor(same_tokens=0.125).verdict("recompute")) == 2


def test_a_refusal_names_the_numbers_and_the_options() -> None:
    message = str(UnsafeAnchorError(make_floor()))
    for word in ("5.0e-04", "1.56 % of responses", "1.0e-04", "3.0e-04", "accept_unsafe_anchor=true", "anchor=auto"):
        assert word in message
    assert make_floor().fills_the_band and not make_floor(band=None).fills_the_band


def test_every_figure_is_a_documented_metric_and_the_other_way_round() -> None:
    documented = {metric.key for metric in RUN_METRICS if metric.key.startswith("noise/")}
    assert set(make_floor().metrics()) == documented
    assert make_floor().metrics()["noise/engine_max"] == 5e-4


def test_nothing_clipped_and_a_third_of_the_band_to_spare_make_the_engine_safe() -> None:
    engine = Gap(max=9e-5, rms=9e-5, token_max=1e-3, ratio=9e-5, bounded=9e-5, clipped=0.0)
    assert make_floor(engine=engine).sampler_is_safe
    assert not make_floor(engine=replace(engine, bounded=1.1e-4)).sampler_is_safe
    assert not make_floor(engine=replace(engine, clipped=0.01)).sampler_is_safe
    assert not make_floor(engine=engine, band=None).sampler_is_safe
