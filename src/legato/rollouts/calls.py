"""One call of the GPU engine: a queue of responses, the slots they have, and their results."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.packs import pack
from legato.policy.policy import Policy
from legato.rollouts.buckets import Bucket
from legato.rollouts.engine import Limits, Request, Response, written
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.sampling import Choice, Sampling
from legato.rollouts.slots import Prefill, Store

_LOOK_EVERY = 8
"""Steps between two looks at the finished flags; a finished row costs at most so many."""


@runtime_checkable
class Decoder(Protocol):
    """What a call asks of the engine."""

    policy: Policy

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
        self.ends = engine.end_tokens(limits.end_tokens)
        self.flags = torch.zeros(memory.room.slots + 1, dtype=torch.bool).pin_memory()

    def run(self) -> list[list[Response]]:
        self._admit()
        looked: list[tuple[int, int]] = []
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        while self.active:
            listed = sorted(self.active)
            bucket = self.engine.bucket(len(listed))
            # A slot may have gone to a response of another prompt since the last look.
            now = [(slot, self.active[slot][1]) for slot in listed]
            if looked != now or bucket is not self._last:
                bucket.place(listed, [prompt for _, prompt in now])
                looked, self._last = now, bucket
            for _ in range(_LOOK_EVERY):
                self.engine.advance(bucket, self.sampling, self.ends)
            self.flags.copy_(self.memory.done, non_blocking=True)
            event.record()
            event.synchronize()
            self._collect([slot for slot in listed if bool(self.flags[slot])])
        return self._responses()

    _last: Bucket | None = None

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
        texts = prompt_texts([self.requests[number].prompt for number, _, _ in parts])
        packed = pack(texts, torch.arange(len(parts))).to(device)
        placed = torch.tensor(entries, device=device)
        memory.prompt_length[placed] = packed.prefix_lengths
        with engine.policy.attending(Prefill(memory, packed, placed)):
            hidden = engine.policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
        owner = torch.tensor([i for i, (_, seeds, _) in enumerate(parts) for _ in seeds], device=device)
        slots = torch.tensor([slot for _, _, listed in parts for slot in listed], device=device)
        seeds = torch.tensor([seed for _, listed, _ in parts for seed in listed], device=device)
        memory.admit(slots, placed[owner], packed.prefix_lengths[owner], seeds, self.limits.max_response_tokens)
        choice = engine.choose(hidden[packed.prompt_ends][owner], slots, self.sampling, 0)
        memory.write(slots, torch.zeros_like(slots), torch.ones_like(slots, dtype=torch.bool), choice, self.ends)
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
            if self.limits.before_stop(decode(row[:length].tolist(), skip_special_tokens=True)) is None:
                continue
            for count in range(1, length + 1):
                before = self.limits.before_stop(decode(row[:count].tolist(), skip_special_tokens=True))
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
        texts = {row: text for row, (_, text) in self.cut.items()}
        found = written(self.engine.policy.tokenizer, tokens, self.logprobs, self.kept, lengths, stops, texts)
        return [found[start:end] for start, end in pairwise(self.first)]
