"""The model being trained: packs in, log-probs, entropies and values out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.shapes import PerToken
from legato.policy import attention
from legato.policy.logprobs import chosen
from legato.policy.packs import Pack, Texts, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """What an objective may differentiate, `[R, width]` of a pack; 0 where no token of the policy stands."""

    logprobs: PerToken
    entropy: PerToken
    values: PerToken | None = None


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
    value_head: ValueHead | None = None
    tokens_per_head: int = 8192
    """How many tokens' logits are held at once."""
    notes: list[str] = field(default_factory=list)
    """What was decided while loading, for the run to print."""

    def __post_init__(self) -> None:
        attention.register()
        self._still()

    def _still(self) -> None:
        """Dropout would make the log-probs of one policy differ from pass to pass; it is off in every pass."""
        self.model.eval()
        for name, module in self.model.named_modules():
            if getattr(module, "router_jitter_noise", 0.0):
                module.router_jitter_noise = 0.0
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

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    @contextmanager
    def serving(self) -> Iterator[Any]:
        """The weights to sample from: here the very parameters being trained, so there is nothing to copy."""
        with torch.no_grad():
            yield self.model

    @contextmanager
    def attending(self, view: attention.View) -> Iterator[None]:
        """Inside, the body lays its tokens out as the view says."""
        with attention.attending(self.body.config, view):
            yield

    @contextmanager
    def reading(self, packed: Pack) -> Iterator[Channels]:
        """The channels of a pack, for as long as their backward may need the pack (gradient checkpointing recomputes)."""
        if self.packing:
            with self.attending(packed):
                yield self._channels(packed, packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0), packed.read)
        else:
            yield self._channels(packed, *padded(packed))

    def score(self, texts: Texts, rows: Tensor) -> Channels:
        """The channels of some rows without a gradient."""
        with torch.no_grad(), self.reading(pack(texts, rows)) as channels:
            return channels

    def _channels(self, packed: Pack, tokens: Tensor, positions: Tensor, read: Tensor) -> Channels:
        hidden = self._hidden(tokens, positions).flatten(0, 1)[read]
        head = self._head()
        found = [
            chosen(head(part), targets, temperature, with_entropy=True)
            for part, targets, temperature in zip(
                *(torch.split(table, self.tokens_per_head) for table in (hidden, packed.targets, packed.temperature)),
                strict=True,
            )
        ]
        logprobs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else (hidden[:0, 0],) * 2
        values = None if self.value_head is None else self.value_head(hidden)
        return Channels(
            logprobs=_spread(logprobs, packed),
            entropy=_spread(entropy, packed),
            values=None if values is None else _spread(values, packed),
        )

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self.body.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _head(self) -> Any:
        return Head.of(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """From the last hidden state to logits, with what some families do after the matrix."""

    linear: nn.Module
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, body: Any) -> "Head":
        config = body.config
        # Granite divides by logits_scaling, Cohere multiplies by logit_scale, Gemma caps softly.
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            linear=body.get_output_embeddings(), scale=scale, softcap=getattr(config, "final_logit_softcapping", None)
        )

    def exact(self, hidden: Tensor) -> Tensor:
        """Logits in float32 or better without a gradient; from the product's accumulators where the device gives them."""
        weight = getattr(self.linear, "weight", None)
        plain = type(self.linear) is nn.Linear and self.linear.bias is None
        if not plain or weight is None or not hidden.is_cuda or hidden.dtype not in (torch.bfloat16, torch.float16):
            logits = self(hidden)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._finished(torch.mm(hidden, weight.t(), out_dtype=torch.float32))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._finished(self.linear(hidden))

    def _finished(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def padded(packed: Pack) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows as a rectangle: tokens, positions and where to read. Padding comes last, so causality hides it."""
    rows, depth = packed.suffix.shape
    lengths = packed.prefix_lengths[packed.owner]
    total = lengths + packed.suffix_lengths
    width = int(total.max())
    columns = torch.arange(width, device=lengths.device).expand(rows, -1)
    from_prefix = packed.prefix[packed.owner].gather(1, columns.clamp(max=packed.prefix.shape[1] - 1))
    later = (columns - lengths[:, None]).clamp(min=0, max=max(depth - 1, 0))
    from_suffix = packed.suffix.gather(1, later) if depth else from_prefix
    source = torch.where(columns < lengths[:, None], from_prefix, from_suffix)
    tokens = torch.where(columns < total[:, None], packed.tokens[source], packed.tokens[0])
    row, step = packed.place // packed.width, packed.place % packed.width
    return tokens, columns, row * width + lengths[row] - 1 + step


def _spread(values: Tensor, packed: Pack) -> Tensor:
    """[K] to [R, width], 0 elsewhere."""
    flat = values.new_zeros(len(packed.rows) * packed.width)
    return flat.index_copy(0, packed.place, values).reshape(len(packed.rows), packed.width)
