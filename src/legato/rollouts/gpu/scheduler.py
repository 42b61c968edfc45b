"""The scheduler of the GPU engine: jobs wait for slots, responses decode in slots, finished responses leave.

A scheduler serves jobs with equal sampling and lives while such jobs are outstanding. Jobs may join while others decode.
The host runs one slot copy behind: it enqueues the next steps before it reads which rows the last steps finished. A
finished row writes nothing more, even if steps are still enqueued. Its tokens are copied to the host after those steps and
waited for together with the next slot copy.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from legato.policy.policy import Policy
from legato.rollouts.engine import Finished, Handle, Job, Partial, Response, token_versions
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.landing import Landing, Row, prompt_routes
from legato.rollouts.gpu.prefill import Opening, PartialResponse, read_prompts, reread
from legato.rollouts.gpu.prefixes import PrefixIndex, copy_prefixes
from legato.rollouts.gpu.slot_copy import LatestTokens, SlotCopy
from legato.rollouts.gpu.slots import KVStore, device_ints
from legato.rollouts.sampling import Choice, Sampling

_COPY_EVERY = 8
"""Steps between two copies of the finished flags. A finished row idles for at most twice as many."""

_BRIEFLY = 4
"""The same in `decode_briefly`: a server must answer a client before the free slot gets its next request."""

_LATEST = 16 * _BRIEFLY + 1
"""How many of the last tokens a slot copy holds if responses are watched: enough if every 16th copy is looked at.

A response that was admitted after a copy has one token more than the steps since."""


@runtime_checkable
class Decoder(Protocol):
    """What a scheduler needs of the engine."""

    policy: Policy
    prefixes: PrefixIndex
    reused_tokens: int
    version: int

    def bucket(self, rows: int) -> Bucket: ...

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None: ...

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice: ...

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What jobs must share to decode together: graphs depend on the sampling and on the address of the end tokens."""

    sampling: Sampling
    end_tokens: tuple[int, ...]
    stop: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> "Kind":
        limits = job.limits
        return cls(sampling=job.sampling, end_tokens=limits.end_tokens, stop=limits.stop)


class Scheduler:
    """Jobs of one kind: waiting for a slot, decoding, or being copied to the host."""

    def __init__(self, engine: Decoder, store: KVStore, kind: Kind) -> None:
        self.engine, self.store, self.kind = engine, store, kind
        self.jobs: dict[Handle, Job] = {}
        """Outstanding jobs."""
        self.queue: deque[Job] = deque()
        """Jobs with seeds that have not started."""
        self.free_slots = list(range(store.room.slots))[::-1]
        self.free_prompts = list(range(store.room.prompts))[::-1]
        self.active: dict[int, Row] = {}
        """slot -> the response that decodes there"""
        self.last: dict[int, Row] = {}
        """slot -> its latest response"""
        self.users: dict[int, int] = {}
        """prompt entry -> number of active responses of that prompt"""
        self.entries: dict[Handle, int] = {}
        """job -> its prompt entry, while any of its responses is active"""
        self.held: dict[int, Job] = {}
        """prompt entry -> the job whose prompt it holds"""
        self.prompt_routes: dict[Handle, Tensor] = {}
        self.cut: dict[Row, tuple[int, str]] = {}
        """Responses that a stop string ended -> (number of tokens, text)"""
        self.ends = engine.end_tokens(kind.end_tokens)
        self.steps = 0
        self.admitted = 0
        """The step before which responses were last admitted."""
        self.until = 0
        """The step by which every active response has ended at its length limit."""
        self.free_copies = [SlotCopy(store, texts=bool(kind.stop)) for _ in range(2)]
        self.pending_copies: deque[SlotCopy] = deque()
        self.landings: list[Landing] = []
        self.placement: tuple[Bucket, list[tuple[int, int]]] | None = None

    # Jobs in and out

    def join(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. Those with a stored prefix go first, before others overwrite it."""
        longest_prefix = self.engine.prefixes.longest_prefix
        self.queue.extend(sorted(jobs, key=lambda job: longest_prefix(job.request.prompt) is None))
        self.jobs |= {job.handle: job for job in jobs}

    def cancel(self, handle: Handle) -> None:
        """Remove a job and free its slots."""
        job = self.jobs.pop(handle, None)
        if job is None:
            return
        if job in self.queue:
            self.queue.remove(job)
        self._free([slot for slot, row in self.active.items() if row.job is job])

    def decode(self) -> list[Finished]:
        """Decode until a job is complete; [] if none is left."""
        self._admit_if_worth_it()
        while self.active:
            copy = self._decode_few(_COPY_EVERY)
            if copy is not None:
                # Responses found finished by the last slot copy were copied before the steps that run now.
                finished = self._finish(self._land())
                self._collect(copy)
                if finished:
                    return finished
        return self._finish(self._land())

    def decode_briefly(self, watched: Collection[Handle]) -> tuple[list[tuple[Job, int, Response]], list[Partial]]:
        """Decode a few steps: the responses that ended, and new tokens of jobs. Jobs stay until `drop_job`.

        New tokens are those of the slot copy that has arrived: of the jobs that were `watched` when it was started, in an
        earlier call as a rule.
        """
        self._admit_if_worth_it()
        copy = self._decode_few(_BRIEFLY, watched) if self.active else None
        landed = self._land() if copy is not None or not self.active else []
        if copy is not None:
            self._collect(copy)
        ended = [(row.job, row.place, response) for row, response in landed if row.job.handle in self.jobs]
        return ended, [] if copy is None else self._partial(copy)

    def drop_job(self, handle: Handle) -> None:
        """Remove a job whose responses have all been reported."""
        del self.jobs[handle]
        self.prompt_routes.pop(handle, None)

    def _decode_few(self, most: int, watched: Collection[Handle] = ()) -> SlotCopy | None:
        """Enqueue `most` steps and a slot copy; returns the slot copy before it once that has arrived, None without one.

        The new slot copy holds the last tokens if jobs are `watched`.
        """
        # Steps beyond the longest response would advance no row.
        steps = min(most, self.until - self.steps)
        if steps > 0:
            self._advance(steps)
        if steps > 0 or not self.pending_copies:
            self.pending_copies.append(self.free_copies.pop().start(dict(self.active), watched, _LATEST))
        if len(self.pending_copies) < 2 and steps > 0:
            return None
        copy = self.pending_copies.popleft().wait()
        self.free_copies.append(copy)
        return copy

    def _partial(self, copy: SlotCopy) -> list[Partial]:
        """The new tokens of watched responses that were decoding at the time of a slot copy and still are."""
        if copy.latest is None:
            return []
        rows = [row for slot, row in copy.rows.items() if self.active.get(slot) is row and row.job.handle in copy.watched]
        return [new for row in rows if (new := self._new_tokens(row, copy.latest)) is not None]

    def _new_tokens(self, row: Row, latest: LatestTokens) -> Partial | None:
        start, end = row.reported, int(latest.counts[row.slot])
        if end <= start:
            return None
        if end - start <= latest.tokens.shape[1]:
            tokens, logprobs = (table[row.slot, start - end :].clone() for table in (latest.tokens, latest.logprobs))
        else:  # watched only now: earlier tokens are still in the slot
            tokens, logprobs = (table[row.slot, start:end].cpu() for table in (self.store.tokens, self.store.logprobs))
        row.reported = end
        return Partial(
            handle=row.job.handle,
            place=row.place,
            start=start,
            tokens=tokens,
            logprobs=logprobs,
            version=token_versions(row.versions, end)[start:],
        )

    # Decoding

    def _advance(self, steps: int) -> None:
        """Enqueue `steps` decode steps of all active rows."""
        listed = sorted(self.active)
        bucket = self.engine.bucket(len(listed))
        # A slot may have been reassigned to a response of another prompt.
        now = (bucket, [(slot, self.active[slot].entry) for slot in listed])
        if self.placement != now:
            bucket.place(listed, [entry for _, entry in now[1]])
            self.placement = now
        for _ in range(steps):
            self.engine.advance(bucket, self.kind.sampling, self.ends)
        self.steps += steps

    def _admit_if_worth_it(self) -> None:
        """Admit if an eighth of the slots is free and as many jobs wait, or fewer have waited for a while.

        A prefill costs a pass whatever its size.
        """
        if not self.queue:
            return
        many = self.store.room.slots // 8
        is_soon = len(self.queue) < many and self.steps - self.admitted < _COPY_EVERY
        if not self.active or (len(self.free_slots) >= many and not is_soon):
            self._admit()

    def _admit(self) -> None:
        """Assign free slots to waiting responses and prefill prompts that have no entry."""
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
        self.admitted = self.steps
        self._read([job for job in admitted if job.handle not in self.entries], [row.slot for row in rows])
        for row in rows:
            row.entry = self.entries[row.job.handle]
        store, device = self.store, self.store.device
        entries, slots = device_ints([row.entry for row in rows], device), device_ints([row.slot for row in rows], device)
        seeds = device_ints([row.job.request.seeds[row.place] for row in rows], device)
        most = [row.job.limits.max_response_tokens for row in rows]
        store.admit(slots, store.prompt_length[entries], seeds, device_ints(most, device))
        assert store.ending is not None
        choice = self.engine.choose(store.ending[entries], slots, self.kind.sampling, 0)
        store.write(slots, torch.zeros_like(slots), torch.ones_like(slots, dtype=torch.bool), choice, self.ends)
        self.until = max(self.until, self.steps + max(most) - 1)
        for row in rows:
            self.users[row.entry] = self.users.get(row.entry, 0) + 1
            self.active[row.slot] = self.last[row.slot] = row

    def _read(self, jobs: Sequence[Job], slots: Sequence[int]) -> None:
        """Prefill the prompts of jobs. Stored prefixes are copied first, before `slots` are overwritten."""
        prefixes, openings, sources = self.engine.prefixes, [], []
        for job in jobs:
            prompt = job.request.prompt
            entry = self.free_prompts.pop()
            # A stored response has its own tiles of keys; in a prompt of training they would begin elsewhere.
            source = None if self.engine.policy.exact else prefixes.longest_prefix(prompt)
            if source is not None:
                sources.append((source, entry))
            openings.append(Opening(entry=entry, prompt=prompt, known=0 if source is None else source.tokens))
            self.entries[job.handle], self.held[entry] = entry, job
        prefixes.drop([one.entry for one in openings], slots)
        copy_prefixes(self.store, sources)
        read_prompts(self.engine.policy, self.store, openings)
        if self.store.routers is not None:
            for job, opening in zip(jobs, openings, strict=True):
                if job.handle not in self.prompt_routes:
                    self.prompt_routes[job.handle] = prompt_routes(self.store, opening.entry, len(opening.prompt))
        self.engine.reused_tokens += sum(one.known for one in openings)

    def reread(self) -> None:
        """Recompute the KV cache of active responses after a change of weights; later tokens are of the new version.

        Tokens sampled so far stay. The host waits for the device here.
        """
        # Finished responses have keys of the old weights: no later prompt may reuse them.
        self.last = dict(self.active)
        self.held = {entry: job for entry, job in self.held.items() if entry in self.users}
        tokens, lengths = self.store.tokens.cpu(), self.store.sampled_count.tolist()
        texts = []
        for slot, row in self.active.items():
            row.versions.append((lengths[slot], self.engine.version))
            texts.append(PartialResponse(row.entry, row.job.request.prompt, slot, tokens[slot, : lengths[slot]]))
        reread(self.engine.policy, self.store, texts)

    # Finished responses

    def _collect(self, copy: SlotCopy) -> None:
        """Start copying finished responses to the host and refill their slots."""
        there = [slot for slot, row in copy.rows.items() if self.active.get(slot) is row]
        finished = [slot for slot in there if bool(copy.done[slot])]
        if copy.texts is not None:
            finished = sorted({*finished, *self._slots_at_stop_strings(there, *copy.texts)})
        if not finished:
            return
        rows = [self.active[slot] for slot in finished]
        width = max(row.job.limits.max_response_tokens for row in rows)
        self.landings.append(Landing(self.store, rows, width, truncated=self.kind.sampling.truncates))
        self._free(finished)
        self._admit_if_worth_it()

    def _free(self, slots: Sequence[int]) -> None:
        """Remove the responses from these slots."""
        if not slots:
            return
        # index_fill_ instead of assignment: an assigned True is copied to the device, and the host would wait for it.
        self.store.done.index_fill_(0, device_ints(slots, self.store.device), True)
        for slot in slots:
            entry = self.active.pop(slot).entry
            self.free_slots.append(slot)
            self.users[entry] -= 1
            if not self.users[entry]:
                del self.users[entry], self.entries[self.held[entry].handle]
                self.free_prompts.append(entry)

    def _slots_at_stop_strings(self, slots: list[int], tokens: Tensor, lengths: Tensor) -> list[int]:
        """The slots whose text contains a stop string."""
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

    def _land(self) -> list[tuple[Row, Response]]:
        """Wait for the responses being copied to the host and return them."""
        landed = []
        for landing in self.landings:
            for row, response in landing.wait(
                self.engine.policy.tokenizer, self.kind.end_tokens, self.cut, self.prompt_routes
            ):
                self._index_texts(row, response)
                landed.append((row, response))
        self.landings.clear()
        return landed

    def _finish(self, landed: Sequence[tuple[Row, Response]]) -> list[Finished]:
        """Store responses in their jobs; remove and return the jobs that they complete."""
        finished = []
        for row, response in landed:
            row.job.responses[row.place] = response
            if row.job.complete and row.job.handle in self.jobs:
                self.drop_job(row.job.handle)
                finished.append(row.job.finish())
        return finished

    def _index_texts(self, row: Row, response: Response) -> None:
        """Add the response's texts to the prefix index if they are still in the store. The last token has no stored key."""
        if self.held.get(row.entry) is not row.job:
            return
        own = {row.slot: (row.entry, response.tokens[:-1])} if self.last.get(row.slot) is row else {}
        self.engine.prefixes.note_for_later({row.entry: row.job.request.prompt}, own)
