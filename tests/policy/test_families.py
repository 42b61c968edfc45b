"""Architectures that mix tokens of different texts in a pack: they must be scored correctly all the same, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from legato.core.texts import Texts
from legato.policy.model.load import Loading, load_policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import VOCABULARY, Words, plain_tables, ragged

COMMON = {"vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
# Attention that bypasses transformers' interface (bloom, gpt-j), or a recurrent state along the row (mamba, lfm2).
STRANGE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "hidden_size": 32}),
    "gpt-j": ("GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "lfm2": (
        "Lfm2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}
LATENT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}


def build(config_class: str, own: dict[str, Any]) -> Any:
    config = getattr(transformers, config_class)(**COMMON, **own)
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def texts() -> Texts:
    table = ragged()
    return replace(table, temperature=table.temperature.float())


@pytest.mark.parametrize("name", STRANGE)
def test_a_body_that_does_not_support_packs_is_scored_correctly_or_refused(name: str) -> None:
    model = build(*STRANGE[name])
    try:
        policy = load_policy(model, Loading(dtype="float32", device="cpu"), tokenizer=Words())
    except ValueError:
        return
    rows = torch.arange(12)
    with torch.no_grad():
        expected, _, _ = plain_tables(policy, texts(), range(12))
    gap = (policy.score(texts(), rows).logprobs - expected).abs().nan_to_num(0.0)
    assert float(gap.max()) < 1e-4


@pytest.mark.parametrize("name", ["gpt-j", "lfm2"])
def test_a_body_that_does_not_support_the_cache_is_sampled_correctly_or_refused(name: str) -> None:
    model = build(*STRANGE[name])
    try:
        policy = load_policy(model, Loading(dtype="float32", device="cpu"), tokenizer=Words())
    except ValueError:
        return
    prompt = torch.tensor([5, 6, 7])
    limits = Limits(max_response_tokens=10, end_tokens=(1,))
    ((response,),) = LocalEngine(policy).generate([Request(prompt=prompt, seeds=(1,))], Sampling(), limits)
    with torch.no_grad():
        expected = model(torch.cat([prompt, response.tokens])[None]).logits[0, 2:-1].log_softmax(-1)
    gap = response.logprobs - expected[torch.arange(len(response.tokens)), response.tokens]
    assert float(gap.abs().max()) < 1e-4


def test_padded_rows_are_correct_for_every_body() -> None:
    for name, spec in STRANGE.items():
        policy = load_policy(build(*spec), Loading(dtype="float32", device="cpu", packing=False), tokenizer=Words())
        with torch.no_grad():
            expected, _, _ = plain_tables(policy, texts(), range(12))
        gap = (policy.score(texts(), torch.arange(12)).logprobs - expected).abs().nan_to_num(0.0)
        assert float(gap.max()) < 1e-4, name


def test_values_narrower_than_keys_are_scored_correctly_in_packs() -> None:
    policy = load_policy(build("DeepseekV3Config", LATENT), Loading(dtype="float32", device="cpu"), tokenizer=Words())
    with torch.no_grad():
        expected, _, _ = plain_tables(policy, texts(), range(12))
    gap = (policy.score(texts(), torch.arange(12)).logprobs - expected).abs().nan_to_num(0.0)
    assert float(gap.max()) < 1e-4


def test_values_narrower_than_keys_are_decoded() -> None:
    model = build("DeepseekV3Config", LATENT)
    policy = load_policy(model, Loading(dtype="float32", device="cpu"), tokenizer=Words())
    requests = [Request(prompt=torch.tensor([5, 6, 7]), seeds=(1, 2))]
    (responses,) = LocalEngine(policy).generate(requests, Sampling(), Limits(max_response_tokens=4, end_tokens=(1,)))
    assert len(responses) == 2
