"""The model being trained. Two verbs: score some rows, and accumulate the gradient of some rows.

channels = policy.score(texts, rows)                                    no gradient
with policy.accumulate_gradient(texts, rows) as forward:                the body goes forward
    for piece in forward.pieces():                                      the head goes forward for a few rows
        piece.backward(coefficients_of(piece.rows, piece.channels))     and backward
                                                                        leaving the block, the body goes backward
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.outcome import Coefficients
from legato.core.shapes import PerToken
from legato.core.texts import Texts
from legato.core.world import others_waiting
from legato.errors import InputError
from legato.policy.experts.routers import Routers, find_routers
from legato.policy.experts.routing import Cells, Directions, Routed, Tap, Traffic
from legato.policy.head.head import Head
from legato.policy.layers.fused import Parts, Projected, run_body, run_body_without_backward, why_not
from legato.policy.layers.layer import run_plain_layer
from legato.policy.layers.products import project_alike
from legato.policy.layout import attention
from legato.policy.layout.packs import Pack, pack
from legato.policy.layout.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The outputs an objective may differentiate, `[R, width]`; 0 at tokens the policy did not write."""

    logprobs: PerToken
    entropy: PerToken
    values: PerToken | None = None
    routed: Routed | None = None
    """The routers' outputs at these tokens, if the directions ask for them; without a gradient."""
    traffic: Traffic | None = None
    """The experts of every token read in the pass, prompts included, if the directions ask for them."""

    def detach(self) -> "Channels":
        """The same values without a gradient."""
        values = None if self.values is None else self.values.detach()
        return replace(self, logprobs=self.logprobs.detach(), entropy=self.entropy.detach(), values=values)

    def widen(self, width: int) -> "Channels":
        """The same rows in a wider table."""

        def pad(table: Tensor) -> Tensor:
            return nn.functional.pad(table, (0, width - table.shape[1]))

        return replace(
            self,
            logprobs=pad(self.logprobs),
            entropy=pad(self.entropy),
            values=None if self.values is None else pad(self.values),
            routed=None if self.routed is None else self.routed.widen(width),
        )

    @staticmethod
    def join(parts: "Sequence[Channels]") -> "Channels":
        """The channels of several runs of rows as one table; all must have the same width."""
        if len(parts) == 1:
            return parts[0]
        values = [part.values for part in parts if part.values is not None]
        routed = [part.routed for part in parts if part.routed is not None]
        return Channels(
            logprobs=torch.cat([part.logprobs for part in parts]),
            entropy=torch.cat([part.entropy for part in parts]),
            values=torch.cat(values) if values else None,
            routed=Routed.join(routed) if routed else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopScores:
    """Log-probs of the K tokens of some rows, row after row, and the likeliest tokens in their places; on the host."""

    counts: tuple[int, ...]
    """How many of the K tokens each row has."""
    logprobs: Tensor
    """[K]"""
    ranks: Tensor
    """[K]: 1 for the likeliest token of the vocabulary."""
    top: Tensor
    """[K, count] token ids, the likeliest first."""
    top_logprobs: Tensor
    """[K, count]"""


class ValueHead(nn.Module):
    """The value of the state before each token, from the body's last hidden state. It starts at 0."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1, dtype=torch.promote_types(dtype, torch.float32), device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values


@dataclass(slots=True, kw_only=True)
class Policy:
    """A causal language model of transformers with its tokenizer, and a value head where the algorithm has one."""

    model: Any
    """The model as trained and sampled from: under LoRA the peft model."""
    tokenizer: Any
    name: str
    """The model's name, for messages."""
    packing: bool = True
    """Lay texts end to end, a group's prompt once; False: right-padded rows through the model's own attention."""
    views: bool = True
    """Whether the body attends through the registered function; packs and the KV cache need it."""
    shared_prompts: bool = True
    """Compute the prompt of a group once per pack; False: once per response."""
    fused: bool = True
    """Train through fused layer parts on a GPU where the family is known; False: through the model's own layers."""
    exact: bool = False
    """Compute products so that the bits of a token do not depend on its pack (`layers/products.py`)."""
    value_head: ValueHead | None = None
    logits_at_once: int | None = None
    """How many logits are allocated at once; None: 2^23 on a CPU (32 MiB), 5 * 2^27 on a GPU (1.3 GB of 16 bits)."""
    divided: bool = False
    """Whether the weights of its layers are divided among ranks."""
    exchanges: bool = False
    """Whether ranks exchange layers or their gradients inside a pass: then all must run equally many passes."""
    exchanging: Callable[[], AbstractContextManager[None]] = others_waiting
    """The context of a pass in which ranks exchange layers."""
    notes: list[str] = field(default_factory=list)
    """Decisions made while loading, for the run to print."""

    routers: Routers | None = field(init=False, default=None)
    """The routers, if the body is a mixture of experts."""
    unrouted: str = field(init=False, default="it has no experts")
    """Why there are no routers."""

    def __post_init__(self) -> None:
        attention.register()
        self._disable_randomness()
        routers = find_routers(self.body)
        if isinstance(routers, Routers):
            self.routers = routers
        elif routers is not None:
            self.unrouted = routers
            note = f"routing is not measured: {routers}"
            # A sampler that differs on purpose is copied from the policy and shares its notes.
            if note not in self.notes:
                self.notes.append(note)

    def _disable_randomness(self) -> None:
        """Turn off dropout and router jitter, which would make the log-probs of one policy differ from pass to pass."""
        self.model.eval()
        for name, module in self.model.named_modules():
            for noise in ("router_jitter_noise", "jitter_noise"):
                if isinstance(getattr(module, noise, None), float) and getattr(module, noise):
                    setattr(module, noise, 0.0)
                    self.notes.append(f"router jitter of {name} is set to 0: a ratio needs the same numbers in every pass")

    @property
    def device(self) -> torch.device:
        device: torch.device = next(iter(self.model.parameters())).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of log-probs: float32 or, for float64 models, float64."""
        return torch.promote_types(self.model.get_input_embeddings().weight.dtype, torch.float32)

    @property
    def body(self) -> Any:
        """The causal language model of transformers, without a LoRA wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def context_length(self) -> int | None:
        return getattr(self.body.config, "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def require_routers(self, wanted_by: str) -> Routers:
        """The routers; InputError naming the option `wanted_by` if there are none."""
        if self.routers is None:
            raise InputError(
                f"{wanted_by} needs a mixture of experts whose routers are known; policy.model {self.name}"
                f" ({type(self.body).__name__}): {self.unrouted}"
            )
        return self.routers

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, the value head's included."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    @contextmanager
    def serving(self) -> Iterator[Any]:
        """The model to sample from, with the trained parameters themselves: nothing is copied.

        Under gradient checkpointing the model is in training mode; inside, it is in eval mode so that layers are not saved
        for recomputation.
        """
        trains = self.model.training
        if trains:
            self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            if trains:
                self.model.train()

    @contextmanager
    def attending(self, view: attention.View) -> Iterator[None]:
        """Inside, the body attends through the view."""
        with attention.attending(self.body.config, view):
            yield

    def pack(self, texts: Texts, rows: Tensor) -> Pack:
        """Some rows as one pack, on the host."""
        return pack(texts, rows, shared=self.shared_prompts)

    def score(self, texts: Texts, rows: Tensor, directions: Directions | None = None) -> Channels:
        """The channels of some rows without a gradient, with the routers' choices if the directions ask for them."""
        packed = self.pack(texts, rows).to(self.device)
        with torch.no_grad(), self._tap(packed, directions) as tap, self._hidden_states(packed) as hidden:
            parts = self._parts(packed, without_logits=Head.from_body(self.body).never_holds_logits(hidden))
            channels = Channels.join([self._channels(state, packed, part) for part, state in _runs(hidden, packed, parts)])
            if tap is None or not tap.directions.record:
                return channels
            routed, traffic = tap.results()
            return replace(channels, routed=routed, traffic=traffic)

    def score_with_top(self, texts: Texts, rows: Tensor, count: int) -> TopScores:
        """The log-probs of some rows and the `count` likeliest tokens in each place, without a gradient."""
        packed = self.pack(texts, rows).to(self.device)
        head, parts = Head.from_body(self.body), []
        with torch.no_grad(), self._hidden_states(packed) as hidden:
            for start in range(0, len(hidden), self.tokens_at_once):
                here = slice(start, start + self.tokens_at_once)
                logprobs = (head.exact(hidden[here]) / packed.temperature[here, None]).log_softmax(1)
                own = logprobs.gather(1, packed.targets[here, None])
                likeliest = logprobs.topk(min(count, logprobs.shape[1]), 1)
                parts.append((own[:, 0], (logprobs > own).sum(1) + 1, likeliest.indices, likeliest.values))
        tables = [torch.cat(list(table)).cpu() for table in zip(*parts, strict=True)]
        return TopScores(counts=packed.counts, logprobs=tables[0], ranks=tables[1], top=tables[2], top_logprobs=tables[3])

    @contextmanager
    def accumulate_gradient(self, texts: Texts, rows: Tensor, directions: Directions | None = None) -> "Iterator[Forward]":
        """Add the gradient of some rows to the parameters; the module docstring shows how.

        The body runs forward once on entering and backward once on leaving, if a piece ran backward and nothing was
        raised. Layouts and router hooks live until then, since gradient checkpointing recomputes layers.
        """
        packed = self.pack(texts, rows).to(self.device)
        with self._tap(packed, directions) as tap, self._hidden_states(packed) as hidden:
            routed, traffic = (None, None) if tap is None or not tap.directions.record else tap.results()
            forward = Forward(policy=self, rows=rows, packed=packed, hidden=hidden, routed=routed, traffic=traffic)
            yield forward
            forward.finish()

    @contextmanager
    def _tap(self, packed: Pack, directions: Directions | None) -> Iterator[Tap | None]:
        """Hook the routers until the backward is over; None without routers or directions."""
        if directions is None or self.routers is None:
            yield None
            return
        tap = Tap(self.routers, packed, None if self.packing else cells(packed), directions)
        with tap.listening():
            yield tap

    @contextmanager
    def _hidden_states(self, packed: Pack) -> Iterator[Tensor]:
        """[K, N]: the last hidden state at the tokens whose logits are read. Errors of a pass over divided layers say so."""
        with self.exchanging() if self.exchanges else nullcontext(), self._run_body(packed) as hidden:
            yield hidden

    @contextmanager
    def _run_body(self, packed: Pack) -> Iterator[Tensor]:
        if not self.packing:
            tokens, positions, read = pad_rows(packed)
            yield self.hidden(tokens, positions).flatten(0, 1)[read]
        elif packed.reads is not None and self.trains_fused:
            parts = _fused_parts(packed, exact=self.exact)
            with run_body(self.body.get_decoder(), packed.tokens, packed.positions, parts) as hidden:
                yield packed.reads.take(hidden)
        else:
            with self.attending(packed):
                hidden = self.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
                yield hidden[packed.read] if packed.reads is None else packed.reads.take(hidden)

    @property
    def trains_fused(self) -> bool:
        """Whether training uses fused layer parts: on a GPU in 16 bits, in a known family."""
        return self.why_not_fused() is None

    def why_not_fused(self) -> str | None:
        """Why training uses the model's own layers; None if it uses fused parts."""
        decoder = self.body.get_decoder()
        if not self.fused or not self.packing:
            return "fused layers are switched off" if self.packing else "rows are padded"
        if (reason := why_not(decoder)) is not None:
            return reason
        weight, width = decoder.embed_tokens.weight, decoder.layers[0].self_attn.head_dim
        if Spans.serve(weight, width):
            return None
        return f"no kernel for heads of {width} in {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"

    def _parts(self, packed: Pack, *, without_logits: bool = False) -> list[range]:
        """Split the rows of a pack into runs whose logits fit at once; a row that does not fit is a run of its own."""
        if without_logits:
            return [range(len(packed.counts))]
        runs, start, tokens, limit = [], 0, 0, self.tokens_at_once
        for row, count in enumerate(packed.counts):
            if row > start and tokens + count > limit:
                runs.append(range(start, row))
                start, tokens = row, 0
            tokens += count
        runs.append(range(start, len(packed.counts)))
        return runs

    @property
    def tokens_at_once(self) -> int:
        """For how many tokens logits are allocated at once."""
        held_at_once = self.logits_at_once or (5 * 2**27 if self.device.type == "cuda" else 2**23)
        return max(1, held_at_once // self.vocabulary)

    def _channels(self, state: Tensor, packed: Pack, rows: range) -> Channels:
        """The channels of a run of rows from their hidden states."""
        first = sum(packed.counts[: rows.start])
        here = slice(first, first + len(state))
        place = packed.place[here] - rows.start * packed.width
        shape = (len(rows), packed.width)
        head = Head.from_body(self.body)
        logprobs, entropy = head.score(state, packed.targets[here], packed.temperature[here], self.tokens_at_once)
        values = None if self.value_head is None else self.value_head(state)
        return Channels(
            logprobs=_spread(logprobs, place, shape),
            entropy=_spread(entropy, place, shape),
            values=None if values is None else _spread(values, place, shape),
        )

    def read_as_in_training(
        self,
        packed: Pack,
        keep: Callable[[int, Tensor, Tensor], None],
        wrap: Callable[[Parts], Parts] = lambda parts: parts,
    ) -> Tensor:
        """[N, width]: the last hidden state of every token of a pack by fused parts, without a gradient.

        `keep(layer, keys, values)` receives the keys and values [N, K, D] of each layer; `wrap` may replace parts.
        """
        parts = wrap(_fused_parts(packed, exact=self.exact, keep=keep))
        return run_body_without_backward(self.body.get_decoder(), packed.tokens, packed.positions, parts)

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The body's last hidden state, `[rows, tokens, N]`."""
        output = self.body.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden


class Piece:
    """A few rows of a forward pass with a gradient. Their logits stay allocated until their backward."""

    def __init__(self, rows: Tensor, attached: Channels) -> None:
        self.rows = rows
        """Their row numbers, on the host."""
        self.channels = attached.detach()
        """The channels an objective reads, detached."""
        self._attached: Channels | None = attached

    def backward(self, coefficients: Coefficients) -> None:
        """Run the head's backward; `coefficients` are minus the derivative of the loss by each channel."""
        assert self._attached is not None, "a piece goes backward once, before the next piece is computed"
        channels, self._attached = self._attached, None
        coefficients.tie(
            channels.logprobs.new_zeros(()),
            logprobs=channels.logprobs,
            entropy=channels.entropy if coefficients.entropy is not None else None,
            values=channels.values if coefficients.values is not None else None,
        ).backward()  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Free the logits. A piece without a backward adds no gradient."""
        self._attached = None


@dataclass(slots=True, kw_only=True)
class Forward:
    """A forward pass with a gradient, after the body has run."""

    policy: Policy
    rows: Tensor
    packed: Pack
    hidden: Tensor
    """[K, N]: the last hidden state at the tokens whose logits are read."""
    routed: Routed | None
    traffic: Traffic | None
    """The experts of every token read, if the directions ask for them."""
    _leaves: list[Tensor] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        """Yield all rows, a few at a time: only the logits of one piece are allocated, and each logit is computed once."""
        for part, state in _runs(self.hidden, self.packed, self.policy._parts(self.packed)):
            # The head's backward ends at this leaf; the body's backward starts after all pieces.
            leaf = state.detach().requires_grad_()
            self._leaves.append(leaf)
            channels = self.policy._channels(leaf, self.packed, part)
            if self.routed is not None:
                channels = replace(channels, routed=self.routed.rows(part))
            piece = Piece(self.rows[part.start : part.stop], channels)
            del channels
            yield piece
            piece.release()

    def finish(self) -> None:
        """Run the backward of the body from the gradients of the pieces' hidden states, and free the activations."""
        hidden, leaves = self.hidden, self._leaves
        # A caller may keep this object for its traffic; it must not keep activations alive.
        del self.hidden, self.packed, self.routed, self._leaves
        # If the whole body is frozen, hidden states need no gradient.
        if not hidden.requires_grad or all(leaf.grad is None for leaf in leaves):
            return
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        if unread := len(hidden) - sum(map(len, gradients)):
            gradients.append(hidden.new_zeros(unread, hidden.shape[1]))
        hidden.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of it, unless it is divided among ranks."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _fused_parts(packed: Pack, *, exact: bool, keep: Callable[[int, Tensor, Tensor], None] | None = None) -> Parts:
    """The fused layer parts, with gradients, for the tokens of a pack; `keep` receives each layer's keys and values."""
    from legato.policy.kernels.gradients import add_norm_with_gradient, rotate, swiglu_with_gradient

    spans, keys_and_values = packed.spans, dict[int, tuple[Tensor, Tensor]]()
    assert spans is not None

    def ready(layer: int, projected: Projected) -> Tensor:
        query_norm, key_norm, epsilon = (None, None, 0.0) if projected.norms is None else projected.norms
        cosine, sine, width = projected.cosine, projected.sine, projected.width
        value = projected.value.reshape(len(projected.value), -1, width)
        keys_and_values[layer] = (rotate(projected.key, cosine, sine, key_norm, epsilon, width), value)
        if keep is not None:
            keep(layer, *keys_and_values[layer])
        return rotate(projected.query, cosine, sine, query_norm, epsilon, width)

    def attend(layer: int, query: Tensor, scaling: float) -> Tensor:
        key, value = keys_and_values.pop(layer)
        return spans.attend(query, key, value, scaling, None)

    def whole(layer: Any, residual: Tensor, update: Tensor | None, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        return run_plain_layer(layer, residual, update, cosine, sine, spans, exact=exact)

    return Parts(
        ready=ready,
        attend=attend,
        add_norm=add_norm_with_gradient,
        swiglu=swiglu_with_gradient,
        project=project_alike if exact else nn.Module.__call__,
        # A whole layer keeps its keys to itself.
        whole=whole if keep is None else None,
    )


def pad_rows(packed: Pack) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a pack right-padded: tokens [R, W], positions [R, W], and the flat indices whose logits are read [K]."""
    places = cells(packed)
    rows = len(packed.suffix)
    tokens = torch.where(places.inside, packed.tokens[places.token], packed.tokens[0]).reshape(rows, -1)
    return tokens, torch.arange(tokens.shape[1], device=tokens.device).expand(rows, -1), places.read


def cells(packed: Pack) -> Cells:
    """Which token of the pack is in each cell of the padded rows."""
    rows, depth = packed.suffix.shape
    lengths = packed.prefix_lengths[packed.owner]
    total = lengths + packed.suffix_lengths
    width = int(total.max())
    columns = torch.arange(width, device=lengths.device).expand(rows, -1)
    from_prefix = packed.prefix[packed.owner].gather(1, columns.clamp(max=packed.prefix.shape[1] - 1))
    later = (columns - lengths[:, None]).clamp(min=0, max=max(depth - 1, 0))
    from_suffix = packed.suffix.gather(1, later) if depth else from_prefix
    token = torch.where(columns < lengths[:, None], from_prefix, from_suffix)
    row, step = packed.place // packed.width, packed.place % packed.width
    return Cells(
        token=token.reshape(-1),
        inside=(columns < total[:, None]).reshape(-1),
        read=row * width + lengths[row] - 1 + step,
    )


def _runs(hidden: Tensor, packed: Pack, parts: list[range]) -> Iterator[tuple[range, Tensor]]:
    """Runs of rows with their hidden states."""
    first = 0
    for part in parts:
        count = sum(packed.counts[part.start : part.stop])
        yield part, hidden[first : first + count]
        first += count


def _spread(values: Tensor, place: Tensor, shape: tuple[int, int]) -> Tensor:
    """[K] to [rows, width], 0 elsewhere."""
    return values.new_zeros(shape[0] * shape[1]).index_copy(0, place, values).reshape(shape)
