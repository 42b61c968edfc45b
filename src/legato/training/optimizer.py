"""AdamW with float32 master weights, gradient clipping and a schedule. Weights are updated in place from their masters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.fields import choice, flag, integer, number, pair
from legato.core.settings import settings
from legato.errors import InputError
from legato.training.memory.model import OFFLOADED_TOGETHER
from legato.training.pieces import Division, Piece, Whole
from legato.training.saved import SavedState, SavedTensors


@settings()
class Schedule:
    """The learning rate of each update, as a share of the peak: a linear rise, then constant, linear or cosine."""

    schedule: str = choice(
        "constant",
        "linear",
        "cosine",
        default="constant",
        says="The learning rate after the warm-up: constant, or falling to final_lr_share at the last update.",
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

    lr: float = number(
        default=1e-6, says="The learning rate; if it is not set, ten times as high with policy.lora.", above=0.0, maximum=1.0
    )
    value_lr: float | None = number(
        default=None,
        says="The learning rate of the value head (ppo); absent: that of the policy.",
        above=0.0,
        maximum=1.0,
        optional=True,
    )
    weight_decay: float = number(
        default=0.0, says="AdamW's weight decay, on matrices only: norms and biases keep their scale.", minimum=0.0
    )
    betas: tuple[float, float] = pair(default=(0.9, 0.95), says="Adam's betas.", minimum=0.0, below=1.0)
    epsilon: float = number(
        default=1e-8,
        says="Adam's epsilon, at most 0.001. The clip of the ratio is algorithm.objective.trust.clip.",
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
    """AdamW on master weights: float32 copies of 16-bit weights (or copies on the host), else the weights themselves.

    With several ranks each has the masters and moments of its pieces (`pieces.py`).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        *,
        total_updates: int,
        division: Division | None = None,
    ) -> None:
        if not parameters:
            raise InputError("nothing is left to train: policy.frozen covers every parameter")
        self.settings, self.total_updates = settings, total_updates
        self.weights = dict(parameters)
        for weight in self.weights.values():
            # Gradients of micro-batches accumulate in float32, whatever the dtype of the weights.
            if type(weight) is nn.Parameter:
                weight.grad_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.division = Whole(self.weights) if division is None else division
        self.masters = {name: self._master(piece.tensor) for name, piece in self._pieces()}
        self.inner = _build_optimizer(self._groups(), settings)
        self._buffers: dict[torch.dtype, Tensor] = {}
        """Host memory through which gradients and weights pass where masters are offloaded, by dtype."""
        self.updates = 0
        self.scale = 1.0
        """A factor on every learning rate: a recovery lowers it."""

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        """The pieces of this rank that hold anything."""
        return ((name, piece) for name, piece in self.division.pieces.items() if piece.stop > piece.start)

    def _master(self, weight: Tensor) -> Tensor:
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        if not is_half and not self.settings.offload_optimizer:
            return weight
        device = torch.device("cpu") if self.settings.offload_optimizer else weight.device
        exact = torch.promote_types(weight.dtype, torch.float32)
        # 16 bits are copied to the host and converted there, by all cores.
        return weight.detach().to(device, copy=True).to(exact).requires_grad_()

    def _groups(self) -> list[dict[str, Any]]:
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, master in self.masters.items():
            is_matrix = self.division.pieces[name].is_matrix
            groups.setdefault((name.startswith("value_head."), is_matrix), []).append(master)
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

        An update whose gradient is not finite is skipped, but the schedule moves on. Nothing here waits for a GPU unless the
        masters are offloaded: the fused optimizer reads the clip and the decision to skip from the device.
        """
        summed = self.division.gradients()
        gradients = {name: summed[name] for name in self.masters}
        del summed
        norm = self.division.norm(gradients)
        applied, clip = norm.isfinite(), self.settings.gradient_clip
        share = self.scale * self.settings.share(self.updates, self.total_updates)
        for group in self.inner.param_groups:
            group["lr"] = group["peak"] * share
        if self.settings.optimizer == "adamw":
            # The fused kernel divides gradients by grad_scale and skips the update if found_inf is 1. Both are float32. They
            # are copied to the masters here: AdamW would copy from a GPU without waiting, and the host read what is not
            # there yet.
            device = next(iter(self.masters.values())).device if self.masters else norm.device
            scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else norm.new_ones(())
            self.inner.grad_scale = scale.to(device, torch.float32)
            self.inner.found_inf = (~applied).to(device, torch.float32)
            self._step_all(gradients)
        elif bool(applied):
            if clip and float(norm) > clip:
                torch._foreach_mul_(list(gradients.values()), clip / (float(norm) + 1e-6))
            self._step_all(gradients)
        self.updates += 1
        for weight in self.weights.values():
            weight.grad = None
        return norm, applied

    def _step_all(self, gradients: dict[str, Tensor]) -> None:
        """Step the masters and copy them to the weights; a few at a time where they are offloaded.

        AdamW leaves masters alone that have no gradient, so the host holds the gradients of those few only.
        """
        for names in self._batches():
            if self.settings.offload_optimizer:
                self._fetch_gradients(names, gradients)
            else:
                for name in names:
                    self.masters[name].grad = gradients.pop(name).to(self.masters[name].dtype)
            self.inner.step()
            for name in names:
                self.masters[name].grad = None
            self._copy_back(names)
        self.division.publish()

    def _batches(self) -> list[list[str]]:
        """The names of masters that are stepped together: all of them, or about a gigabyte if they are offloaded."""
        if not self.settings.offload_optimizer:
            return [list(self.masters)]
        batches, room = [list[str]()], OFFLOADED_TOGETHER
        for name, master in self.masters.items():
            if batches[-1] and master.numel() > room:
                batches.append([])
                room = OFFLOADED_TOGETHER
            batches[-1].append(name)
            room -= master.numel()
        return batches

    def _fetch_gradients(self, names: Sequence[str], gradients: dict[str, Tensor]) -> None:
        """Give offloaded masters their gradients, which lie in a buffer of the host until the next call."""
        if not names:
            return
        masters = [self.masters[name] for name in names]
        device = self.division.pieces[names[0]].tensor.device
        for name, master, space in zip(names, masters, self._spaces(masters, device), strict=True):
            master.grad = space.copy_(gradients.pop(name), non_blocking=True)
            self.weights[name].grad = None
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _spaces(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Host memory of the shape and dtype of each tensor, which a later call returns again."""
        self._buffers = self._buffers or self._make_buffers(device)
        spaces, used = list[Tensor](), dict[torch.dtype, int]()
        for tensor in tensors:
            start = used.get(tensor.dtype, 0)
            used[tensor.dtype] = start + tensor.numel()
            spaces.append(self._buffers[tensor.dtype][start : used[tensor.dtype]].view(tensor.shape))
        return spaces

    def _make_buffers(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Host memory for the gradients and the weights of the largest batch, by dtype.

        It is pinned if weights are on a GPU: copies from and to other memory are several times as slow. torch rounds pinned
        memory up to a power of two and never gives it back, so all of it is one piece, and made once.
        """
        most = dict[torch.dtype, int]()
        for names in self._batches():
            for tensors in ([self.masters[name] for name in names], [self.division.pieces[name].tensor for name in names]):
                for dtype in {tensor.dtype for tensor in tensors}:
                    count = sum(tensor.numel() for tensor in tensors if tensor.dtype == dtype)
                    most[dtype] = max(most.get(dtype, 0), count)
        # The widest first, so that every dtype begins at a multiple of its size.
        ordered = sorted(most, key=lambda dtype: -dtype.itemsize)
        sizes = [most[dtype] * dtype.itemsize for dtype in ordered]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        return {dtype: part.view(dtype) for dtype, part in zip(ordered, torch.split(memory, sizes), strict=True)}

    @torch.no_grad()
    def _copy_back(self, names: Sequence[str]) -> None:
        pieces = self.division.pieces
        copied = [name for name in names if self.masters[name] is not pieces[name].tensor]
        weights, masters = [pieces[name].tensor for name in copied], [self.masters[name] for name in copied]
        if not copied:
            return
        if not self.settings.offload_optimizer:
            torch._foreach_copy_(weights, masters)
            return
        # Rounded on the host, by all cores. The next gradients come on the same stream, after these copies.
        for weight, master, space in zip(weights, masters, self._spaces(weights, weights[0].device), strict=True):
            weight.copy_(space.copy_(master), non_blocking=True)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state for a checkpoint: tensors by name (masters and moments) and plain numbers.

        Keys are `kind|weight`, or `kind|weight|start` of a piece that begins at the number `start` of the flat weight.
        """
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {"updates": self.updates, "scale": self.scale}
        for name, master in self.masters.items():
            piece = self.division.pieces[name]
            place = name if piece.is_whole else f"{name}|{piece.start}"
            if master is not piece.tensor or piece.is_master:
                tensors[f"master|{place}"] = master.detach()
            for key, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}|{place}"] = value
                else:
                    numbers[f"{key}|{place}"] = value
        return tensors, numbers

    def load(self, tensors: SavedTensors | Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Load a state that any number of ranks saved; the weights must be loaded before."""
        saved = SavedState(tensors if isinstance(tensors, SavedTensors) else SavedTensors(tensors), numbers)
        self.updates, self.scale = int(numbers["updates"]), float(numbers.get("scale", 1.0))
        # The 8-bit optimizer has different state for small and large weights, so its entries are not checked.
        wanted = {"step", "exp_avg", "exp_avg_sq"} if self.settings.optimizer == "adamw" else set[str]()
        for name, master in self.masters.items():
            piece, kinds = self.division.pieces[name], saved.kinds(name)
            if (master is not piece.tensor or piece.is_master) and "master" not in kinds:
                raise InputError(f"the optimizer state has no 'master|{name}': it was saved with another dtype or offload")
            lacking = wanted - kinds
            if self.updates and (lacking or not kinds - {"master"}):
                raise InputError(f"the optimizer state of {name} lacks {', '.join(sorted(lacking)) or 'everything'}")
        for name, master in self.masters.items():
            piece = self.division.pieces[name]
            if master is not piece.tensor or piece.is_master:
                with torch.no_grad():
                    master.copy_(saved.read("master", name, piece).reshape(master.shape))
            # A state from before the first update has no moments: the current ones are removed.
            self.inner.state.pop(master, None)
            moments = {kind: saved.read(kind, name, piece) for kind in sorted(saved.kinds(name) - {"master"})}
            if moments:
                self.inner.state[master] = {
                    kind: _like(value, master).to(master.device, copy=True) if isinstance(value, Tensor) else value
                    for kind, value in moments.items()
                }


def _like(value: Tensor, master: Tensor) -> Tensor:
    """A moment in the shape of its master; other tensors of a state (step, tables of 8 bits) have a shape of their own."""
    return value.reshape(master.shape) if value.numel() == master.numel() and value.dim() else value


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
