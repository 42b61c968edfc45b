"""One call of the GPU engine: a queue of responses, the slots they have, and their results.

The host is a look behind: it enqueues the next steps before it reads which rows had finished by the last ones. A finished
row writes nothing more, whatever is still enqueued for it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response, written
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.looks import Look
from legato.rollouts.gpu.prefill import Opening, read
from legato.rollouts.gpu.recall import Recall, copy
from legato.rollouts.gpu.routes import CallRoutes
from legato.rollouts.gpu.slots import Store, numbers
from legato.rollouts.sampling import Choice, Sampling

_LOOK_EVERY = 8
"""Steps between two looks at the finished flags; a finished row costs at most twice as many."""


@runtime_checkable
class Decoder(Protocol):
    """What a call asks of the engine."""

    policy: Policy
    recall: Recall
    reused_tokens: int

    def bucket(self, rows: int) -> Bucket: ...

    def advance(self, bucket: Bucket, sampling: Sampling, ends: Tensor) -> None: ...

    def choose(self, hidden: Tensor, slots: Tensor, sampling: Sampling, add: int) -> Choice: ...

    def end_tokens(self, ends: tuple[int, ...]) -> Tensor: ...


class Call:
    """One call of generate: a queue of responses, the slots they have, the results."""

    def __init__(
        self, engine: Decoder, memory: Store, requests: Sequence[Request], sampling: Sampling, limits: Limits
    ) -> None:
        self.engine, self.memory, self.requests, self.sampling, self.limits = engine, memory, requests, sampling, limits
        waiting = [number for number, request in enumerate(requests) if request.seeds]
        # What the store holds a beginning of comes first: the others will overwrite it.
        waiting.sort(key=lambda number: engine.recall.longest(requests[number].prompt) is None)
        self.queue = deque((number, list(requests[number].seeds)) for number in waiting)
        self.free_slots = list(range(memory.room.slots))[::-1]
        self.free_prompts = list(range(memory.room.prompts))[::-1]
        self.active: dict[int, tuple[int, int]] = {}
        """slot -> (row of the results, prompt entry)"""
        self.users: dict[int, int] = {}
        """prompt entry -> responses that still read it"""
        self.entries: dict[int, int] = {}
        """request -> its entry, while responses read it"""
        self.held: dict[int, int] = {}
        """prompt entry -> the request it was last filled for"""
        self.last: dict[int, tuple[int, int, int]] = {}
        """slot -> (row, request, prompt entry) it was last given to"""
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
        self.routes = CallRoutes(memory, rows, width) if memory.routers is not None else None
        self.cut: dict[int, tuple[int, str]] = {}
        """row -> (tokens, text) where a stop string ended it"""
        self.ends = engine.end_tokens(limits.end_tokens)
        self.steps = 0
        self.youngest = 0
        """The step at which the last responses began."""
        self.placed: tuple[Bucket, list[tuple[int, int]]] | None = None

    def run(self) -> list[list[Response]]:
        free = [Look(self.memory, texts=bool(self.limits.stop)) for _ in range(2)]
        asked: deque[Look] = deque()
        self._admit()
        while self.active:
            # Steps beyond the longest response would move nobody.
            steps = min(_LOOK_EVERY, self.limits.max_response_tokens - 1 - (self.steps - self.youngest))
            if steps > 0:
                self._advance(steps)
            if steps > 0 or not asked:
                asked.append(free.pop().ask({slot: row for slot, (row, _) in self.active.items()}))
            if len(asked) == 2 or steps <= 0:
                look = asked.popleft().taken()
                free.append(look)
                self._collect(look)
        return self._responses()

    def _advance(self, steps: int) -> None:
        """Enqueue some steps of all active rows."""
        listed = sorted(self.active)
        bucket = self.engine.bucket(len(listed))
        # A slot may have gone to a response of another prompt since the last look.
        now = (bucket, [(slot, self.active[slot][1]) for slot in listed])
        if self.placed != now:
            bucket.place(listed, [entry for _, entry in now[1]])
            self.placed = now
        for _ in range(steps):
            self.engine.advance(bucket, self.sampling, self.ends)
        self.steps += steps

    def _admit(self) -> None:
        """Give free slots to waiting responses; prompts that no entry holds are read."""
        parts: list[tuple[int, list[int], list[int]]] = []
        while self.queue and self.free_slots:
            number, seeds = self.queue.popleft()
            taken = seeds[: len(self.free_slots)]
            parts.append((number, taken, [self.free_slots.pop() for _ in taken]))
            if len(taken) < len(seeds):
                self.queue.appendleft((number, seeds[len(taken) :]))
        if not parts:
            return
        slots = [slot for _, _, listed in parts for slot in listed]
        self._read([number for number, _, _ in parts if number not in self.entries], slots)
        memory, device = self.memory, self.memory.device
        entries = numbers([self.entries[number] for number, seeds, _ in parts for _ in seeds], device)
        placed = numbers(slots, device)
        drawn = numbers([seed for _, seeds, _ in parts for seed in seeds], device)
        memory.admit(placed, memory.prompt_length[entries], drawn, self.limits.max_response_tokens)
        assert memory.ending is not None
        choice = self.engine.choose(memory.ending[entries], placed, self.sampling, 0)
        memory.write(placed, torch.zeros_like(placed), torch.ones_like(placed, dtype=torch.bool), choice, self.ends)
        self.youngest = self.steps
        for number, _, listed in parts:
            entry = self.entries[number]
            self.users[entry] = self.users.get(entry, 0) + len(listed)
            for slot in listed:
                row = self.first[number] + self.given[number]
                self.active[slot], self.last[slot] = (row, entry), (row, number, entry)
                self.given[number] += 1

    def _read(self, numbers: list[int], slots: list[int]) -> None:
        """Prefill the prompts of some requests; what the store holds of them already is copied, before slots go away."""
        recall, openings, sources = self.engine.recall, [], []
        for number in numbers:
            prompt = self.requests[number].prompt
            entry = self.free_prompts.pop()
            source = recall.longest(prompt)
            if source is not None:
                sources.append((source, entry))
            openings.append(Opening(entry=entry, prompt=prompt, known=0 if source is None else source.tokens))
            self.entries[number], self.held[entry] = entry, number
        recall.drop([one.entry for one in openings], slots)
        copy(self.memory, sources)
        read(self.engine.policy, self.memory, openings)
        if self.routes is not None:
            self.routes.read({number: self.entries[number] for number in numbers}, self.requests)
        self.engine.reused_tokens += sum(one.known for one in openings)

    def _collect(self, look: Look) -> None:
        """Take finished responses out and fill their slots again."""
        there = [slot for slot, row in look.rows.items() if slot in self.active and self.active[slot][0] == row]
        finished = [slot for slot in there if bool(look.done[slot])]
        if look.texts is not None:
            finished = sorted({*finished, *self._stopped(there, *look.texts)})
        if not finished:
            return
        slots = numbers(finished, self.memory.device)
        rows = numbers([self.active[slot][0] for slot in finished], self.memory.device)
        width = self.limits.max_response_tokens
        self.tokens[rows] = self.memory.tokens[slots, :width]
        self.logprobs[rows] = self.memory.logprobs[slots, :width]
        self.lengths[rows] = self.memory.written[slots]
        if self.kept is not None:
            self.kept[rows] = self.memory.kept[slots, :width]
        if self.routes is not None:
            self.routes.collect(rows, slots)
        self.memory.done.index_fill_(0, slots, True)  # assigned, True would be copied and waited for
        for slot in finished:
            _, entry = self.active.pop(slot)
            self.free_slots.append(slot)
            self.users[entry] -= 1
            if not self.users[entry]:
                del self.users[entry], self.entries[self.held[entry]]
                self.free_prompts.append(entry)
        # A prefill costs a pass whatever its size: it waits until a fair share of the slots is free.
        if self.queue and (len(self.free_slots) >= self.memory.room.slots // 8 or not self.active):
            self._admit()

    def _stopped(self, slots: list[int], tokens: Tensor, lengths: Tensor) -> list[int]:
        """Slots whose text has reached a stop string."""
        found = []
        decode = self.engine.policy.tokenizer.decode
        for slot in slots:
            row, length = tokens[slot].tolist(), int(lengths[slot])
            if self.limits.before_stop(decode(row[:length], skip_special_tokens=True)) is None:
                continue
            for count in range(1, length + 1):
                before = self.limits.before_stop(decode(row[:count], skip_special_tokens=True))
                if before is not None:
                    self.cut[self.active[slot][0]] = (count, before)
                    found.append(slot)
                    break
        return found

    def _responses(self) -> list[list[Response]]:
        tokens, lengths = self.tokens.cpu(), self.lengths.tolist()
        ends = set(self.limits.end_tokens)
        stops = [
            StopReason.END_TOKEN if int(tokens[row, length - 1]) in ends else StopReason.LENGTH
            for row, length in enumerate(lengths)
        ]
        for row, (count, _) in self.cut.items():
            lengths[row], stops[row] = count, StopReason.STOP_STRING
        self._remember(tokens, lengths)
        texts = {row: text for row, (_, text) in self.cut.items()}
        found = written(self.engine.policy.tokenizer, tokens, self.logprobs, self.kept, lengths, stops, texts)
        if self.routes is not None:
            owners = [number for number, request in enumerate(self.requests) for _ in request.seeds]
            found = self.routes.added(found, owners, self.requests)
        return [found[start:end] for start, end in pairwise(self.first)]

    def _remember(self, tokens: Tensor, lengths: list[int]) -> None:
        """Which texts this call leaves in the store. The last token of a response was chosen, but its key not yet stored."""
        self.engine.recall.note(
            {entry: self.requests[number].prompt for entry, number in self.held.items()},
            {
                slot: (entry, tokens[row, : lengths[row] - 1])
                for slot, (row, number, entry) in self.last.items()
                if self.held[entry] == number
            },
        )
