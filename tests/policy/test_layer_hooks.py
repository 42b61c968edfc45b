"""The fused walk calls its layers: hooks fire, checkpointing happens once, and who wants autograd's gradients gets them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from legato.core.outcome import Coefficients
from legato.policy.head.head import Head, _Product
from legato.policy.layers import fused
from legato.policy.layers.accumulate import may_write_gradients
from legato.policy.layers.unrolled import Unrolled
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Piece, Policy
from tests.policy.exact import accumulate, ones
from tests.policy.fused import install, texts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter, on a CPU"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]
ROWS = torch.arange(5)
SMALL = TinyShape(hidden=32, layers=2, heads=2, experts=4)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as within:
        yield within


def tiny(**changes: Any) -> Policy:
    return load_policy("tiny", Loading(device="cpu", dtype="float32", tiny=SMALL, **changes))


def layers_of(policy: Policy) -> list[Any]:
    return list(policy.body.get_decoder().layers)


def learn(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs as an update sees them, and the gradient of a fixed mixture of them."""
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))

    def respond(piece: Piece) -> Coefficients:
        return Coefficients(logprobs=weight[piece.rows] * (piece.channels.logprobs != 0))

    policy.model.zero_grad()
    channels, _ = accumulate(policy, texts(), ROWS, respond)
    return channels.logprobs, {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}


def furthest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_hooks_at_a_layer_fire_and_see_the_hidden_state_of_the_model_itself(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    outputs, backwards = list[Tensor](), list[Tensor]()

    def learn_observed() -> tuple[Tensor, dict[str, Tensor]]:
        layer = layers_of(policy)[1]
        handles = [
            layer.register_forward_hook(lambda _, given, output: outputs.append(output.detach())),
            layer.register_full_backward_hook(lambda _, to_input, to_output: backwards.append(to_output[0])),
        ]
        learnt = learn(policy)
        for handle in handles:
            handle.remove()
        return learnt

    learn_observed()
    (own,), (to_own,) = outputs, backwards
    install(patch)
    plain, slopes = learn(policy)
    outputs.clear()
    backwards.clear()
    found, mine = learn_observed()
    assert len(outputs) == len(backwards) == 1
    assert torch.allclose(outputs[0], own[0], atol=1e-5) and torch.allclose(backwards[0], to_own[0], atol=1e-5)
    assert torch.equal(found, plain) and furthest(mine, slopes) < 1e-6


def test_a_hook_that_changes_what_a_layer_says_is_obeyed(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    plain = policy.score(texts(), ROWS).logprobs
    handle = layers_of(policy)[0].register_forward_hook(lambda _, given, output: 0.5 * output)
    right = policy.score(texts(), ROWS).logprobs
    install(patch)
    found = policy.score(texts(), ROWS).logprobs
    handle.remove()
    assert torch.allclose(found, right, atol=1e-5) and not torch.allclose(found, plain, atol=1e-3)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_a_checkpointed_layer_runs_forward_exactly_twice(model: str, patch: pytest.MonkeyPatch) -> None:
    loading = Loading(device="cpu", dtype="float32", tiny=SMALL, gradient_checkpointing=True)
    policy = load_policy(model, loading)
    install(patch)
    runs = dict.fromkeys(range(len(layers_of(policy))), 0)
    computed = fused._compute_layer

    def counted(parts: fused.Parts, number: int, *given: Any) -> tuple[Tensor, Tensor]:
        runs[number] += 1
        return computed(parts, number, *given)

    patch.setattr(fused, "_compute_layer", counted)
    accumulate(policy, texts(), ROWS, ones)
    assert set(runs.values()) == {2}
    policy.score(texts(), ROWS)
    assert set(runs.values()) == {3}


def test_layers_have_their_own_forward_again_whatever_happens_inside(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    install(patch)
    with pytest.raises(RuntimeError, match="inside"), policy.accumulate_gradient(texts(), ROWS):
        assert all("forward" in vars(layer) for layer in layers_of(policy))
        raise RuntimeError("inside")
    assert not any("forward" in vars(layer) for layer in layers_of(policy))


def test_a_layer_with_a_hook_at_a_weight_takes_autograds_way_and_only_that_layer(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    install(patch)
    whole = list[Any]()
    learned = fused.Parts

    def watched(**parts: Any) -> fused.Parts:
        at_once = parts["whole"]
        return learned(**{**parts, "whole": lambda layer, *given: whole.append(layer) or at_once(layer, *given)})

    patch.setattr("legato.policy.policy.Parts", watched)
    plain, slopes = learn(policy)
    assert whole == layers_of(policy)
    whole.clear()
    weight, seen = layers_of(policy)[0].self_attn.q_proj.weight, list[Tensor]()
    handle = weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    found, mine = learn(policy)
    handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)
    assert whole == layers_of(policy)[1:]
    assert torch.equal(found, plain) and furthest(mine, slopes) < 1e-5


def test_who_may_write_gradients() -> None:
    class Other(nn.Parameter):
        pass

    def weight() -> nn.Parameter:
        return nn.Parameter(torch.zeros(2))

    hooked, counted, frozen = weight(), weight(), Other(torch.zeros(2), requires_grad=False)
    hooked.register_hook(lambda gradient: gradient)
    counted.register_post_accumulate_grad_hook(lambda parameter: None)
    sharded = type("FSDPLinear", (type("FSDPModule", (), {}), nn.Linear), {})(2, 2)
    plain = nn.Linear(2, 2)
    assert may_write_gradients([weight(), None, frozen], plain)
    assert not may_write_gradients([weight(), hooked], plain)
    assert not may_write_gradients([counted], plain)
    assert not may_write_gradients([Other(torch.zeros(2))], plain)
    assert not may_write_gradients([weight()], plain, sharded)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_layers_learn_what_whole_ones_do(checkpointing: bool, patch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers the weights of a layer before it is called, and again before its backward: only hooks tell it when."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    policy, sharded = tiny(gradient_checkpointing=checkpointing), tiny(gradient_checkpointing=checkpointing)
    install(patch)
    right, slopes = learn(policy)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in layers_of(sharded):
            fully_shard(layer, mesh=mesh)
        found, mine = learn(sharded)
        local = {name: slope.to_local() if hasattr(slope, "to_local") else slope for name, slope in mine.items()}
    finally:
        distributed.destroy_process_group()
    assert torch.equal(found, right)
    assert furthest(local, slopes) < 1e-5


def test_the_head_leaves_the_gradient_of_a_hooked_weight_to_autograd(patch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(0)
    linear = nn.Linear(16, 40, bias=False)
    hidden, targets = torch.randn(9, 16, generator=source), torch.randint(0, 40, (9,), generator=source)
    patch.setattr(Head, "_product", lambda self, hidden: _Product(weight=linear.weight))
    slopes = []
    for hooked in (False, True):
        linear.weight.grad, seen = None, list[Tensor]()
        handle = linear.weight.register_hook(seen.append) if hooked else None
        head = Head(linear=linear, scale=1.0, softcap=None)
        logprobs, _ = head.score(hidden.clone().requires_grad_(), targets, torch.ones(9), at_once=4)
        (logprobs * torch.arange(9)).sum().backward()
        assert len(seen) == hooked and linear.weight.grad is not None
        slopes.append(linear.weight.grad)
        if handle is not None:
            handle.remove()
    assert torch.allclose(*slopes, atol=1e-5)


def test_hooks_that_would_not_fire_keep_a_body_out_of_the_walk() -> None:
    policy = tiny()
    body = policy.body.get_decoder()
    assert fused.why_not(body) is None and Unrolled.serves(policy.body)
    handle = body.layers[1].mlp.register_forward_hook(lambda *given: None)
    assert "hooks" in (fused.why_not(body) or "")
    handle.remove()
    handle = body.layers[1].register_forward_hook(lambda *given: None)
    assert fused.why_not(body) is None and not Unrolled.serves(policy.body)
    handle.remove()
    body.layers[0].forward = lambda *given: None
    assert "replaced" in (fused.why_not(body) or "")
