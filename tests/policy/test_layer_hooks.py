"""Fused layers are called as modules: hooks fire, checkpointing runs once, weights with hooks get autograd's gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from legato.core.outcome import Coefficients
from legato.policy import policy as policy_module
from legato.policy.head.head import Head, _Product
from legato.policy.layers import fused
from legato.policy.layers.accumulate import may_write_gradients
from legato.policy.layers.unrolled import Unrolled
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Piece, Policy, local_part
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


def accumulate_update(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs in an update, and the gradient of a fixed weighted sum of them."""
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))

    def respond(piece: Piece) -> Coefficients:
        return Coefficients(logprobs=weight[piece.rows] * (piece.channels.logprobs != 0))

    policy.model.zero_grad()
    channels, _ = accumulate(policy, texts(), ROWS, respond)
    return channels.logprobs, {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_hooks_at_a_layer_fire_and_see_the_hidden_state_of_the_model_itself(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    outputs, backwards = list[Tensor](), list[Tensor]()

    def accumulate_with_hooks() -> tuple[Tensor, dict[str, Tensor]]:
        layer = layers_of(policy)[1]
        handles = [
            layer.register_forward_hook(lambda _, inputs, output: outputs.append(output.detach())),
            layer.register_full_backward_hook(lambda _, to_input, to_output: backwards.append(to_output[0])),
        ]
        update = accumulate_update(policy)
        for handle in handles:
            handle.remove()
        return update

    accumulate_with_hooks()
    (own,), (to_own,) = outputs, backwards
    install(patch)
    plain, plain_gradients = accumulate_update(policy)
    outputs.clear()
    backwards.clear()
    logprobs, gradients = accumulate_with_hooks()
    assert len(outputs) == len(backwards) == 1
    assert torch.allclose(outputs[0], own[0], atol=1e-5) and torch.allclose(backwards[0], to_own[0], atol=1e-5)
    assert torch.equal(logprobs, plain) and largest_difference(gradients, plain_gradients) < 1e-6


def test_a_hook_that_changes_the_output_of_a_layer_takes_effect(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    plain = policy.score(texts(), ROWS).logprobs
    handle = layers_of(policy)[0].register_forward_hook(lambda _, inputs, output: 0.5 * output)
    expected = policy.score(texts(), ROWS).logprobs
    install(patch)
    logprobs = policy.score(texts(), ROWS).logprobs
    handle.remove()
    assert torch.allclose(logprobs, expected, atol=1e-5) and not torch.allclose(logprobs, plain, atol=1e-3)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_a_checkpointed_layer_runs_forward_exactly_twice(model: str, patch: pytest.MonkeyPatch) -> None:
    loading = Loading(device="cpu", dtype="float32", tiny=SMALL, gradient_checkpointing=True)
    policy = load_policy(model, loading)
    install(patch)
    runs = dict.fromkeys(range(len(layers_of(policy))), 0)
    compute = fused._compute_layer

    def count_run(parts: fused.Parts, number: int, *inputs: Any) -> tuple[Tensor, Tensor]:
        runs[number] += 1
        return compute(parts, number, *inputs)

    patch.setattr(fused, "_compute_layer", count_run)
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


def test_only_a_layer_with_a_hook_at_a_weight_leaves_its_gradients_to_autograd(patch: pytest.MonkeyPatch) -> None:
    policy = tiny()
    install(patch)
    whole = list[Any]()
    parts_class = fused.Parts

    def make_parts(**parts: Any) -> fused.Parts:
        at_once = parts["whole"]
        return parts_class(**{**parts, "whole": lambda layer, *inputs: whole.append(layer) or at_once(layer, *inputs)})

    patch.setattr("legato.policy.policy.Parts", make_parts)
    plain, plain_gradients = accumulate_update(policy)
    assert whole == layers_of(policy)
    whole.clear()
    weight, hook_gradients = layers_of(policy)[0].self_attn.q_proj.weight, list[Tensor]()
    handle = weight.register_hook(lambda gradient: hook_gradients.append(gradient.clone()))
    logprobs, gradients = accumulate_update(policy)
    handle.remove()
    assert len(hook_gradients) == 1 and torch.equal(hook_gradients[0], weight.grad)
    assert whole == layers_of(policy)[1:]
    assert torch.equal(logprobs, plain) and largest_difference(gradients, plain_gradients) < 1e-5


def test_may_write_gradients_refuses_hooks_subclasses_and_sharding() -> None:
    class Other(nn.Parameter):
        pass

    def weight() -> nn.Parameter:
        return nn.Parameter(torch.zeros(2))

    hooked, counted, frozen = weight(), weight(), Other(torch.zeros(2), requires_grad=False)
    hooked.register_hook(lambda gradient: gradient)
    counted.register_post_accumulate_grad_hook(lambda parameter: None)
    # FSDP2 reads the gradients of gathered weights after the backward; FSDP1 learns of them from autograd.
    gathered = type("FSDPLinear", (type("FSDPModule", (), {}), nn.Linear), {})(2, 2)
    sharded = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    plain = nn.Linear(2, 2)
    assert may_write_gradients([weight(), None, frozen], plain)
    assert not may_write_gradients([weight(), hooked], plain)
    assert not may_write_gradients([counted], plain)
    assert not may_write_gradients([Other(torch.zeros(2))], plain)
    assert not may_write_gradients([weight()], plain, sharded)
    assert may_write_gradients([weight()], plain, gathered)


def test_sharded_layers_get_the_gradients_of_whole_layers(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers the weights of a layer before it is called, and again before its backward; hooks tell it when."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    policy, sharded = tiny(), tiny()
    install(patch)
    expected, expected_gradients = accumulate_update(policy)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in layers_of(sharded):
            fully_shard(layer, mesh=mesh)
        logprobs, gradients = accumulate_update(sharded)
        local = {
            name: gradient.to_local() if hasattr(gradient, "to_local") else gradient for name, gradient in gradients.items()
        }
    finally:
        distributed.destroy_process_group()
    assert torch.equal(logprobs, expected)
    assert largest_difference(local, expected_gradients) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_divided_among_ranks_run_whole_and_follow_their_weights(
    checkpointing: bool, patch: pytest.MonkeyPatch
) -> None:
    """`training.shard = "layers"`: each layer is one hand-written function, and is gathered anew after every update."""
    from torch import distributed

    from legato.training.ranks.layers import divide_layers
    from legato.training.ranks.process_group import ProcessGroup

    policy, divided = tiny(gradient_checkpointing=checkpointing), tiny(gradient_checkpointing=checkpointing)
    install(patch)
    expected, expected_gradients = accumulate_update(policy)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        divide_layers(divided, ProcessGroup())
        assert divided.trains_fused, divided.why_not_fused()
        whole, run_whole = list[Any](), policy_module.run_plain_layer

        def counted(layer: Any, *rest: Any, **options: Any) -> Any:
            whole.append(layer)
            return run_whole(layer, *rest, **options)

        patch.setattr(policy_module, "run_plain_layer", counted)
        divided.score(texts(), ROWS)
        # Before the first backward of a step FSDP2 has gathered for scoring only.
        for _ in range(2):
            whole.clear()
            logprobs, gradients = accumulate_update(divided)
            assert whole[: len(layers_of(divided))] == layers_of(divided)
            local = {name: local_part(gradient) for name, gradient in gradients.items()}
            assert torch.equal(logprobs, expected) and largest_difference(local, expected_gradients) < 1e-6
        for each in (policy, divided):
            for name, weight in each.parameters().items():
                if ".layers." in name:
                    local_part(weight.data).mul_(1.5)
        assert torch.equal(divided.score(texts(), ROWS).logprobs, policy.score(texts(), ROWS).logprobs)
        assert not torch.equal(policy.score(texts(), ROWS).logprobs, expected)
        assert not any("forward" in vars(module) for module in (divided.body.get_decoder(), *layers_of(divided)))
    finally:
        distributed.destroy_process_group()


def test_the_head_leaves_the_gradient_of_a_hooked_weight_to_autograd(patch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(0)
    linear = nn.Linear(16, 40, bias=False)
    hidden, targets = torch.randn(9, 16, generator=source), torch.randint(0, 40, (9,), generator=source)
    patch.setattr(Head, "_product", lambda self, hidden: _Product(weight=linear.weight))
    gradients = []
    for hooked in (False, True):
        linear.weight.grad, hook_gradients = None, list[Tensor]()
        handle = linear.weight.register_hook(hook_gradients.append) if hooked else None
        head = Head(linear=linear, scale=1.0, softcap=None)
        logprobs, _ = head.score(hidden.clone().requires_grad_(), targets, torch.ones(9), at_once=4)
        (logprobs * torch.arange(9)).sum().backward()
        assert len(hook_gradients) == hooked and linear.weight.grad is not None
        gradients.append(linear.weight.grad)
        if handle is not None:
            handle.remove()
    assert torch.allclose(*gradients, atol=1e-5)


def test_a_body_with_hooks_that_would_not_fire_is_not_fused() -> None:
    policy = tiny()
    body = policy.body.get_decoder()
    assert fused.why_not(body) is None and Unrolled.serves(policy.body)
    handle = body.layers[1].mlp.register_forward_hook(lambda *inputs: None)
    assert "hooks" in (fused.why_not(body) or "")
    handle.remove()
    handle = body.layers[1].register_forward_hook(lambda *inputs: None)
    assert fused.why_not(body) is None and not Unrolled.serves(policy.body)
    handle.remove()
    body.layers[0].forward = lambda *inputs: None
    assert "replaced" in (fused.why_not(body) or "")
