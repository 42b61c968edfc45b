"""A sampler that differs from the trainer in a controlled way: the gap that other engines have by accident, chosen.

    bf16, fp16   weights and arithmetic in that precision
    int8         each matrix of the layers in 255 steps per output channel, then computed with as it is
    kv-bf16      keys and values rounded on their way into the store
    kv-int8      the same in 255 steps per token and head
    perturbed    every weight times 1 + size * n, n standard normal, the same n after every update
    stale        the weights of so many updates ago; before there were so many, those of the start
It samples from a copy of the policy, written anew by every `publish`, so that what it is follows from weights and seed; only
`stale` remembers something. The log-probs it returns are the sampler's own.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.errors import InputError
from legato.policy.layout.attention import Heads, View
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Engine, Finished, Handle, Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import local_engine
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import Sampling

KINDS = ("bf16", "fp16", "int8", "kv-bf16", "kv-int8", "perturbed", "stale")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How the sampler differs."""

    kind: str
    size: float = 1e-3
    """perturbed: the standard deviation of the relative change of a weight."""
    updates: int = 4
    """stale: how many updates old the weights are."""
    seed: int = 0

    @property
    def copies(self) -> int:
        """How often the weights lie in memory beside those being trained."""
        return 0 if self.kind.startswith("kv-") else 1 + (self.updates if self.kind == "stale" else 0)


def in_steps(values: Tensor) -> Tensor:
    """Rounded to 255 equal steps, symmetric around 0, of the largest value along the last dimension."""
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    step = exact.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (exact / step).round() * step, 0.0).to(values.dtype)


def _in_bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


@dataclass(frozen=True, slots=True)
class _RoundedView:
    """A view that is given rounded keys and values, to store and to look at."""

    view: View
    rounded: Callable[[Tensor], Tensor]

    def attend(self, heads: Heads) -> Tensor:
        return self.view.attend(replace(heads, key=self.rounded(heads.key), value=self.rounded(heads.value)))


@dataclass(slots=True, kw_only=True)
class _RoundedPolicy(Policy):
    """The policy itself, whose keys and values are rounded."""

    rounded: Callable[[Tensor], Tensor]

    @contextmanager
    def attending(self, view: View) -> Iterator[None]:
        with Policy.attending(self, _RoundedView(view, self.rounded)):
            yield


class MismatchedEngine(Engine):
    """Samples as a policy that differs from the one being trained."""

    def __init__(
        self,
        policy: Policy,
        mismatch: Mismatch,
        rows_at_once: int = 256,
        kv_memory_share: float = 0.5,
        *,
        record_routes: bool = False,
        training_bytes: int = 0,
    ) -> None:
        self.policy, self.mismatch = policy, mismatch
        self.name = f"local, {mismatch.kind}"
        self._past: deque[dict[str, Tensor]] = deque(maxlen=mismatch.updates if mismatch.kind == "stale" else 0)
        """The trained weights before each of the last updates, the oldest first."""
        self._weights: dict[str, Tensor] = {}
        """Those of the copy, by name; none where keys and values differ, not weights."""
        if mismatch.kind.startswith("kv-"):
            if not policy.views:
                raise InputError(
                    f"rollouts.mismatch.kind = {mismatch.kind!r}: {type(policy.body).__name__} keeps its keys and values to"
                    " itself; a model that attends through the interface of transformers is needed"
                )
            rounded = in_steps if mismatch.kind == "kv-int8" else _in_bf16
            sampler: Policy = _RoundedPolicy(rounded=rounded, **_as(policy, policy.model))
            # Through the registered attention function, which hands over keys and values; `Blocks` does without it.
            self.engine: Any = LocalEngine(sampler, rows_at_once, way="cached", record_routes=record_routes)
            return
        body = copy.deepcopy(policy.model).requires_grad_(False)
        for weight in body.parameters():
            # Weights only: buffers such as rotary frequencies stay exact, as they do in a model loaded in 16 bits.
            weight.data = weight.data.to(_DTYPES.get(mismatch.kind, weight.dtype))
        ends = (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())
        embeddings = {id(layer.weight) for layer in ends if layer is not None}
        self._embeddings = {name for name, weight in policy.model.named_parameters() if id(weight) in embeddings}
        self._weights = dict(body.named_parameters())
        with torch.no_grad():
            for name, weight in policy.model.named_parameters():
                self._weights[name].copy_(self._altered(name, weight))
        self.engine = local_engine(
            Policy(**_as(policy, body)),
            rows_at_once,
            kv_memory_share=kv_memory_share,
            record_routes=record_routes,
            training_bytes=training_bytes,
        )

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        own: Capabilities = self.engine.capabilities
        return replace(own, holds_weights=bool(self._weights))

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles: list[Handle] = self.engine.submit(requests, sampling, limits)
        return handles

    def poll(self) -> list[Finished]:
        finished: list[Finished] = self.engine.poll()
        return finished

    def cancel(self, handle: Handle) -> None:
        self.engine.cancel(handle)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the copy anew from the policy's weights, or under `stale` from those of so many updates ago."""
        past = self._past[0] if self._past else {}
        with torch.no_grad():
            for name, weight in weights:
                if name in self._weights:
                    self._weights[name].copy_(self._altered(name, past.get(name, weight)))
        self.version = version
        self.engine.publish((), version)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """What changes from update to update, where the sampler has a copy of it."""
        return ((name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad and name in self._weights)

    def _altered(self, name: str, values: Tensor) -> Tensor:
        """The values of a weight of the policy as the sampler has them."""
        if self.mismatch.kind == "int8" and values.dim() >= 2 and name not in self._embeddings:
            return in_steps(values)
        if self.mismatch.kind == "perturbed":
            source = torch.Generator(values.device).manual_seed(seed_of("mismatch", self.mismatch.seed, name))
            exact = torch.promote_types(values.dtype, torch.float32)
            noise = torch.randn(values.shape, generator=source, device=values.device, dtype=exact)
            return values.to(exact) * (1 + self.mismatch.size * noise)
        return values

    @property
    def settled(self) -> bool:
        """Whether the past is long enough; only `stale` has to wait for it."""
        return len(self._past) == self._past.maxlen

    def before_update(self) -> None:
        """The weights are about to change."""
        if self._past.maxlen:
            self._past.append({name: weight.detach().clone() for name, weight in self._trained()})

    def state(self) -> dict[str, Tensor]:
        """What does not follow from weights and seed: the past weights, by age and name."""
        return {f"{place:06d}.{name}": tensor for place, past in enumerate(self._past) for name, tensor in past.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        self._past.clear()
        found: dict[str, dict[str, Tensor]] = {}
        for key in sorted(state):
            place, _, name = key.partition(".")
            found.setdefault(place, {})[name] = state[key].to(self.policy.device)
        self._past.extend(found.values())


def _as(policy: Policy, model: Any) -> dict[str, Any]:
    """What makes a policy of another model that is laid out like this one; what it notes is noted there."""
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
