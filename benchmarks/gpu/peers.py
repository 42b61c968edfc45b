"""The heads of other projects, as B1 to B3 call them: hidden states, weight and targets in; log-probs or a loss out.

Each head comes from its installed package (`carry.sh`); no code is copied here. If a head cannot be imported or run, the
caller stores its error.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TRL_CHUNK = 32768
"""Vocabulary columns per tile, as TRL's trainer sets it."""
WIDE = 0.2
"""The clip band of B2. It is wide, so that rounding clips no row and every head does the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Concatenated responses: N tokens of S sequences."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    owner: Tensor
    """[N]: the sequence of each token."""
    counts: tuple[int, ...]
    lengths: Tensor
    """[S]: the counts, on the device."""
    old: Tensor
    advantages: Tensor
    """[S]"""
    temperature: float
    temperatures: Tensor
    """[N]: the temperature of each token."""

    def even(self) -> tuple[int, int]:
        """Rows and columns of a rectangle that holds these tokens without padding, for heads that take only rectangles."""
        return len(self.counts), len(self.owner) // len(self.counts)


def sequence_loss(batch: Sequences, logprobs: Tensor) -> Tensor:
    """The GSPO loss, as a user writes it on top of a head that returns log-probs."""
    sums = torch.zeros(len(batch.counts), device=logprobs.device, dtype=torch.float32)
    ratio = (sums.index_add(0, batch.owner, logprobs.float() - batch.old) / batch.lengths).exp()
    clipped = ratio.clamp(1 - WIDE, 1 + WIDE)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()


Scorer = Callable[[Sequences], Tensor]
"""Log-probs [N], differentiable."""


def plain(batch: Sequences) -> Tensor:
    """Log-probs [N] in plain torch: all logits in memory, log-softmax in float32."""
    logits = (batch.hidden @ batch.weight.t()).float() / batch.temperature
    return logits.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)


def trl_chunked() -> Scorer:
    function = import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def call(batch: Sequences) -> Tensor:
        logprobs: Tensor = function.apply(
            batch.hidden, batch.weight, None, batch.targets, batch.temperature, TRL_CHUNK, None, 1.0, ("entropy",)
        )[0]
        return logprobs

    return call


def trl_on_logits() -> Scorer:
    function = import_module("trl.trainer.utils").selective_log_softmax_and_entropy

    def call(batch: Sequences) -> Tensor:
        logits = batch.hidden @ batch.weight.t()
        logprobs: Tensor = function(logits, batch.targets, entropy_requires_grad=False, temperature=batch.temperature)[0]
        return logprobs

    return call


def _verl(name: str) -> Any:
    """Import a module of `verl.utils` without importing verl itself, which needs ray, tensordict and hydra."""
    if "verl.utils.device" in sys.modules:
        return import_module(f"verl.utils.{name}")
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    for package in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.experimental"):
        bare = types.ModuleType(package)
        bare.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = bare
    device: Any = types.ModuleType("verl.utils.device")
    device.is_cuda_available = torch.cuda.is_available()
    device.get_device_capability = torch.cuda.get_device_capability
    device.get_device_name = lambda: "cuda" if torch.cuda.is_available() else "cpu"
    device.get_torch_device = lambda: torch.cuda
    sys.modules["verl.utils.device"] = device
    return import_module(f"verl.utils.{name}")


def verl_triton() -> Scorer:
    function = _verl("kernel.linear_cross_entropy").linear_cross_entropy

    def call(batch: Sequences) -> Tensor:
        logprobs: Tensor = function(batch.hidden, batch.weight, batch.targets, batch.temperature, "none")[0]
        return logprobs

    return call


def verl_torch() -> Scorer:
    function = _verl("experimental.torch_functional").FusedLinearForPPOFunction

    def call(batch: Sequences) -> Tensor:
        logprobs: Tensor = function.apply(batch.hidden, batch.weight, batch.targets, batch.temperature, 512)[0]
        return logprobs

    return call


def cce() -> Scorer:
    function = import_module("cut_cross_entropy").linear_cross_entropy

    def call(batch: Sequences) -> Tensor:
        if batch.temperature != 1.0:
            raise ValueError("cut-cross-entropy has no temperature")
        logprobs: Tensor = -function(batch.hidden, batch.weight, batch.targets, reduction="none")
        return logprobs

    return call


SCORERS: dict[str, Callable[[], Scorer]] = {
    "plain torch": lambda: plain,
    "TRL chunked": trl_chunked,
    "TRL on logits": trl_on_logits,
    "verl Triton": verl_triton,
    "verl torch": verl_torch,
    "cut-cross-entropy": cce,
}


def _grpo_arguments() -> dict[str, Any]:
    return {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0}


def liger_grpo() -> Callable[[Sequences], Tensor]:
    """Liger's fused linear GRPO loss: compiled, as shipped; not compiled if this machine cannot compile it."""
    build = import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
    cache: dict[str, Any] = {}

    def call(batch: Sequences) -> Tensor:
        rows, columns = batch.even()
        if not cache:
            cache["loss"] = build(
                **_grpo_arguments(),
                use_ref_model=False,
                epsilon_low=WIDE,
                epsilon_high=WIDE,
                temperature=batch.temperature,
                compiled=batch.hidden.is_cuda,
            )
        arguments = (
            batch.hidden.view(rows, columns, -1),
            batch.weight,
            batch.targets.view(rows, columns),
            torch.ones(rows, columns, device=batch.hidden.device),
            batch.advantages,
        )
        try:
            logprobs: Tensor = cache["loss"](*arguments, old_per_token_logps=batch.old.view(rows, columns))[0]
        except Exception:  # a compiler may raise anything
            if not cache["loss"].compiled:
                raise
            cache["loss"].compiled = False
            logprobs = cache["loss"](*arguments, old_per_token_logps=batch.old.view(rows, columns))[0]
        return logprobs

    return call


def liger_triton() -> Callable[[Sequences], Tensor]:
    """Liger's Triton GRPO loss on logits. It expects one more column of logits than tokens."""
    function = import_module("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def call(batch: Sequences) -> Tensor:
        rows, columns = batch.even()
        states = torch.nn.functional.pad(batch.hidden.view(rows, columns, -1), (0, 0, 0, 1))
        logprobs: Tensor = function(
            states @ batch.weight.t(),
            batch.old.view(rows, columns),
            None,
            batch.targets.view(rows, columns),
            batch.advantages,
            completion_mask=torch.ones(rows, columns, device=states.device),
            temperature=batch.temperature,
            eps_low=WIDE,
            eps_high=WIDE,
            reduce=True,
            **_grpo_arguments(),
        )[0]
        return logprobs

    return call


LOSSES: dict[str, Callable[[], Callable[[Sequences], Tensor]]] = {
    "Liger GRPO": liger_grpo,
    "Liger Triton on logits": liger_triton,
}
