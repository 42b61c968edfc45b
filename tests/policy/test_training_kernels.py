"""The training kernels one by one against plain torch: in Triton's interpreter on a CPU, compiled on a GPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

triton = pytest.importorskip("triton")

import legato.policy.kernels.head as kernels  # noqa: E402
from legato.core.outcome import Coefficients  # noqa: E402
from legato.policy.head.head import _Exact  # noqa: E402
from legato.policy.kernels.gradients import add_norm_with_gradient, rotate, swiglu_with_gradient  # noqa: E402
from legato.policy.kernels.sums import sum_uses  # noqa: E402
from legato.policy.layout.spans import Spans, Uses, move_to_device  # noqa: E402
from legato.policy.model.load import Loading, load_policy  # noqa: E402
from legato.policy.policy import Piece  # noqa: E402
from tests.policy.exact import accumulate  # noqa: E402
from tests.policy.fused import install, texts  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaf(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * size).requires_grad_()


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to the norm of the expected tensor."""
    return float((result - expected).detach().norm() / expected.detach().norm())


def gradients(value: Tensor, weight: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((value * weight).sum(), leaves)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("by_descriptors", [True, False])
@pytest.mark.parametrize(
    ("softcap", "scale", "at_once", "hidden", "vocabulary"),
    [(None, 1.0, 999, 64, 300), (5.0, 0.5, 999, 40, 517), (None, 2.0, 64, 64, 256)],
)
def test_the_head_and_its_gradient_are_those_of_float64(
    softcap: float | None,
    scale: float,
    at_once: int,
    hidden: int,
    vocabulary: int,
    by_descriptors: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cuda":
        pytest.skip("float32 products; the 16-bit head has its own test on a GPU")
    monkeypatch.setattr(kernels, "tensor_memory", lambda states: by_descriptors)
    tokens = 150
    x, w = leaf(tokens, hidden), leaf(vocabulary, hidden, size=0.3)
    targets, temperature = torch.randint(0, vocabulary, (tokens,)), torch.rand(tokens) + 0.5
    logprobs, entropy = _Exact.apply(x, w, None, targets, temperature, scale, softcap, at_once, True)
    xx, ww = (value.detach().double().requires_grad_() for value in (x, w))
    logits = xx @ ww.t() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    table = (logits / temperature[:, None]).log_softmax(1)
    expected, expected_entropy = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)
    assert torch.allclose(logprobs.double(), expected, atol=1e-5) and torch.allclose(
        entropy.double(), expected_entropy, atol=1e-5
    )
    to_logprobs, to_entropy = torch.randn(tokens), torch.randn(tokens)
    (logprobs * to_logprobs + entropy * to_entropy).sum().backward()
    (expected * to_logprobs + expected_entropy * to_entropy).sum().backward()
    assert x.grad is not None and w.grad is not None and xx.grad is not None and ww.grad is not None
    assert relative_error(x.grad.double(), xx.grad) < 3e-6 and relative_error(w.grad.double(), ww.grad) < 3e-6


def test_without_a_gradient_the_head_gives_the_same_bits_and_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    x, w = torch.randn(70, 32, device=DEVICE).to(dtype), torch.randn(130, 32, device=DEVICE).to(dtype)
    targets, temperature = torch.randint(0, 130, (70,), device=DEVICE), torch.ones(70, device=DEVICE)
    keep_options = []
    project = kernels.project

    def spy(*inputs: Any, **options: Any) -> kernels.Projection:
        keep_options.append(options["keep"])
        return project(*inputs, **options)

    monkeypatch.setattr(kernels, "project", spy)
    with torch.no_grad():
        without_gradient = _Exact.apply(x, w, None, targets, temperature, 1.0, None, 999, True)
    with_gradient = _Exact.apply(x.clone().requires_grad_(), w, None, targets, temperature, 1.0, None, 999, True)
    part = _Exact.apply(x[33:], w, None, targets[33:], temperature[33:], 1.0, None, 999, True)
    assert keep_options == [False, True, False]
    assert torch.equal(without_gradient[0], with_gradient[0]) and torch.equal(without_gradient[1], with_gradient[1])
    if DEVICE == "cpu":  # numpy's products depend on the number of rows; a GPU's tiles do not
        assert torch.allclose(without_gradient[0][33:], part[0], atol=1e-6)
    else:
        assert torch.equal(without_gradient[0][33:], part[0])


def test_lora_on_the_head_is_one_wider_product() -> None:
    if DEVICE == "cuda":
        pytest.skip("float32 products")
    hidden, base, down, up = leaf(40, 24), torch.randn(60, 24), leaf(8, 24), leaf(60, 8)
    targets, temperature, to_logprobs = torch.randint(0, 60, (40,)), torch.ones(40), torch.randn(40)
    beside = hidden @ down.t() * 2.0
    logprobs, _ = _Exact.apply(torch.cat([hidden, beside], 1), base, up, targets, temperature, 1.0, None, 16, True)
    logits = hidden @ base.t() + hidden @ down.t() * 2.0 @ up.t()
    expected = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-4)
    leaves = [hidden, down, up]
    pairs = zip(gradients(logprobs, to_logprobs, leaves), gradients(expected, to_logprobs, leaves), strict=True)
    assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


def test_the_head_frees_its_logits_if_no_backward_runs() -> None:
    if DEVICE == "cuda":
        pytest.skip("float32 products")
    x, w = leaf(20, 16), torch.randn(40, 16)
    logprobs, _ = _Exact.apply(x, w, None, torch.zeros(20, dtype=torch.int64), torch.ones(20), 1.0, None, 99, True)
    distances = weakref.ref(logprobs.grad_fn.projection.distances)
    assert distances() is not None
    del logprobs, _
    gc.collect()
    assert distances() is None


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_lora_adapters_of_a_16_bit_head_are_cast_from_float32() -> None:
    from legato.policy.head.head import _product_of
    from legato.policy.model.adapters import Lora, with_lora

    policy = load_policy("tiny", Loading(device="cpu", dtype="float32"))
    layer = with_lora(policy.model.bfloat16(), Lora(rank=8, targets=("lm_head",))).get_base_model().lm_head
    assert layer.lora_A["default"].weight.dtype == torch.float32
    hidden = torch.randn(5, layer.base_layer.weight.shape[1], dtype=torch.bfloat16)
    product = _product_of(layer, hidden)
    assert product is not None and product.beside is not None and product.added is not None
    assert {product.weight.dtype, product.beside.dtype, product.added.dtype} == {torch.bfloat16}


@pytest.mark.parametrize("updates", [True, False])
def test_add_norm_matches_torch_in_value_and_gradient(updates: bool) -> None:
    residual, update, weight = leaf(37, 48), leaf(37, 48) if updates else None, leaf(48)
    leaves = [value for value in (residual, update, weight) if value is not None]
    to_total, to_out = torch.randn(37, 48, device=DEVICE), torch.randn(37, 48, device=DEVICE)
    total, out = add_norm_with_gradient(residual, update, weight, 1e-6)
    plain = residual if update is None else residual + update
    normed = rms_norm(plain, (48,), weight, 1e-6)
    assert relative_error(out, normed) < 1e-6 and relative_error(total, plain) < 1e-6
    gradients_of_kernel = torch.autograd.grad((total * to_total + out * to_out).sum(), leaves)
    expected = torch.autograd.grad((plain * to_total + normed * to_out).sum(), leaves)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(gradients_of_kernel, expected, strict=True))


@pytest.mark.parametrize("normed", [True, False])
def test_rotate_matches_torch_in_value_and_gradient(normed: bool) -> None:
    rows, heads, width = 37, 3, 24
    query, weight = leaf(rows, heads * width), leaf(width)
    cosine, sine = torch.randn(rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    split = query.reshape(rows, heads, width)
    split = rms_norm(split, (width,), weight, 1e-6) if normed else split
    low, high = split.chunk(2, -1)
    expected = split * cosine.unsqueeze(1) + torch.cat([-high, low], -1) * sine.unsqueeze(1)
    result = rotate(query, cosine, sine, weight if normed else None, 1e-6, width)
    assert relative_error(result, expected) < 1e-6
    towards, leaves = torch.randn_like(expected), [query, weight] if normed else [query]
    pairs = zip(gradients(result, towards, leaves), gradients(expected, towards, leaves), strict=True)
    assert all(relative_error(a, b) < 1e-6 for a, b in pairs)


def test_swiglu_matches_torch_in_value_and_gradient() -> None:
    gate, up, towards = leaf(29, 40), leaf(29, 40), torch.randn(29, 40, device=DEVICE)
    result, expected = swiglu_with_gradient(gate, up), silu(gate) * up
    assert relative_error(result, expected) < 1e-6
    pairs = zip(gradients(result, towards, [gate, up]), gradients(expected, towards, [gate, up]), strict=True)
    assert all(relative_error(a, b) < 1e-6 for a, b in pairs)


def test_a_frozen_norm_passes_gradients_on_and_allocates_none_for_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    residual, weight, towards = leaf(5, 16), torch.rand(16, device=DEVICE), torch.randn(5, 16, device=DEVICE)
    shapes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **rest: shapes.append(shape) or empty(*shape, **rest))
    _, out = add_norm_with_gradient(residual, None, weight, 1e-6)
    (to_residual,) = gradients(out, towards, [residual])
    assert not [shape for shape in shapes if len(shape) == 2], "a buffer for the gradient of a frozen weight"
    assert relative_error(to_residual, gradients(rms_norm(residual, (16,), weight, 1e-6), towards, [residual])[0]) < 1e-6


def test_the_gradient_of_a_row_taken_several_times_is_the_sum() -> None:
    index, towards = torch.randint(0, 9, (40,)), torch.randn(40, 4)
    uses, table = Uses.from_index(index, 10), torch.randn(10, 4, requires_grad=True)
    assert torch.equal(uses.take(table), table[index])
    expected = torch.zeros(10, 4).index_add_(0, index, towards)
    (by_autograd,) = torch.autograd.grad(uses.take(table), table, towards)
    by_kernel = sum_uses(towards.to(DEVICE), uses.order.to(DEVICE), uses.ends.to(DEVICE))
    assert torch.allclose(by_autograd, expected, atol=1e-5) and torch.allclose(by_kernel.cpu(), expected, atol=1e-5)


# Every pair of values is in `make test`, every triple in `make slow`: Triton's interpreter takes two seconds each.
@pytest.mark.parametrize(
    ("owner", "window", "width"),
    [
        pytest.param(owner, window, width, marks=[] if (place + (window > 0) + (width == 32)) % 2 == 0 else pytest.mark.slow)
        for place, owner in enumerate(([0, 0, 0, 1], [0, 2, 2, 2]))
        for window in (0, 5)
        for width in (24, 32)  # by pointers, by descriptors
    ],
)
def test_attention_over_prompts_stored_once_matches_a_masked_table(owner: list[int], window: int, width: int) -> None:
    """Compares with one masked softmax over all tokens: prompts of 37, 1 and 5 tokens, responses of 20, 0, 130 and 3."""
    prompts, responses, belongs = torch.tensor([37, 1, 5]), torch.tensor([20, 0, 130, 3]), torch.tensor(owner)
    lengths = torch.cat([prompts, responses])
    begins = torch.cat([torch.zeros(3, dtype=torch.int64), prompts[belongs]])
    places = torch.cat([begin + torch.arange(count) for begin, count in zip(begins, lengths, strict=True)])
    span = torch.arange(len(lengths)).repeat_interleave(lengths)
    prompt_span = torch.cat([torch.full((3,), -1), belongs])[span]
    here = torch.arange(len(span))
    visible = ((span[:, None] == span) & (here[:, None] >= here)) | (prompt_span[:, None] == span)
    visible = visible & (places[:, None] - places < window) if window else visible
    query, key, value = leaf(len(span), 4, width), leaf(len(span), 2, width), leaf(len(span), 2, width)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    weights = scores.masked_fill(~visible.to(DEVICE), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
    spans = move_to_device(Spans.from_lengths(prompts, responses, belongs, places), torch.device(DEVICE))
    result = spans.attend(query, key, value, 0.3, window or None)
    assert torch.allclose(result, expected, atol=1e-5)
    towards, leaves = torch.randn_like(expected).contiguous(), [query, key, value]
    pairs = zip(gradients(result, towards, leaves), gradients(expected, towards, leaves), strict=True)
    assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


QUICK = [
    ("tiny", True, False, True),
    ("tiny", False, True, False),
    ("tiny-moe", False, True, True),
]
"""Every value of every option at least once; `make slow` runs all combinations."""


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has its own test of the fused body, in 16 bits")
@pytest.mark.parametrize(
    ("model", "checkpointing", "shared", "whole"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in (
            (model, checkpointing, *layout)
            for model in ("tiny", "tiny-moe")
            for checkpointing in (False, True)
            for layout in ((True, True), (False, True), (True, False))
        )
    ],
)
def test_a_pack_through_fused_parts_trains_as_the_model_itself(
    model: str, checkpointing: bool, shared: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU training path with interpreted kernels: whole layers as one function, and part by part as LoRA needs it."""
    policy = load_policy(model, Loading(device="cpu", dtype="float32", gradient_checkpointing=checkpointing))
    policy.shared_prompts = shared
    with torch.no_grad():
        for parameter in policy.parameters().values():
            if parameter.dim() == 1:
                # Norm weights start at 1, where a forgotten one would go unnoticed.
                parameter.add_(0.3 * torch.randn_like(parameter))
    rows, weight = torch.arange(5), torch.randn(5, 6)

    def logprobs_and_gradients() -> tuple[Tensor, dict[str, Tensor]]:
        def respond(piece: Piece) -> Coefficients:
            return Coefficients(logprobs=weight[piece.rows] * (piece.channels.logprobs != 0))

        policy.model.zero_grad()
        channels, _ = accumulate(policy, texts(), rows, respond)
        return channels.logprobs, {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}

    expected, expected_gradients = logprobs_and_gradients()
    attentions = install(monkeypatch)
    if not whole:
        monkeypatch.setattr("legato.policy.layers.fused.is_plain", lambda layer: False)
    logprobs, fused_gradients = logprobs_and_gradients()
    assert len(attentions) == len(policy.body.get_decoder().layers) * (2 if checkpointing else 1)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert fused_gradients.keys() == expected_gradients.keys()
    assert all(
        torch.allclose(fused_gradients[name], expected_gradients[name], atol=2e-5, rtol=1e-3) for name in expected_gradients
    )
