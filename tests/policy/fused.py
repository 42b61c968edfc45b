"""The GPU's way to train, on a CPU: kernels in Triton's interpreter, a loop in place of torch's flash attention."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from legato.policy.packs import Pack, Texts
from legato.policy.policy import Policy
from legato.policy.spans import Spans, Uses


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


def install(patch: pytest.MonkeyPatch, kernel: str = "flash") -> list[int]:
    """From here on packs go through fused parts; an entry for each attention that was asked for."""
    plain_pack, asked = Policy.pack, list[int]()
    attend = Spans.attend if kernel == "shared" else looped

    def with_spans(policy: Policy, given: Texts, chosen: Tensor) -> Pack:
        packed = plain_pack(policy, given, chosen)
        spans = Spans.of(packed.prefix_lengths, packed.suffix_lengths, packed.owner, packed.positions)
        return replace(packed, spans=spans, reads=Uses.of(packed.read, len(packed.tokens)))

    patch.setattr(Policy, "pack", with_spans)
    patch.setattr(Spans, "serve", staticmethod(lambda like, width: True))
    patch.setattr("legato.policy.spans.KERNEL", kernel)
    patch.setattr(Spans, "attend", lambda self, *given: asked.append(1) or attend(self, *given))
    return asked


def looped(spans: Spans, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """What flash attention does with the spans: every query sees the gathered keys up to its own, counted from the end."""
    found, repeat = [], query.shape[1] // key.shape[1]
    keys, values = (x[spans.keys.index].repeat_interleave(repeat, 1) for x in (key, value))
    ends = list(zip(spans.query_ends.tolist(), spans.key_ends.tolist(), strict=True))
    for (q, k), (q_end, k_end) in pairwise(ends):
        scores = torch.einsum("qhd,khd->hqk", query[q:q_end], keys[k:k_end]) * scaling
        hidden = (
            torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).tril(k_end - k - (q_end - q)).logical_not()
        )
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values[k:k_end]))
    return torch.cat(found)
