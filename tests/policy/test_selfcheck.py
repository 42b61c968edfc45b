"""The self-check of a loaded model: it finds layouts that leak from text to text, and tolerates rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from legato.errors import InputError
from legato.policy.experts.routing import Directions
from legato.policy.layout.attention import Heads
from legato.policy.layout.packs import Pack
from legato.policy.model import selfcheck
from legato.policy.policy import Channels, Policy
from legato.rollouts.local.agreement import disagreement
from legato.rollouts.local.engine import LocalEngine
from tests.policy.exact import Words

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_STATE = {"num_hidden_layers": 4, "mamba_d_state": 8}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", {"num_hidden_layers": 4, **_LINEAR}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 4, "shared_expert_intermediate_size": 32, **_EXPERTS, **_LINEAR},
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "block_multiple_of": 8},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_STATE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
        },
    ),
}
DENSE = ("Qwen3Config", {"num_hidden_layers": 4})
DEEP = ("Qwen3Config", {"num_hidden_layers": 8, "initializer_range": 0.2})
MIXTURE = ("Qwen3MoeConfig", {"num_hidden_layers": 2, **_EXPERTS})


def policy_of(kind: tuple[str, dict[str, Any]], dtype: torch.dtype) -> Policy:
    name, changes = kind
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_config(getattr(transformers, name)(**{**SHAPE, **changes}), dtype=dtype).eval()
    return Policy(model=model, tokenizer=None, name=name)


def scaled_head(policy: Policy, by: float) -> Policy:
    with torch.no_grad():
        policy.body.get_output_embeddings().weight.mul_(by)
    return policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HYBRIDS)
def test_bodies_whose_state_runs_along_the_row_get_padded_rows(name: str, dtype: torch.dtype) -> None:
    """LFM2 leaks 2.5e-4 in float32 and 0.002 in bfloat16: too little to notice by comparing two forwards."""
    policy = policy_of(HYBRIDS[name], dtype)
    selfcheck.check(policy)
    assert not policy.packing and not policy.views
    note = policy.notes[-1]
    assert "texts see one another" in note and "5.5 times" in note and "not measured" in note
    texts, rows = selfcheck.sample_texts(64), torch.arange(4)
    own = selfcheck.own_forward(policy, texts).logprobs
    assert torch.allclose(policy.score(texts, rows).logprobs, own, atol=1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_body_does_not_leak_in_any_dtype(dtype: torch.dtype) -> None:
    policy = policy_of(DENSE, dtype)
    selfcheck.check(policy)
    assert policy.packing and policy.views and not policy.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_with_replayed_routes_does_not_leak(dtype: torch.dtype) -> None:
    policy = policy_of(MIXTURE, dtype)
    selfcheck.check(policy)
    assert policy.packing and policy.views and not policy.notes
    texts = selfcheck.sample_texts(64)
    score, replays = selfcheck._scorer(policy, texts)
    assert replays
    for changed, others in selfcheck._changes(texts, 64):
        assert torch.equal(score(changed)[others], score(texts)[others])


def test_every_change_affects_one_whole_text_and_leaves_other_rows_to_compare() -> None:
    texts = selfcheck.sample_texts(64)
    changes = list(selfcheck._changes(texts, 64))
    touched = {
        (
            bool((changed.prompts != texts.prompts).any()),
            *(changed.tokens != texts.tokens).all(1).nonzero().flatten().tolist(),
        )
        for changed, _ in changes
    }
    assert touched == {(False, 0), (False, 2), (False, 3), (True,)}
    assert all(others for _, others in changes)


def coarser_attention(patch: pytest.MonkeyPatch, by: float) -> None:
    """Make packs round attention differently, as another kernel might, without leaks between rows."""
    attend = Pack.attend
    patch.setattr(Pack, "attend", lambda self, heads: (1 + by) * attend(self, heads))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_16_bit_rounding_is_tolerated_whatever_the_size_of_logits(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense 8B with random weights rounds by more than 0.25; here large logits do."""
    policy = scaled_head(policy_of(DEEP, torch.bfloat16), size)
    coarser_attention(monkeypatch, 2**-4)
    texts = selfcheck.sample_texts(64)
    own = selfcheck.own_forward(policy, texts)
    gap = selfcheck.distance(torch.bfloat16, policy.score(texts, torch.arange(4)).logprobs, own.logprobs)
    assert gap > 0.25 or size == 1.0
    selfcheck.check(policy)
    assert policy.packing and not policy.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_rounding_is_refused_in_float32_and_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(DEEP, dtype)
    coarser_attention(monkeypatch, 2**-4)
    selfcheck.check(policy)
    assert not policy.packing and not policy.views and "off by" in policy.notes[0]


def test_packs_that_score_other_tokens_are_refused_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = scaled_head(policy_of(DEEP, torch.bfloat16), 10.0)
    score = Policy.score

    def other(self: Policy, texts: Any, rows: Tensor, directions: Directions | None = None) -> Channels:
        return score(self, replace(texts, tokens=(texts.tokens + 7) % 64) if self.packing else texts, rows, directions)

    monkeypatch.setattr(Policy, "score", other)
    selfcheck.check(policy)
    assert not policy.packing and "off by" in policy.notes[0]


def test_a_body_that_leaks_in_padded_rows_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(DENSE, torch.float32)
    score = Policy.score

    def leaking(self: Policy, texts: Any, rows: Tensor, directions: Directions | None = None) -> Channels:
        channels = score(self, texts, rows, directions)
        return replace(channels, logprobs=channels.logprobs + 1e-6 * channels.logprobs.sum())

    monkeypatch.setattr(Policy, "score", leaking)
    with pytest.raises(InputError, match="neither in packs"):
        selfcheck.check(policy)


def test_a_body_whose_packs_raise_gets_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Pack, heads: Heads) -> Tensor:
        raise RuntimeError("not that\nway")

    monkeypatch.setattr(Pack, "attend", broken)
    policy = policy_of(DENSE, torch.float32)
    selfcheck.check(policy)
    assert not policy.views and "RuntimeError: not that way" in policy.notes[0]


def test_padded_rows_by_choice_are_noted_with_their_cost() -> None:
    policy = policy_of(DENSE, torch.float32)
    policy.packing = False
    selfcheck.check(policy)
    assert policy.views and not policy.packing
    assert policy.notes == ["policy.packing = false: " + policy.notes[0].removeprefix("policy.packing = false: ")]
    assert "5.5 times" in policy.notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_unknown_extras_is_refused(dtype: torch.dtype) -> None:
    policy = policy_of(DENSE, dtype)
    forward = policy.model.forward

    def forward_scaled(*inputs: Any, **options: Any) -> Any:
        output = forward(*inputs, **options)
        output.logits = 0.9 * output.logits
        return output

    policy.model.forward = forward_scaled
    with pytest.raises(InputError, match="not a linear layer"):
        selfcheck.check(policy)


def test_log_probs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="NaN or infinity"):
        selfcheck.check(scaled_head(policy_of(DENSE, torch.bfloat16), float("nan")))


@pytest.mark.parametrize(("offset", "agrees"), [(0.1, True), (0.6, True), (20.0, False)])
def test_an_engine_may_differ_as_much_as_the_policys_own_forwards_do(
    offset: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs of this policy differ by about 0.4 from its own forward by rounding alone; an engine off by 0.6 is accepted."""
    policy = scaled_head(policy_of(DEEP, torch.bfloat16), 30.0)
    policy.tokenizer = Words()
    engine = LocalEngine(policy, 8)
    engine._way = "cached"
    generate = engine.generate

    def generate_with_offset(*inputs: Any, **options: Any) -> Any:
        responses = generate(*inputs, **options)
        return [[replace(one, logprobs=one.logprobs + offset) for one in group] for group in responses]

    own = selfcheck.own_forward

    def own_forward_with_offset(of: Any, texts: Any) -> selfcheck.Own:
        result = own(of, texts)
        return replace(result, logprobs=result.logprobs + 0.4)

    monkeypatch.setattr(engine, "generate", generate_with_offset)
    monkeypatch.setattr("legato.rollouts.local.agreement.own_forward", own_forward_with_offset)
    reason = disagreement(engine, policy)
    assert (reason is None) is agrees
