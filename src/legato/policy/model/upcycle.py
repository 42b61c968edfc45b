"""Sparse upcycling (arXiv 2212.05055): turns a dense model into a mixture of experts.

Every expert starts as a copy of its layer's MLP, and the router is initialised at random. A token's gates are normalised
over its K active experts, so the copies add up to the dense output: before noise, the mixture computes the logits of the
dense model, and `upcycle` checks that it does. While all experts are equal, the router has no gradient, because its choice
does not change the output. Experts diverge as they are trained on different tokens, or from the start through noise.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import integer, number
from legato.core.settings import settings
from legato.errors import InputError

_MIXTURE_OF = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense families, and the mixture family that differs from each only in the MLP."""

_COPIED_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_dropout",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)

_TOLERANCE = 1e-4
"""How far logits may be from the dense model's, relative to the largest logit if that is above 1."""


@settings(resume="refused")
class Upcycling:
    """The number of experts, and the noise that makes them differ before training."""

    experts: int = integer(default=8, says="Experts per layer.", minimum=2)
    # At least 2: the normalised gate of a single expert is always 1, so its router would never learn.
    experts_per_token: int = integer(default=2, says="Active experts per token.", minimum=2)
    noise: float = number(
        default=0.0,
        says="Standard deviation of noise on the experts, relative to that of each matrix; 0: copies, equal to the dense"
        " model.",
        minimum=0.0,
        maximum=100.0,
    )

    def check(self) -> None:
        """Check that a token has no more active experts than there are."""
        if self.experts_per_token > self.experts:
            raise InputError(f"experts_per_token: expected at most experts = {self.experts}, got {self.experts_per_token}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycled:
    """The mixture, and how far its logits are from the dense model's."""

    model: Any
    difference: float
    """The largest difference of a logit from the dense model's, before noise."""
    words: str
    """One sentence that describes the conversion, for the notes of a run."""


def upcycle(dense: Any, upcycling: Upcycling, *, seed: int) -> Upcycled:
    """Convert a dense causal language model of transformers to a mixture of experts; `dense` itself is not changed.

    Routers and noise depend on the seed alone. Raises InputError if no mixture family matches the dense one, or if the
    mixture does not reproduce the dense logits.
    """
    family = _family(dense)
    model = _build_mixture(dense, family, upcycling)
    _copy_weights(dense, model, family)
    source = torch.Generator().manual_seed(seed)
    mixtures = [layer.mlp for layer in model.get_decoder().layers]
    with torch.no_grad():
        for mixture in mixtures:
            mixture.gate.weight.copy_(_normal(mixture.gate.weight, source) * dense.config.initializer_range)
        difference = _compare(dense, model)
        # Noise is drawn after all routers, so that routers do not depend on it.
        if upcycling.noise:
            for mixture in mixtures:
                _add_noise(mixture.experts, upcycling.noise, source)
    return Upcycled(model=model, difference=difference, words=_describe(dense, model, upcycling, difference))


def _family(dense: Any) -> str:
    """The family of a dense model; InputError if it cannot be upcycled."""
    family = getattr(getattr(dense, "config", None), "model_type", None)
    model = f"a {type(dense).__name__} (model_type {family!r})"
    if family not in _MIXTURE_OF:
        raise InputError(f"policy.upcycle: expected a dense model of the families {', '.join(_MIXTURE_OF)}, got {model}")
    if dense.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"policy.upcycle: expected a model in float32 or float64, got {model} in {dense.dtype}; load it in float32, make"
            " the mixture, then round it"
        )
    if family == "qwen3" and "sliding_attention" in (dense.config.layer_types or ()):
        raise InputError(
            f"policy.upcycle: expected a sliding window in all layers or in none, as a qwen3_moe has it, got {model} with a"
            " sliding window in some layers"
        )
    return str(family)


def _build_mixture(dense: Any, family: str, upcycling: Upcycling) -> Any:
    """A mixture with the shape of the dense model; its weights are not set yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dense.config
    shape = {name: getattr(config, name) for name in _COPIED_CONFIG if hasattr(config, name)}
    if family == "qwen3":
        shape |= {
            "attention_bias": config.attention_bias,
            "num_experts": upcycling.experts,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    else:
        shape |= {
            "num_local_experts": upcycling.experts,
            "sliding_window": getattr(config, "sliding_window", None),
            "router_jitter_noise": 0.0,
        }
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = auto_class.from_config(
            AutoConfig.for_model(_MIXTURE_OF[family], num_experts_per_tok=upcycling.experts_per_token, **shape),
            dtype=dense.dtype,
            attn_implementation=config._attn_implementation,
        )
    model.generation_config = dense.generation_config
    without_grouped_float64(model)
    return model.to(dense.device).eval()


def without_grouped_float64(model: Any) -> None:
    """Make a float64 model compute its experts one after the other: torch has no grouped float64 matrix product."""
    if getattr(model, "dtype", None) == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def _copy_weights(dense: Any, model: Any, family: str) -> None:
    """Copy each dense MLP to every expert of its layer, and all other weights unchanged."""
    weights = dense.state_dict()
    for depth, layer in enumerate(model.get_decoder().layers):
        gate, up, down = (
            weights.pop(f"model.layers.{depth}.mlp.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")
        )
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj.copy_(torch.cat([gate, up]))
            layer.mlp.experts.down_proj.copy_(down)
    unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        raise InputError(
            f"policy.upcycle: this {family} has {unexpected[0]}"
            + (f" and {len(unexpected) - 1} more" if unexpected[1:] else "")
            + f", for which a {_MIXTURE_OF[family]} has no place"
        )


def _normal(like: Tensor, source: torch.Generator) -> Tensor:
    """Normal noise of the shape of `like`, drawn on the host: a seed gives the same numbers on every device."""
    return torch.randn(like.shape, generator=source, dtype=like.dtype).to(like.device)


def _compare(dense: Any, model: Any) -> float:
    """The largest difference between the logits on a few tokens; InputError if it is more than rounding."""
    vocabulary = dense.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0)).to(dense.device)
    training = dense.training
    dense.eval()
    dense_logits, mixture_logits = dense(input_ids=tokens).logits, model(input_ids=tokens).logits
    dense.train(training)
    difference = float((mixture_logits - dense_logits).abs().max())
    # Written so that a NaN fails.
    if not difference <= _TOLERANCE * max(1.0, float(dense_logits.abs().max())):
        raise InputError(
            f"policy.upcycle: logits of the {type(model).__name__} are off by {difference:.2g} from those of the"
            f" {type(dense).__name__} it was copied from (the largest is {float(dense_logits.abs().max()):.2g}); the dense"
            " model does something the mixture does not"
        )
    return difference


def _add_noise(experts: Any, noise: float, source: torch.Generator) -> None:
    for weight in (*experts.gate_up_proj.chunk(2, 1), experts.down_proj):
        weight.add_(_normal(weight, source) * (noise * weight[0].std()))


def _describe(dense: Any, model: Any, upcycling: Upcycling, difference: float) -> str:
    before, after = (sum(p.numel() for p in each.parameters()) for each in (dense, model))
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    idle = in_experts * (upcycling.experts - upcycling.experts_per_token) // upcycling.experts
    noise = f"then noise of {upcycling.noise:g} was added to the experts" if upcycling.noise else "experts are copies so far"
    return (
        f"upcycled from {type(dense).__name__} to {type(model).__name__}: {upcycling.experts} experts a layer,"
        f" {upcycling.experts_per_token} a token; {before:,} parameters became {after:,}, of which a token meets"
        f" {after - idle:,}; logits equal the dense model's to {difference:.1e}, {noise}"
    )
