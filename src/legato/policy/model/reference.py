"""The frozen policy that a KL term compares with: the policy as it was before training."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.policy.policy import Channels, Policy


@dataclass(slots=True, kw_only=True)
class Reference:
    """The reference policy. Under LoRA it is the model without its adapters, and costs no memory; else a frozen copy."""

    policy: Policy
    adapters: bool
    original: Policy | None = None
    """The policy that this is a frozen copy of. Both then choose the same kernels, so equal weights give equal bits."""

    @classmethod
    def from_policy(cls, policy: Policy) -> "Reference":
        adapters = hasattr(policy.model, "disable_adapter")
        if adapters:
            return cls(policy=policy, adapters=True)
        frozen = copy.deepcopy(policy.model).requires_grad_(False)
        own = Policy(model=frozen, tokenizer=policy.tokenizer, name=policy.name, packing=policy.packing)
        return cls(policy=own, adapters=False, original=policy)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        if self.adapters:
            with self.policy.model.disable_adapter():
                yield
        else:
            yield

    def score(self, texts: Texts, rows: Tensor) -> Channels:
        """The channels of some rows without a gradient."""
        if self.original is not None:
            self.policy.exact = self.original.exact  # decided after this copy was made, and may change during a run
        with torch.no_grad(), self._without_adapters():
            return self.policy.score(texts, rows)
