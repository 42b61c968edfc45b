"""Decoding on a CPU: rows in blocks of one prompt, copies of the weights that never outlive a call."""

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
KNOWN = ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral"]
COUNTS = (5, 1, 3, 8)


def body(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small model of a known family as transformers makes it, with weights that have opinions."""
    config_class, own = FAMILIES[name]
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config = getattr(transformers, config_class)(**{**shape, **own, "sliding_window": None, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        automatic: Any = transformers.AutoModelForCausalLM
        model = automatic.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def policy(name: str = "llama", **changes: Any) -> Policy:
    return Policy(model=body(name, **changes), tokenizer=Words(), name=name)


def requests(counts: tuple[int, ...] = COUNTS) -> list[Request]:
    """Ragged prompts with so many responses each."""
    source = torch.Generator().manual_seed(2)
    seeds = iter(range(10**6))
    return [
        Request(prompt=torch.randint(2, VOCABULARY, (length,), generator=source), seeds=tuple(next(seeds) for _ in range(n)))
        for length, n in zip((7, 1, 12, 4), counts, strict=True)
    ]


def plain(model: Any, prompt: Tensor, response: Response) -> Tensor:
    with torch.no_grad():
        logits = model(torch.cat([prompt, response.tokens])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, response.tokens[:, None])[:, 0]


def furthest(served: Policy, engine: LocalEngine) -> float:
    """How far any log-prob of the engine is from a plain forward over the finished text."""
    asked = requests()
    found = engine.generate(asked, Sampling(), LIMITS)
    return max(
        float((response.logprobs - plain(served.model, request.prompt, response)).abs().max())
        for request, row in zip(asked, found, strict=True)
        for response in row
    )


@pytest.mark.parametrize("name", KNOWN)
def test_known_families_go_in_blocks_and_say_what_a_plain_forward_says(name: str) -> None:
    served = policy(name)
    engine = LocalEngine(served)
    assert furthest(served, engine) < 1e-5
    assert engine._way == "blocks" and served.notes == []


@pytest.mark.parametrize("name", KNOWN)
def test_every_way_of_remembering_writes_the_same(name: str) -> None:
    served, written = policy(name), []
    for way in ("blocks", "cached", "recomputed"):
        engine = LocalEngine(served)
        engine._way = way
        found = engine.generate(requests(), Sampling(), LIMITS)
        written.append([response.tokens.tolist() for row in found for response in row])
    lengths = {len(tokens) for tokens in written[0]}
    assert written[0] == written[1] == written[2] and len(lengths) > 3


def test_a_float64_model_is_decoded_in_float64() -> None:
    served = policy(dtype=torch.float64)
    engine = LocalEngine(served)
    assert furthest(served, engine) < 1e-6 and engine._way == "blocks"


def test_weights_changed_by_an_optimizer_are_the_ones_sampled_from() -> None:
    served = policy()
    engine = LocalEngine(served)
    optimizer = torch.optim.AdamW(served.model.parameters(), lr=0.05, fused=True)
    before = engine.generate(requests(), Sampling(), LIMITS)
    served.model(torch.arange(2, 20)[None]).logits.square().mean().backward()
    optimizer.step()
    after = engine.generate(requests(), Sampling(), LIMITS)
    assert not torch.equal(before[0][0].logprobs[:1], after[0][0].logprobs[:1])
    assert furthest(served, engine) < 1e-5


def test_weights_changed_behind_autograd_are_too() -> None:
    served = policy()
    engine = LocalEngine(served)
    engine.generate(requests(), Sampling(), LIMITS)
    for parameter in served.model.parameters():
        parameter.data.mul_(1.1)  # no version counter moves
    assert furthest(served, engine) < 1e-5


def test_no_copy_outlives_a_call() -> None:
    engine = LocalEngine(policy())
    gc.collect()
    engine.generate(requests(), Sampling(), LIMITS)
    # Without another collection: the memory is free again at once.
    assert not [thing for thing in gc.get_objects() if type(thing) is ReorderedProduct]


def test_a_body_that_was_changed_is_left_to_its_own_forward() -> None:
    served = policy()
    served.model.model.layers[1].mlp.act_fn = nn.Tanh()
    engine = LocalEngine(served)
    assert furthest(served, engine) < 1e-5
    assert engine._way == "cached"
    assert len(served.notes) == 1 and "LlamaForCausalLM cannot be decoded layer by layer" in served.notes[0]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), width=st.integers(1, 40), depth=st.integers(0, 40))
def test_an_arrangement_holds_every_row_once_beside_its_prompt_and_reads_the_fewest_keys(
    counts: list[int], width: int, depth: int
) -> None:
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    found = _Arrangement(owner, width, depth)
    rows = torch.arange(len(owner))
    assert len(found.places.unique()) == len(owner)
    assert torch.equal(found.prompts[found.places // found.size], owner)
    assert torch.equal(found.gather_rows(found.spread(rows).flatten(0, 1)), rows)
    table = found.rows()
    assert torch.equal(table.flatten()[found.places], rows) and torch.equal(
        owner[table], found.prompts[:, None].expand_as(table)
    )

    def keys(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (width + size * depth)

    assert keys(found.size) == min(keys(size) for size in range(1, max(counts) + 1))
