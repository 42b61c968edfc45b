"""A sampler that differs from the trainer in a controlled way, to reproduce the gap that real engines have by accident.

    bf16, fp16   weights and arithmetic in that precision
    int8         each matrix of the layers rounded to 255 steps per output channel; arithmetic stays as it is
    kv-bf16      keys and values rounded on their way into the KV cache
    kv-int8      the same in 255 steps per token and head
    perturbed    every weight times 1 + size * n, n standard normal, the same n after every update
    stale        the weights of `updates` updates ago; until then, the initial weights
The engine samples from a copy of the policy, rewritten by every `publish`. The copy follows from weights and seed; only
`stale` has state of its own. The log-probs are those of the sampler, not of the trainer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.core.fields import choice, integer, number
from legato.core.settings import settings
from legato.errors import InputError
from legato.policy.layout.attention import Heads, View
from legato.policy.policy import Policy
from legato.rollouts.copied import CopiedEngine, policy_fields
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.randomness import seed_of

KINDS = ("bf16", "fp16", "int8", "kv-bf16", "kv-int8", "perturbed", "stale")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@settings()
class Mismatch:
    """How the sampler differs (docs/mismatch.md)."""

    kind: str = choice(
        "none",
        *KINDS,
        default="none",
        says="What differs: precision of the weights or of stored keys and values, noise on the weights, or their age.",
    )
    size: float | None = number(
        default=None,
        says="'perturbed': the standard deviation of the relative noise on a weight; absent: 0.001.",
        above=0.0,
        maximum=100.0,
        optional=True,
    )
    updates: int | None = integer(
        default=None,
        says="'stale': how many updates old the sampler's weights are; absent: 4. So many copies are held.",
        minimum=1,
        optional=True,
    )

    @property
    def noise(self) -> float:
        """`size`, or its default."""
        return 1e-3 if self.size is None else self.size

    @property
    def age(self) -> int:
        """`updates`, or its default."""
        return 4 if self.updates is None else self.updates

    @property
    def copies(self) -> int:
        """How many copies of the weights are held beside those being trained."""
        if self.kind == "none" or self.kind.startswith("kv-"):
            return 0
        return 1 + (self.age if self.kind == "stale" else 0)


def round_to_int8(values: Tensor) -> Tensor:
    """The values rounded to 255 equal steps, symmetric around 0, scaled by the largest value of the last dimension."""
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    step = exact.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (exact / step).round() * step, 0.0).to(values.dtype)


def _round_to_bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


@dataclass(frozen=True, slots=True)
class _RoundedView:
    """A view that receives rounded keys and values."""

    view: View
    round_values: Callable[[Tensor], Tensor]

    def attend(self, heads: Heads) -> Tensor:
        return self.view.attend(replace(heads, key=self.round_values(heads.key), value=self.round_values(heads.value)))


@dataclass(slots=True, kw_only=True)
class _RoundedPolicy(Policy):
    """The policy itself, with rounded keys and values."""

    round_values: Callable[[Tensor], Tensor]

    @contextmanager
    def attending(self, view: View) -> Iterator[None]:
        with Policy.attending(self, _RoundedView(view, self.round_values)):
            yield


class MismatchedEngine(CopiedEngine):
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
        seed: int = 0,
    ) -> None:
        self.policy, self.mismatch, self.seed = policy, mismatch, seed
        self._past: deque[dict[str, Tensor]] = deque(maxlen=mismatch.age if mismatch.kind == "stale" else 0)
        """The trained weights before each of the last updates, the oldest first."""
        if mismatch.kind.startswith("kv-"):
            if not policy.views:
                raise InputError(
                    f"rollouts.mismatch.kind = {mismatch.kind!r}: expected a model that attends through the interface of"
                    f" transformers, got {type(policy.body).__name__}, which hides its keys and values"
                )
            round_values = round_to_int8 if mismatch.kind == "kv-int8" else _round_to_bf16
            sampler: Policy = _RoundedPolicy(round_values=round_values, **policy_fields(policy, policy.model))
            self._weights = {}  # the policy's own: only keys and values differ
            # `Blocks` bypasses the registered attention function, where keys and values are rounded.
            self.engine = LocalEngine(sampler, rows_at_once, way="cached", record_routes=record_routes)
        else:
            ends = (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())
            embeddings = {id(layer.weight) for layer in ends if layer is not None}
            self._embeddings = {name for name, weight in policy.model.named_parameters() if id(weight) in embeddings}
            super().__init__(
                policy,
                rows_at_once,
                kv_memory_share,
                record_routes=record_routes,
                training_bytes=training_bytes,
                dtype=_DTYPES.get(mismatch.kind),
            )
        self.name = f"local, {mismatch.kind}"

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Rewrite the copy from the policy's weights, or for `stale` from the oldest stored weights."""
        past = self._past[0] if self._past else {}
        super().publish(((name, past.get(name, weight)) for name, weight in weights), version)

    def _trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights that the sampler has a copy of."""
        return ((name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad and name in self._weights)

    def alter(self, name: str, values: Tensor) -> Tensor:
        if self.mismatch.kind == "int8" and values.dim() >= 2 and name not in self._embeddings:
            return round_to_int8(values)
        if self.mismatch.kind == "perturbed":
            source = torch.Generator(values.device).manual_seed(seed_of("mismatch", self.seed, name))
            exact = torch.promote_types(values.dtype, torch.float32)
            noise = torch.randn(values.shape, generator=source, device=values.device, dtype=exact)
            return values.to(exact) * (1 + self.mismatch.noise * noise)
        return values

    @property
    def settled(self) -> bool:
        """True once the weight history is full; only `stale` has one."""
        return len(self._past) == self._past.maxlen

    def before_update(self) -> None:
        """Store the current weights in the history of a `stale` sampler."""
        if self._past.maxlen:
            self._past.append({name: weight.detach().clone() for name, weight in self._trained_weights()})

    def state(self) -> dict[str, Tensor]:
        """The past weights by age and name; everything else follows from weights and seed."""
        return {f"{place:06d}.{name}": tensor for place, past in enumerate(self._past) for name, tensor in past.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._past.clear()
        by_age: dict[str, dict[str, Tensor]] = {}
        for key in sorted(state):
            place, _, name = key.partition(".")
            by_age.setdefault(place, {})[name] = state[key].to(self.policy.device)
        self._past.extend(by_age.values())
