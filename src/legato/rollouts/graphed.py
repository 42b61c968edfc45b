"""The local engine on a GPU: one captured graph per bucket of rows decodes a token for all of them.

What changes from token to token lies in memory (`slots.py`), so a step is a replay. The host looks at the finished flags a
few steps late, frees slots, refills them from the queue and moves to a smaller bucket when rows run out. Without graphs the
same step runs eagerly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from legato.policy.fused import Parts, through, why_not
from legato.policy.head import Head
from legato.policy.policy import Policy
from legato.policy.triton.layers import add_norm, swiglu
from legato.policy.triton.sample import sample
from legato.rollouts.buckets import BUCKETS, Bucket
from legato.rollouts.calls import Call
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Choice, Sampling
from legato.rollouts.sampling import choose as choose_plainly
from legato.rollouts.slots import Room, Store

_KV_SHARE = 0.5
"""How much of the free memory keys and values may take."""


class GraphedEngine:
    """Samples from the policy itself, on a GPU."""

    name = "local"

    def __init__(
        self,
        policy: Policy,
        rows_at_once: int = 256,
        *,
        graphs: bool = True,
        fused: bool = True,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.policy, self.rows_at_once, self.graphs, self.say = policy, rows_at_once, graphs, say
        reason = why_not(policy.body.get_decoder()) if fused else "it was switched off"
        self.fused = reason is None
        if fused and reason is not None:
            say(f"the engine decodes through the model's own layers: {reason}")
        self.store: Store | None = None
        self.buckets: dict[int, Bucket] = {}
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()
        self._asked = Room(slots=0, prompts=0, prompt_tokens=0, response_tokens=0)
        self._ends: dict[tuple[int, ...], Tensor] = {}

    # Memory

    def _prepare(self, requests: Sequence[Request], limits: Limits) -> Store:
        rows = sum(len(request.seeds) for request in requests)
        slots = min(self.rows_at_once, max(rows, 1))
        room = Room(
            slots=slots,
            prompts=slots,
            prompt_tokens=-(-max(len(request.prompt) for request in requests) // 64) * 64,
            response_tokens=limits.max_response_tokens,
        )
        addresses = tuple(parameter.data_ptr() for parameter in self.policy.model.parameters())
        if self.store is not None and addresses == self._addresses and self._asked.holds(room):
            return self.store
        if self.store is not None:
            held = self._asked
            room = Room(
                slots=max(room.slots, held.slots),
                prompts=max(room.prompts, held.prompts),
                prompt_tokens=max(room.prompt_tokens, held.prompt_tokens),
                response_tokens=max(room.response_tokens, held.response_tokens),
            )
        self.forget()
        self._addresses, self._asked = addresses, room
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
        # What training will still ask for: gradients, float32 masters and two moments of every trained weight.
        later = 14 * sum(weight.numel() for weight in self.policy.parameters().values())
        fits = max(1, int((free + cached - later) * _KV_SHARE / per_slot))
        if fits >= room.slots:
            return room
        self.say(f"the engine decodes {fits} sequences at a time instead of {room.slots}: more do not fit in memory")
        return Room(slots=fits, prompts=fits, prompt_tokens=room.prompt_tokens, response_tokens=room.response_tokens)

    # One step

    def _step(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        memory, slots = bucket.store, bucket.slots
        length = memory.length[slots]
        hidden = self._decoded(bucket, memory.token[slots], memory.base[slots] + length)
        choice = self.choose(hidden, slots, sampling, 1)
        alive = ~memory.done[slots]
        memory.write(slots, (length + 1).clamp(max=memory.room.response_tokens - 1), alive, choice, ends)
        memory.length[slots] = torch.where(alive, length + 1, length)

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice:
        """The next token of each slot, `add` places after those whose keys are stored."""
        memory = self.store
        assert memory is not None
        logits = Head.of(self.policy.body).exact(hidden)
        if not sampling.truncates:
            tokens, logprobs = sample(logits, slots, memory.seed, memory.length, temperature=sampling.temperature, add=add)
            return Choice(tokens=tokens, logprobs=logprobs, kept_logmass=None)
        return choose_plainly(logits, uniform(memory.seed[slots], memory.length[slots] + add), sampling)

    def _decoded(self, bucket: Bucket, tokens: Tensor, positions: Tensor) -> Tensor:
        """[R, N]: the last hidden state of one token per row, through fused parts where the family is known."""
        if not self.fused:
            return self.policy.hidden(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
        parts = Parts(ready=bucket.ready, attend=bucket.look, add_norm=add_norm, swiglu=swiglu)
        return through(self.policy.body.get_decoder(), tokens, positions, parts)

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        """One step of a bucket: a replay where it is captured."""
        if not self.graphs:
            with self.policy.attending(bucket):
                self._step(bucket, sampling, ends)
            return
        key = (sampling, ends.data_ptr())
        if key not in bucket.graphs:
            bucket.graphs[key] = self._capture(bucket, sampling, ends)
        bucket.graphs[key].replay()

    def _capture(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> Any:
        """Run the step once on the dump, so that kernels are compiled and memory is there, then record it."""
        held = bucket.slots.clone()
        bucket.slots.fill_(bucket.store.dump)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
            return Call(self, memory, requests, sampling, limits).run()

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor:
        """The end tokens as a tensor that keeps its address, since graphs have read it."""
        if ends not in self._ends:
            self._ends[ends] = torch.tensor(ends or (-1,), device=self.policy.device)
        return self._ends[ends]

    def bucket(self, rows: int) -> Bucket:
        """The smallest bucket that holds so many rows."""
        assert self.store is not None
        size = next((size for size in BUCKETS if size >= rows), rows)
        size = min(size, self.store.room.slots) if rows <= self.store.room.slots else size
        if size not in self.buckets:
            self.buckets[size] = Bucket(size, self.store, self.policy.device)
        return self.buckets[size]
