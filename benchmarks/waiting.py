"""An engine that computes nothing and waits as long as a GPU would decode: it shows what a server costs, without a GPU.

Slots, admission and pieces of four steps are those of the engine on a GPU. A step takes 1.9 ms with few rows and 5.5 ms with
256, a prefill 4 ms and 0.8 ms a prompt: 256 requests of 256 + 256 tokens then take 1.6 s, as with a 0.6B model on an H200
(`benchmarks/results/serve.json`).
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from legato.core.rollout import StopReason
from legato.rollouts.engine import Capabilities, Finished, Handle, Job, JobEngine, Partial, Progress, Response

STEP_SECONDS, STEP_SECONDS_OF_ROWS = 1.9e-3, 3.6e-3 / 256
PREFILL_SECONDS, PREFILL_SECONDS_OF_PROMPT = 4e-3, 0.8e-3
PIECE = 4
"""Steps between two looks at what has ended."""
PATIENCE = 8
"""Steps that a few requests wait for more of them, since a prefill costs a pass whatever its size."""
LONGEST = 4096


@dataclass(slots=True, eq=False)
class _Row:
    job: Job
    length: int = 0
    reported: int = 0


class WaitingEngine(JobEngine):
    """Every response has `max_response_tokens` tokens. Requests have one seed."""

    name = "waiting"
    capabilities = Capabilities(partial=True)

    def __init__(self, slots: int, wait: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self.slots, self.wait = slots, wait
        self._active: list[_Row] = []
        self._steps = self._admitted = 0
        self._tokens = torch.arange(1000, 1000 + LONGEST)
        self._logprobs = torch.linspace(-3.0, -0.1, LONGEST)
        self._versions = torch.zeros(LONGEST, dtype=torch.int64)

    def cancel(self, handle: Handle) -> None:
        super().cancel(handle)
        self._active = [row for row in self._active if row.job.handle != handle]

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        self._admit()
        if not self._active:
            return Progress()
        steps = min([PIECE, *(row.job.limits.max_response_tokens - row.length for row in self._active)])
        self.wait(steps * (STEP_SECONDS + STEP_SECONDS_OF_ROWS * len(self._active)))
        self._steps += steps
        for row in self._active:
            row.length += steps
        ended = [row for row in self._active if row.length == row.job.limits.max_response_tokens]
        self._active = [row for row in self._active if row.length < row.job.limits.max_response_tokens]
        partial = [self._new_tokens(row) for row in self._active if row.job.handle in watched]
        return Progress(ended=self.end_responses((row.job, 0, self._response(row)) for row in ended), partial=tuple(partial))

    def poll(self) -> list[Finished]:
        while self.jobs:
            ended = self.decode_briefly().ended
            if ended:
                return [Finished(handle=each.handle, responses=[each.response]) for each in ended]
        return []

    def _admit(self) -> None:
        active, free = {row.job.handle for row in self._active}, self.slots - len(self._active)
        queue = deque(job for handle, job in self.jobs.items() if handle not in active)
        many = self.slots // 8
        is_soon = len(queue) < many and self._steps - self._admitted < PATIENCE
        if queue and (not self._active or (free >= many and not is_soon)):
            admitted = [_Row(queue.popleft()) for _ in range(min(free, len(queue)))]
            self._active += admitted
            self._admitted = self._steps
            self.wait(PREFILL_SECONDS + PREFILL_SECONDS_OF_PROMPT * len(admitted))

    def _new_tokens(self, row: _Row) -> Partial:
        start, row.reported = row.reported, row.length
        new = slice(start, row.length)
        return Partial(
            handle=row.job.handle,
            place=0,
            start=start,
            tokens=self._tokens[new],
            logprobs=self._logprobs[new],
            version=self._versions[new],
        )

    def _response(self, row: _Row) -> Response:
        return Response(
            tokens=self._tokens[: row.length],
            logprobs=self._logprobs[: row.length],
            kept_logmass=None,
            text="",
            stop=StopReason.LENGTH,
            version=self._versions[: row.length],
        )
