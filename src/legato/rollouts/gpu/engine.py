"""The local engine on a GPU: one captured graph per bucket of rows decodes a token for all of them.

What changes from token to token lies in memory (`slots.py`), so a step is a replay. The host looks at the finished flags a
few steps late, frees slots, refills them from the queue and moves to a smaller bucket when rows run out. Without graphs the
same step runs eagerly, on a CPU too (in Triton's interpreter, for tests).
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from legato.policy.head.head import Head
from legato.policy.kernels.layers import add_norm, swiglu
from legato.policy.kernels.sample import sample
from legato.policy.layers.fused import Parts, run_body_without_backward, why_not
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Finished, Handle, Job, JobEngine, Limits, Request, Response
from legato.rollouts.gpu import budget
from legato.rollouts.gpu.buckets import BUCKETS, Bucket
from legato.rollouts.gpu.capture import captured, graph_pool
from legato.rollouts.gpu.recall import Recall, fingerprint
from legato.rollouts.gpu.scheduler import Kind, Scheduler
from legato.rollouts.gpu.slots import Room, Store, numbers
from legato.rollouts.local.routes import heard
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Choice, Sampling
from legato.rollouts.sampling import choose as choose_plainly

_Result = TypeVar("_Result")

_SAMPLINGS = 4
"""Ways of sampling whose graphs a bucket keeps: training's, evaluation's and a little more."""


class GraphedEngine(JobEngine):
    """Samples from the policy itself, on a GPU."""

    name = "local"

    def __init__(
        self,
        policy: Policy,
        rows_at_once: int = 256,
        *,
        graphs: bool = True,
        fused: bool = True,
        kv_memory_share: float = 0.5,
        record_routes: bool = False,
        training_bytes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self.policy, self.graphs, self.kv_memory_share, self.say = policy, graphs, kv_memory_share, say
        self.rows_at_once = rows_at_once
        """Lowered where memory runs out."""
        self.training_bytes = training_bytes
        """What training will still ask for of the device's memory; it is not given to keys and values."""
        self.routers = policy.routers if record_routes else None
        reason = why_not(policy.body.get_decoder()) if fused else "it was switched off"
        self.fused = reason is None
        if fused and reason is not None:
            say(
                f"the engine decodes through the model's own layers ({reason}): about 1.6 times as slow (0.6B,"
                " docs/performance.md B7)"
            )
        self.store: Store | None = None
        self.recall = Recall()
        self.buckets: dict[int, Bucket] = {}
        self.captures = 0
        """Graphs captured so far."""
        self.reused_tokens = 0
        """Prompt tokens whose keys and values were copied instead of computed, so far."""
        self._waiting: deque[Job] = deque()
        """Jobs that no scheduler has yet."""
        self._scheduler: Scheduler | None = None
        self._seedless = False
        """Whether requests without seeds are to be reported, which have nothing to wait for."""
        self._grow_generously = False
        """Whether requests had to wait because they came while others decoded in too small a room."""
        self._pool: Any = None
        self._weights: tuple[tuple[int, ...], tuple[int, ...], Tensor] | None = None
        self._asked: Room | None = None
        self._room: Room | None = None
        self._budget: int | None = None
        self._per_token: int | None = None
        self._ends = numbers([-1] * 8, policy.device)

    # Requests

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(routes=self.routers is not None)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles = super().submit(requests, sampling, limits)
        # A next turn goes on from what was reported before it was submitted.
        self.recall.settle()
        self._waiting.extend(job for handle in handles if (job := self.jobs[handle]).waiting)
        self._seedless = self._seedless or any(not request.seeds for request in requests)
        return handles

    def poll(self) -> list[Finished]:
        if self._seedless:
            self._seedless = False
            if complete := self.report_complete():
                return complete
        return self._guarded(self._decode)

    def cancel(self, handle: Handle) -> None:
        super().cancel(handle)
        self._waiting = deque(job for job in self._waiting if job.handle != handle)
        if self._scheduler is not None:
            self._scheduler.cancel(handle)
            self._end_burst_when_idle()

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        # Once around all polls: where layers are checkpointed, every module is switched to evaluation and back.
        with self.policy.serving():
            return super().generate(requests, sampling, limits)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The policy's own tensors have changed. Responses that decode keep their tokens and go on with this version."""
        self.version = version
        if self._scheduler is None:
            return
        self.recall.clear()
        before, self._weights = self._weights, self._weights_now()
        if before is None or before[0] != self._weights[0]:
            # Graphs are of weights at their addresses: everything begins again.
            self._restart()
            self.forget()
        else:
            self._guarded(self._read_again)

    def _read_again(self) -> None:
        if self._scheduler is not None:
            self._scheduler.read_again()

    def _decode(self) -> list[Finished]:
        """Decode until a request is complete. Kinds of requests take turns in the order they were submitted."""
        finished: list[Finished] = []
        while not finished and (self._scheduler is not None or self._waiting):
            if self._scheduler is None:
                self._begin_burst()
            self._let_join()
            assert self._scheduler is not None
            finished = self._scheduler.decode()
            for one in finished:
                del self.jobs[one.handle]
            self._end_burst_when_idle()
        return finished

    def _begin_burst(self) -> None:
        """A scheduler for the requests at the head of the queue that are sampled alike."""
        kind = Kind.of(self._waiting[0])
        room = _Needed()
        for job in takewhile(lambda job: Kind.of(job) == kind, self._waiting):
            room.add(job)
        self._scheduler = Scheduler(self, self._prepare(room.within(self.rows_at_once)), kind)

    def _let_join(self) -> None:
        """Hand requests to the scheduler, in order, while they are of its kind and the room is large enough.

        The others wait until what decodes has finished; then room is made for them.
        """
        scheduler, joining = self._scheduler, []
        assert scheduler is not None and self._asked is not None
        if not self._waiting or Kind.of(self._waiting[0]) != scheduler.kind:
            return
        room = _Needed()
        for job in scheduler.jobs.values():
            room.add(job)
        while self._waiting and Kind.of(self._waiting[0]) == scheduler.kind:
            room.add(self._waiting[0])
            if not self._asked.holds(room.within(self.rows_at_once)):
                self._grow_generously = True
                break
            joining.append(self._waiting.popleft())
        if joining:
            scheduler.join(joining)

    def _end_burst_when_idle(self) -> None:
        if self._scheduler is None or self._scheduler.jobs:
            return
        self._per_token = self._scheduler.memory.bytes_per_token or self._per_token
        self._scheduler = None
        self.recall.settle()

    def _restart(self) -> None:
        """What is outstanding begins again: the scheduler is gone, with everything it had decoded."""
        self._scheduler = None
        for job in self.jobs.values():
            job.restart()
        self._waiting = deque(job for job in self.jobs.values() if job.waiting)

    def _guarded(self, work: Callable[[], _Result]) -> _Result:
        """Do some work on the device. Where memory runs out, it is done again with half the slots."""
        while True:
            try:
                with self.policy.serving():
                    return work()
            except RuntimeError as error:
                self._restart()
                if not budget.is_out_of_memory(error):
                    raise
            except BaseException:
                self._restart()
                raise
            # Out of the handler: the frames of the error hold on to the scheduler and to the store.
            self._shrink()

    # Memory

    def _prepare(self, wanted: Room) -> Store:
        self._notice_weights()
        if self.store is not None and self._asked is not None:
            if self._asked.holds(wanted):
                return self.store
            if self._grow_generously:
                # Requests that come while others decode come one by one: room for twice as many, so that this is rare.
                slots = min(self.rows_at_once, max(wanted.slots, 2 * self._asked.slots))
                wanted = replace(wanted, slots=slots, prompts=min(slots, max(wanted.prompts, 2 * self._asked.prompts)))
            wanted = self._asked.joined(wanted)
            if wanted.prompt_tokens > self._asked.prompt_tokens:
                # Prompts that grew once will again: a quarter more, so that graphs are not captured anew each time.
                wanted = replace(wanted, prompt_tokens=wanted.prompt_tokens * 5 // 4)
        self._grow_generously = False
        self._asked = replace(wanted, prompt_tokens=-(-wanted.prompt_tokens // 64) * 64)
        return self._make_room(self._asked)

    def _make_room(self, wanted: Room) -> Store:
        if self._budget is None:
            self._budget = budget.allowed(self.policy.device, self.kv_memory_share, self.training_bytes)
        self._per_token = self._per_token or budget.bytes_per_token(self.policy)
        self._room = room = budget.fitting(wanted, self._per_token, self._budget)
        if room.slots < wanted.slots:
            self.say(
                f"the engine decodes {room.slots} sequences at a time instead of {wanted.slots}: more do not fit in"
                f" rollouts.kv_memory_share = {self.kv_memory_share} of the memory"
            )
        self._drop_graphs()
        if self.store is not None and self.recall.prompts:
            self.store.grow(room)
            self.recall.keep(room)
        else:
            self.store = None  # before the new one is made
            self.store = Store(room, self.policy.device, self.routers)
        return self.store

    def _weights_now(self) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
        """Addresses, version counters and bits of the weights."""
        parameters = list(self.policy.model.parameters())
        addresses, versions = tuple(one.data_ptr() for one in parameters), tuple(one._version for one in parameters)
        return addresses, versions, fingerprint(parameters)

    def _notice_weights(self) -> None:
        """Graphs are of weights at their addresses; what was read is of the weights as they were."""
        addresses, versions, bits = now = self._weights_now()
        if self._weights is None or addresses != self._weights[0]:
            self.forget()
        elif self.recall.prompts and (versions != self._weights[1] or not torch.equal(bits, self._weights[2])):
            self.recall.clear()
        self._weights = now

    def forget(self) -> None:
        """Give all memory back: keys, values and graphs."""
        self.store = self._asked = None
        self.recall.clear()
        self._drop_graphs()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        self.buckets.clear()
        self._pool = None

    def _shrink(self) -> None:
        """Half the slots, everything given back first."""
        assert self._room is not None and self._per_token is not None
        room = self._room
        self.forget()
        gc.collect()
        if room.slots == 1:
            raise torch.OutOfMemoryError(budget.nothing_fits(room, self._per_token, self.policy.device))
        self.rows_at_once = room.slots // 2
        self.say(
            f"out of memory with {room.slots} sequences at a time: the engine goes on with {self.rows_at_once}"
            " (a lower rollouts.rows_at_once or rollouts.kv_memory_share avoids the attempt)"
        )

    # One step

    def _step(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        memory, slots = bucket.store, bucket.slots
        length = memory.length[slots]

        def note(number: int, experts: Tensor) -> None:
            memory.routes[number][slots, 0, length] = experts

        with heard(self.routers, note):
            hidden = self._decoded(bucket, memory.token[slots], memory.base[slots] + length)
        choice = self.choose(hidden, slots, sampling, 1)
        alive = ~memory.done[slots]
        memory.write(slots, (length + 1).clamp(max=memory.room.response_tokens - 1), alive, choice, ends)
        memory.length[slots] = torch.where(alive, length + 1, length)

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice:
        """The next token of each slot, `add` places after those whose keys are stored."""
        memory = self.store
        assert memory is not None
        logits = Head.from_body(self.policy.body).exact(hidden)
        if not sampling.truncates:
            tokens, logprobs = sample(logits, slots, memory.seed, memory.length, temperature=sampling.temperature, add=add)
            return Choice(tokens=tokens, logprobs=logprobs, kept_logmass=None)
        return choose_plainly(logits, uniform(memory.seed[slots], memory.length[slots] + add), sampling)

    def _decoded(self, bucket: Bucket, tokens: Tensor, positions: Tensor) -> Tensor:
        """[R, N]: the last hidden state of one token per row, through fused parts where the family is known."""
        if not self.fused:
            return self.policy.hidden(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
        parts = Parts(ready=bucket.ready, attend=bucket.look, add_norm=add_norm, swiglu=swiglu)
        return run_body_without_backward(self.policy.body.get_decoder(), tokens, positions, parts)

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        """One step of a bucket: a replay where it is captured."""
        if not self.graphs:
            with self.policy.attending(bucket):
                self._step(bucket, sampling, ends)
            return
        if sampling not in bucket.graphs:
            if len(bucket.graphs) == _SAMPLINGS:
                del bucket.graphs[next(iter(bucket.graphs))]
            bucket.graphs[sampling] = self._capture(bucket, sampling, ends)
        bucket.graphs[sampling].replay()

    def _capture(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> Any:
        """Run the step once on the dump, so that kernels are compiled and memory is there, then record it."""
        held = bucket.slots.clone()
        bucket.slots.fill_(bucket.store.dump)
        self._pool = self._pool or graph_pool()
        with self.policy.attending(bucket):
            graph = captured(lambda: self._step(bucket, sampling, ends), self._pool)
        bucket.slots.copy_(held)
        self.captures += 1
        return graph

    # What the scheduler asks for

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor:
        """The end tokens in a tensor that keeps its address, since graphs read it; -1 is no token."""
        if len(ends) > len(self._ends):
            self._drop_graphs()
            self._ends = numbers([-1] * 2 * len(ends), self.policy.device)
        self._ends.copy_(numbers([*ends, *[-1] * (len(self._ends) - len(ends))], self.policy.device))
        return self._ends

    def bucket(self, rows: int) -> Bucket:
        """The smallest bucket that holds so many rows."""
        assert self.store is not None
        slots = self.store.room.slots
        size = min(next((size for size in BUCKETS if size >= rows), slots), slots)
        if size not in self.buckets:
            self.buckets[size] = Bucket(size, self.store, self.policy.device)
        return self.buckets[size]


@dataclass(slots=True)
class _Needed:
    """The room that jobs need to decode together, added up job by job."""

    rows: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0

    def add(self, job: Job) -> None:
        self.rows += len(job.request.seeds)
        self.prompts += 1
        self.prompt_tokens = max(self.prompt_tokens, len(job.request.prompt))
        self.response_tokens = max(self.response_tokens, job.limits.max_response_tokens)

    def within(self, rows_at_once: int) -> Room:
        """The room for as many rows as may decode together."""
        return Room(
            slots=self.rows,
            prompts=self.prompts,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        ).within(rows_at_once)
