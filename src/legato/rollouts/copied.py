"""An engine that samples from a copy of the policy's weights, which every publish rewrites.

A run needs one where the policy's own weights are divided among ranks, and where the sampler differs on purpose
(`mismatch.py`).
"""

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Engine, Finished, Handle, Limits, Progress, Request
from legato.rollouts.local.select import local_engine
from legato.rollouts.sampling import Sampling


class CopiedEngine(Engine):
    """Samples from a copy of the weights. Subclasses may alter them (`alter`) or hold another dtype."""

    def __init__(
        self,
        policy: Policy,
        rows_at_once: int = 256,
        kv_memory_share: float = 0.5,
        *,
        record_routes: bool = False,
        training_bytes: int = 0,
        dtype: torch.dtype | None = None,
        shared: Collection[str] = (),
    ) -> None:
        """`shared` are names of weights that are not copied: the policy's own, which stay whole."""
        self.name = "local, a copy"
        kept = {id(weight): weight for name, weight in policy.model.named_parameters() if name in shared}
        body = copy.deepcopy(policy.model, dict(kept))
        self._weights: dict[str, Tensor] = {n: weight for n, weight in body.named_parameters() if id(weight) not in kept}
        """The weights of the copy, by name."""
        for weight in self._weights.values():
            # Weights only: buffers such as rotary frequencies stay exact, as they do in a model loaded in 16 bits.
            weight.requires_grad_(False)
            weight.data = weight.data.to(dtype or weight.dtype)
        self._write(policy.model.named_parameters())
        self.engine: Any = local_engine(
            Policy(**policy_fields(policy, body)),
            rows_at_once,
            kv_memory_share=kv_memory_share,
            record_routes=record_routes,
            training_bytes=training_bytes,
        )

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        own: Capabilities = self.engine.capabilities
        # It decodes on the device that trains: there, captured graphs and another thread's kernels do not go together.
        return replace(own, holds_weights=bool(self._weights), in_background=False)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles: list[Handle] = self.engine.submit(requests, sampling, limits)
        return handles

    def poll(self) -> list[Finished]:
        finished: list[Finished] = self.engine.poll()
        return finished

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        progress: Progress = self.engine.decode_briefly(watched)
        return progress

    def reserve(self, prompt_tokens: int, response_tokens: int) -> None:
        self.engine.reserve(prompt_tokens, response_tokens)

    def cancel(self, handle: Handle) -> None:
        self.engine.cancel(handle)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Rewrite the copy. Weights that are not given keep their values: nothing has trained them."""
        self._write(weights)
        self.version = version
        self.engine.publish((), version)

    @torch.no_grad()
    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name in self._weights:
                self._weights[name].copy_(self.alter(name, weight))

    def alter(self, name: str, values: Tensor) -> Tensor:
        """The values of a policy weight as the sampler uses them."""
        return values


def policy_fields(policy: Policy, model: Any) -> dict[str, Any]:
    """Arguments for a policy with another model of the same layout. Both policies share one list of notes."""
    return {
        "model": model,
        "tokenizer": policy.tokenizer,
        "name": policy.name,
        "packing": policy.packing,
        "views": policy.views,
        "shared_prompts": policy.shared_prompts,
        "fused": policy.fused,
        "notes": policy.notes,
    }
