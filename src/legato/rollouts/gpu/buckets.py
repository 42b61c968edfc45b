"""Rows decoded together on a GPU: the view their attention takes, and the graph that was captured of a step."""

from typing import Any

import torch
from torch import Tensor

from legato.policy.kernels.decode import Workspace, attend_slots, rows_per_block, store
from legato.policy.kernels.layers import heads as heads_ready
from legato.policy.layers.fused import Projected
from legato.policy.layout.attention import Heads
from legato.rollouts.gpu.slots import Store, blocks, numbers

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes that are captured; rows left over go to the dump."""


class Bucket:
    """Rows decoded together: their slots, the blocks that share a prompt, and the captured graph."""

    def __init__(self, rows: int, store_: Store, device: torch.device) -> None:
        self.rows, self.store = rows, store_
        self.slots = torch.full((rows,), store_.dump, dtype=torch.int64, device=device)
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}
        """rows of a block -> (prompt of each block, its rows); layers may differ in their heads, and so in their blocks"""
        self.workspaces: dict[tuple[int, int], Workspace] = {}
        self.graphs: dict[Any, Any] = {}
        self.prompts = [-1] * rows
        """The prompt of each row, -1 where a row only fills up."""

    def place(self, slots: list[int], prompts: list[int]) -> None:
        """Put slots into the rows; rows left over go to the dump."""
        filler = self.rows - len(slots)
        self.slots.copy_(numbers([*slots, *[self.store.dump] * filler], self.slots.device))
        self.prompts = [*prompts, *[-1] * filler]
        for per_block, (held_prompts, held_rows) in self.blocks.items():
            owners, rows = blocks(self.prompts, per_block, self.rows)
            held_prompts.copy_(numbers(owners, self.slots.device))
            held_rows.copy_(numbers(rows, self.slots.device))

    def _blocks(self, per_block: int) -> tuple[Tensor, Tensor]:
        """Made once per kind of layer: a graph finds them where they were."""
        if per_block not in self.blocks:
            owners, rows = blocks(self.prompts, per_block, self.rows)
            self.blocks[per_block] = numbers(owners, self.slots.device), numbers(rows, self.slots.device)
        return self.blocks[per_block]

    def attend(self, heads: Heads) -> Tensor:
        """The view of a decode step: store the new key and value, attend over prompt and response."""
        memory, layer = self.store, heads.layer
        store(
            heads.key[:, :, 0].contiguous(),
            heads.value[:, :, 0].contiguous(),
            memory.keys[layer],
            memory.values[layer],
            self.slots,
            memory.length,
        )
        scaling = heads.scaling if heads.scaling is not None else heads.query.shape[3] ** -0.5
        found = self.look(
            layer,
            heads.query[:, :, 0].contiguous(),
            scaling,
            window=heads.window or 0,
            softcap=heads.softcap or 0.0,
            sinks=heads.sinks,
        )
        return found.unsqueeze(1)

    def ready(self, layer: int, projected: Projected) -> Tensor:
        """Make heads ready and store keys and values, in one kernel."""
        memory = self.store
        return heads_ready(
            projected.query,
            projected.key,
            projected.value,
            projected.cosine,
            projected.sine,
            projected.norms,
            memory.keys[layer],
            memory.values[layer],
            self.slots,
            memory.length,
            projected.width,
        )

    def look(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[R, H, D]: what the new tokens see; their own keys and values are stored already."""
        rows, count, width = query.shape
        memory = self.store
        key_heads = memory.keys[layer].shape[1]
        block_prompt, block_rows = self._blocks(rows_per_block(count, key_heads))
        shape = (count, width)
        if shape not in self.workspaces:
            # Programs enough for every multiprocessor, few enough that merging them costs nothing; an interpreter runs one.
            splits = max(1, min(8, 512 // max(1, rows * key_heads))) if query.is_cuda else 1
            self.workspaces[shape] = Workspace(rows, count, width, splits, splits, query.device)
        return attend_slots(
            query,
            memory.prompt_keys[layer],
            memory.prompt_values[layer],
            memory.keys[layer],
            memory.values[layer],
            slots=self.slots,
            slot_length=memory.length,
            prompt_length=memory.prompt_length,
            block_prompt=block_prompt,
            block_rows=block_rows,
            workspace=self.workspaces[shape],
            scale=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
