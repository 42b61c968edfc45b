"""Decoding on a CPU: rows in blocks of one prompt, and weight copies that never outlive a call."""

import gc
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from legato.policy.layers.reordered import ReorderedProduct
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.local.blocks import _Arrangement
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import FAMILIES, VOCABULARY, Words

LIMITS = Limits(max_response_tokens=16, end_tokens=(1,))
KNOWN = ["llama", "qwen2", "qwen3", "qwen3-moe", "olmoe", "mistral"]
COUNTS = (5, 1, 3, 8)


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small transformers model of a known family, with clearly unequal token probabilities."""
    config_class, own = FAMILIES[name]
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": None}
    config = getattr(transformers, config_class)(**{**shape, **own, **heads, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        automatic: Any = transformers.AutoModelForCausalLM
        model = automatic.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def make_policy(name: str = "llama", **changes: Any) -> Policy:
    return Policy(model=make_model(name, **changes), tokenizer=Words(), name=name)


def make_requests(counts: tuple[int, ...] = COUNTS) -> list[Request]:
    """Prompts of different lengths, with `counts` responses each."""
    source = torch.Generator().manual_seed(2)
    seeds = iter(range(10**6))
    return [
        Request(prompt=torch.randint(2, VOCABULARY, (length,), generator=source), seeds=tuple(next(seeds) for _ in range(n)))
        for length, n in zip((7, 1, 12, 4), counts, strict=True)
    ]


def forward_logprobs(model: Any, prompt: Tensor, response: Response) -> Tensor:
    with torch.no_grad():
        logits = model(torch.cat([prompt, response.tokens])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, response.tokens[:, None])[:, 0]


def largest_gap(policy: Policy, engine: LocalEngine) -> float:
    """The largest difference between the engine's log-probs and a plain forward over the finished text."""
    requests = make_requests()
    responses = engine.generate(requests, Sampling(), LIMITS)
    return max(
        float((response.logprobs - forward_logprobs(policy.model, request.prompt, response)).abs().max())
        for request, row in zip(requests, responses, strict=True)
        for response in row
    )


@pytest.mark.parametrize("name", KNOWN)
def test_known_families_decode_in_blocks_and_match_a_plain_forward(name: str) -> None:
    policy = make_policy(name)
    engine = LocalEngine(policy)
    assert largest_gap(policy, engine) < 1e-5
    assert engine._way == "blocks" and policy.notes == []


@pytest.mark.parametrize("name", KNOWN)
def test_every_kind_of_kv_cache_gives_the_same_tokens(name: str) -> None:
    policy, tokens_by_way = make_policy(name), []
    for way in ("blocks", "cached", "recomputed"):
        engine = LocalEngine(policy)
        engine._way = way
        responses = engine.generate(make_requests(), Sampling(), LIMITS)
        tokens_by_way.append([response.tokens.tolist() for row in responses for response in row])
    lengths = {len(tokens) for tokens in tokens_by_way[0]}
    assert tokens_by_way[0] == tokens_by_way[1] == tokens_by_way[2] and len(lengths) > 3


def test_a_float64_model_is_decoded_in_float64() -> None:
    policy = make_policy(dtype=torch.float64)
    engine = LocalEngine(policy)
    assert largest_gap(policy, engine) < 1e-6 and engine._way == "blocks"


def test_weights_changed_by_an_optimizer_are_the_ones_sampled_from() -> None:
    policy = make_policy()
    engine = LocalEngine(policy)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05, fused=True)
    before = engine.generate(make_requests(), Sampling(), LIMITS)
    policy.model(torch.arange(2, 20)[None]).logits.square().mean().backward()
    optimizer.step()
    after = engine.generate(make_requests(), Sampling(), LIMITS)
    assert not torch.equal(before[0][0].logprobs[:1], after[0][0].logprobs[:1])
    assert largest_gap(policy, engine) < 1e-5


def test_weights_changed_through_data_are_the_ones_sampled_from() -> None:
    policy = make_policy()
    engine = LocalEngine(policy)
    engine.generate(make_requests(), Sampling(), LIMITS)
    for parameter in policy.model.parameters():
        parameter.data.mul_(1.1)  # no version counter moves
    assert largest_gap(policy, engine) < 1e-5


def test_no_weight_copy_outlives_a_generate_call() -> None:
    engine = LocalEngine(make_policy())
    gc.collect()
    engine.generate(make_requests(), Sampling(), LIMITS)
    # No second gc.collect(): reference counting alone must free the copies.
    assert not [thing for thing in gc.get_objects() if type(thing) is ReorderedProduct]


def test_a_model_with_a_changed_layer_uses_its_own_forward() -> None:
    policy = make_policy()
    policy.model.model.layers[1].mlp.act_fn = nn.Tanh()
    engine = LocalEngine(policy)
    assert largest_gap(policy, engine) < 1e-5
    assert engine._way == "cached"
    assert len(policy.notes) == 1 and "LlamaForCausalLM cannot be decoded layer by layer" in policy.notes[0]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), width=st.integers(1, 40), depth=st.integers(0, 40))
def test_an_arrangement_places_every_row_once_next_to_its_prompt_and_reads_the_fewest_keys(
    counts: list[int], width: int, depth: int
) -> None:
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    arrangement = _Arrangement(owner, width, depth)
    rows = torch.arange(len(owner))
    assert len(arrangement.places.unique()) == len(owner)
    assert torch.equal(arrangement.prompts[arrangement.places // arrangement.size], owner)
    assert torch.equal(arrangement.gather_rows(arrangement.spread(rows).flatten(0, 1)), rows)
    table = arrangement.rows()
    assert torch.equal(table.flatten()[arrangement.places], rows) and torch.equal(
        owner[table], arrangement.prompts[:, None].expand_as(table)
    )

    def keys(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (width + size * depth)

    assert keys(arrangement.size) == min(keys(size) for size in range(1, max(counts) + 1))
