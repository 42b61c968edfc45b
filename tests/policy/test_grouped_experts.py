"""Grouped experts against a float64 reference and the modules of transformers, on a GPU or in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

triton = pytest.importorskip("triton")

from legato.policy.experts.grouped import Grouped, find_grouped, run_grouped, why_not_grouped  # noqa: E402
from legato.policy.kernels.experts import KINDS, Tiles, Weights, apply_experts, route  # noqa: E402
from tests.policy.routes import as_published, family_gates, routers_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:invalid value"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Triton's interpreter keeps bfloat16 as integers, and multiplies those."""
FAMILIES = ("qwen3-moe", "olmoe", "gpt-oss", "mixtral", "qwen2-moe")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def reference(x: Tensor, experts: Tensor, gates: Tensor, weights: Weights) -> Tensor:
    """Row by row and expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    gate_up, down = weights.gate_up.double(), weights.down.double()
    half = gate_up.shape[1] // 2
    for row in range(len(x)):
        for expert, gate in zip(experts[row].tolist(), gates[row].double(), strict=True):
            both = gate_up[expert] @ x[row].double()
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[expert].double()
            left, right = (both[::2], both[1::2]) if weights.interleaved else (both[:half], both[half:])
            if weights.clamp is None:
                hidden = left * torch.sigmoid(left) * right
            else:
                alpha, limit = weights.clamp
                left, right = left.clamp(max=limit), right.clamp(-limit, limit)
                hidden = left * torch.sigmoid(alpha * left) * (right + 1)
            part = down[expert] @ hidden
            out[row] += gate * (part if weights.down_bias is None else part + weights.down_bias[expert].double())
    return out


def make_weights(count: int, width: int, inner: int, *, clamped: bool, scale: float = 0.3) -> Weights:
    gate_up, down = scale * normal(count, 2 * inner, width, seed=1), scale * normal(count, width, inner, seed=2)
    if not clamped:
        return Weights(gate_up=gate_up, down=down)
    # Stored with the inputs first, as gpt-oss does.
    return Weights(
        gate_up=gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        down=down.transpose(1, 2).contiguous().transpose(1, 2),
        gate_up_bias=normal(count, 2 * inner, seed=3),
        down_bias=normal(count, width, seed=4),
        interleaved=True,
        clamp=(1.702, 1.5),  # low enough that both sides of the clamp occur
    )


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(
    ("rows", "active", "count", "width", "inner", "pairs"),
    [
        (1, 2, 5, 32, 16, 16),  # fewer pairs than experts
        (37, 2, 3, 40, 24, 16),  # several blocks for an expert; no size divides the tiles
        (9, 4, 4, 64, 32, 32),  # every expert is active in every row
        (5, 1, 1, 33, 7, 16),
    ],
)
def test_grouped_experts_are_the_gated_sum_over_the_chosen_experts(
    rows: int, active: int, count: int, width: int, inner: int, pairs: int, clamped: bool
) -> None:
    x, weights = normal(rows, width), make_weights(count, width, inner, clamped=clamped)
    gates, experts = route(normal(rows, count, seed=5), active, "all", torch.float32)
    tiles = Tiles(pairs=pairs, outputs=32, step=32, warps=4, stages=1)
    expected = reference(x, experts, gates, weights)
    out = apply_experts(x, experts, gates, weights, tiles)
    assert torch.allclose(out.double(), expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(out, apply_experts(x, experts, gates, weights, tiles)), "sums have one order"


def test_experts_that_no_row_chose_are_not_read() -> None:
    weights = make_weights(6, 32, 16, clamped=False)
    experts = torch.tensor([[1, 4], [4, 1], [1, 2]], device=DEVICE)
    x, gates = normal(3, 32), torch.rand(3, 2).to(DEVICE)
    expected = reference(x, experts, gates, weights)
    for idle in (0, 3, 5):
        weights.gate_up[idle] = weights.down[idle] = float("nan")
    assert torch.allclose(apply_experts(x, experts, gates, weights).double(), expected, atol=2e-5)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routes_are_those_of_topk_and_softmax(kind: str, dtype: torch.dtype) -> None:
    logits = normal(20, 11).to(dtype)
    gates, experts = route(logits, 3, kind, dtype)
    values, expected = logits.float().topk(3, dim=-1)
    assert torch.equal(experts.sort(-1).values, expected.sort(-1).values)
    name = {"all": "olmoe", "all, divided": "qwen3-moe", "chosen": "gpt-oss"}[kind]
    allowed = 2e-6 if dtype is torch.float32 else 2**-7  # Triton's interpreter cuts off where a GPU rounds
    assert torch.allclose(gates.float(), family_gates(name, logits.float(), experts), rtol=allowed)
    assert torch.equal(logits.float().gather(1, experts), values)


def test_of_equal_logits_the_first_experts_are_chosen_and_nan_writes_nowhere_else() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0], [2.0] * 5, [float("nan")] * 5], device=DEVICE)
    _, experts = route(logits, 3, "all", torch.float32)
    assert experts[:2].tolist() == [[1, 3, 0], [0, 1, 2]]
    assert int(experts.min()) >= 0 and int(experts.max()) < 5
    weights, x, gates = make_weights(5, 32, 16, clamped=False), normal(3, 32), torch.rand(3, 3).to(DEVICE)
    out = apply_experts(x, experts, gates, weights)
    assert torch.allclose(out[:2].double(), reference(x[:2], experts[:2], gates[:2], weights), atol=2e-5)


def mixture(name: str, dtype: torch.dtype) -> tuple[Any, Any, Grouped]:
    """The first mixture of a small model of a family, its router, and what grouped kernels replace in it."""
    model = as_published(name, dtype).to(DEVICE)
    block = model.get_decoder().layers[0].mlp
    grouped = find_grouped(block)
    assert isinstance(grouped, Grouped) and len(grouped.experts) == len(grouped.routers) == 1
    return block, routers_of(block)[0], grouped


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "16-bit"])
def test_a_mixture_of_transformers_computes_the_same_through_grouped_kernels(name: str, dtype: torch.dtype) -> None:
    block, router, grouped = mixture(name, dtype)
    x = normal(1, 13, 32).to(dtype)
    routed: list[tuple[Tensor, ...]] = []
    hook = router.register_forward_hook(lambda module, inputs, output: routed.append(output))
    with torch.no_grad():
        own = block(x)
        with run_grouped(grouped):
            new = block(x)
    hook.remove()
    own, new = (output[0] if isinstance(output, tuple) else output for output in (own, new))
    (own_logits, own_gates, own_experts), (logits, gates, experts) = routed
    assert torch.equal(logits, own_logits) and gates.dtype == own_gates.dtype
    assert torch.equal(experts.sort(-1).values, own_experts.sort(-1).values)
    largest = float(own.float().abs().max())
    allowed = 1e-5 if dtype is torch.float32 else 0.02
    assert torch.allclose(gates.float(), own_gates.float(), rtol=allowed)
    assert torch.allclose(new.float(), own.float(), atol=allowed * largest)
    assert "forward" not in vars(router) and "forward" not in vars(grouped.experts[0])


def test_experts_that_do_not_fit_say_why() -> None:
    block, _, grouped = mixture("qwen3-moe", torch.float32)
    experts: Any = grouped.experts[0]
    assert find_grouped(nn.Linear(2, 2)) is None
    experts.act_fn = nn.GELU()
    assert why_not_grouped(experts) == "its activation is GELU"
    experts.double()
    assert find_grouped(block) == "the weights of Qwen3MoeExperts are in float64"
