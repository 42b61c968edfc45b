"""Models that compute everything in float64, and the simplest way to score a text with them.

Transformers computes norms, routers and eager softmaxes in float32 whatever the dtype of the weights. They are replaced
here, so that two computations of one number must agree to 1e-12. Attention is written out from its definition.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from legato.core.outcome import Coefficients
from legato.core.texts import Texts
from legato.policy.experts.routing import Directions, Traffic
from legato.policy.policy import Channels, Piece, Policy

VOCABULARY = 41


def by_definition(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows, padding last; window, soft cap and sinks as the papers have them."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places
    hidden = (distance < 0) if sliding_window is None else (distance < 0) | (distance >= sliding_window)
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.reshape(1, -1, 1, 1).exp()
    return torch.einsum("bhqk,bhkd->bqhd", weights / total, value), None


AttentionInterface.register("by-definition", by_definition)


class _Router(nn.Module):
    """A router with its softmax over all experts, without its float32."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        # Mixtral has no such option: it always divides.
        self.weight, self.top_k, self.normalise = router.weight, router.top_k, getattr(router, "norm_topk_prob", True)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, self.weight.shape[1]) @ self.weight.T
        scores, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True) if self.normalise else scores, experts


def _norm(module: Any) -> nn.Module:
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 1e-6)
    exact = nn.RMSNorm(module.weight.shape[0], eps=epsilon, dtype=torch.float64)
    shift = 1.0 if "Gemma" in type(module).__name__ else 0.0
    exact.weight.data.copy_(module.weight.data + shift)
    return exact


def exact(model: Any, seed: int = 0) -> Any:
    """The model in float64 throughout, with noise on every weight, so that an error in any of them would show."""
    model = model.double().eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _norm(child))
            elif type(child).__name__.endswith("TopKRouter") and "GptOss" not in type(child).__name__:
                setattr(parent, name, _Router(child))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.config._attn_implementation = "by-definition"
    return model


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (
        "OlmoeConfig",
        {"head_dim": 6, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.4}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
}


def family(name: str, seed: int = 0, **changes: Any) -> Any:
    """A small random model of a real architecture that computes in float64."""
    config_class, own = FAMILIES[name]
    config = getattr(transformers, config_class)(**{**_COMMON, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto_class: Any = AutoModelForCausalLM
        return exact(auto_class.from_config(config, dtype=torch.float64), seed)


class Words:
    """The part of a tokenizer that a policy needs in these tests: words are token numbers."""

    eos_token_id, pad_token_id, unk_token_id, chat_template = 1, 0, None, None

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in tokens if not (skip_special_tokens and token in (0, 1)))

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def policy_of(model: Any, **changes: Any) -> Policy:
    """A policy around a module as it is."""
    return Policy(model=model, tokenizer=Words(), name="exact", **changes)


def plain(policy: Policy, texts: Texts, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and last hidden states before each token of one row, by `model(input_ids).logits` alone."""
    prompt = texts.prompts[texts.group[row], : texts.prompt_lengths[texts.group[row]]]
    response = texts.tokens[row, : texts.lengths[row]]
    output = policy.model(input_ids=torch.cat([prompt, response])[None], use_cache=False, output_hidden_states=True)
    before = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
    logprobs = (output.logits[0, before] / texts.temperature[row]).log_softmax(-1)
    chosen = logprobs[torch.arange(len(response)), response]
    return chosen, -(logprobs.exp() * logprobs).sum(-1), output.hidden_states[-1][0, before]


def plain_tables(policy: Policy, texts: Texts, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """[rows, T] log-probs, entropies and values by `plain`, NaN where the policy wrote nothing; one autograd graph."""
    width = texts.tokens.shape[1]
    tables: list[list[Tensor]] = [[], [], []]
    for row in rows:
        logprobs, entropy, hidden = plain(policy, texts, row)
        values = hidden[:, 0] * 0 if policy.value_head is None else policy.value_head(hidden)
        written = texts.mask[row, : texts.lengths[row]]
        for table, values_of_row in zip(tables, (logprobs, entropy, values), strict=True):
            row_table = torch.where(written, values_of_row, torch.nan)
            table.append(nn.functional.pad(row_table, (0, width - len(row_table)), value=torch.nan))
    logprobs, entropy, values = (torch.stack(table) for table in tables)
    return logprobs, entropy, None if policy.value_head is None else values


def ragged(seed: int = 0, groups: int = 4, each: int = 3, longest: int = 9) -> Texts:
    """Texts with ragged prompts (one of a single token), responses of length 0, 1 and more, tool tokens, mixed temperatures.

    Tokens and mask beyond a length are random on purpose: nothing may read them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows = groups * each
    prompt_lengths = draw(2, 8, (groups,))
    prompt_lengths[0] = 1
    lengths = draw(2, longest + 1, (rows,))
    lengths[1], lengths[each], lengths[-1] = 0, 1, longest
    mask = torch.rand((rows, longest), generator=generator) > 0.2
    mask[torch.arange(rows), (lengths - 1).clamp(min=0)] = True
    mask[3 * each % rows, 0] = False
    order = torch.arange(groups).repeat_interleave(each)
    return Texts(
        prompts=draw(2, VOCABULARY, (groups, 8)),
        prompt_lengths=prompt_lengths,
        tokens=draw(2, VOCABULARY, (rows, longest)),
        lengths=lengths,
        mask=mask,
        group=order,
        temperature=0.5 + torch.rand(rows, generator=generator, dtype=torch.float64),
    )


def accumulate(
    policy: Policy,
    texts: Texts,
    rows: Tensor,
    coefficients_of: Callable[[Piece], Coefficients],
    directions: Directions | None = None,
) -> tuple[Channels, Traffic | None]:
    """Accumulate the gradient of some rows; returns the channels of all pieces as one table, and the routers' traffic."""
    channels = []
    with policy.accumulate_gradient(texts, rows, directions) as forward:
        for piece in forward.pieces():
            channels.append(piece.channels)
            piece.backward(coefficients_of(piece))
    return Channels.join(channels), forward.traffic


def ones(piece: Piece) -> Coefficients:
    """Coefficients whose gradient is that of minus the sum of all log-probs."""
    return Coefficients(logprobs=torch.ones_like(piece.channels.logprobs))
