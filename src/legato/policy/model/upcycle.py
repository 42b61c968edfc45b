"""A dense model made into a mixture of experts: every expert starts as a copy of its layer's MLP, the router is fresh.

Sparse upcycling (arXiv 2212.05055). A token's gates are normalised over the K experts it is sent to, so copies add up to the
dense output and the mixture starts as the model it came from; this is measured before anything else is done to it. Copies
also leave the router without a gradient (whatever it chooses, the output is the same) until they have parted: through the
tokens that reach each of them, or from the start through noise on their weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import integer, number
from legato.core.settings import settings
from legato.errors import InputError

_INTO = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense families and the mixtures whose layers are the same but for the MLP."""

_CARRIED = (
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

_ALLOWED = 1e-4
"""How far logits may be from the dense model's, relative to the largest of them where that is above 1."""


@settings(resume="refused")
class Upcycling:
    """The size of the mixture, and what tells its experts apart before they are trained."""

    experts: int = integer(default=8, says="Experts of a layer.", minimum=2)
    # The gate of a single expert is always 1, and the router would never learn.
    experts_per_token: int = integer(default=2, says="Experts a token is sent to.", minimum=2)
    noise: float = number(
        default=0.0,
        says="Standard deviation of noise on the experts, relative to that of each matrix; 0: copies, equal to the dense"
        " model.",
        minimum=0.0,
    )

    def check(self) -> None:
        """A token cannot be sent to more experts than there are."""
        if self.experts_per_token > self.experts:
            raise InputError(f"experts_per_token: expected at most experts = {self.experts}, got {self.experts_per_token}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycled:
    """The mixture, and how it compares with what it was made of."""

    model: Any
    difference: float
    """The largest difference of a logit from the dense model's, before noise."""
    words: str
    """What was done, in a sentence."""


def upcycle(dense: Any, upcycling: Upcycling, *, seed: int) -> Upcycled:
    """The mixture a dense causal language model of transformers becomes; the model itself stays as it is.

    Router and noise follow from the seed alone. ValueError where the family has no mixture of its kind, or the copy does not
    give the logits of the original.
    """
    family = _family(dense)
    model = _empty(dense, family, upcycling)
    _copy(dense, model, family)
    source = torch.Generator().manual_seed(seed)
    mixtures = [layer.mlp for layer in model.get_decoder().layers]
    with torch.no_grad():
        for mixture in mixtures:
            mixture.gate.weight.copy_(_normal(mixture.gate.weight, source) * dense.config.initializer_range)
        difference = _compare(dense, model)
        # Drawn after every router, so that a router does not depend on the noise.
        if upcycling.noise:
            for mixture in mixtures:
                _disturb(mixture.experts, upcycling.noise, source)
    return Upcycled(model=model, difference=difference, words=_words(dense, model, upcycling, difference))


def _family(dense: Any) -> str:
    """The dense family, or a sentence that says what was found in its place."""
    family = getattr(getattr(dense, "config", None), "model_type", None)
    found = f"policy.upcycle: the model is a {type(dense).__name__} (model_type {family!r})"
    if family not in _INTO:
        raise InputError(f"{found}; dense models of the families {', '.join(_INTO)} can be upcycled")
    if dense.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{found} in {dense.dtype}; load it in float32, make the mixture, then round it")
    if family == "qwen3" and "sliding_attention" in (dense.config.layer_types or ()):
        raise InputError(f"{found} with a sliding window in some layers; a qwen3_moe has it in all or none")
    return str(family)


def _empty(dense: Any, family: str, upcycling: Upcycling) -> Any:
    """A mixture of the dense model's shape, its weights yet to be filled in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dense.config
    shape = {name: getattr(config, name) for name in _CARRIED if hasattr(config, name)}
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
    automatic: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = automatic.from_config(
            AutoConfig.for_model(_INTO[family], num_experts_per_tok=upcycling.experts_per_token, **shape),
            dtype=dense.dtype,
            attn_implementation=config._attn_implementation,
        )
    model.generation_config = dense.generation_config
    without_grouped_float64(model)
    return model.to(dense.device).eval()


def without_grouped_float64(model: Any) -> None:
    """Torch has no grouped product of float64 matrices: there, experts are computed one after the other."""
    if getattr(model, "dtype", None) == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def _copy(dense: Any, model: Any, family: str) -> None:
    """Everything but the MLPs as it is, and each MLP to every expert of its layer."""
    weights = dense.state_dict()
    for depth, layer in enumerate(model.get_decoder().layers):
        gate, up, down = (
            weights.pop(f"model.layers.{depth}.mlp.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")
        )
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj.copy_(torch.cat([gate, up]))
            layer.mlp.experts.down_proj.copy_(down)
    homeless = model.load_state_dict(weights, strict=False).unexpected_keys
    if homeless:
        raise InputError(
            f"policy.upcycle: this {family} has {homeless[0]}"
            + (f" and {len(homeless) - 1} more" if homeless[1:] else "")
            + f", for which a {_INTO[family]} has no place"
        )


def _normal(like: Tensor, source: torch.Generator) -> Tensor:
    """Drawn on the host, so that a seed gives the same numbers wherever the model lies."""
    return torch.randn(like.shape, generator=source, dtype=like.dtype).to(like.device)


def _compare(dense: Any, model: Any) -> float:
    """The largest difference of a logit on a few tokens; ValueError where it is more than rounding."""
    vocabulary = dense.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0)).to(dense.device)
    training = dense.training
    dense.eval()
    right, found = dense(input_ids=tokens).logits, model(input_ids=tokens).logits
    dense.train(training)
    difference = float((found - right).abs().max())
    # A NaN is no agreement.
    if not difference <= _ALLOWED * max(1.0, float(right.abs().max())):
        raise InputError(
            f"policy.upcycle: logits of the {type(model).__name__} are off by {difference:.2g} from those of the"
            f" {type(dense).__name__} it was copied from (the largest is {float(right.abs().max()):.2g}); the dense model"
            " does something the mixture does not"
        )
    return difference


def _disturb(experts: Any, noise: float, source: torch.Generator) -> None:
    for copies in (*experts.gate_up_proj.chunk(2, 1), experts.down_proj):
        copies.add_(_normal(copies, source) * (noise * copies[0].std()))


def _words(dense: Any, model: Any, upcycling: Upcycling, difference: float) -> str:
    before, after = (sum(p.numel() for p in each.parameters()) for each in (dense, model))
    spread = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    idle = spread * (upcycling.experts - upcycling.experts_per_token) // upcycling.experts
    told = f"then noise of {upcycling.noise:g} was added to the experts" if upcycling.noise else "experts are copies so far"
    return (
        f"upcycled from {type(dense).__name__} to {type(model).__name__}: {upcycling.experts} experts a layer,"
        f" {upcycling.experts_per_token} a token; {before:,} parameters became {after:,}, of which a token meets"
        f" {after - idle:,}; logits equal the dense model's to {difference:.1e}, {told}"
    )
