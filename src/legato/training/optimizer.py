"""AdamW with float32 master weights, gradient clipping and a schedule. Weights are updated in place from their masters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.fields import choice, flag, integer, number, pair
from legato.core.settings import settings
from legato.errors import InputError


@settings()
class Schedule:
    """The learning rate of each update, as a share of the peak: a linear rise, then constant, linear or cosine."""

    schedule: str = choice(
        "constant",
        "linear",
        "cosine",
        default="constant",
        says="How the learning rate goes on after the warm-up, down to final_lr_share at the last update.",
    )
    warm_up_updates: int = integer(
        default=0,
        says="Updates over which the learning rate rises from 0; in a run that has no more than these, all but the last.",
        minimum=0,
    )
    final_lr_share: float = number(
        default=0.0,
        says="The share of the learning rate that is left at the end of a falling schedule.",
        minimum=0.0,
        maximum=1.0,
    )

    def warm_up(self, total: int) -> int:
        """The number of warm-up updates in a run of `total` updates. The last update always has the peak learning rate."""
        return min(self.warm_up_updates, max(0, total - 1))

    def share(self, update: int, total: int) -> float:
        """The share of the peak learning rate at update 0, 1, 2 ... of `total`."""
        warm_up = self.warm_up(total)
        if update < warm_up:
            return (update + 1) / warm_up
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (update - warm_up) / max(1, total - warm_up))
        falling = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final_lr_share + (1 - self.final_lr_share) * falling


@settings()
class OptimizerSettings(Schedule):
    """The settings of the optimizer and its schedule."""

    lr: float = number(default=1e-6, says="The learning rate.", above=0.0, maximum=1.0)
    value_lr: float | None = number(
        default=None,
        says="The learning rate of the value head (ppo); absent: that of the policy.",
        above=0.0,
        maximum=1.0,
        optional=True,
    )
    weight_decay: float = number(
        default=0.0, says="Of AdamW. On matrices only: norms and biases keep their scale.", minimum=0.0
    )
    betas: tuple[float, float] = pair(default=(0.9, 0.95), says="Of Adam.", minimum=0.0, below=1.0)
    epsilon: float = number(
        default=1e-8,
        says="Of Adam, at most 0.001. The clip of the ratio is algorithm.objective.trust.clip.",
        above=0.0,
    )
    gradient_clip: float = number(default=1.0, says="The largest norm of the gradient; 0: no limit.", minimum=0.0)
    optimizer: str = choice(
        "adamw", "adamw-8bit", default="adamw", says="'adamw-8bit' needs bitsandbytes and a GPU.", resume="refused"
    )
    offload_optimizer: bool = flag(
        default=False,
        says="Whether the state of the optimizer is kept in the memory of the CPU.",
        resume="refused",
    )


class Optimizer:
    """AdamW on master weights: float32 copies of 16-bit weights (or copies on the host), else the weights themselves."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, total_updates: int) -> None:
        if not parameters:
            raise InputError("nothing is left to train: policy.frozen covers every parameter")
        self.settings, self.total_updates = settings, total_updates
        self.weights = dict(parameters)
        for weight in self.weights.values():
            # Gradients of micro-batches accumulate in float32, whatever the dtype of the weights.
            weight.grad_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.masters = {name: self._master(weight) for name, weight in self.weights.items()}
        self.inner = _build_optimizer(self._groups(), settings)
        self.updates = 0
        self.scale = 1.0
        """A factor on every learning rate: a recovery lowers it."""

    def _master(self, weight: nn.Parameter) -> Tensor:
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        if not is_half and not self.settings.offload_optimizer:
            return weight
        device = torch.device("cpu") if self.settings.offload_optimizer else weight.device
        return weight.detach().to(device, torch.promote_types(weight.dtype, torch.float32), copy=True).requires_grad_()

    def _groups(self) -> list[dict[str, Any]]:
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, master in self.masters.items():
            groups.setdefault((name.startswith("value_head."), master.dim() >= 2), []).append(master)
        return [
            {
                "params": members,
                "weight_decay": self.settings.weight_decay if decays else 0.0,
                "peak": self.settings.lr if not value or self.settings.value_lr is None else self.settings.value_lr,
            }
            for (value, decays), members in groups.items()
        ]

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.settings.lr * self.scale * self.settings.share(self.updates, self.total_updates)

    def step(self) -> tuple[Tensor, Tensor]:
        """One update from the gradients in the weights: (gradient norm before clipping, whether it was applied).

        An update whose gradient is not finite is skipped, but the schedule moves on. Nothing here waits for a GPU: the
        fused optimizer reads the clip and the decision to skip from the device.
        """
        gradients = {name: self._gradient(name) for name in self.weights}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        applied, clip = norm.isfinite(), self.settings.gradient_clip
        for name, master in self.masters.items():
            master.grad = gradients[name]
        share = self.scale * self.settings.share(self.updates, self.total_updates)
        for group in self.inner.param_groups:
            group["lr"] = group["peak"] * share
        if self.settings.optimizer == "adamw":
            # The fused kernel divides gradients by grad_scale and skips the update if found_inf is 1. Both are float32.
            self.inner.grad_scale = ((norm + 1e-6) / clip).clamp(min=1.0).float() if clip else norm.new_ones(()).float()
            self.inner.found_inf = (~applied).float()
            self.inner.step()
            self._copy_back()
        elif bool(applied):
            if clip and float(norm) > clip:
                torch._foreach_mul_(list(gradients.values()), clip / (float(norm) + 1e-6))
            self.inner.step()
            self._copy_back()
        self.updates += 1
        for name, weight in self.weights.items():
            weight.grad = None
            self.masters[name].grad = None
        return norm, applied

    def _gradient(self, name: str) -> Tensor:
        weight, master = self.weights[name], self.masters[name]
        if weight.grad is None:
            # An update without any row still steps with a gradient of 0: momentum moves on.
            return torch.zeros_like(master)
        return weight.grad.detach().to(master.device, master.dtype)

    @torch.no_grad()
    def _copy_back(self) -> None:
        copied = [name for name, master in self.masters.items() if master is not self.weights[name]]
        if copied:
            torch._foreach_copy_([self.weights[name] for name in copied], [self.masters[name] for name in copied])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state for a checkpoint: tensors by name (masters and moments) and plain numbers."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {"updates": self.updates, "scale": self.scale}
        for name, master in self.masters.items():
            if master is not self.weights[name]:
                tensors[f"master|{name}"] = master.detach()
            for key, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}|{name}"] = value
                else:
                    numbers[f"{key}|{name}"] = value
        return tensors, numbers

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Load a saved state; the weights must be loaded before."""
        expected = {f"master|{name}" for name in self.masters if self.masters[name] is not self.weights[name]}
        missing = expected - set(tensors)
        if missing:
            raise InputError(
                f"the optimizer state has no {sorted(missing)[0]!r}: it was saved with another dtype or offload"
            )
        self.updates, self.scale = int(numbers["updates"]), float(numbers.get("scale", 1.0))
        states: dict[str, dict[str, Any]] = {}
        for key, value in [*tensors.items(), *numbers.items()]:
            kind, _, owner = key.partition("|")
            if owner and kind != "master":
                states.setdefault(owner, {})[kind] = value
        # The 8-bit optimizer has different state for small and large weights, so its entries are not checked.
        wanted = {"step", "exp_avg", "exp_avg_sq"} if self.settings.optimizer == "adamw" else set[str]()
        for name in self.masters:
            lacking = wanted - set(states.get(name, {}))
            if self.updates and (lacking or name not in states):
                raise InputError(f"the optimizer state of {name} lacks {', '.join(sorted(lacking)) or 'everything'}")
        for name, master in self.masters.items():
            if master is not self.weights[name]:
                with torch.no_grad():
                    master.copy_(tensors[f"master|{name}"])
            # A state from before the first update has no moments: the current ones are removed.
            self.inner.state.pop(master, None)
            if states.get(name):
                self.inner.state[master] = {
                    kind: value.to(master.device, copy=True) if isinstance(value, Tensor) else value
                    for kind, value in states[name].items()
                }


def _build_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> Any:
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.epsilon}
    if settings.optimizer == "adamw-8bit":
        return check_eight_bit()(groups, **common)
    return torch.optim.AdamW(groups, fused=True, **common)


def check_eight_bit() -> Any:
    """The 8-bit AdamW class of bitsandbytes; InputError if it is not installed."""
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError("training.optimizer = 'adamw-8bit' needs bitsandbytes: pip install bitsandbytes") from None
    return AdamW8bit
