"""Rows that decode together in the plain engine while others join and leave, for servers.

A stream holds responses of one kind: equal sampling, end tokens and stop strings. New responses are prefilled by their own
decoder, which then joins that of the stream. A step samples one token for every row. As in a wave of the engine, finished
rows leave the decoder once a quarter of the batch has finished, so a request that is alone gets the bits it would get there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.policy import Policy
from legato.rollouts.engine import Job, Limits, Partial, Response, make_responses, token_versions
from legato.rollouts.local.blocks import Blocks
from legato.rollouts.local.cached import Cached
from legato.rollouts.local.recompute import Recompute
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Sampling, choose

COMPACT_AT = 0.75
"""Finished rows are dropped once at most this share still decodes: copying the KV cache costs a few passes."""

Decoder = Blocks | Cached | Recompute
MakeDecoder = Callable[[list[Tensor], Tensor, int], Decoder]
"""(prompts, the prompt of each row, largest number of response tokens) -> a decoder of new rows"""


@dataclass(slots=True, eq=False)
class Row:
    """A response that is being decoded."""

    job: Job
    place: int
    """Index among the job's seeds."""
    versions: list[tuple[int, int]]
    """(first token, policy version from that token on)"""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_logmass: list[float] = field(default_factory=list)
    reported: int = 0
    """How many tokens were reported before the end."""
    stop: StopReason | None = None
    """Why it ended; None: it has not."""
    cut: str | None = None
    """The text before the stop string that ended it."""

    @property
    def left(self) -> int:
        """The largest number of tokens to come."""
        return self.job.limits.max_response_tokens - len(self.tokens)

    def report(self) -> Partial | None:
        """The tokens since the last report; None if there are none."""
        start, self.reported = self.reported, len(self.tokens)
        if start == self.reported:
            return None
        return Partial(
            handle=self.job.handle,
            place=self.place,
            start=start,
            tokens=torch.tensor(self.tokens[start:]),
            logprobs=torch.tensor(self.logprobs[start:], dtype=torch.float32),
            version=token_versions(self.versions, len(self.tokens))[start:],
        )


class Stream:
    """The rows of one kind."""

    def __init__(self, policy: Policy, sampling: Sampling, limits: Limits) -> None:
        """`limits` are those of any job: only their budgets differ."""
        self.policy, self.sampling, self.limits = policy, sampling, limits
        self.rows: list[Row] = []
        """The rows that the decoder holds, in its order; some may have ended."""
        self._decoder: Decoder | None = None
        self._logits = torch.empty(0)
        """[rows, V]: of the next token of each row."""
        self._seeds = torch.empty(0, dtype=torch.int64)

    @property
    def decoding(self) -> list[Row]:
        """The rows that have not ended."""
        return [row for row in self.rows if row.stop is None]

    def join(self, jobs: Sequence[tuple[Job, int]], make_decoder: MakeDecoder, version: int) -> None:
        """Start the next responses of jobs: (job, how many)."""
        rows, owner = [], []
        for number, (job, count) in enumerate(jobs):
            rows += [Row(job, place, [(0, version)]) for place in range(job.taken, job.taken + count)]
            owner += [number] * count
            job.taken += count
        decoder = make_decoder(
            [job.request.prompt for job, _ in jobs],
            torch.tensor(owner, device=self.policy.device),
            max(row.left for row in rows),
        )
        self._add(rows, decoder)

    def reread(self, make_decoder: MakeDecoder, version: int) -> None:
        """Recompute the KV cache with new weights. Tokens sampled so far stay; later ones are of this version."""
        rows = self.decoding
        self.rows, self._decoder = [], None
        if not rows:
            return
        for row in rows:
            row.versions.append((len(row.tokens), version))
        texts = [torch.cat([row.job.request.prompt, torch.tensor(row.tokens, dtype=torch.int64)]) for row in rows]
        owner = torch.arange(len(rows), device=self.policy.device)
        self._add(rows, make_decoder(texts, owner, max(row.left for row in rows)))

    def _add(self, rows: list[Row], decoder: Decoder) -> None:
        """Prefill with the decoder and add its rows."""
        logits = decoder.first()
        if self._decoder is None:
            self._decoder, self._logits, self.rows = decoder, logits, rows
        else:
            mine: Any = self._decoder
            mine.join(decoder)
            self._logits = torch.cat([self._logits, logits])
            self.rows = self.rows + rows
        self._seeds = torch.tensor([row.job.request.seeds[row.place] for row in self.rows], device=self.policy.device)

    def cancel(self, job: Job) -> None:
        """End the rows of a job without a report."""
        for row in self.rows:
            if row.job is job and row.stop is None:
                row.stop = StopReason.ABORTED

    def step(self) -> list[tuple[Job, int, Response]]:
        """Sample one token for every row; returns the responses that end with it: (job, place, response)."""
        places = torch.tensor([len(row.tokens) for row in self.rows], device=self.policy.device)
        choice = choose(self._logits, uniform(self._seeds, places), self.sampling)
        tokens, logprobs = choice.tokens.tolist(), choice.logprobs.tolist()
        kept = None if choice.kept_logmass is None else choice.kept_logmass.tolist()
        ended: list[Row] = []
        for index, row in enumerate(self.rows):
            if row.stop is not None:
                continue
            row.tokens.append(tokens[index])
            row.logprobs.append(logprobs[index])
            row.kept_logmass.append(0.0 if kept is None else kept[index])
            self._end(row)
            if row.stop is not None:
                ended.append(row)
        self._next(choice.tokens)
        return self._responses(ended)

    def _end(self, row: Row) -> None:
        """Note whether a row ends with its last token."""
        if row.tokens[-1] in self.limits.end_tokens:
            row.stop = StopReason.END_TOKEN
            return
        if self.limits.stop:
            row.cut = self.limits.before_stop(self.policy.tokenizer.decode(row.tokens, skip_special_tokens=True))
        if row.cut is not None:
            row.stop = StopReason.STOP_STRING
        elif row.left == 0:
            row.stop = StopReason.LENGTH

    def _next(self, tokens: Tensor) -> None:
        """Read the sampled tokens, after dropping ended rows if there are enough of them."""
        decoding = [index for index, row in enumerate(self.rows) if row.stop is None]
        if not decoding or self._decoder is None:
            self.rows, self._decoder = [], None
            return
        if len(decoding) <= COMPACT_AT * len(self.rows):
            kept = torch.tensor(decoding, device=self.policy.device)
            self._decoder.keep(kept)
            tokens, self._seeds = tokens[kept], self._seeds[kept]
            self.rows = [self.rows[index] for index in decoding]
        self._logits = self._decoder.next(tokens)

    def _responses(self, rows: Sequence[Row]) -> list[tuple[Job, int, Response]]:
        if not rows:
            return []
        pad = torch.nn.utils.rnn.pad_sequence
        lengths = [len(row.tokens) for row in rows]
        kept = None
        if self.sampling.truncates:
            kept = pad([torch.tensor(row.kept_logmass, dtype=torch.float32) for row in rows], batch_first=True)
        responses = make_responses(
            self.policy.tokenizer,
            pad([torch.tensor(row.tokens) for row in rows], batch_first=True),
            pad([torch.tensor(row.logprobs, dtype=torch.float32) for row in rows], batch_first=True),
            kept,
            lengths,
            [row.stop or StopReason.ABORTED for row in rows],
            {index: row.cut for index, row in enumerate(rows) if row.cut is not None},
            [token_versions(row.versions, length) for row, length in zip(rows, lengths, strict=True)],
        )
        return [(row.job, row.place, response) for row, response in zip(rows, responses, strict=True)]
