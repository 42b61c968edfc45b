"""The local engine on a GPU: one captured graph per bucket decodes a token for all rows of the bucket.

The state that changes from token to token is in device tensors (`slots.py`), so a step is a graph replay. The host reads the
finished flags a few steps late, frees slots, refills them from the queue, and moves to a smaller bucket when rows run out.
Without graphs the same step runs eagerly, also on a CPU (in Triton's interpreter, for tests).
"""

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from legato.core.out_of_memory import is_out_of_memory
from legato.policy.experts.grouped import find_grouped, run_grouped
from legato.policy.head.head import Head
from legato.policy.kernels.sample import sample
from legato.policy.layers.fused import run_body_without_backward, why_not
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Finished, Handle, Job, JobEngine, Limits, Progress, Request, Response
from legato.rollouts.gpu import budget
from legato.rollouts.gpu.buckets import BUCKETS, Bucket
from legato.rollouts.gpu.capture import capture, graph_pool
from legato.rollouts.gpu.prefixes import PrefixIndex, fingerprint
from legato.rollouts.gpu.scheduler import Kind, Scheduler
from legato.rollouts.gpu.slots import KVStore, Room, device_ints
from legato.rollouts.local.routes import listen_to_routers
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Choice, Sampling
from legato.rollouts.sampling import choose as choose_plainly

_Result = TypeVar("_Result")

_SAMPLINGS = 4
"""How many sampling settings a bucket keeps graphs for: training, evaluation and a few more."""


class GraphedEngine(JobEngine):
    """Samples from the policy's own tensors, on a GPU."""

    name = "local"

    def __init__(
        self,
        policy: Policy,
        rows_at_once: int = 256,
        *,
        graphs: bool = True,
        fused: bool = True,
        grouped: bool = True,
        joined: bool = True,
        kv_memory_share: float = 0.5,
        record_routes: bool = False,
        training_bytes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self.policy, self.graphs, self.kv_memory_share, self.say = policy, graphs, kv_memory_share, say
        self.joined = joined
        """Whether projections are joined where they can be (`layers/joined.py`)."""
        self.rows_at_once = rows_at_once
        """Lowered if memory runs out."""
        self.training_bytes = training_bytes
        """Device memory that training will still need; the KV cache does not use it."""
        self.routers = policy.routers if record_routes else None
        reason = why_not(policy.body.get_decoder()) if fused else "it was switched off"
        self.fused = reason is None
        if fused and reason is not None:
            say(
                f"the engine decodes through the model's own layers ({reason}): about 1.6 times as slow (0.6B,"
                " docs/performance.md B7)"
            )
        experts = find_grouped(policy.body) if grouped else None
        self.grouped = None if isinstance(experts, str) else experts
        """The experts that decode by grouped kernels; None: there are none, or they run through the model's own layers."""
        if isinstance(experts, str):
            say(own_experts_note(experts))
        self.store: KVStore | None = None
        self.prefixes = PrefixIndex()
        self.buckets: dict[int, Bucket] = {}
        self.captures = 0
        """Graphs captured so far."""
        self.reused_tokens = 0
        """How many prompt tokens had their KV cache copied instead of computed, so far."""
        self._waiting: deque[Job] = deque()
        """Jobs that no scheduler has taken yet."""
        self._scheduler: Scheduler | None = None
        self._seedless = False
        """Whether requests without seeds are to be reported, which have nothing to wait for."""
        self._grow_generously = False
        """Whether requests that arrived during decoding had to wait because the store was too small."""
        self._pool: Any = None
        self._weights: tuple[tuple[int, ...], tuple[int, ...], Tensor] | None = None
        self._requested_room: Room | None = None
        self._room: Room | None = None
        self._budget: int | None = None
        self._per_token: int | None = None
        self._ends = device_ints([-1] * 8, policy.device)

    @property
    def exact(self) -> bool:
        """Whether log-probs of sampled tokens equal the trainer's to the bit."""
        return self.policy.exact and self.fused

    # Requests

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(routes=self.routers is not None, partial=True)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles = super().submit(requests, sampling, limits)
        # The next turn of an episode reuses the texts reported before it was submitted.
        self.prefixes.settle()
        self._waiting.extend(job for handle in handles if (job := self.jobs[handle]).waiting)
        self._seedless = self._seedless or any(not request.seeds for request in requests)
        return handles

    def poll(self) -> list[Finished]:
        if self._seedless:
            self._seedless = False
            if complete := self.report_complete():
                return complete
        return self._with_less_memory_if_needed(self._decode)

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        return self._with_less_memory_if_needed(lambda: self._decode_few(watched))

    def reserve(self, prompt_tokens: int, response_tokens: int) -> None:
        rows = self.rows_at_once
        wanted = Room(slots=rows, prompts=rows, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        self._with_less_memory_if_needed(lambda: self._prepare(wanted.within(self.rows_at_once)))

    def cancel(self, handle: Handle) -> None:
        super().cancel(handle)
        self._waiting = deque(job for job in self._waiting if job.handle != handle)
        if self._scheduler is not None:
            self._scheduler.cancel(handle)
            self._end_burst_when_idle()

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        # Once around all polls: with gradient checkpointing, every module is switched to evaluation mode and back.
        with self.policy.serving():
            return super().generate(requests, sampling, limits)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note that the policy's tensors have changed. Active responses keep their tokens and continue with this version."""
        self.version = version
        self.prefixes.clear()
        if self._scheduler is None and not self.weights_are_published:
            return  # the next burst looks whether they have moved
        before, self._weights = self._weights, self._weights_now()
        if before is None or before[0] != self._weights[0]:
            # Graphs hold the addresses of the weights: all outstanding requests start over.
            self._restart()
            self.forget()
        else:
            self._with_less_memory_if_needed(self._reread)

    def _reread(self) -> None:
        if self._scheduler is not None:
            self._scheduler.reread()

    def _decode(self) -> list[Finished]:
        """Decode until a request is complete. Requests of different kinds run one kind after the other, in order."""
        finished: list[Finished] = []
        while not finished and (self._scheduler is not None or self._waiting):
            if self._scheduler is None:
                self._begin_burst()
            self._join_waiting()
            assert self._scheduler is not None
            finished = self._scheduler.decode()
            for one in finished:
                del self.jobs[one.handle]
            self._end_burst_when_idle()
        return finished

    def _decode_few(self, watched: Collection[Handle]) -> Progress:
        """Decode a few steps of the requests of one kind."""
        if self._seedless:
            self._seedless = False
            self.report_complete()  # requests without seeds: there is nothing to report
        if self._scheduler is None:
            if not self._waiting:
                return Progress()
            self._begin_burst()
        self._join_waiting()
        scheduler = self._scheduler
        assert scheduler is not None
        responses, partial = scheduler.decode_briefly(watched)
        ended = self.end_responses(responses)
        for handle in {job.handle for job, _, _ in responses} - set(self.jobs):
            scheduler.drop_job(handle)
        self._end_burst_when_idle()
        return Progress(ended=ended, partial=tuple(partial))

    def _begin_burst(self) -> None:
        """Create a scheduler for the requests of one kind at the head of the queue."""
        kind = Kind.of(self._waiting[0])
        room = _Needed()
        for job in takewhile(lambda job: Kind.of(job) == kind, self._waiting):
            room.add(job)
        self._scheduler = Scheduler(self, self._prepare(room.within(self.rows_at_once)), kind)

    def _join_waiting(self) -> None:
        """Hand requests to the scheduler, in order, while they are of its kind and fit in the store.

        The others wait until the active requests have finished; then the store grows.
        """
        scheduler, joining = self._scheduler, []
        assert scheduler is not None and self._requested_room is not None
        if not self._waiting or Kind.of(self._waiting[0]) != scheduler.kind:
            return
        room = _Needed()
        for job in scheduler.jobs.values():
            room.add(job)
        while self._waiting and Kind.of(self._waiting[0]) == scheduler.kind:
            room.add(self._waiting[0])
            if not self._requested_room.holds(room.within(self.rows_at_once)):
                self._grow_generously = True
                break
            joining.append(self._waiting.popleft())
        if joining:
            scheduler.join(joining)

    def _end_burst_when_idle(self) -> None:
        if self._scheduler is None or self._scheduler.jobs:
            return
        self._per_token = self._scheduler.store.bytes_per_token or self._per_token
        self._scheduler = None
        self.prefixes.settle()

    def _restart(self) -> None:
        """Restart all outstanding jobs. The scheduler is dropped with everything it has decoded."""
        self._scheduler = None
        for job in self.jobs.values():
            job.restart()
        self._waiting = deque(job for job in self.jobs.values() if job.waiting)

    def _with_less_memory_if_needed(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the device. If memory runs out, run it again with half the slots."""
        while True:
            try:
                with self.policy.serving():
                    return work()
            except RuntimeError as error:
                self._restart()
                if not is_out_of_memory(error):
                    raise
            except BaseException:
                self._restart()
                raise
            # Outside the handler: the frames of the error keep the scheduler and the store alive.
            self._shrink()

    # Memory

    def _prepare(self, wanted: Room) -> KVStore:
        if self._weights is None or not self.weights_are_published:
            self._notice_weights()
        if self.store is not None and self._requested_room is not None:
            if self._requested_room.holds(wanted):
                return self.store
            if self._grow_generously:
                # Requests that arrive during decoding arrive one by one: double the room, so that growing is rare.
                slots = min(self.rows_at_once, max(wanted.slots, 2 * self._requested_room.slots))
                wanted = replace(
                    wanted, slots=slots, prompts=min(slots, max(wanted.prompts, 2 * self._requested_room.prompts))
                )
            wanted = self._requested_room.union(wanted)
            if wanted.prompt_tokens > self._requested_room.prompt_tokens:
                # Prompts that grew once will grow again: a quarter more, so that graphs are not captured again each time.
                wanted = replace(wanted, prompt_tokens=wanted.prompt_tokens * 5 // 4)
        self._grow_generously = False
        self._requested_room = replace(wanted, prompt_tokens=-(-wanted.prompt_tokens // 64) * 64)
        return self._make_room(self._requested_room)

    def _make_room(self, wanted: Room) -> KVStore:
        if self._budget is None:
            self._budget = budget.kv_budget(self.policy.device, self.kv_memory_share, self.training_bytes)
        self._per_token = self._per_token or budget.bytes_per_token(self.policy)
        self._room = room = budget.fit_room(wanted, self._per_token, self._budget)
        if room.slots < wanted.slots:
            self.say(
                f"the engine decodes {room.slots} sequences at a time instead of {wanted.slots}: more do not fit in"
                f" rollouts.kv_memory_share = {self.kv_memory_share} of the memory"
            )
        self._drop_graphs()
        if self.store is not None and self.prefixes.prompts:
            self.store.grow(room)
            self.prefixes.drop_outside(room)
        else:
            self.store = None  # before the new one is made
            self.store = KVStore(room, self.policy.device, self.routers)
        return self.store

    def _weights_now(self) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
        """Addresses, version counters and bits of the weights."""
        parameters = list(self.policy.model.parameters())
        addresses, versions = tuple(one.data_ptr() for one in parameters), tuple(one._version for one in parameters)
        return addresses, versions, fingerprint(parameters)

    def _notice_weights(self) -> None:
        """Drop graphs if weights moved to other addresses, and stored prefixes if weights changed."""
        addresses, versions, bits = now = self._weights_now()
        if self._weights is None or addresses != self._weights[0]:
            self.forget()
        elif self.prefixes.prompts and (versions != self._weights[1] or not torch.equal(bits, self._weights[2])):
            self.prefixes.clear()
        self._weights = now

    def forget(self) -> None:
        """Free all memory: the KV cache and the graphs."""
        self.store = self._requested_room = None
        self.prefixes.clear()
        self._drop_graphs()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        self.buckets.clear()
        self._pool = None

    def _shrink(self) -> None:
        """Free all memory and halve the number of slots."""
        assert self._room is not None and self._per_token is not None
        room = self._room
        self.forget()
        gc.collect()
        if room.slots == 1:
            raise torch.OutOfMemoryError(budget.nothing_fits_message(room, self._per_token, self.policy.device))
        self.rows_at_once = room.slots // 2
        self.say(
            f"out of memory with {room.slots} sequences at a time: the engine goes on with {self.rows_at_once}"
            " (a lower rollouts.rows_at_once or rollouts.kv_memory_share avoids the attempt)"
        )

    # One step

    def _step(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        store, slots = bucket.store, bucket.slots
        length = store.length[slots]

        def note(number: int, experts: Tensor) -> None:
            store.routes[number][slots, 0, length] = experts

        with listen_to_routers(self.routers, note), run_grouped(self.grouped):
            hidden = self._hidden_states(bucket, store.token[slots], store.base[slots] + length)
        choice = self.choose(hidden, slots, sampling, 1)
        alive = ~store.done[slots]
        store.write(slots, (length + 1).clamp(max=store.room.response_tokens - 1), alive, choice, ends)
        store.length[slots] = torch.where(alive, length + 1, length)

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice:
        """Sample the next token of each slot, `add` positions after the last stored key."""
        store = self.store
        assert store is not None
        head = Head.from_body(self.policy.body)
        logits = head.exact(hidden)
        if not sampling.truncates:
            tokens, logprobs = sample(logits, slots, store.seed, store.length, temperature=sampling.temperature, add=add)
            if self.exact:
                temperature = torch.full((len(tokens),), sampling.temperature or 1.0, device=tokens.device)
                # 0 logits at once: none are kept for a backward.
                logprobs, _ = head.score(hidden, tokens, temperature, 0)
            return Choice(tokens=tokens, logprobs=logprobs, kept_logmass=None)
        return choose_plainly(logits, uniform(store.seed[slots], store.length[slots] + add), sampling)

    def _hidden_states(self, bucket: Bucket, tokens: Tensor, positions: Tensor) -> Tensor:
        """[R, N]: the last hidden state of one token per row, through fused layers if the model family is known."""
        if not self.fused:
            return self.policy.hidden(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
        return run_body_without_backward(self.policy.body.get_decoder(), tokens, positions, bucket.parts())

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None:
        """Run one step of a bucket, as a graph replay if graphs are on."""
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
        """Capture a step. Warm-up runs use the dump slot, so that no response changes."""
        held = bucket.slots.clone()
        bucket.slots.fill_(bucket.store.dump)
        self._pool = self._pool or graph_pool()
        with self.policy.attending(bucket):
            graph = capture(lambda: self._step(bucket, sampling, ends), self._pool)
        bucket.slots.copy_(held)
        self.captures += 1
        return graph

    # Called by the scheduler

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor:
        """The end tokens, padded with -1, in a tensor with a fixed address, since graphs read it."""
        if len(ends) > len(self._ends):
            self._drop_graphs()
            self._ends = device_ints([-1] * 2 * len(ends), self.policy.device)
        self._ends.copy_(device_ints([*ends, *[-1] * (len(self._ends) - len(ends))], self.policy.device))
        return self._ends

    def bucket(self, rows: int) -> Bucket:
        """The smallest bucket that holds `rows` rows."""
        assert self.store is not None
        slots = self.store.room.slots
        size = min(next((size for size in BUCKETS if size >= rows), slots), slots)
        if size not in self.buckets:
            self.buckets[size] = Bucket(size, self.store, self.policy.device, exact=self.exact, joined=self.joined)
        return self.buckets[size]


def own_experts_note(reason: str) -> str:
    """What the user is told where experts are not decoded by grouped kernels."""
    return f"experts decode through the model's own layers ({reason}): slower (docs/experts.md)"


@dataclass(slots=True)
class _Needed:
    """Accumulates the room that jobs need to decode together."""

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
        """The needed room with at most `rows_at_once` slots."""
        return Room(
            slots=self.rows,
            prompts=self.prompts,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        ).within(rows_at_once)
