"""The model being trained: packs in, log-probs, entropies and values out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.outcome import Coefficients
from legato.core.shapes import PerToken
from legato.errors import InputError
from legato.policy.experts.routers import Routers, find
from legato.policy.experts.routing import Cells, Directions, Routed, Tap, Traffic
from legato.policy.head.head import Head
from legato.policy.layers.fused import Parts, Projected, through, why_not
from legato.policy.layers.layer import learned
from legato.policy.layout import attention
from legato.policy.layout.packs import Pack, Texts, pack
from legato.policy.layout.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """What an objective may differentiate, `[R, width]` of a pack; 0 where no token of the policy stands."""

    logprobs: PerToken
    entropy: PerToken
    values: PerToken | None = None
    routed: Routed | None = None
    """What the routers gave, where the pass was asked; it carries no gradient."""


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
    """Where it came from, for people."""
    packing: bool = True
    """Lay texts end to end, a group's prompt once; False: right-padded rows through the model's own attention."""
    views: bool = True
    """Whether the body attends through the registered function, so that packs and a cache of keys mean what they should."""
    shared_prompts: bool = True
    """Compute the prompt of a group once a pack; False: once a response."""
    fused: bool = True
    """Train through fused layer parts on a GPU where the family is known; False: through the model's own layers."""
    value_head: ValueHead | None = None
    logits_at_once: int | None = None
    """How many logits are held at once; None: 2^23 on a CPU (32 MiB), 5 * 2^27 on a GPU (1.3 GB of 16 bits)."""
    notes: list[str] = field(default_factory=list)
    """What was decided while loading, for the run to print."""

    routers: Routers | None = field(init=False, default=None)
    """Of a mixture of experts."""
    unrouted: str = field(init=False, default="it has no experts")
    """Why there are no routers."""

    def __post_init__(self) -> None:
        attention.register()
        self._still()
        found = find(self.body)
        if isinstance(found, Routers):
            self.routers = found
        elif found is not None:
            self.unrouted = found
            note = f"routing is not measured: {found}"
            # A sampler that differs on purpose is made of the policy and shares its notes.
            if note not in self.notes:
                self.notes.append(note)

    def _still(self) -> None:
        """Dropout would make the log-probs of one policy differ from pass to pass; it is off in every pass."""
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
        """Of log-probs: float32 or, for float64 models, float64."""
        return torch.promote_types(self.model.get_input_embeddings().weight.dtype, torch.float32)

    @property
    def body(self) -> Any:
        """The causal language model of transformers, whatever is wrapped around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def context_length(self) -> int | None:
        return getattr(self.body.config, "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def known_routers(self, wanted_by: str) -> Routers:
        """The routers, which some option cannot do without."""
        if self.routers is None:
            raise InputError(
                f"{wanted_by} needs a mixture of experts whose routers are known; policy.model {self.name}"
                f" ({type(self.body).__name__}): {self.unrouted}"
            )
        return self.routers

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    @contextmanager
    def serving(self) -> Iterator[Any]:
        """The weights to sample from: here the very parameters being trained, so there is nothing to copy.

        Under gradient checkpointing the model is in training mode, in which its layers would prepare to be recomputed.
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
        """Inside, the body lays its tokens out as the view says."""
        with attention.attending(self.body.config, view):
            yield

    def pack(self, texts: Texts, rows: Tensor) -> Pack:
        """Some rows of a table as this policy lays them out; on the host."""
        return pack(texts, rows, shared=self.shared_prompts)

    @contextmanager
    def reading(self, packed: Pack) -> Iterator[Channels]:
        """The channels of a pack, for as long as their backward may need the pack (gradient checkpointing recomputes)."""
        packed = packed.to(self.device)
        with self._laid_out(packed) as hidden:
            yield self._channels(hidden, packed, range(len(packed.counts)))

    def score(self, texts: Texts, rows: Tensor, directions: Directions | None = None) -> Channels:
        """The channels of some rows without a gradient."""
        return self.scored(texts, rows, directions)[0]

    def scored(self, texts: Texts, rows: Tensor, directions: Directions | None) -> tuple[Channels, Traffic | None]:
        """The same, and which way the tokens went."""
        packed = self.pack(texts, rows).to(self.device)
        with torch.no_grad(), self._tapped(packed, directions) as tap, self._laid_out(packed) as hidden:
            parts = self._parts(packed, without_logits=Head.of(self.body).never_holds_logits(hidden))
            channels = joined([self._channels(state, packed, part) for part, state in _runs(hidden, packed, parts)])
            if tap is None or not tap.directions.record:
                return channels, None
            routed, traffic = tap.found()
            return replace(channels, routed=routed), traffic

    def learn(
        self, packed: Pack, respond: Callable[[range, Channels], Coefficients], directions: Directions | None = None
    ) -> Traffic | None:
        """Add the gradient of a pack. `respond` is given the channels of some of its rows and says their coefficients.

        The head goes forward and backward a few whole rows at a time, so that logits are held for those only and computed
        once; the body goes forward and backward once.
        """
        packed = packed.to(self.device)
        with self._tapped(packed, directions) as tap, self._laid_out(packed) as hidden:
            routed, traffic = (None, None) if tap is None or not tap.directions.record else tap.found()
            gradients = []
            for part, state in _runs(hidden, packed, self._parts(packed)):
                leaf = state.detach().requires_grad_()
                channels = self._channels(leaf, packed, part)
                if routed is not None:
                    channels = replace(channels, routed=routed.rows(part))
                field = respond(part, channels)
                field.tie(
                    channels.logprobs.new_zeros(()),
                    logprobs=channels.logprobs,
                    entropy=channels.entropy if field.entropy is not None else None,
                    values=channels.values if field.values is not None else None,
                ).backward()  # type: ignore[no-untyped-call]
                gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            # With the whole body frozen there is nothing behind the hidden states.
            if hidden.requires_grad:
                hidden.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
        return traffic

    @contextmanager
    def _tapped(self, packed: Pack, directions: Directions | None) -> Iterator[Tap | None]:
        """The routers looked at and told, where there are any; until the backward is over."""
        if directions is None or self.routers is None:
            yield None
            return
        tap = Tap(self.routers, packed, None if self.packing else cells(packed), directions)
        with tap.listening():
            yield tap

    @contextmanager
    def _laid_out(self, packed: Pack) -> Iterator[Tensor]:
        """[K, N]: the last hidden state wherever the pack wants logits."""
        if not self.packing:
            tokens, positions, read = padded(packed)
            yield self.hidden(tokens, positions).flatten(0, 1)[read]
        elif packed.reads is not None and self.trains_fused:
            yield packed.reads.take(_through_pack(self.body.get_decoder(), packed))
        else:
            with self.attending(packed):
                hidden = self.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
                yield hidden[packed.read] if packed.reads is None else packed.reads.take(hidden)

    @property
    def trains_fused(self) -> bool:
        """Whether the layers of a pack go through fused parts: on a GPU in 16 bits, in a family whose parts are known."""
        decoder = self.body.get_decoder()
        if not self.fused or not self.packing or why_not(decoder) is not None:
            return False
        return Spans.serve(decoder.embed_tokens.weight, decoder.layers[0].self_attn.head_dim)

    def _parts(self, packed: Pack, *, without_logits: bool = False) -> list[range]:
        """The rows of a pack in runs whose logits may be held at once; a longer row is a run of its own."""
        if without_logits:
            return [range(len(packed.counts))]
        runs, start, held = [], 0, 0
        for row, count in enumerate(packed.counts):
            if row > start and held + count > self.tokens_at_once:
                runs.append(range(start, row))
                start, held = row, 0
            held += count
        runs.append(range(start, len(packed.counts)))
        return runs

    @property
    def tokens_at_once(self) -> int:
        """For how many tokens logits are held at once; a longer row is a case of its own."""
        held_at_once = self.logits_at_once or (5 * 2**27 if self.device.type == "cuda" else 2**23)
        return max(1, held_at_once // self.vocabulary)

    def _channels(self, state: Tensor, packed: Pack, rows: range) -> Channels:
        """The channels of a run of rows from their hidden states."""
        first = sum(packed.counts[: rows.start])
        here = slice(first, first + len(state))
        place = packed.place[here] - rows.start * packed.width
        shape = (len(rows), packed.width)
        head = Head.of(self.body)
        logprobs, entropy = head.scored(state, packed.targets[here], packed.temperature[here], self.tokens_at_once)
        values = None if self.value_head is None else self.value_head(state)
        return Channels(
            logprobs=_spread(logprobs, place, shape),
            entropy=_spread(entropy, place, shape),
            values=None if values is None else _spread(values, place, shape),
        )

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The body's last hidden state, `[rows, tokens, N]`; inside `attending`, laid out as the view says."""
        output = self.body.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden


def _through_pack(decoder: Any, packed: Pack) -> Tensor:
    """[N, H]: the last hidden state of a pack's tokens, layer by layer through fused parts with their gradients."""
    from legato.policy.kernels.gradients import add_norm_learned, swiglu_learned, turn

    spans, held = packed.spans, dict[int, tuple[Tensor, Tensor]]()
    assert spans is not None

    def ready(layer: int, projected: Projected) -> Tensor:
        query_norm, key_norm, epsilon = (None, None, 0.0) if projected.norms is None else projected.norms
        cosine, sine, width = projected.cosine, projected.sine, projected.width
        value = projected.value.reshape(len(projected.value), -1, width)
        held[layer] = (turn(projected.key, cosine, sine, key_norm, epsilon, width), value)
        return turn(projected.query, cosine, sine, query_norm, epsilon, width)

    def attend(layer: int, query: Tensor, scaling: float) -> Tensor:
        key, value = held.pop(layer)
        return spans.attend(query, key, value, scaling, None)

    def whole(layer: Any, residual: Tensor, update: Tensor | None, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        return learned(layer, residual, update, cosine, sine, spans)

    parts = Parts(ready=ready, attend=attend, add_norm=add_norm_learned, swiglu=swiglu_learned, whole=whole)
    return through(decoder, packed.tokens, packed.positions, parts)


def padded(packed: Pack) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows as a rectangle: tokens, positions and where to read. Padding comes last, so causality hides it."""
    found = cells(packed)
    rows = len(packed.suffix)
    tokens = torch.where(found.inside, packed.tokens[found.token], packed.tokens[0]).reshape(rows, -1)
    return tokens, torch.arange(tokens.shape[1], device=tokens.device).expand(rows, -1), found.read


def cells(packed: Pack) -> Cells:
    """Which token of the pack stands where in that rectangle."""
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


def joined(parts: list[Channels]) -> Channels:
    """The channels of several runs of rows as one table; they are equally wide."""
    if len(parts) == 1:
        return parts[0]
    values = [part.values for part in parts if part.values is not None]
    routed = [part.routed for part in parts if part.routed is not None]
    return Channels(
        logprobs=torch.cat([part.logprobs for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        values=torch.cat(values) if values else None,
        routed=Routed.joined(routed) if routed else None,
    )
