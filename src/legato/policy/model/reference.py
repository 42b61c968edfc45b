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

    @classmethod
    def from_policy(cls, policy: Policy) -> "Reference":
        adapters = hasattr(policy.model, "disable_adapter")
        if adapters:
            return cls(policy=policy, adapters=True)
        frozen = copy.deepcopy(policy.model).requires_grad_(False)
        return cls(
            policy=Policy(model=frozen, tokenizer=policy.tokenizer, name=policy.name, packing=policy.packing), adapters=False
        )

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        if self.adapters:
            with self.policy.model.disable_adapter():
                yield
        else:
            yield

    def score(self, texts: Texts, rows: Tensor) -> Channels:
        """The channels of some rows without a gradient."""
        with torch.no_grad(), self._without_adapters():
            return self.policy.score(texts, rows)
