"""The layers of a pack as CUDA graphs, so that it is not the host that decides how long an update takes.

A layer is some 15 launches forward and 45 backward. Where the device is done with them sooner than the host, it waits. Here
a pack is laid into tensors that keep their address, in a few sizes: what is left over is a text of zeros, which looks at
itself alone and has no gradient. The first time a size is seen, its layers are launched one by one; the second time they
are recorded, and from then on replayed. All of it runs the same kernels on the same shapes: the numbers are the same.

Gradients of the weights lie in tensors of their own, which stay; what a graph keeps between forward and backward stays too.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from legato.core.capture import graph_pool, recorded
from legato.core.device import sent
from legato.policy.accumulate import add_gradient
from legato.policy.fused import of_whole_layers
from legato.policy.layer import How, Kept, layer_backward, layer_forward, weights_of
from legato.policy.packs import Pack
from legato.policy.spans import TILE, Spans, Uses

MOST_WORK = 4e11
"""Weights of a layer times tokens of a pack: with more, a device is busy for longer than a slow host takes to launch it."""
_GRAPHS = 32
"""Sizes whose graphs are kept."""


def rounded(tokens: int) -> int:
    """The size a pack is filled up to: one of sixteen between a power of two and the next."""
    step = max(TILE, (1 << (tokens.bit_length() - 1)) // 16)
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Tensors of one size that keep their address."""

    given: Tensor
    """[N, H]: embeddings."""
    cosine: Tensor
    sine: Tensor
    spans: Spans
    found: Tensor
    """[N, H]: the last hidden state."""
    to_found: Tensor
    to_given: Tensor


@dataclass(slots=True, kw_only=True)
class _Way:
    """How packs of one size go: launched, or replayed once they were recorded."""

    frame: _Frame
    seen: int = 0
    forward: Any = None
    backward: Any = None


@dataclass(slots=True)
class Graphs:
    """The layers of one decoder. A forward with a gradient must be followed by its backward before the next forward."""

    ways: dict[tuple[int, int, bool], _Way] = field(default_factory=dict)
    """By tokens, tiles, and whether a backward follows."""
    turns: int = 0
    """Forwards so far."""
    recording: bool = True
    _storage: _Frame | None = None
    _gradients: list[Tensor] = field(default_factory=list)
    _signature: tuple[Any, ...] = ()
    _pool: Any = None

    def serve(self, decoder: Any, tokens: int) -> bool:
        """Whether a pack of so many tokens goes this way: layers of plain matrices, all trained or none, not too large."""
        if not of_whole_layers(decoder):
            return False
        weights = _weights(decoder)
        matrices = sum(weight.numel() for weight in weights if weight.dim() == 2) / len(decoder.layers)
        return matrices * rounded(tokens) <= MOST_WORK and len({weight.requires_grad for weight in weights}) == 1

    def through(self, decoder: Any, packed: Pack) -> Tensor:
        """[K, H]: the last hidden state wherever the pack wants logits."""
        assert packed.spans is not None and packed.reads is not None
        given = decoder.embed_tokens(packed.tokens)
        cosine, sine = (angle[0] for angle in decoder.rotary_emb(given.unsqueeze(0), packed.positions.unsqueeze(0)))
        norm = decoder.norm.weight
        learns = torch.is_grad_enabled() and norm.requires_grad
        body = _Body(decoder)
        self._check(body.weights)
        way = self._laid(given.detach(), cosine, sine, packed.spans, learns=learns)
        if not learns:
            self.forward(body, way, learns=False)
            return way.frame.found.index_select(0, packed.reads.index)
        # The norm is handed over so that there is a backward even where the embeddings are frozen.
        found: Tensor = _Through.apply(given, norm, self, body, way, packed.reads)  # type: ignore[no-untyped-call]
        return found

    def clear(self) -> None:
        """Give all memory back."""
        self.ways.clear()
        self._gradients.clear()
        self._storage, self._pool = None, None

    def _check(self, weights: list[Tensor]) -> None:
        """What was recorded reads and writes addresses: where any of them changed, it is dropped."""
        signature = tuple((weight.data_ptr(), weight.grad_dtype, weight.requires_grad) for weight in weights)
        if signature != self._signature:
            self.clear()
            self._signature = signature

    def _laid(self, given: Tensor, cosine: Tensor, sine: Tensor, spans: Spans, *, learns: bool) -> _Way:
        """The pack in the tensors of its size, and how packs of that size go."""
        tokens = len(given)
        size = rounded(tokens)
        more = -(-(size - tokens) // TILE)
        tiles = len(spans.query_tiles)
        assert len(spans.key_tiles) == tiles
        room = 1 << (tiles + more - 1).bit_length()
        key = (size, room, learns)
        if key not in self.ways:
            if len(self.ways) >= _GRAPHS:
                del self.ways[next(iter(self.ways))]
            frame = self._frame(size, room, given, cosine)
            self.ways[key] = _Way(frame=frame)
        else:
            # The one used last is dropped last.
            self.ways[key] = self.ways.pop(key)
        frame = self.ways[key].frame
        for target, source in ((frame.given, given), (frame.cosine, cosine), (frame.sine, sine)):
            target[:tokens].copy_(source)
        frame.given[tokens:].zero_()
        frame.spans.places[:tokens].copy_(spans.places)
        rest = sent(_rest(tokens, size, room - tiles), given.device)
        for table, source in ((frame.spans.query_tiles, spans.query_tiles), (frame.spans.key_tiles, spans.key_tiles)):
            table[:tiles].copy_(source)
            table[tiles:].copy_(rest)
        return self.ways[key]

    def _frame(self, size: int, room: int, given: Tensor, cosine: Tensor) -> _Frame:
        """A part of the storage, which grows to the next power of two where it is too small."""
        held = self._storage
        if held is None or len(held.given) < size or len(held.spans.query_tiles) < room:
            most = 1 << (max(size, 0 if held is None else len(held.given)) - 1).bit_length()
            most_tiles = max(room, 0 if held is None else len(held.spans.query_tiles))
            self.ways.clear()
            self._pool = None
            self._storage = held = _Frame(
                **{name: given.new_zeros(most, given.shape[1]) for name in ("given", "found", "to_found", "to_given")},
                cosine=cosine.new_zeros(most, cosine.shape[1]),
                sine=cosine.new_zeros(most, cosine.shape[1]),
                spans=Spans(
                    places=given.new_zeros(most, dtype=torch.int32),
                    query_tiles=given.new_zeros(most_tiles, 5, dtype=torch.int32),
                    key_tiles=given.new_zeros(most_tiles, 5, dtype=torch.int32),
                ),
            )
        spans = held.spans
        return _Frame(
            given=held.given[:size],
            cosine=held.cosine[:size],
            sine=held.sine[:size],
            spans=Spans(places=spans.places[:size], query_tiles=spans.query_tiles[:room], key_tiles=spans.key_tiles[:room]),
            found=held.found[:size],
            to_found=held.to_found[:size],
            to_given=held.to_given[:size],
        )

    def forward(self, body: "_Body", way: _Way, *, learns: bool) -> list[Kept] | None:
        """Fills `found`; what the backward needs where the layers were launched one by one."""
        self.turns += 1
        way.seen += 1
        if way.seen == 2 and self.recording and way.frame.given.is_cuda:
            self._record(body, way, learns=learns)
        if way.forward is None:
            return body.forward(way.frame, keep=learns)
        way.forward.replay()
        return None

    def backward(self, body: "_Body", way: _Way, kept: list[Kept] | None) -> None:
        """Adds the gradients of the weights and fills `to_given`."""
        self._settle(body.weights)
        if kept is None:
            way.backward.replay()
        else:
            body.backward(way.frame, kept)

    def _record(self, body: "_Body", way: _Way, *, learns: bool) -> None:
        held: list[list[Kept]] = []
        self._pool = self._pool or graph_pool()
        try:
            way.forward = recorded(lambda: held.append(body.forward(way.frame, keep=learns)), self._pool)
            if learns:
                self._settle(body.weights)
                way.backward = recorded(lambda: body.backward(way.frame, held[0]), self._pool)
        except torch.OutOfMemoryError:
            held.clear()
            self.recording = False
            self.ways.clear()
            self._pool = None
            way.forward = way.backward = None
            warnings.warn(
                "too little memory is free to record layers as CUDA graphs: they are launched one by one", stacklevel=2
            )

    def _settle(self, weights: list[Tensor]) -> None:
        """The gradients lie where graphs add to them; one that does not exist yet is 0."""
        if not self._gradients:
            self._gradients = [torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype) for weight in weights]
        pairs = list(zip(weights, self._gradients, strict=True))
        fresh = [own for weight, own in pairs if weight.grad is None]
        moved = [(own, weight.grad) for weight, own in pairs if weight.grad is not None and weight.grad is not own]
        with torch.no_grad():
            if fresh:
                torch._foreach_zero_(fresh)
            if moved:
                torch._foreach_copy_([own for own, _ in moved], [grad for _, grad in moved])
        for weight, own in pairs:
            if weight.grad is not own:
                weight.grad = own


class _Body:
    """The layers and the last norm as plain functions of a frame."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.layers = [weights_of(layer) for layer in decoder.layers]
        self.weights = _weights(decoder)

    def forward(self, frame: _Frame, *, keep: bool) -> list[Kept]:
        """Fills `found`; with `keep`, returns what the backward needs."""
        from legato.policy.triton.layers import add_norm

        residual, update, kept = frame.given, None, list[Kept]()
        for layer, weights in zip(self.decoder.layers, self.layers, strict=True):
            how = How.of(layer, frame.spans)
            residual, update, needed = layer_forward(how, residual, update, frame.cosine, frame.sine, weights)
            if keep:
                kept.append(needed)
            del needed
        norm = self.decoder.norm
        total, found = add_norm(residual, update, norm.weight, norm.variance_epsilon)
        frame.found.copy_(found)
        return [*kept, (total,)] if keep else []

    def backward(self, frame: _Frame, kept: list[Kept]) -> None:
        """Lets go of what was kept as it goes."""
        from legato.policy.triton.gradients import norm_backward

        norm = self.decoder.norm
        (total,) = kept.pop()
        towards, to_norm = norm_backward(total, norm.weight, norm.variance_epsilon, frame.to_found, None, learns=True)
        del total
        assert to_norm is not None
        add_gradient(norm.weight, to_norm)
        for layer, weights in zip(reversed(self.decoder.layers), reversed(self.layers), strict=True):
            # A layer reads the sum of residual and update: both have the gradient of the sum.
            towards = layer_backward(How.of(layer, frame.spans), weights, kept.pop(), towards, towards)
        frame.to_given.copy_(towards)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, norm: Tensor, graphs: Graphs, body: _Body, way: _Way, reads: Uses) -> Tensor:
        ctx.kept = graphs.forward(body, way, learns=True)
        ctx.tokens, ctx.turn, ctx.given = len(given), graphs.turns, (graphs, body, way, reads)
        return way.frame.found.index_select(0, reads.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graphs, body, way, reads = ctx.given
        if ctx.turn != graphs.turns:
            raise RuntimeError("another pack went forward before the backward of this one: what it needs was overwritten")
        way.frame.to_found[: ctx.tokens].copy_(reads.give_back(gradients[0]))
        way.frame.to_found[ctx.tokens :].zero_()
        graphs.backward(body, way, ctx.kept)
        ctx.kept = None
        # A copy: the frame is overwritten by the next pack.
        return way.frame.to_given[: ctx.tokens].clone() if ctx.needs_input_grad[0] else None, *(None,) * 5


def _weights(decoder: Any) -> list[Tensor]:
    """Of all layers and the last norm."""
    found = [weight for layer in decoder.layers for weight in weights_of(layer) if weight is not None]
    return [*found, decoder.norm.weight]


def _rest(tokens: int, size: int, count: int) -> Tensor:
    """[count, 5] on the host: the tiles of the text that fills a pack up, then empty ones."""
    found = torch.zeros(count, 5, dtype=torch.int32)
    first = torch.arange(tokens, size, TILE, dtype=torch.int32)
    found[: len(first), 0] = first
    found[: len(first), 1], found[: len(first), 2] = tokens, size
    return found
