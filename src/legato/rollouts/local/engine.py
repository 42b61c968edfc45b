"""The engine that lives with the policy: it samples from the very tensors being trained, so nothing is ever out of date.

A wave of prompts is prefilled once each, then all responses decode in step, one token a pass; finished ones leave the batch
when a quarter of it has finished. On a CPU known families go through `blocks.py`, a group's prompt held once; others through
their own forward, its keys and values copied to every response; what no cache serves is recomputed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.head.head import Head
from legato.policy.layers.unrolled import Unrolled
from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.packs import Pack, pack
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Finished, Handle, JobEngine, Limits, Request, Response, make_responses
from legato.rollouts.local.agreement import disagreement
from legato.rollouts.local.blocks import Blocks
from legato.rollouts.local.recompute import Recompute
from legato.rollouts.local.routes import WaveRoutes
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Choice, Sampling, choose

_COMPACT_AT = 0.75
"""Finished rows leave when at most this share of the rows is still writing: copying keys and values costs a few passes."""


class _Prefill:
    """The view of a pack that keeps each layer's keys and values, laid out for decoding."""

    def __init__(self, packed: Pack, cache: "_Cache", rows: Tensor) -> None:
        self.packed, self.cache, self.rows = packed, cache, rows

    def attend(self, heads: Heads) -> Tensor:
        self.cache.start(heads, self.packed, self.rows)
        return self.packed.attend(heads)


class _Cache:
    """Keys and values `[rows, heads, columns, width]` per layer. Prompts end at column P - 1; all rows write one column."""

    def __init__(self, prompt_lengths: Tensor, width: int, capacity: int) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.width, self.capacity, self.column = width, capacity, width
        self.first = width - prompt_lengths
        self._biases: dict[int | None, Tensor | None] = {}
        self._even = bool((self.first == 0).all())

    def start(self, heads: Heads, packed: Pack, rows: Tensor) -> None:
        """Copy the prompts' keys and values to the rows, aligned at their end."""
        columns = torch.arange(self.width, device=rows.device)
        shifted = (columns - self.first[:, None]).clamp(min=0)
        index = packed.prefix[rows].gather(1, shifted)
        for store, source in ((self.keys, heads.key), (self.values, heads.value)):
            found = source[0].transpose(0, 1)[index].transpose(1, 2)
            table = found.new_empty(len(rows), found.shape[1], self.capacity, found.shape[3])
            table[:, :, : self.width] = found
            store[heads.layer] = table

    def attend(self, heads: Heads) -> Tensor:
        keys, values = self.keys[heads.layer], self.values[heads.layer]
        keys[:, :, self.column] = heads.key[:, :, 0]
        values[:, :, self.column] = heads.value[:, :, 0]
        end = self.column + 1
        bias = self._bias(heads.window, heads.query)
        return attend(heads, heads.query, keys[:, :, :end], values[:, :, :end], bias).transpose(1, 2)

    def _bias(self, window: int | None, like: Tensor) -> Tensor | None:
        """What the new token may not see; nothing where all prompts are of one length."""
        if self._even and window is None:
            return None
        if window not in self._biases:
            columns = torch.arange(self.column + 1, device=like.device)
            seen = columns >= self.first[:, None]
            if window is not None:
                seen = seen & (columns > self.column - window)
            self._biases[window] = as_bias(seen[:, None, None, :], like)
        return self._biases[window]

    def advance(self) -> None:
        self.column += 1
        self._biases.clear()

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay."""
        self.first = self.first[rows]
        self._biases.clear()
        for store in (self.keys, self.values):
            for layer, table in store.items():
                store[layer] = table.index_select(0, rows)


class _Cached:
    """The rows of a wave with their keys and values: one token a pass."""

    def __init__(self, policy: Policy, packed: Pack, owner: Tensor, limit: int) -> None:
        self.policy, self.packed, self.owner = policy, packed, owner
        lengths = packed.prefix_lengths[owner]
        self.cache = _Cache(lengths, packed.prefix.shape[1], packed.prefix.shape[1] + limit)
        self.positions = lengths.clone()
        self.head = Head.from_body(policy.body)

    def first(self) -> Tensor:
        """[n, V]: prompts are read once each, whatever the number of their rows."""
        packed = self.packed
        with self.policy.attending(_Prefill(packed, self.cache, self.owner)):
            hidden = self.policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
        return self.head.exact(hidden[packed.prompt_ends])[self.owner]

    def next(self, tokens: Tensor) -> Tensor:
        """[n, V] after one more token of each row."""
        with self.policy.attending(self.cache):
            hidden = self.policy.hidden(tokens.unsqueeze(1), self.positions.unsqueeze(1))[:, 0]
        self.positions = self.positions + 1
        self.cache.advance()
        return self.head.exact(hidden)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.positions = self.positions[rows]


_Memory = Blocks | _Cached | Recompute
_Remember = Callable[[list[Tensor], Tensor, int], _Memory]
"""(prompts, the prompt of each row, most tokens) -> the rows of a wave before their first token."""


@dataclass(slots=True)
class _Wave:
    """The rows being written: tables over all rows of the wave, and which of them are still in memory."""

    tokens: Tensor
    """[places, rows], as are the next two; what stands beyond a row's length is never read."""
    logprobs: Tensor
    kept: Tensor | None
    lengths: Tensor
    stops: list[StopReason]
    cut: dict[int, str]
    """row -> its text, where a stop string ended it"""
    ends: Tensor
    """The end tokens."""
    rows: Tensor
    """[n]: the wave's row of each row in memory."""
    seeds: Tensor
    finished: Tensor
    """[n] bool"""
    writing: int
    """How many of the n are not finished."""


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
        """'blocks', 'cached' or 'recomputed'; None: not looked at yet."""
        self._remember: tuple[int, _Remember] | None = None
        """How rows are remembered, and the policy version it was made for; None while nothing is outstanding."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        # Without a memory every token is read over and over: its routes are not those of one pass.
        return Capabilities(routes=self.routers is not None and self._choose_way() != "recomputed")

    def poll(self) -> list[Finished]:
        """Decode one wave, or more until a request is complete; what is submitted meanwhile joins the next wave."""
        while self.jobs:
            finished = self.report_complete()
            if finished:
                self._drop_copies_when_idle()
                return finished
            self._decode_wave()
        return []

    def cancel(self, handle: Handle) -> None:
        super().cancel(handle)
        self._drop_copies_when_idle()

    def _drop_copies_when_idle(self) -> None:
        if not self.jobs:
            self._remember = None

    def _decode_wave(self) -> None:
        """Write the next `rows_at_once` responses, in the order of requests and seeds; all sampled as the first one is."""
        first = next(iter(self.jobs.values()))
        room, wave = self.rows_at_once, []
        for job in self.jobs.values():
            if room and job.waiting and (job.sampling, job.limits) == (first.sampling, first.limits):
                wave.append((job, job.waiting[:room]))
                room -= len(wave[-1][1])
        with self.policy.serving():
            rows = self._run([(job.request, seeds) for job, seeds in wave], self._memory(), first.sampling, first.limits)
        for (job, seeds), responses in zip(wave, rows, strict=True):
            job.responses |= dict(enumerate(responses, job.taken))
            job.taken += len(seeds)

    def _memory(self) -> _Remember:
        """How rows are remembered. It may hold copies of the weights, made once for all waves of a burst of requests."""
        if self._remember is None or self._remember[0] != self.version:
            self._remember = None  # before new copies are made
            self._remember = self.version, self._make_memory()
        return self._remember[1]

    def _make_memory(self) -> _Remember:
        policy, way = self.policy, self._choose_way()
        if way == "recomputed":
            return lambda prompts, owner, _: Recompute(policy, prompts, owner)
        if way == "blocks":
            body = Unrolled(policy.body)
            every = self.routers is not None
            return lambda prompts, owner, limit: Blocks(body, _packed(prompts, policy.device), owner, limit, every)
        return lambda prompts, owner, limit: _Cached(policy, _packed(prompts, policy.device), owner, limit)

    def _choose_way(self) -> str:
        """The fastest way that gives this body's own log-probs; looked at once, on a few tokens."""
        if self._way is not None:
            return self._way
        ways = []
        if self.policy.views:
            ways = ["blocks", "cached"] if Unrolled.serves(self.policy.body) else ["cached"]
        for way in ways:
            # In an engine of its own: requests may be outstanding here.
            tried = LocalEngine(self.policy, self.rows_at_once, way=way, record_routes=self.routers is not None)
            wrong = disagreement(tried, self.policy)
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

    def _run(
        self, parts: list[tuple[Request, tuple[int, ...]]], remember: _Remember, sampling: Sampling, limits: Limits
    ) -> list[list[Response]]:
        device = self.policy.device
        counts = [len(seeds) for _, seeds in parts]
        owner = torch.repeat_interleave(torch.tensor(counts)).to(device)
        prompts = [request.prompt for request, _ in parts]
        memory = remember(prompts, owner, limits.max_response_tokens)
        wave = _start(parts, sampling, limits, len(owner), device)
        routes = None
        if self.routers is not None and not isinstance(memory, Recompute):
            routes = WaveRoutes(self.routers, limits.max_response_tokens, len(owner), device)
        with nullcontext() if routes is None else routes.listening():
            logits = memory.first()
            if routes is not None:
                routes.first()
            for place in range(limits.max_response_tokens):
                choice = choose(logits, uniform(wave.seeds, place), sampling)
                self._write(wave, choice, place, limits)
                if wave.writing == 0 or place + 1 == limits.max_response_tokens:
                    break
                logits = memory.next(_compacted(wave, memory, choice.tokens))
                if routes is not None:
                    routes.next(place, wave.rows)
        tokens, logprobs, kept = (table if table is None else table.t() for table in (wave.tokens, wave.logprobs, wave.kept))
        assert tokens is not None and logprobs is not None
        lengths = wave.lengths.tolist()
        versions = [torch.full((length,), self.version) for length in lengths]
        responses = make_responses(self.policy.tokenizer, tokens, logprobs, kept, lengths, wave.stops, wave.cut, versions)
        if routes is not None:
            responses = routes.added(responses, prompts, owner)
        cuts = torch.tensor([0, *counts]).cumsum(0).tolist()
        return [responses[start:end] for start, end in pairwise(cuts)]

    def _write(self, wave: _Wave, choice: Choice, place: int, limits: Limits) -> None:
        """Note what was chosen, and which of the rows still writing end with it."""
        wave.tokens[place].index_copy_(0, wave.rows, choice.tokens)
        wave.logprobs[place].index_copy_(0, wave.rows, choice.logprobs.to(wave.logprobs.dtype))
        if wave.kept is not None and choice.kept_logmass is not None:
            wave.kept[place].index_copy_(0, wave.rows, choice.kept_logmass.to(wave.kept.dtype))
        ended = torch.isin(choice.tokens, wave.ends).logical_and_(~wave.finished)
        for row in wave.rows[ended].tolist():
            wave.stops[row] = StopReason.END_TOKEN
        if limits.stop:
            self._stop_at_strings(wave, ~(wave.finished | ended), place, limits, ended)
        wave.lengths[wave.rows[ended]] = place + 1
        wave.finished |= ended
        wave.writing -= int(ended.sum())

    def _stop_at_strings(self, wave: _Wave, asked: Tensor, place: int, limits: Limits, ended: Tensor) -> None:
        for index in asked.nonzero().squeeze(1).tolist():
            row = int(wave.rows[index])
            text = self.policy.tokenizer.decode(wave.tokens[: place + 1, row].tolist(), skip_special_tokens=True)
            before = limits.before_stop(text)
            if before is not None:
                wave.stops[row], wave.cut[row] = StopReason.STOP_STRING, before
                ended[index] = True


def _packed(prompts: list[Tensor], device: torch.device) -> Pack:
    return pack(prompt_texts(prompts), torch.arange(len(prompts))).to(device)


def _compacted(wave: _Wave, memory: _Memory, tokens: Tensor) -> Tensor:
    """Drop finished rows once they are worth the copy; the tokens to go on with."""
    if wave.writing > _COMPACT_AT * len(tokens):
        return tokens
    writing = (~wave.finished).nonzero().squeeze(1)
    memory.keep(writing)
    wave.rows, wave.seeds, wave.finished = wave.rows[writing], wave.seeds[writing], wave.finished[writing]
    return tokens[writing]


def _start(
    parts: list[tuple[Request, tuple[int, ...]]], sampling: Sampling, limits: Limits, rows: int, device: torch.device
) -> _Wave:
    width = limits.max_response_tokens
    return _Wave(
        tokens=torch.zeros(width, rows, dtype=torch.int64, device=device),
        logprobs=torch.zeros(width, rows, dtype=torch.float32, device=device),
        kept=torch.zeros(width, rows, dtype=torch.float32, device=device) if sampling.truncates else None,
        lengths=torch.full((rows,), width, device=device),
        stops=[StopReason.LENGTH] * rows,
        cut={},
        ends=torch.tensor(limits.end_tokens, dtype=torch.int64, device=device),
        rows=torch.arange(rows, device=device),
        seeds=torch.tensor([seed for _, seeds in parts for seed in seeds], dtype=torch.int64, device=device),
        finished=torch.zeros(rows, dtype=torch.bool, device=device),
        writing=rows,
    )
