"""The sizes of a model that decide its memory."""

from dataclasses import dataclass
from typing import Any

from legato.errors import InputError

_WITHOUT_HEAD_NORMS = {
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "gemma",
    "gemma2",
    "phi3",
    "granite",
    "gpt2",
    "gpt_oss",
}
"""Families without norms on queries and keys. Unknown families count as having them: overestimating is safer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that decide its memory."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    width: int
    """Numbers per head."""
    intermediate: int
    """SwiGLU width of a layer without experts."""
    vocabulary: int
    tied: bool
    """Whether embedding and head are one matrix."""
    head_norms: bool
    """Whether queries and keys are normalised."""
    sparse_layers: int = 0
    """How many of the layers have experts."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """SwiGLU width of the expert that every token uses; 0: none."""

    @classmethod
    def from_config(cls, config: Any) -> "Shape":
        """The sizes in a transformers configuration; InputError if it does not describe a decoder."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        lacking = [
            name
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if not isinstance(getattr(config, name, None), int)
        ]
        if lacking:
            raise InputError(f"the configuration {type(config).__name__} has no {lacking[0]}; memory cannot be estimated")
        hidden, heads = config.hidden_size, config.num_attention_heads
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        intermediate = _first(config, "intermediate_size") or 4 * hidden
        return cls(
            layers=config.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            key_heads=_first(config, "num_key_value_heads") or heads,
            width=_first(config, "head_dim") or hidden // heads,
            intermediate=intermediate,
            vocabulary=config.vocab_size,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            head_norms=getattr(config, "model_type", None) not in _WITHOUT_HEAD_NORMS,
            sparse_layers=_sparse_layers(config) if experts else 0,
            experts=experts,
            experts_per_token=_first(config, "num_experts_per_tok") if experts else 0,
            expert_intermediate=(_first(config, "moe_intermediate_size") or intermediate) if experts else 0,
            shared_intermediate=_first(config, "shared_expert_intermediate_size") if experts else 0,
        )

    @property
    def query(self) -> int:
        """Numbers in all queries of a token."""
        return self.heads * self.width

    @property
    def key(self) -> int:
        """Numbers in all keys of a token."""
        return self.key_heads * self.width

    @property
    def parameters(self) -> int:
        """Number of weights of a model like Llama, Qwen3 or Qwen3-MoE. Biases are ignored: they are few."""
        dense, sparse = (self.layer_parameters(sparse=each) for each in (False, True))
        return (self.layers - self.sparse_layers) * dense + self.sparse_layers * sparse + self.parameters_outside

    def layer_parameters(self, *, sparse: bool) -> int:
        """Number of weights of one layer, with experts (`sparse`) or without."""
        attention = 2 * self.hidden * (self.query + self.key)
        norms = 2 * self.hidden + (2 * self.width if self.head_norms else 0)
        if not sparse:
            return attention + norms + 3 * self.hidden * self.intermediate
        experts = 3 * (self.experts * self.expert_intermediate + self.shared_intermediate) + self.experts
        return attention + norms + self.hidden * experts

    @property
    def largest_layer(self) -> int:
        """Number of weights of the largest layer."""
        kinds = [sparse for sparse in (False, True) if (self.sparse_layers if sparse else self.layers - self.sparse_layers)]
        return max(self.layer_parameters(sparse=sparse) for sparse in kinds)

    @property
    def parameters_outside(self) -> int:
        """Number of weights outside the layers: embedding, last norm and head."""
        return self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapters(self, rank: int) -> int:
        """Number of adapter weights on linear layers, routers and experts.

        An expert's gate and up share one adapter of twice the rank.
        """
        attention = 4 * self.hidden + 2 * self.query + 2 * self.key
        dense = 3 * (self.hidden + self.intermediate)
        sparse = self.hidden + self.experts + self.experts * (3 * self.hidden + 5 * self.expert_intermediate)
        if self.shared_intermediate:
            sparse += 3 * (self.hidden + self.shared_intermediate)
        linear = (self.layers - self.sparse_layers) * dense + self.sparse_layers * sparse
        return rank * (self.layers * attention + linear)

    @property
    def largest_in_layers(self) -> int:
        """Number of weights of the largest matrix in the layers; the experts' gate and up are one matrix."""
        dense = self.intermediate if self.sparse_layers < self.layers else 0
        return self.hidden * max(dense, 2 * self.experts * self.expert_intermediate, self.query)

    @property
    def largest(self) -> int:
        """Number of weights of the largest matrix, embedding and head included."""
        return max(self.largest_in_layers, self.hidden * self.vocabulary)


def _first(config: Any, *names: str) -> int:
    """The first of these attributes that is a positive integer; 0 if none is."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int) and value > 0), 0)


def _sparse_layers(config: Any) -> int:
    """How many layers have experts."""
    every, dense = _first(config, "decoder_sparse_step") or 1, set(getattr(config, "mlp_only_layers", None) or ())
    layers = config.num_hidden_layers
    # Counted without a loop over the layers: a configuration may claim any number of them.
    without = sum((layer + 1) % every == 0 for layer in dense if isinstance(layer, int) and 0 <= layer < layers)
    return int(layers // every - without)
