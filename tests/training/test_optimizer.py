"""The optimizer: float32 masters, clipping, decay, schedule, state, and gradients that are not numbers."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legato.training import optimizer as module
from legato.training.optimizer import Optimizer, OptimizerSettings, Schedule

TOTAL = 12


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.matrix": (5, 4), "body.norm": (4,), "body.experts": (3, 4, 2), "value_head.linear.weight": (1, 4)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32, size: float = 0.01) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: (size * torch.randn(w.shape, generator=generator)).to(dtype) for name, w in weights().items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        # An optimizer keeps gradients in float32, whatever the weights are; the same numbers then arrive in that.
        parameter.grad = values[name].clone().to(parameter.grad_dtype or parameter.dtype)


def make_optimizer(parameters: Mapping[str, nn.Parameter], **changes: Any) -> Optimizer:
    return Optimizer(parameters, OptimizerSettings(**{"lr": 1e-2, **changes}), total_updates=TOTAL)


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], within: float = 1e-6) -> bool:
    return all(float((left[name] - right[name]).detach().abs().max()) <= within for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offload", [False, True])
def test_weights_follow_a_plain_float32_adamw(dtype: torch.dtype, offload: bool) -> None:
    mine = weights(dtype)
    plain = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in mine.items()}
    optimizer = make_optimizer(mine, lr=1e-4, offload_optimizer=offload, weight_decay=0.0)
    reference = torch.optim.AdamW(plain.values(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(60):
        values = gradients(step, dtype)
        set_gradients(mine, values)
        set_gradients(plain, {name: value.float() for name, value in values.items()})
        optimizer.step()
        reference.step()
    for name, weight in mine.items():
        assert weight.dtype == dtype
        assert torch.allclose(optimizer.masters[name].detach(), plain[name].detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(weight.detach(), optimizer.masters[name].detach().to(dtype))


def test_updates_too_small_for_16_bits_add_up_in_the_masters() -> None:
    mine = {"body.matrix": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    optimizer = make_optimizer(mine, lr=1e-4)
    for _ in range(80):
        mine["body.matrix"].grad = torch.full((2, 2), 0.1)
        optimizer.step()
    assert float(mine["body.matrix"].detach()[0, 0]) < 1.0


def test_masters_on_the_host_change_no_bit() -> None:
    here, there = weights(), weights()
    near, far = make_optimizer(here, weight_decay=0.1), make_optimizer(there, weight_decay=0.1, offload_optimizer=True)
    for step in range(20):
        for parameters, optimizer in ((here, near), (there, far)):
            set_gradients(parameters, gradients(step))
            optimizer.step()
    assert equal(here, there)


def test_offloaded_masters_of_several_dtypes_pass_through_one_buffer_each() -> None:
    """Divided layers are float32 beside 16-bit weights; a batch may be smaller than the one before."""
    here, there = ({**weights(torch.bfloat16), "exact": nn.Parameter(torch.ones(3, 5))} for _ in range(2))
    near, far = make_optimizer(here), make_optimizer(there, offload_optimizer=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OFFLOADED_TOGETHER", 20)
        for step in range(3):
            values = {**gradients(step, torch.bfloat16), "exact": torch.full((3, 5), 0.1 * step)}
            for parameters, optimizer in ((here, near), (there, far)):
                set_gradients(parameters, {name: value.clone() for name, value in values.items()})
                optimizer.step()
        batches = far._batches()
    assert equal(here, there) and len(batches) > 1
    largest = max(sum(far.masters[name].numel() for name in names) for names in batches)
    half = max(sum(there[name].numel() for name in names if name != "exact") for names in batches)
    assert {dtype: len(buffer) for dtype, buffer in far._buffers.items()} == {torch.float32: largest, torch.bfloat16: half}
    pieces = {buffer.untyped_storage().data_ptr() for buffer in far._buffers.values()}
    assert len(pieces) == 1, "torch rounds each piece of pinned memory up to a power of two"


def test_weights_keep_their_address() -> None:
    for dtype, offload in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        mine = weights(dtype)
        before = {name: weight.data_ptr() for name, weight in mine.items()}
        optimizer = make_optimizer(mine, offload_optimizer=offload)
        set_gradients(mine, gradients(0, dtype))
        optimizer.step()
        optimizer.load(*optimizer.state())
        assert {name: weight.data_ptr() for name, weight in mine.items()} == before


def test_a_gradient_is_clipped_as_a_whole_and_its_size_reported_before() -> None:
    mine, plain = weights(), weights()
    values = gradients(0, size=5.0)
    norm = math.sqrt(sum(float(value.square().sum()) for value in values.values()))
    optimizer, free = (
        make_optimizer(mine, gradient_clip=0.7, epsilon=1.0),
        make_optimizer(plain, gradient_clip=0.0, epsilon=1.0),
    )
    set_gradients(mine, values)
    set_gradients(plain, {name: 0.7 / norm * value for name, value in values.items()})
    size, applied = optimizer.step()
    free.step()
    assert applied and abs(size - norm) < 1e-4 * norm
    assert close(mine, plain) and not equal(mine, weights())


def test_a_small_gradient_and_a_clip_of_0_leave_the_gradient_alone() -> None:
    for clip in (0.0, 1e6):
        mine, plain = weights(), weights()
        optimizer = make_optimizer(mine, gradient_clip=clip, epsilon=1.0)
        reference = torch.optim.AdamW(plain.values(), lr=1e-2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
        set_gradients(mine, gradients(0, size=50.0))
        set_gradients(plain, gradients(0, size=50.0))
        optimizer.step()
        reference.step()
        assert close(mine, plain)


def test_only_matrices_decay() -> None:
    mine = weights()
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    optimizer = make_optimizer(mine, lr=0.1, weight_decay=0.5)
    set_gradients(mine, {name: torch.zeros_like(weight) for name, weight in mine.items()})
    optimizer.step()
    for name, weight in mine.items():
        share = 1.0 if weight.dim() < 2 else 1 - 0.1 * 0.5
        assert torch.allclose(weight.detach(), share * before[name], rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_dropped_whole_and_the_schedule_moves_on(dtype: torch.dtype, bad: float) -> None:
    mine = weights(dtype)
    optimizer = make_optimizer(mine, schedule="linear", warm_up_updates=2)
    set_gradients(mine, gradients(0, dtype))
    optimizer.step()
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    tensors = {key: value.clone() for key, value in optimizer.state()[0].items()}
    values = gradients(1, dtype)
    values["body.norm"][2] = bad
    set_gradients(mine, values)
    size, applied = optimizer.step()
    assert not applied and not math.isfinite(size)
    assert equal(mine, before) and equal(tensors, optimizer.state()[0])
    assert optimizer.updates == 2 and optimizer.lr == 1e-2 * optimizer.settings.share(2, TOTAL)
    assert all(weight.grad is None for weight in mine.values())


def test_an_update_without_gradients_still_steps_with_zeros() -> None:
    mine, plain = weights(), weights()
    one, two = make_optimizer(mine), make_optimizer(plain)
    set_gradients(mine, gradients(0))
    set_gradients(plain, gradients(0))
    one.step()
    two.step()
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    size, applied = one.step()
    set_gradients(plain, {name: torch.zeros_like(weight) for name, weight in plain.items()})
    two.step()
    assert size == 0.0 and applied and one.updates == 2
    assert equal(mine, plain) and not equal(mine, before)


@pytest.mark.parametrize(("dtype", "offload"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_a_saved_state_goes_on_to_the_bit(dtype: torch.dtype, offload: bool) -> None:
    schedule = {"schedule": "cosine", "warm_up_updates": 3}
    straight = weights(dtype)
    first = make_optimizer(straight, **schedule, offload_optimizer=offload, weight_decay=0.1)
    for step in range(5):
        set_gradients(straight, gradients(step, dtype))
        first.step()
    tensors, numbers = first.state()
    saved = {key: value.clone() for key, value in tensors.items()}
    resumed = {name: nn.Parameter(weight.detach().clone()) for name, weight in straight.items()}
    second = make_optimizer(resumed, **schedule, offload_optimizer=offload, weight_decay=0.1)
    second.load(saved, dict(numbers))
    for step in range(5, 10):
        for parameters, optimizer in ((straight, first), (resumed, second)):
            set_gradients(parameters, gradients(step, dtype))
            optimizer.step()
    assert second.updates == 10 and equal(straight, resumed) and equal(first.state()[0], second.state()[0])


def test_a_state_from_before_the_first_update_forgets_the_moments() -> None:
    """A run that is rolled back to its beginning begins: with the moments of later steps it would go elsewhere."""
    fresh, used = weights(), weights()
    one, two = make_optimizer(fresh), make_optimizer(used)
    start = {name: weight.detach().clone() for name, weight in used.items()}
    beginning = two.state()
    for step in range(3):
        set_gradients(used, gradients(step))
        two.step()
    with torch.no_grad():
        for name, weight in used.items():
            weight.copy_(start[name])
    two.load(*beginning)
    assert not two.state()[0]
    for parameters, optimizer in ((fresh, one), (used, two)):
        set_gradients(parameters, gradients(7))
        optimizer.step()
    assert equal(fresh, used) and equal(one.state()[0], two.state()[0])


def test_a_state_without_masters_is_refused_where_they_are_needed() -> None:
    plain = make_optimizer(weights())
    with pytest.raises(ValueError, match="master"):
        make_optimizer(weights(torch.bfloat16)).load(*plain.state())


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing.*train"):
        make_optimizer({})


def test_the_value_head_may_have_a_rate_of_its_own() -> None:
    mine = weights()
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    optimizer = make_optimizer(mine, lr=1e-3, value_lr=1e-1)
    set_gradients(mine, {name: torch.ones_like(weight) for name, weight in mine.items()})
    optimizer.step()
    moved = {name: float((weight.detach() - before[name]).abs().mean()) for name, weight in mine.items()}
    assert abs(moved["body.matrix"] - 1e-3) < 1e-5 and abs(moved["value_head.linear.weight"] - 1e-1) < 1e-3


def test_schedules_rise_linearly_and_then_do_as_their_name_says() -> None:
    for kind in ("constant", "linear", "cosine"):
        schedule = Schedule(schedule=kind, warm_up_updates=4, final_lr_share=0.2)
        assert [schedule.share(update, 14) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert schedule.share(4, 14) == 1.0
    constant = Schedule(schedule="constant", warm_up_updates=4)
    assert [constant.share(update, 14) for update in (4, 14, 99)] == [1.0, 1.0, 1.0]
    linear = Schedule(schedule="linear", warm_up_updates=4, final_lr_share=0.2)
    cosine = Schedule(schedule="cosine", warm_up_updates=4, final_lr_share=0.2)
    assert math.isclose(linear.share(9, 14), 0.6) and math.isclose(cosine.share(9, 14), 0.6)
    assert math.isclose(linear.share(14, 14), 0.2) and math.isclose(cosine.share(14, 14), 0.2)
    assert math.isclose(cosine.share(5, 14), 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 10)))
    assert math.isclose(linear.share(1000, 14), 0.2) and math.isclose(cosine.share(1000, 14), 0.2)


def test_without_warm_up_the_first_update_has_the_whole_rate() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert Schedule(schedule=kind).share(0, 10) == 1.0


def test_a_warm_up_longer_than_the_run_leaves_the_last_update_the_whole_rate() -> None:
    for kind in ("constant", "linear", "cosine"):
        schedule = Schedule(schedule=kind, warm_up_updates=40)
        assert [schedule.share(update, 4) for update in range(4)] == [1 / 3, 2 / 3, 1.0, 1.0]
        assert schedule.share(0, 1) == 1.0
        assert schedule.share(0, 41) == 1 / 40


def test_the_rate_of_each_update_is_the_one_it_is_made_with() -> None:
    mine = {"body.matrix": nn.Parameter(torch.zeros(1, 1))}
    optimizer = make_optimizer(mine, schedule="linear", warm_up_updates=2, lr=1.0, betas=(0.0, 0.0), gradient_clip=0.0)
    for update in range(6):
        assert optimizer.lr == optimizer.settings.share(update, TOTAL)
        before = float(mine["body.matrix"].detach())
        mine["body.matrix"].grad = torch.full((1, 1), 3.0)
        optimizer.step()
        assert math.isclose(
            before - float(mine["body.matrix"].detach()), optimizer.settings.share(update, TOTAL), rel_tol=1e-5
        )
