"""The schedule of the GPU engine: jobs wait for slots, responses decode in slots, finished ones leave.

A scheduler lives while jobs are outstanding that are sampled alike. Jobs may join while others decode. The host is a look
behind: it enqueues the next steps before it reads which rows had finished by the last ones. A finished row writes nothing
more, whatever is still enqueued for it. Its tokens are copied to the host behind the steps that are under way, and are
waited for when the next look is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from legato.policy.policy import Policy
from legato.rollouts.engine import Finished, Handle, Job, Response
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.landing import Landing, Row, prompt_routes
from legato.rollouts.gpu.looks import Look
from legato.rollouts.gpu.prefill import Opening, Written, read, read_again
from legato.rollouts.gpu.recall import Recall, copy
from legato.rollouts.gpu.slots import Store, numbers
from legato.rollouts.sampling import Choice, Sampling

_LOOK_EVERY = 8
"""Steps between two looks at the finished flags; a finished row costs at most twice as many."""


@runtime_checkable
class Decoder(Protocol):
    """What a scheduler asks of the engine."""

    policy: Policy
    recall: Recall
    reused_tokens: int
    version: int

    def bucket(self, rows: int) -> Bucket: ...

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None: ...

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice: ...

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What jobs must have in common to decode together: a graph is of one sampling, and end tokens lie at one address."""

    sampling: Sampling
    end_tokens: tuple[int, ...]
    stop: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> "Kind":
        limits = job.limits
        return cls(sampling=job.sampling, end_tokens=limits.end_tokens, stop=limits.stop)


class Scheduler:
    """Jobs of one kind: those waiting for a slot, those that decode, and those on their way to the host."""

    def __init__(self, engine: Decoder, memory: Store, kind: Kind) -> None:
        self.engine, self.memory, self.kind = engine, memory, kind
        self.jobs: dict[Handle, Job] = {}
        """What is outstanding."""
        self.queue: deque[Job] = deque()
        """Jobs with seeds that have no slot yet."""
        self.free_slots = list(range(memory.room.slots))[::-1]
        self.free_prompts = list(range(memory.room.prompts))[::-1]
        self.active: dict[int, Row] = {}
        """slot -> the response that decodes there"""
        self.last: dict[int, Row] = {}
        """slot -> the response it was last given to"""
        self.users: dict[int, int] = {}
        """prompt entry -> responses that still read it"""
        self.entries: dict[Handle, int] = {}
        """job -> its prompt entry, while responses read it"""
        self.held: dict[int, Job] = {}
        """prompt entry -> the job it was last filled for"""
        self.prompt_routes: dict[Handle, Tensor] = {}
        self.cut: dict[Row, tuple[int, str]] = {}
        """Responses that a stop string ended: (tokens, text)"""
        self.ends = engine.end_tokens(kind.end_tokens)
        self.steps = 0
        self.until = 0
        """The step at which every response that has a slot has ended, at the latest."""
        self.free_looks = [Look(memory, texts=bool(kind.stop)) for _ in range(2)]
        self.asked: deque[Look] = deque()
        self.landings: list[Landing] = []
        self.placed: tuple[Bucket, list[tuple[int, int]]] | None = None

    # Jobs in and out

    def join(self, jobs: Sequence[Job]) -> None:
        """Let jobs wait for slots. What the store holds a beginning of comes first: the others will overwrite it."""
        longest = self.engine.recall.longest
        self.queue.extend(sorted(jobs, key=lambda job: longest(job.request.prompt) is None))
        self.jobs |= {job.handle: job for job in jobs}

    def cancel(self, handle: Handle) -> None:
        """Drop a job, and free its slots."""
        job = self.jobs.pop(handle, None)
        if job is None:
            return
        if job in self.queue:
            self.queue.remove(job)
        self._free([slot for slot, row in self.active.items() if row.job is job])

    def decode(self) -> list[Finished]:
        """Decode until a job is complete; [] where none is left."""
        self._admit_if_worth_it()
        while self.active:
            # Steps beyond the longest response would move nobody.
            steps = min(_LOOK_EVERY, self.until - self.steps)
            if steps > 0:
                self._advance(steps)
            if steps > 0 or not self.asked:
                self.asked.append(self.free_looks.pop().ask(dict(self.active)))
            if len(self.asked) == 2 or steps <= 0:
                look = self.asked.popleft().taken()
                self.free_looks.append(look)
                # What left at the last look was copied before the steps that are under way now.
                finished = self._land()
                self._collect(look)
                if finished:
                    return finished
        return self._land()

    # Decoding

    def _advance(self, steps: int) -> None:
        """Enqueue some steps of all active rows."""
        listed = sorted(self.active)
        bucket = self.engine.bucket(len(listed))
        # A slot may have gone to a response of another prompt since the last look.
        now = (bucket, [(slot, self.active[slot].entry) for slot in listed])
        if self.placed != now:
            bucket.place(listed, [entry for _, entry in now[1]])
            self.placed = now
        for _ in range(steps):
            self.engine.advance(bucket, self.kind.sampling, self.ends)
        self.steps += steps

    def _admit_if_worth_it(self) -> None:
        # A prefill costs a pass whatever its size: it waits until a fair share of the slots is free.
        if self.queue and (len(self.free_slots) >= self.memory.room.slots // 8 or not self.active):
            self._admit()

    def _admit(self) -> None:
        """Give free slots to waiting responses; prompts that no entry holds are read."""
        rows: list[Row] = []
        admitted: list[Job] = []
        while self.queue and self.free_slots:
            job = self.queue[0]
            admitted.append(job)
            for _ in job.waiting[: len(self.free_slots)]:
                rows.append(Row(job, job.taken, self.free_slots.pop(), -1, [(0, self.engine.version)]))
                job.taken += 1
            if not job.waiting:
                self.queue.popleft()
        if not rows:
            return
        self._read([job for job in admitted if job.handle not in self.entries], [row.slot for row in rows])
        for row in rows:
            row.entry = self.entries[row.job.handle]
        memory, device = self.memory, self.memory.device
        entries, slots = numbers([row.entry for row in rows], device), numbers([row.slot for row in rows], device)
        seeds = numbers([row.job.request.seeds[row.place] for row in rows], device)
        most = [row.job.limits.max_response_tokens for row in rows]
        memory.admit(slots, memory.prompt_length[entries], seeds, numbers(most, device))
        assert memory.ending is not None
        choice = self.engine.choose(memory.ending[entries], slots, self.kind.sampling, 0)
        memory.write(slots, torch.zeros_like(slots), torch.ones_like(slots, dtype=torch.bool), choice, self.ends)
        self.until = max(self.until, self.steps + max(most) - 1)
        for row in rows:
            self.users[row.entry] = self.users.get(row.entry, 0) + 1
            self.active[row.slot] = self.last[row.slot] = row

    def _read(self, jobs: Sequence[Job], slots: Sequence[int]) -> None:
        """Prefill the prompts of some jobs; what the store holds of them already is copied, before slots go away."""
        recall, openings, sources = self.engine.recall, [], []
        for job in jobs:
            prompt = job.request.prompt
            entry = self.free_prompts.pop()
            source = recall.longest(prompt)
            if source is not None:
                sources.append((source, entry))
            openings.append(Opening(entry=entry, prompt=prompt, known=0 if source is None else source.tokens))
            self.entries[job.handle], self.held[entry] = entry, job
        recall.drop([one.entry for one in openings], slots)
        copy(self.memory, sources)
        read(self.engine.policy, self.memory, openings)
        if self.memory.routers is not None:
            for job, opening in zip(jobs, openings, strict=True):
                if job.handle not in self.prompt_routes:
                    self.prompt_routes[job.handle] = prompt_routes(self.memory, opening.entry, len(opening.prompt))
        self.engine.reused_tokens += sum(one.known for one in openings)

    def read_again(self) -> None:
        """The weights have changed: keys and values of what decodes are computed anew, and later tokens are of this version.

        Its tokens stay. The host waits for the device here.
        """
        # What is finished has keys of the old weights: no later prompt may go on from it.
        self.last = dict(self.active)
        self.held = {entry: job for entry, job in self.held.items() if entry in self.users}
        tokens, lengths = self.memory.tokens.cpu(), self.memory.written.tolist()
        texts = []
        for slot, row in self.active.items():
            row.versions.append((lengths[slot], self.engine.version))
            texts.append(Written(row.entry, row.job.request.prompt, slot, tokens[slot, : lengths[slot]]))
        read_again(self.engine.policy, self.memory, texts)

    # Finished responses

    def _collect(self, look: Look) -> None:
        """Send finished responses to the host and fill their slots again."""
        there = [slot for slot, row in look.rows.items() if self.active.get(slot) is row]
        finished = [slot for slot in there if bool(look.done[slot])]
        if look.texts is not None:
            finished = sorted({*finished, *self._stopped(there, *look.texts)})
        if not finished:
            return
        rows = [self.active[slot] for slot in finished]
        width = max(row.job.limits.max_response_tokens for row in rows)
        self.landings.append(Landing(self.memory, rows, width, kept=self.kind.sampling.truncates))
        self._free(finished)
        self._admit_if_worth_it()

    def _free(self, slots: Sequence[int]) -> None:
        """Take responses out of their slots."""
        if not slots:
            return
        # Filled and not assigned: True would be copied to the device, and the host would wait for that.
        self.memory.done.index_fill_(0, numbers(slots, self.memory.device), True)
        for slot in slots:
            entry = self.active.pop(slot).entry
            self.free_slots.append(slot)
            self.users[entry] -= 1
            if not self.users[entry]:
                del self.users[entry], self.entries[self.held[entry].handle]
                self.free_prompts.append(entry)

    def _stopped(self, slots: list[int], tokens: Tensor, lengths: Tensor) -> list[int]:
        """Slots whose text has reached a stop string."""
        stopped = []
        decode = self.engine.policy.tokenizer.decode
        for slot in slots:
            row, limits = self.active[slot], self.active[slot].job.limits
            text = tokens[slot, : int(lengths[slot])].tolist()
            if limits.before_stop(decode(text, skip_special_tokens=True)) is None:
                continue
            for count in range(1, len(text) + 1):
                before = limits.before_stop(decode(text[:count], skip_special_tokens=True))
                if before is not None:
                    self.cut[row] = (count, before)
                    stopped.append(slot)
                    break
        return stopped

    def _land(self) -> list[Finished]:
        """Wait for the responses that were sent to the host; the jobs that are complete with them."""
        finished = []
        for landing in self.landings:
            for row, response in landing.wait(
                self.engine.policy.tokenizer, self.kind.end_tokens, self.cut, self.prompt_routes
            ):
                self._remember(row, response)
                row.job.responses[row.place] = response
                if row.job.complete and self.jobs.pop(row.job.handle, None) is not None:
                    self.prompt_routes.pop(row.job.handle, None)
                    finished.append(row.job.finish())
        self.landings.clear()
        return finished

    def _remember(self, row: Row, response: Response) -> None:
        """Note the texts that lie in the store, if nothing took their place. The last token's key was never stored."""
        if self.held.get(row.entry) is not row.job:
            return
        own = {row.slot: (row.entry, response.tokens[:-1])} if self.last.get(row.slot) is row else {}
        self.engine.recall.note_for_later({row.entry: row.job.request.prompt}, own)
