"""Projections whose weights lie side by side: one product in decoding, parameters of their own everywhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("triton")

from legato.core.outcome import Coefficients
from legato.policy.kernels.exact import rotate_into_slots
from legato.policy.kernels.layers import heads, swiglu
from legato.policy.layers import products
from legato.policy.layers.joined import joined_weight, lay_side_by_side, project_joined, project_joined_alike
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits
from legato.rollouts.gpu import buckets
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import Words, accumulate
from tests.policy.fused import texts
from tests.rollouts import in_torch
from tests.rollouts.families import END, assert_same_responses, make_model, make_policy, make_requests

ROWS = torch.arange(5)


def projections(model: Any) -> list[list[nn.Module]]:
    """What one layer after the other reads together: queries, keys and values; gate and up."""
    together = []
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        together += [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    return together


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])  # qwen2 has biases
def test_joined_projections_are_the_separate_ones(name: str) -> None:
    model = make_model(name)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    x = torch.randn(7, 32)
    expected = [[module(x) for module in modules] for modules in projections(model)]
    parameters = list(model.parameters())
    assert all(joined_weight(modules) is None for modules in projections(model))
    assert lay_side_by_side(model) == 4
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    for modules, outputs in zip(projections(model), expected, strict=True):
        weight: Any = joined_weight(modules)
        assert weight is not None and weight.data_ptr() == modules[0].weight.data_ptr(), "no copy"
        for new, old in zip(project_joined(modules, x), outputs, strict=True):
            assert torch.allclose(new, old, atol=1e-6)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    lay_side_by_side(model)
    assert addresses == [weight.data_ptr() for weight in model.parameters()], "a second call moves nothing"


def test_updates_in_place_are_seen_and_moved_weights_are_not_joined() -> None:
    model = make_model("qwen3")
    lay_side_by_side(model)
    (modules, *_), x = projections(model), torch.randn(3, 32)
    with torch.no_grad():
        modules[1].weight.mul_(2)  # type: ignore[operator,union-attr]
    assert joined_weight(modules) is not None
    assert torch.allclose(project_joined(modules, x)[1], modules[1](x), atol=1e-6)
    modules[1].weight.data = modules[1].weight.data.clone()  # type: ignore[union-attr,operator]
    assert joined_weight(modules) is None
    assert torch.equal(project_joined(modules, x)[1], modules[1](x))


def test_projections_with_hooks_adapters_or_other_dtypes_are_not_joined() -> None:
    hooked, mixed, partly = ([nn.Linear(8, 4, bias=False) for _ in range(2)] for _ in range(3))
    hooked[0].register_forward_hook(lambda module, inputs, output: output)
    mixed[1].double()
    partly[1] = nn.Linear(8, 4)

    class Adapted(nn.Linear):
        pass

    for modules in (hooked, mixed, partly, [Adapted(8, 4), Adapted(8, 4)]):
        mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = *modules, nn.Linear(4, 8)
        assert lay_side_by_side(mlp) == 0 and joined_weight(modules) is None


def test_training_gradients_and_saved_files_do_not_change(tmp_path: Path) -> None:
    def gradients(policy: Policy) -> dict[str, Any]:
        policy.model.zero_grad()
        accumulate(policy, texts(), ROWS, lambda piece: Coefficients(logprobs=torch.cos(piece.channels.logprobs)))
        return {name: weight.grad.clone() for name, weight in policy.parameters().items() if weight.grad is not None}

    policy = load_policy(make_model("qwen2"), Loading(device="cpu", dtype="float32"), tokenizer=Words())
    before = gradients(policy)
    policy.model.save_pretrained(tmp_path / "apart")
    lay_side_by_side(policy.model)
    after = gradients(policy)
    assert len(before) == len(after) > 20 and all(torch.equal(before[name], after[name]) for name in before)
    policy.model.save_pretrained(tmp_path / "joined")
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("apart", "joined")]
    assert sizes[0] == sizes[1]
    again = type(policy.model).from_pretrained(tmp_path / "joined")
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in policy.model.state_dict().items())
    # Also without the help of transformers: parts of one storage that do not overlap.
    save_file({name: weight.detach() for name, weight in policy.parameters().items()}, tmp_path / "weights.safetensors")


def test_the_engine_decodes_the_same_tokens_with_joined_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)
    joined: list[int] = []

    def counted(modules: Any, x: Any) -> Any:
        joined.append(joined_weight(modules) is not None)
        return project_joined(modules, x)

    monkeypatch.setattr(buckets, "project_joined", counted)
    limits = Limits(max_response_tokens=5, end_tokens=(END,))
    for name in ("qwen3", "qwen2", "olmoe"):
        policy, requests = make_policy(name), make_requests(3, 9, each=2)
        lay_side_by_side(policy.model)
        joined.clear()
        expected = GraphedEngine(policy, 4, graphs=False, joined=False).generate(requests, Sampling(), limits)
        assert not joined
        assert_same_responses(GraphedEngine(policy, 4, graphs=False).generate(requests, Sampling(), limits), expected)
        assert all(joined) and bool(joined) == (name != "olmoe")  # its norm reads whole rows, and it has experts


@pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy
def test_kernels_read_columns_of_one_tensor() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, count, key_heads, width = 3, 4, 2, 16
    product = torch.randn(rows, (count + 2 * key_heads) * width, device=device)
    query, key, value = product.split([count * width, key_heads * width, key_heads * width], 1)
    norms = torch.rand(width, device=device), torch.rand(width, device=device), 1e-6
    cosine, sine = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    slots, length = torch.tensor([2, 0, 1], device=device), torch.tensor([3, 1, 0, 0], device=device)
    tables = [[torch.zeros(4, key_heads, 5, width, device=device) for _ in range(2)] for _ in range(2)]
    apart = heads(
        query.contiguous(), key.contiguous(), value.contiguous(), cosine, sine, norms, *tables[0], slots, length, 16
    )
    joined = heads(query, key, value, cosine, sine, norms, *tables[1], slots, length, 16)
    assert torch.equal(apart, joined) and all(map(torch.equal, *tables)) and bool(tables[0][0].any())
    gate, up = torch.randn(rows, 2 * 1100, device=device).split(1100, 1)
    assert torch.equal(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))


@pytest.mark.filterwarnings("ignore:Conversion of an array")
def test_the_exact_rotation_reads_columns_of_one_tensor() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, count, key_heads, width = 5, 4, 2, 16
    query, key, value = torch.randn(rows, 8 * width, device=device).split([4 * width, 2 * width, 2 * width], 1)
    norms = torch.rand(width, device=device), torch.rand(width, device=device), 1e-6
    angles = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device), norms
    places = torch.tensor([2, 0, 1, 4, 3], device=device), torch.tensor([3, 1, 0, 0, 2, 0], device=device), width
    tables = [[torch.zeros(6, key_heads, 5, width, device=device) for _ in range(2)] for _ in range(2)]
    apart = rotate_into_slots(query.contiguous(), key.contiguous(), value.contiguous(), *angles, *tables[0], *places)
    joined = rotate_into_slots(query, key, value, *angles, *tables[1], *places)
    assert apart.shape == (rows, count, width)
    assert torch.equal(apart, joined) and all(map(torch.equal, *tables)) and bool(tables[0][1].any())


def test_an_exact_engine_joins_only_where_joined_products_have_the_bits_of_separate_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = make_model("qwen2"), torch.randn(4, 32)
    lay_side_by_side(model)
    (modules, *_) = projections(model)
    for least, joins in ((None, False), (5, False), (4, True), (1, True)):
        monkeypatch.setattr(products, "least_rows_joined", lambda *_, least=least: least)
        outputs = project_joined_alike(modules, x)
        assert (outputs[0].stride(0) == sum(output.shape[1] for output in outputs)) == joins
        assert all(torch.allclose(new, module(x), atol=1e-6) for new, module in zip(outputs, modules, strict=True))


def test_joined_products_are_measured_against_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    product = products.plain_linear
    monkeypatch.setattr(products, "_PACK", 64)
    monkeypatch.setattr(products, "_SIZES", (1, 2, 5, 9))

    def splits_few_rows(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        # As a kernel that splits sums of wide products with at most five rows.
        output = product(x.double(), weight.double(), bias).float()
        return output + 1e-3 if len(weight) > 8 and len(x) <= 5 else output

    monkeypatch.setattr(products, "plain_linear", splits_few_rows)
    measure = products._measure_least_rows.__wrapped__
    assert measure(torch.device("cpu"), torch.float32, (8,), 4, False) == 1
    assert measure(torch.device("cpu"), torch.float32, (8, 2), 4, False) == 6
