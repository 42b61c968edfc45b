"""The local engine on a GPU: one captured graph per bucket of rows decodes a token for all of them.

What changes from token to token lies in memory (`slots.py`), so a step is a replay. The host looks at the finished flags a
few steps late, frees slots, refills them from the queue and moves to a smaller bucket when rows run out. Without graphs the
same step runs eagerly.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.attention import Heads
from legato.policy.packs import pack
from legato.policy.policy import Head, Policy
from legato.policy.triton.decode import Workspace, attend_slots, rows_per_block, store
from legato.policy.triton.sample import sample
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Sampling, choose
from legato.rollouts.slots import Prefill, Room, Store, blocks

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_LOOK_EVERY = 8
"""Steps between two looks at the finished flags; a finished row costs at most twice as many."""
_KV_SHARE = 0.6
"""How much of the free memory keys and values may take."""


class _Bucket:
    """Rows decoded together: their slots, the blocks that share a prompt, and the captured graph."""

    def __init__(self, rows: int, store_: Store, device: torch.device) -> None:
        self.rows, self.store = rows, store_
        self.slots = torch.full((rows,), store_.dump, dtype=torch.int64, device=device)
        self.block_prompt: Tensor | None = None
        self.block_rows: Tensor | None = None
        self.workspaces: dict[tuple[int, int], Workspace] = {}
        self.graphs: dict[Any, Any] = {}
        self._pending: tuple[list[int], list[int]] | None = None

    def place(self, slots: list[int], prompts: list[int]) -> None:
        """Put slots into the rows; rows left over go to the dump."""
        filler = self.rows - len(slots)
        self.slots.copy_(torch.tensor([*slots, *[self.store.dump] * filler]))
        self._pending = (slots, [*prompts, *[-1] * filler])
        for per_block in {rows.shape[1] for rows in [self.block_rows] if rows is not None}:
            self._blocks(per_block)

    def _blocks(self, per_block: int) -> None:
        assert self._pending is not None
        owners, rows = blocks(self._pending[1], per_block, self.rows)
        device = self.slots.device
        if self.block_rows is None or self.block_prompt is None:
            self.block_prompt = torch.tensor(owners, device=device)
            self.block_rows = torch.tensor(rows, device=device)
        else:
            self.block_prompt.copy_(torch.tensor(owners))
            self.block_rows.copy_(torch.tensor(rows))

    def attend(self, heads: Heads) -> Tensor:
        """The view of a decode step: store the new key and value, attend over prompt and response."""
        rows, count, _, width = heads.query.shape
        key_heads = heads.key.shape[1]
        if self.block_rows is None:
            self._blocks(rows_per_block(count, key_heads))
        assert self.block_prompt is not None and self.block_rows is not None
        shape = (count, width)
        if shape not in self.workspaces:
            # Programs enough for every multiprocessor, few enough that merging them costs nothing.
            splits = max(1, min(8, 512 // max(1, rows * key_heads)))
            self.workspaces[shape] = Workspace(rows, count, width, splits, splits, heads.query.device)
        memory, layer = self.store, heads.layer
        store(
            heads.key[:, :, 0].contiguous(),
            heads.value[:, :, 0].contiguous(),
            memory.keys[layer],
            memory.values[layer],
            self.slots,
            memory.length,
        )
        found = attend_slots(
            heads.query[:, :, 0].contiguous(),
            memory.prompt_keys[layer],
            memory.prompt_values[layer],
            memory.keys[layer],
            memory.values[layer],
            slots=self.slots,
            slot_length=memory.length,
            prompt_length=memory.prompt_length,
            block_prompt=self.block_prompt,
            block_rows=self.block_rows,
            workspace=self.workspaces[shape],
            scale=heads.scaling if heads.scaling is not None else width**-0.5,
            window=heads.window or 0,
            softcap=heads.softcap or 0.0,
            sinks=heads.sinks,
        )
        return found.unsqueeze(1)


class GraphedEngine:
    """Samples from the policy itself, on a GPU."""

    name = "local"

    def __init__(
        self,
        policy: Policy,
        rows_at_once: int = 256,
        *,
        graphs: bool = True,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.policy, self.rows_at_once, self.graphs, self.say = policy, rows_at_once, graphs, say
        self.store: Store | None = None
        self.buckets: dict[int, _Bucket] = {}
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()

    # Memory

    def _prepare(self, requests: Sequence[Request], limits: Limits) -> Store:
        rows = sum(len(request.seeds) for request in requests)
        slots = min(self.rows_at_once, max(rows, 1))
        room = Room(
            slots=slots,
            prompts=slots,
            prompt_tokens=max(len(request.prompt) for request in requests),
            response_tokens=limits.max_response_tokens,
        )
        addresses = tuple(parameter.data_ptr() for parameter in self.policy.model.parameters())
        if self.store is not None and addresses == self._addresses and self.store.room.holds(room):
            return self.store
        if self.store is not None:
            held = self.store.room
            room = Room(
                slots=max(room.slots, held.slots),
                prompts=max(room.prompts, held.prompts),
                prompt_tokens=max(room.prompt_tokens, held.prompt_tokens),
                response_tokens=max(room.response_tokens, held.response_tokens),
            )
        self.forget()
        self._addresses = addresses
        self.store = Store(self._fitting(room), self.policy.device)
        return self.store

    def forget(self) -> None:
        """Give all memory back: keys, values and graphs."""
        self.store = None
        self.buckets.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def _fitting(self, room: Room) -> Room:
        """As many slots as the memory allows."""
        config = self.policy.body.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = self.policy.model.get_input_embeddings().weight.element_size()
        per_token = 2 * config.num_hidden_layers * key_heads * width * size
        per_slot = per_token * (room.response_tokens + room.prompt_tokens)
        free, _ = torch.cuda.mem_get_info(self.policy.device)
        cached = torch.cuda.memory_reserved(self.policy.device) - torch.cuda.memory_allocated(self.policy.device)
        fits = max(1, int((free + cached) * _KV_SHARE / per_slot))
        if fits >= room.slots:
            return room
        self.say(f"the engine decodes {fits} sequences at a time instead of {room.slots}: more do not fit in memory")
        return Room(
            slots=fits, prompts=fits, prompt_tokens=room.prompt_tokens, response_tokens=room.response_tokens
        )

    # One step

    def _step(self, bucket: _Bucket, sampling: Sampling, ends: Tensor) -> None:
        memory, slots = bucket.store, bucket.slots
        length = memory.length[slots]
        hidden = self._hidden(memory.token[slots].unsqueeze(1), (memory.base[slots] + length).unsqueeze(1))[:, 0]
        tokens, logprobs, kept = self._choose(hidden, slots, sampling, 1)
        alive = ~memory.done[slots]
        place = (length + 1).clamp(max=memory.room.response_tokens - 1)
        self._note(memory, slots, place, alive, tokens, logprobs, kept, ends)
        memory.length[slots] = torch.where(alive, length + 1, length)

    def _choose(
        self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        memory = self.store
        assert memory is not None
        logits = Head.of(self.policy.body).exact(hidden)
        if not sampling.truncates:
            tokens, logprobs = sample(
                logits, slots, memory.seed, memory.length, temperature=sampling.temperature, add=add
            )
            return tokens, logprobs, None
        choice = choose(logits, uniform(memory.seed[slots], memory.length[slots] + add), sampling)
        return choice.tokens, choice.logprobs, choice.kept_logmass

    def _note(
        self,
        memory: Store,
        slots: Tensor,
        place: Tensor,
        alive: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        kept: Tensor | None,
        ends: Tensor,
    ) -> None:
        """Write what was chosen for the rows still writing, and which of them end with it."""
        memory.tokens[slots, place] = torch.where(alive, tokens, memory.tokens[slots, place])
        memory.logprobs[slots, place] = torch.where(alive, logprobs, memory.logprobs[slots, place])
        if kept is not None:
            memory.kept[slots, place] = torch.where(alive, kept.float(), memory.kept[slots, place])
        memory.token[slots] = torch.where(alive, tokens, memory.token[slots])
        written = torch.where(alive, place + 1, memory.written[slots])
        memory.written[slots] = written
        ended = (tokens.unsqueeze(1) == ends).any(1) | (written >= memory.limit[slots])
        memory.done[slots] = ~alive | ended

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        body: Any = self.policy.body.get_decoder()
        hidden: Tensor = body(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return hidden

    def _advance(self, bucket: _Bucket, sampling: Sampling, ends: Tensor) -> None:
        """One step of a bucket: a replay where it is captured."""
        if not self.graphs:
            with self.policy.attending(bucket):
                self._step(bucket, sampling, ends)
            return
        key = (sampling, ends.data_ptr())
        if key not in bucket.graphs:
            bucket.graphs[key] = self._capture(bucket, sampling, ends)
        bucket.graphs[key].replay()

    def _capture(self, bucket: _Bucket, sampling: Sampling, ends: Tensor) -> Any:
        """Run the step once on the dump, so that kernels are compiled and memory is there, then record it."""
        held = bucket.slots.clone()
        bucket.slots.fill_(bucket.store.dump)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.policy.attending(bucket):
            for _ in range(2):
                self._step(bucket, sampling, ends)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with self.policy.attending(bucket), torch.cuda.graph(graph, pool=self._pool):
            self._step(bucket, sampling, ends)
        self._pool = self._pool or graph.pool()
        bucket.slots.copy_(held)
        return graph

    # The run of a call

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        if not requests:
            return []
        with self.policy.serving():
            memory = self._prepare(requests, limits)
            return _Call(self, memory, requests, sampling, limits).run()

    def bucket(self, rows: int) -> _Bucket:
        """The smallest bucket that holds so many rows."""
        assert self.store is not None
        size = next((size for size in BUCKETS if size >= rows), rows)
        size = min(size, self.store.room.slots) if rows <= self.store.room.slots else size
        if size not in self.buckets:
            self.buckets[size] = _Bucket(size, self.store, self.policy.device)
        return self.buckets[size]


class _Call:
    """One call of generate: a queue of responses, the slots they have, the results."""

    def __init__(
        self, engine: GraphedEngine, memory: Store, requests: Sequence[Request], sampling: Sampling, limits: Limits
    ) -> None:
        self.engine, self.memory, self.requests, self.sampling, self.limits = engine, memory, requests, sampling, limits
        self.queue = deque((number, seeds) for number, request in enumerate(requests) for seeds in [list(request.seeds)])
        self.free_slots = list(range(memory.room.slots))[::-1]
        self.free_prompts = list(range(memory.room.prompts))[::-1]
        self.active: dict[int, tuple[int, int]] = {}
        """slot -> (row of the results, prompt entry)"""
        self.users: dict[int, int] = {}
        """prompt entry -> responses that still read it"""
        device = memory.device
        self.first = [0]
        for request in requests:
            self.first.append(self.first[-1] + len(request.seeds))
        rows, width = self.first[-1], limits.max_response_tokens
        self.given = [0] * len(requests)
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.kept = torch.zeros(rows, width, dtype=torch.float32, device=device) if sampling.truncates else None
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.cut: dict[int, tuple[int, str]] = {}
        """row -> (tokens, text) where a stop string ended it"""
        self.ends = engine_ends(engine, limits.end_tokens, device)
        self.flags = torch.zeros(memory.room.slots + 1, dtype=torch.bool).pin_memory()

    def run(self) -> list[list[Response]]:
        self._admit()
        looked: list[int] | None = None
        event = torch.cuda.Event()
        while self.active:
            listed = sorted(self.active)
            bucket = self.engine.bucket(len(listed))
            if looked != listed or bucket is not self._last:
                bucket.place(listed, [self.active[slot][1] for slot in listed])
                looked, self._last = listed, bucket
            for _ in range(_LOOK_EVERY):
                self.engine._advance(bucket, self.sampling, self.ends)
            self.flags.copy_(self.memory.done, non_blocking=True)
            event.record()
            event.synchronize()
            self._collect([slot for slot in listed if bool(self.flags[slot])])
        return self._responses()

    _last: _Bucket | None = None

    def _admit(self) -> None:
        """Prefill prompts for as many waiting responses as there are free slots."""
        parts: list[tuple[int, list[int], list[int]]] = []
        while self.queue and len(self.free_slots) > 0:
            number, seeds = self.queue[0]
            taken = seeds[: len(self.free_slots)]
            parts.append((number, taken, [self.free_slots.pop() for _ in taken]))
            if len(taken) < len(seeds):
                self.queue[0] = (number, seeds[len(taken) :])
            else:
                self.queue.popleft()
        if parts:
            self._prefill(parts)

    def _prefill(self, parts: list[tuple[int, list[int], list[int]]]) -> None:
        engine, memory, device = self.engine, self.memory, self.memory.device
        entries = [self.free_prompts.pop() for _ in parts]
        packed = pack(
            prompt_texts([self.requests[number].prompt for number, _, _ in parts], device),
            torch.arange(len(parts), device=device),
        )
        placed = torch.tensor(entries, device=device)
        memory.prompt_length[placed] = packed.prefix_lengths
        with engine.policy.attending(Prefill(memory, packed, placed)):
            hidden = engine._hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
        ends = packed.prefix.gather(1, packed.prefix_lengths[:, None] - 1).squeeze(1)
        owner = torch.tensor([i for i, (_, seeds, _) in enumerate(parts) for _ in seeds], device=device)
        slots = torch.tensor([slot for _, _, listed in parts for slot in listed], device=device)
        seeds = torch.tensor([seed for _, listed, _ in parts for seed in listed], device=device)
        memory.admit(slots, placed[owner], packed.prefix_lengths[owner], seeds, self.limits.max_response_tokens)
        tokens, logprobs, kept = engine._choose(hidden[ends][owner], slots, self.sampling, 0)
        alive = torch.ones_like(slots, dtype=torch.bool)
        engine._note(memory, slots, torch.zeros_like(slots), alive, tokens, logprobs, kept, self.ends)
        for entry, (number, seeds_, listed) in zip(entries, parts, strict=True):
            self.users[entry] = len(seeds_)
            for slot in listed:
                self.active[slot] = (self.first[number] + self.given[number], entry)
                self.given[number] += 1

    def _collect(self, finished: list[int]) -> None:
        """Take finished responses out and fill their slots again."""
        if self.limits.stop_strings:
            finished = sorted({*finished, *self._stopped()})
        if not finished:
            return
        slots = torch.tensor(finished, device=self.memory.device)
        rows = torch.tensor([self.active[slot][0] for slot in finished], device=self.memory.device)
        width = self.limits.max_response_tokens
        self.tokens[rows] = self.memory.tokens[slots, :width]
        self.logprobs[rows] = self.memory.logprobs[slots, :width]
        self.lengths[rows] = self.memory.written[slots]
        if self.kept is not None:
            self.kept[rows] = self.memory.kept[slots, :width]
        self.memory.done[slots] = True
        for slot in finished:
            _, entry = self.active.pop(slot)
            self.free_slots.append(slot)
            self.users[entry] -= 1
            if not self.users[entry]:
                del self.users[entry]
                self.free_prompts.append(entry)
        # A prefill costs a pass whatever its size: it waits until a fair share of the slots is free.
        if self.queue and (len(self.free_slots) >= self.memory.room.slots // 8 or not self.active):
            self._admit()

    def _stopped(self) -> list[int]:
        """Slots whose text has reached a stop string."""
        listed = sorted(self.active)
        index = torch.tensor(listed, device=self.memory.device)
        tokens, written = self.memory.tokens[index].cpu(), self.memory.written[index].tolist()
        found = []
        decode = self.engine.policy.tokenizer.decode
        for slot, row, length in zip(listed, tokens, written, strict=True):
            if self.active[slot][0] in self.cut:
                continue
            whole = decode(row[:length].tolist(), skip_special_tokens=True)
            if not any(stop in whole for stop in self.limits.stop_strings):
                continue
            for count in range(1, length + 1):
                text = decode(row[:count].tolist(), skip_special_tokens=True)
                cuts = [text.find(stop) for stop in self.limits.stop_strings if stop in text]
                if cuts:
                    self.cut[self.active[slot][0]] = (count, text[: min(cuts)])
                    found.append(slot)
                    break
        return found

    def _responses(self) -> list[list[Response]]:
        tokens, logprobs, lengths = self.tokens.cpu(), self.logprobs.cpu(), self.lengths.tolist()
        kept = None if self.kept is None else self.kept.cpu()
        ends = set(self.limits.end_tokens)
        said, stops = [], []
        for row, length in enumerate(lengths):
            if row in self.cut:
                lengths[row] = length = self.cut[row][0]
                stops.append(StopReason.STOP_STRING)
            else:
                stops.append(StopReason.END_TOKEN if int(tokens[row, length - 1]) in ends else StopReason.LENGTH)
            said.append(tokens[row, : length - (stops[-1] is StopReason.END_TOKEN)].tolist())
        texts = self.engine.policy.tokenizer.batch_decode(said, skip_special_tokens=True)
        found = [
            Response(
                tokens=tokens[row, :length].clone(),
                logprobs=logprobs[row, :length].clone(),
                kept_logmass=None if kept is None else kept[row, :length].clone(),
                text=self.cut[row][1] if row in self.cut else texts[row],
                stop=stops[row],
            )
            for row, length in enumerate(lengths)
        ]
        return [found[start:end] for start, end in zip(self.first, self.first[1:], strict=False)]


def engine_ends(engine: GraphedEngine, ends: tuple[int, ...], device: torch.device) -> Tensor:
    """The end tokens as a tensor that keeps its address, since graphs have read it."""
    known: dict[tuple[int, ...], Tensor] = engine.__dict__.setdefault("_ends", {})
    if ends not in known:
        known[ends] = torch.tensor(ends or (-1,), device=device)
    return known[ends]
