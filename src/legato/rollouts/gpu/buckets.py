"""Buckets: fixed numbers of rows decoded together on a GPU, with their attention view and captured graphs.

An exact bucket has the arithmetic of training (`kernels/exact.py`, `layers/products.py`): slower with few rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from legato.policy.kernels.decode import Workspace, attend_slots, rows_per_block
from legato.policy.kernels.decode import store as store_kv
from legato.policy.kernels.exact import attend_chained, rotate_into_slots, rows_per_tile
from legato.policy.kernels.layers import add_norm, swiglu
from legato.policy.kernels.layers import heads as heads_ready
from legato.policy.layers.fused import Parts, Projected
from legato.policy.layers.joined import project_joined, project_joined_alike
from legato.policy.layers.products import project_alike
from legato.policy.layout.attention import Heads
from legato.rollouts.gpu.slots import KVStore, device_ints, group_by_prompt

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Bucket sizes; rows left over use the dump slot."""


class Bucket:
    """Rows decoded together: their slots, the blocks that share a prompt, and the captured graph."""

    def __init__(
        self, rows: int, store_: KVStore, device: torch.device, *, exact: bool = False, joined: bool = True
    ) -> None:
        self.rows, self.store, self.exact = rows, store_, exact
        self.joined = joined
        """Whether projections that read the same input are one product, where their weights allow it."""
        self.slots = torch.full((rows,), store_.dump, dtype=torch.int64, device=device)
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}
        """rows per block -> (prompt of each block, its rows); layers with other heads have other block sizes"""
        self.workspaces: dict[tuple[int, int], Workspace] = {}
        self.graphs: dict[Any, Any] = {}
        self.prompts = [-1] * rows
        """The prompt of each row; -1 for filler rows."""

    def place(self, slots: list[int], prompts: list[int]) -> None:
        """Assign slots to the rows; rows left over use the dump slot."""
        filler = self.rows - len(slots)
        self.slots.copy_(device_ints([*slots, *[self.store.dump] * filler], self.slots.device))
        self.prompts = [*prompts, *[-1] * filler]
        for per_block, (held_prompts, held_rows) in self.blocks.items():
            owners, rows = group_by_prompt(self.prompts, per_block, self.rows)
            held_prompts.copy_(device_ints(owners, self.slots.device))
            held_rows.copy_(device_ints(rows, self.slots.device))

    def _blocks(self, per_block: int) -> tuple[Tensor, Tensor]:
        """The blocks of a block size, allocated once: captured graphs need fixed addresses."""
        if per_block not in self.blocks:
            owners, rows = group_by_prompt(self.prompts, per_block, self.rows)
            self.blocks[per_block] = device_ints(owners, self.slots.device), device_ints(rows, self.slots.device)
        return self.blocks[per_block]

    def attend(self, heads: Heads) -> Tensor:
        """Attention of a decode step: store the new key and value, then attend over prompt and response."""
        store, layer = self.store, heads.layer
        store_kv(
            heads.key[:, :, 0].contiguous(),
            heads.value[:, :, 0].contiguous(),
            store.keys[layer],
            store.values[layer],
            self.slots,
            store.length,
        )
        scaling = heads.scaling if heads.scaling is not None else heads.query.shape[3] ** -0.5
        output = self.attend_stored(
            layer,
            heads.query[:, :, 0].contiguous(),
            scaling,
            window=heads.window or 0,
            softcap=heads.softcap or 0.0,
            sinks=heads.sinks,
        )
        return output.unsqueeze(1)

    def parts(self) -> Parts:
        """The functions that fused layers call for the rows of this bucket."""
        return Parts(
            ready=self.store_heads,
            attend=self.attend_stored,
            add_norm=add_norm,
            swiglu=swiglu,
            project=project_alike if self.exact else nn.Module.__call__,
            project_many=(project_joined_alike if self.exact else project_joined) if self.joined else None,
        )

    def store_heads(self, layer: int, projected: Projected) -> Tensor:
        """Normalise and rotate the heads and store keys and values, in one kernel; returns the queries."""
        store, kernel = self.store, rotate_into_slots if self.exact else heads_ready
        return kernel(
            projected.query,
            projected.key,
            projected.value,
            projected.cosine,
            projected.sine,
            projected.norms,
            store.keys[layer],
            store.values[layer],
            self.slots,
            store.length,
            projected.width,
        )

    def attend_stored(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention output [R, H, D] of the new tokens, whose keys and values are already stored."""
        rows, count, width = query.shape
        store = self.store
        key_heads = store.keys[layer].shape[1]
        per_block = rows_per_tile(count, key_heads) if self.exact else rows_per_block(count, key_heads)
        block_prompt, block_rows = self._blocks(per_block)
        tables = (store.prompt_keys, store.prompt_values, store.keys, store.values)
        inputs = (query, *(table[layer] for table in tables))
        places: dict[str, Any] = {
            "slots": self.slots,
            "slot_length": store.length,
            "prompt_length": store.prompt_length,
            "block_prompt": block_prompt,
            "block_rows": block_rows,
        }
        if self.exact:
            return attend_chained(*inputs, **places, scale=scaling)
        shape = (count, width)
        if shape not in self.workspaces:
            # Enough programs for every multiprocessor, few enough that merging is cheap; the interpreter runs one.
            splits = max(1, min(8, 512 // max(1, rows * key_heads))) if query.is_cuda else 1
            self.workspaces[shape] = Workspace(rows, count, width, splits, splits, query.device)
        return attend_slots(
            *inputs,
            **places,
            workspace=self.workspaces[shape],
            scale=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
