"""The local engine: it samples from the tensors being trained, so its weights are never out of date.

The prompts of a wave are prefilled once each. Then all responses decode together, one token per pass, and finished rows
leave once a quarter of the batch has finished. On a CPU, known model families decode through `blocks.py`, which stores a
group's prompt once and reuses the KV cache of an episode's earlier turns (`kept.py`). Other families use their own forward
with a KV cache per response. Models without a usable cache recompute. `decode_briefly` decodes in streams (`stream.py`),
which requests join and leave at any token.
"""

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.layers.unrolled import Unrolled
from legato.policy.layout.packs import Pack, pack
from legato.policy.policy import Policy
from legato.rollouts.engine import (
    Capabilities,
    Finished,
    Handle,
    Job,
    JobEngine,
    Limits,
    Progress,
    Response,
    make_responses,
)
from legato.rollouts.local.agreement import disagreement
from legato.rollouts.local.blocks import Blocks
from legato.rollouts.local.cached import Cached
from legato.rollouts.local.kept import Keeper, KeptText
from legato.rollouts.local.recompute import Recompute
from legato.rollouts.local.routes import WaveRoutes
from legato.rollouts.local.stream import COMPACT_AT, Decoder, MakeDecoder, Stream
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Choice, Sampling, choose


@dataclass(slots=True)
class _Wave:
    """The responses being decoded: tables over all rows of the wave, and which rows the decoder still holds."""

    tokens: Tensor
    """[places, rows], like the next two; values beyond a row's length are never read."""
    logprobs: Tensor
    kept_logmass: Tensor | None
    lengths: Tensor
    stops: list[StopReason]
    cut: dict[int, str]
    """row -> text before the stop string, for rows that a stop string ended"""
    ends: Tensor
    """The end tokens."""
    rows: Tensor
    """[n]: the wave's row of each row that the decoder holds."""
    seeds: Tensor
    budgets: Tensor
    """[n]: the most tokens of each row."""
    finished: Tensor
    """[n] bool"""
    writing: int
    """How many of the n rows are not finished."""
    texts: dict[int, Tensor]
    """row -> its prompt, for rows whose KV cache shall be kept"""
    kept: dict[int, KeptText]
    """row -> its KV cache"""


class LocalEngine(JobEngine):
    """Samples from the policy itself, a wave of rows at a time."""

    name = "local"

    def __init__(
        self, policy: Policy, rows_at_once: int = 256, *, way: str | None = None, record_routes: bool = False
    ) -> None:
        super().__init__()
        self.policy = policy
        self.rows_at_once = rows_at_once
        self.routers = policy.routers if record_routes else None
        self._way = way
        """'blocks', 'cached' or 'recomputed'; None: not chosen yet."""
        self._decoder_maker: tuple[int, MakeDecoder] | None = None
        """(policy version, decoder factory for that version); None while nothing is outstanding."""
        self._streams: dict[tuple[Sampling, tuple[str, ...], tuple[int, ...]], Stream] = {}
        """The responses of `decode_briefly`, by what they have in common."""
        self._serves = False
        """Whether weights change by `publish` alone, so that copies of weights may be kept while nothing is outstanding."""
        self.keeper = Keeper()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        # Without a KV cache every token is read many times, so there is no single route to record.
        routes = self.routers is not None and self._choose_way() != "recomputed"
        return Capabilities(routes=routes, partial=self.routers is None)

    def poll(self) -> list[Finished]:
        """Decode waves until a request is complete. Requests submitted meanwhile join the next wave."""
        self._serves = False
        while self.jobs:
            finished = self.report_complete()
            if finished:
                self._drop_copies_when_idle()
                return finished
            if self._streams:  # begun by `decode_briefly`
                for job, place, response in self._step_streams():
                    job.responses[place] = response
            else:
                self._decode_wave()
        return []

    def cancel(self, handle: Handle) -> None:
        job = self.jobs.get(handle)
        super().cancel(handle)
        if job is not None:
            for stream in self._streams.values():
                stream.cancel(job)
        self._drop_copies_when_idle()

    def _drop_copies_when_idle(self) -> None:
        if not self.jobs and not self._serves:
            self._decoder_maker = None

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        """Start responses that wait, as far as there is room, and sample one token of every response."""
        if self.routers is not None:
            return super().decode_briefly(watched)
        self._serves = True
        self.report_complete()  # requests without seeds: there is nothing to report
        self._join_streams()
        ended = self.end_responses(self._step_streams())
        decoding = [row for stream in self._streams.values() for row in stream.decoding if row.job.handle in watched]
        return Progress(ended=ended, partial=tuple(new for row in decoding if (new := row.report()) is not None))

    def _step_streams(self) -> list[tuple[Job, int, Response]]:
        """Sample one token of every response; returns the responses that end with it."""
        with self.policy.serving():
            ended = [each for stream in self._streams.values() for each in stream.step()]
        self._drop_empty_streams()
        return ended

    def _drop_empty_streams(self) -> None:
        self._streams = {kind: stream for kind, stream in self._streams.items() if stream.rows}

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note that the policy's tensors have changed. Responses of `decode_briefly` keep their tokens and continue."""
        super().publish(weights, version)
        self.keeper.forget()
        with self.policy.serving():
            for stream in self._streams.values():
                stream.reread(self._current_decoder_maker(), version)
        self._drop_empty_streams()

    def before_update(self) -> None:
        self.keeper.forget()

    def _join_streams(self) -> None:
        """Start the responses that fit, each in the stream of its kind, in the order of requests and seeds."""
        room = self.rows_at_once - sum(len(stream.decoding) for stream in self._streams.values())
        # A prefill costs a pass whatever its size: wait until an eighth of the rows is free.
        if room < max(1, self.rows_at_once // 8):
            return
        joining: dict[tuple[Sampling, tuple[str, ...], tuple[int, ...]], list[tuple[Job, int]]] = {}
        for job in self.jobs.values():
            if room and job.waiting:
                joining.setdefault(_kind(job), []).append((job, min(room, len(job.waiting))))
                room -= joining[_kind(job)][-1][1]
        with self.policy.serving():
            for kind, jobs in joining.items():
                if kind not in self._streams:
                    self._streams[kind] = Stream(self.policy, jobs[0][0].sampling, jobs[0][0].limits)
                self._streams[kind].join(jobs, self._current_decoder_maker(), self.version)

    def _decode_wave(self) -> None:
        """Decode the next `rows_at_once` responses with the sampling of the first, in the order of requests and seeds.

        Their budgets may differ: the later turns of an episode have fewer tokens left.
        """
        first = next(iter(self.jobs.values()))
        room, wave = self.rows_at_once, []
        for job in self.jobs.values():
            if room and job.waiting and _kind(job) == _kind(first):
                wave.append((job, job.waiting[:room]))
                room -= len(wave[-1][1])
        with self.policy.serving():
            rows = self._decode_rows(wave, self._current_decoder_maker(), first.sampling, first.limits)
        for (job, seeds), responses in zip(wave, rows, strict=True):
            job.responses |= dict(enumerate(responses, job.taken))
            job.taken += len(seeds)

    def _current_decoder_maker(self) -> MakeDecoder:
        """The decoder factory for the current weights. It may hold copies of weights, so it is kept between waves."""
        if self._decoder_maker is None or self._decoder_maker[0] != self.version:
            self._decoder_maker = None  # before new copies are made
            self._decoder_maker = self.version, self._new_decoder_maker()
        return self._decoder_maker[1]

    def _new_decoder_maker(self) -> MakeDecoder:
        policy, way = self.policy, self._choose_way()
        if way == "recomputed":
            return lambda prompts, owner, _: Recompute(policy, prompts, owner)
        if way == "blocks":
            body = Unrolled(policy.body)
            every = self.routers is not None
            return lambda prompts, owner, limit: Blocks(body, _pack_prompts(prompts, policy.device), owner, limit, every)
        return lambda prompts, owner, limit: Cached(policy, _pack_prompts(prompts, policy.device), owner, limit)

    def _choose_way(self) -> str:
        """The fastest decoding that reproduces the model's own log-probs. Tested once, on a few tokens."""
        if self._way is not None:
            return self._way
        ways = []
        if self.policy.views:
            ways = ["blocks", "cached"] if Unrolled.serves(self.policy.body) else ["cached"]
        for way in ways:
            # In a separate engine: this one may have outstanding requests.
            candidate = LocalEngine(self.policy, self.rows_at_once, way=way, record_routes=self.routers is not None)
            wrong = disagreement(candidate, self.policy)
            if wrong is None:
                self._way = way
                return way
            how, instead = {
                "blocks": ("layer by layer", "its own forward is tried (slower, not measured how much)"),
                "cached": (
                    "with our cache",
                    "the whole text is computed again for every token (slower, not measured how much)",
                ),
            }[way]
            self.policy.notes.append(f"{type(self.policy.body).__name__} cannot be decoded {how} ({wrong}): {instead}")
        self._way = "recomputed"
        return self._way

    def _decode_rows(
        self, parts: list[tuple[Job, tuple[int, ...]]], make_decoder: MakeDecoder, sampling: Sampling, limits: Limits
    ) -> list[list[Response]]:
        """The responses of each job to some of its seeds. `limits` are those of any job: only their budgets differ."""
        device = self.policy.device
        counts = [len(seeds) for _, seeds in parts]
        owner = torch.repeat_interleave(torch.tensor(counts)).to(device)
        prompts = [job.request.prompt for job, _ in parts]
        longest = max(job.limits.max_response_tokens for job, _ in parts)
        decoder = make_decoder(prompts, owner, longest)
        wave = _start_wave(parts, sampling, limits, longest, device)
        self._reuse_kept(decoder, [job for job, _ in parts])
        routes = None
        if self.routers is not None and not isinstance(decoder, Recompute):
            routes = WaveRoutes(self.routers, longest, len(owner), device)
        with nullcontext() if routes is None else routes.listening():
            logits = decoder.first()
            for job, _ in parts:
                job.request = replace(job.request, kept=None)  # frees its memory
            if routes is not None:
                routes.first()
            for place in range(longest):
                choice = choose(logits, uniform(wave.seeds, place), sampling)
                self._write(wave, choice, place, limits)
                if wave.writing == 0:
                    break
                logits = decoder.next(self._drop_finished_rows(wave, decoder, choice.tokens))
                if routes is not None:
                    routes.next(place, wave.rows)
        self._keep_finished(wave, decoder)
        tokens, logprobs, kept_logmass = (
            table if table is None else table.t() for table in (wave.tokens, wave.logprobs, wave.kept_logmass)
        )
        assert tokens is not None and logprobs is not None
        lengths = wave.lengths.tolist()
        versions = [torch.full((length,), self.version) for length in lengths]
        responses = make_responses(
            self.policy.tokenizer, tokens, logprobs, kept_logmass, lengths, wave.stops, wave.cut, versions
        )
        if routes is not None:
            responses = routes.add_routes(responses, prompts, owner)
        responses = [
            replace(response, kept=wave.kept[row]) if row in wave.kept else response
            for row, response in enumerate(responses)
        ]
        cuts = torch.tensor([0, *counts]).cumsum(0).tolist()
        return [responses[start:end] for start, end in pairwise(cuts)]

    def _reuse_kept(self, decoder: Decoder, jobs: list[Job]) -> None:
        """Let the decoder begin after the KV caches that earlier turns of these jobs left."""
        if not isinstance(decoder, Blocks) or self.routers is not None:
            return  # recording routes needs every prompt token
        brought = [job.request.kept for job in jobs]
        if not any(brought):
            return
        kept = [self.keeper.usable(each, job.request.prompt) for each, job in zip(brought, jobs, strict=True)]
        covered = sum(one[1] for one in kept if one is not None)
        if covered:
            decoder.reuse(kept)
            self.keeper.reused_tokens += covered

    def _keep_finished(self, wave: _Wave, decoder: Decoder) -> None:
        """Keep the KV caches of finished rows that the decoder still holds, as far as they fit."""
        if not wave.texts or not isinstance(decoder, Blocks) or self.routers is not None:
            return
        finished = wave.finished.tolist()
        wanted = [place for place, row in enumerate(wave.rows.tolist()) if row in wave.texts and finished[place]]
        wanted = wanted[: self.keeper.room // decoder.row_bytes()]
        if not wanted:
            return
        rows = wave.rows[wanted].tolist()
        # The last token of a response was sampled but never read.
        texts = [torch.cat([wave.texts[row], wave.tokens[: int(wave.lengths[row]) - 1, row]]) for row in rows]
        wave.kept |= dict(zip(rows, self.keeper.keep(decoder.copy_rows(torch.tensor(wanted)), texts), strict=True))

    def _drop_finished_rows(self, wave: _Wave, decoder: Decoder, tokens: Tensor) -> Tensor:
        """Drop finished rows if there are enough of them; the tokens of the remaining rows."""
        if wave.writing > COMPACT_AT * len(tokens):
            return tokens
        self._keep_finished(wave, decoder)
        writing = (~wave.finished).nonzero().squeeze(1)
        decoder.keep(writing)
        wave.rows, wave.seeds, wave.finished = wave.rows[writing], wave.seeds[writing], wave.finished[writing]
        wave.budgets = wave.budgets[writing]
        return tokens[writing]

    def _write(self, wave: _Wave, choice: Choice, place: int, limits: Limits) -> None:
        """Store the chosen tokens and mark the rows that end with them."""
        wave.tokens[place].index_copy_(0, wave.rows, choice.tokens)
        wave.logprobs[place].index_copy_(0, wave.rows, choice.logprobs.to(wave.logprobs.dtype))
        if wave.kept_logmass is not None and choice.kept_logmass is not None:
            wave.kept_logmass[place].index_copy_(0, wave.rows, choice.kept_logmass.to(wave.kept_logmass.dtype))
        ended = torch.isin(choice.tokens, wave.ends).logical_and_(~wave.finished)
        for row in wave.rows[ended].tolist():
            wave.stops[row] = StopReason.END_TOKEN
        if limits.stop:
            self._stop_at_strings(wave, ~(wave.finished | ended), place, limits, ended)
        ended |= (wave.budgets == place + 1).logical_and_(~wave.finished)
        wave.lengths[wave.rows[ended]] = place + 1
        wave.finished |= ended
        wave.writing -= int(ended.sum())

    def _stop_at_strings(self, wave: _Wave, writing: Tensor, place: int, limits: Limits, ended: Tensor) -> None:
        for index in writing.nonzero().squeeze(1).tolist():
            row = int(wave.rows[index])
            text = self.policy.tokenizer.decode(wave.tokens[: place + 1, row].tolist(), skip_special_tokens=True)
            before = limits.before_stop(text)
            if before is not None:
                wave.stops[row], wave.cut[row] = StopReason.STOP_STRING, before
                ended[index] = True


def _kind(job: Job) -> tuple[Sampling, tuple[str, ...], tuple[int, ...]]:
    """What jobs must share to decode together: everything but their prompts, seeds and budgets."""
    return job.sampling, job.limits.stop, job.limits.end_tokens


def _pack_prompts(prompts: list[Tensor], device: torch.device) -> Pack:
    return pack(prompt_texts(prompts), torch.arange(len(prompts))).to(device)


def _start_wave(
    parts: list[tuple[Job, tuple[int, ...]]], sampling: Sampling, limits: Limits, width: int, device: torch.device
) -> _Wave:
    budgets = [job.limits.max_response_tokens for job, seeds in parts for _ in seeds]
    prompts = [job.request.prompt if job.request.keep else None for job, seeds in parts for _ in seeds]
    rows = len(budgets)
    return _Wave(
        tokens=torch.zeros(width, rows, dtype=torch.int64, device=device),
        logprobs=torch.zeros(width, rows, dtype=torch.float32, device=device),
        kept_logmass=torch.zeros(width, rows, dtype=torch.float32, device=device) if sampling.truncates else None,
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        stops=[StopReason.LENGTH] * rows,
        cut={},
        ends=torch.tensor(limits.end_tokens, dtype=torch.int64, device=device),
        rows=torch.arange(rows, device=device),
        seeds=torch.tensor([seed for _, seeds in parts for seed in seeds], dtype=torch.int64, device=device),
        budgets=torch.tensor(budgets, dtype=torch.int64, device=device),
        finished=torch.zeros(rows, dtype=torch.bool, device=device),
        writing=rows,
        texts={row: prompt for row, prompt in enumerate(prompts) if prompt is not None},
        kept={},
    )
