"""The GPU training path on a CPU, with kernels in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.policy.layout.packs import Pack
from legato.policy.layout.spans import Spans, Uses
from legato.policy.policy import Policy


def texts() -> Texts:
    source = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 1, 3, 6, 2])
    return Texts(
        prompts=torch.randint(3, 20, (2, 4), generator=source),
        prompt_lengths=torch.tensor([4, 2]),
        tokens=torch.randint(3, 20, (5, 6), generator=source),
        lengths=lengths,
        mask=torch.arange(6) < lengths[:, None],
        group=torch.tensor([0, 0, 0, 1, 1]),
        temperature=torch.ones(5),
    )


def install(patch: pytest.MonkeyPatch) -> list[int]:
    """Make every policy train through fused parts; returns a list that gets an entry for each attention forward."""
    plain_pack, attend, attentions = Policy.pack, Spans.attend_forward, list[int]()

    def with_spans(policy: Policy, table: Texts, chosen: Tensor) -> Pack:
        packed = plain_pack(policy, table, chosen)
        spans = Spans.from_lengths(packed.prefix_lengths, packed.suffix_lengths, packed.owner, packed.positions)
        return replace(packed, spans=spans, reads=Uses.from_index(packed.read, len(packed.tokens)))

    patch.setattr(Policy, "pack", with_spans)
    patch.setattr(Spans, "serve", staticmethod(lambda like, width: True))
    patch.setattr(Spans, "attend_forward", lambda self, *inputs: attentions.append(1) or attend(self, *inputs))
    return attentions


def sum_in_order(patch: pytest.MonkeyPatch) -> None:
    """Make products in the interpreter add up over k in order, in blocks of any shape, as they do on a GPU.

    The interpreter calls numpy, whose BLAS chooses the order by the shape of a block, the place in it and the CPU: without
    this, a test that compares bits holds on one machine and fails on the next.
    """

    def multiply(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
        for k in range(a.shape[-1]):
            total += a[..., :, k : k + 1] * b[..., k : k + 1, :]
        return total

    patch.setattr(np, "matmul", multiply)
