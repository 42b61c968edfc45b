"""Small random models of the families the GPU engine supports, and log-probs of responses by a plain forward."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from legato.policy.policy import Policy
from legato.rollouts.engine import Engine, Limits, Request, Response
from legato.rollouts.sampling import Sampling
from tests.policy.exact import Words

VOCABULARY, END = 64, 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "gemma2": (
        "Gemma2Config",
        {**_TWO_KINDS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", {**_TWO_KINDS, "query_pre_attn_scalar": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "olmoe": ("OlmoeConfig", {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_TWO_KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_TWO_KINDS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Any:
    """A random model with clearly unequal token probabilities.

    Its weights are the same on every device and, up to rounding, in every dtype.
    """
    config_class, own = {**FAMILIES, **OTHERS}[name]
    config = getattr(transformers, config_class)(**{**_COMMON, **own, **changes})
    automatic: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Eager if scores are capped: sdpa of transformers before 5.20 silently ignores the cap.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        model = automatic.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(device, dtype)


def make_policy(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Policy:
    return Policy(model=make_model(name, dtype, device, **changes), tokenizer=Words(), name=name)


def make_prompts(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def make_requests(*lengths: int, each: int = 2, seed: int = 0) -> list[Request]:
    """One request per prompt length, each with `each` seeds of its own."""
    return [
        Request(prompt=prompt, seeds=tuple(range(100 * place, 100 * place + each)))
        for place, prompt in enumerate(make_prompts(*lengths, seed=seed))
    ]


def forward_logprobs(policy: Policy, prompt: Tensor, response: Response, temperature: float = 1.0) -> Tensor:
    """[T] log-probs of a response by one forward of the model over the finished text."""
    whole = torch.cat([prompt, response.tokens]).to(policy.device)
    with torch.no_grad():
        logits = policy.model(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, whole[len(prompt) :, None]).squeeze(1).cpu()


def assert_same_responses(
    left: Sequence[Sequence[Response]], right: Sequence[Sequence[Response]], within: float = 1e-5
) -> None:
    """Assert equal tokens, stop reasons and texts; log-probs may differ by `within`."""
    assert [len(row) for row in left] == [len(row) for row in right]
    for one, other in zip(chain(*left), chain(*right), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.text, one.stop) == (other.text, other.stop)
        assert torch.allclose(one.logprobs, other.logprobs, atol=within)
        assert (one.kept_logmass is None) == (other.kept_logmass is None)
        if one.kept_logmass is not None and other.kept_logmass is not None:
            assert torch.allclose(one.kept_logmass, other.kept_logmass, atol=within)


def next_turn(engine: Engine, requests: Sequence[Request], limits: Limits, more: int, seed: int = 9) -> list[Request]:
    """Requests of the next turn: each prompt, its first response and `more` new tokens."""
    responses = engine.generate(requests, Sampling(), limits)
    later = make_prompts(*[more] * len(requests), seed=seed)
    return [
        Request(prompt=torch.cat([request.prompt, row[0].tokens, new]), seeds=request.seeds)
        for request, row, new in zip(requests, responses, later, strict=True)
    ]
