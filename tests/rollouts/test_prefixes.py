"""Later turns reuse the KV cache of earlier turns: the tokens of a fresh engine, with less prefill."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.prefixes import FEWEST_REUSED, PrefixIndex, fingerprint
from legato.rollouts.sampling import Sampling
from tests.rollouts import in_torch
from tests.rollouts.families import (
    END,
    FAMILIES,
    OTHERS,
    assert_same_responses,
    make_policy,
    make_prompts,
    make_requests,
    next_turn,
)

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 9)))


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


def fresh_responses(engine: GraphedEngine, requests: list[Request], limits: Limits = LIMITS) -> Any:
    return GraphedEngine(engine.policy, engine.rows_at_once, graphs=False).generate(requests, Sampling(), limits)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_second_and_third_turns_match_a_fresh_engine(name: str) -> None:
    engine = GraphedEngine(make_policy(name), 8, graphs=False)
    requests = make_requests(20, 31, 18, each=2)
    for _ in range(2):
        lengths, before = [len(request.prompt) for request in requests], engine.reused_tokens
        requests = next_turn(engine, requests, LIMITS, more=5)
        assert_same_responses(engine.generate(requests, Sampling(), LIMITS), fresh_responses(engine, requests))
        # If the first responses are still in their slots, all tokens but the last are reused.
        grown = [len(request.prompt) - 5 for request in requests]
        assert engine.reused_tokens - before >= sum(grown) - len(grown) > sum(lengths)


def test_each_response_of_a_group_continues_from_its_own_slot() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    first = Request(prompt=make_prompts(40)[0], seeds=tuple(range(8)))
    (row,) = engine.generate([first], Sampling(), LIMITS)
    new = make_prompts(3, seed=2)[0]
    later = [Request(prompt=torch.cat([first.prompt, response.tokens, new]), seeds=(7,)) for response in row]
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens == sum(len(request.prompt) - len(new) - 1 for request in later)
    assert_same_responses(responses, fresh_responses(engine, later))


def test_entries_are_copied_before_they_are_overwritten() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 6, graphs=False)
    requests = make_requests(*[24] * 6, each=1)
    later = next_turn(engine, requests, LIMITS, more=4)
    # In reverse order, each request goes to the entry that holds another request's prefix.
    later = later[::-1]
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens >= sum(len(request.prompt) - 5 for request in later)
    assert_same_responses(responses, fresh_responses(engine, later))


def test_more_conversations_than_slots_reuse_the_prefixes_still_stored() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4, graphs=False)
    requests = make_requests(*[20] * 11, each=1)
    later = next_turn(engine, requests, LIMITS, more=4)
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens >= 4 * 19
    assert_same_responses(responses, fresh_responses(engine, later))


def test_a_text_cut_by_a_stop_string_is_reused_up_to_the_cut() -> None:
    limits = Limits(max_response_tokens=30, end_tokens=(), stop=("<17>", "<3"))
    engine = GraphedEngine(make_policy("llama"), 8, graphs=False)
    later = next_turn(engine, make_requests(20, 31, 18, each=2), limits, more=5)
    assert_same_responses(engine.generate(later, Sampling(), limits), fresh_responses(engine, later, limits))
    assert engine.reused_tokens >= 20 + 31 + 18


def test_repeated_prompts_prefill_only_their_last_token() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    requests = make_requests(20, 31, each=2)
    before = engine.generate(requests, Sampling(), LIMITS)
    assert_same_responses(engine.generate(requests, Sampling(), LIMITS), before)
    assert engine.reused_tokens == 19 + 30


def test_a_short_common_prefix_is_not_reused() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    start = make_prompts(FEWEST_REUSED - 1)[0]
    for seed in (1, 2):
        engine.generate(
            [Request(prompt=torch.cat([start, torch.tensor([seed + 20]), make_prompts(9, seed=seed)[0]]), seeds=(1,))],
            Sampling(),
            LIMITS,
        )
    assert engine.reused_tokens == 0


def add_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(0.05)


def multiply_data(weight: Tensor) -> None:
    weight.data.mul_(1.5)


def fused_step(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.05, fused=True).step()
    weight.grad = None


@pytest.mark.parametrize("change", [add_in_place, multiply_data, fused_step])
def test_no_prefix_is_reused_after_the_weights_changed(change: Any) -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    later = next_turn(engine, make_requests(20, 31, each=2), LIMITS, more=5)
    change(engine.policy.model.model.layers[0].mlp.up_proj.weight)
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens == 0
    assert_same_responses(responses, fresh_responses(engine, later))


def test_where_weights_are_published_no_burst_looks_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, looks = GraphedEngine(make_policy("qwen3"), 8, graphs=False), list[int]()
    engine.weights_are_published = True
    real = engine._notice_weights
    monkeypatch.setattr(engine, "_notice_weights", lambda: (looks.append(1), real()))
    requests = make_requests(20, 31, each=2)
    later = next_turn(engine, requests, LIMITS, more=5)
    engine.generate(requests, Sampling(), LIMITS)
    assert looks == [1]
    engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens > 0
    reused = engine.reused_tokens
    multiply_data(engine.policy.model.model.layers[0].mlp.up_proj.weight)
    engine.publish(engine.policy.model.named_parameters(), 1)
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens == reused and looks == [1]
    assert_same_responses(responses, fresh_responses(engine, later))


def test_a_fingerprint_changes_with_the_smallest_change_of_any_weight() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weights = [torch.randn(7, 5).to(dtype), torch.randn(3).to(dtype)]
        before = fingerprint(weights)
        assert torch.equal(before, fingerprint([weight.clone() for weight in weights]))
        weights[1][2] = torch.nextafter(weights[1][2], torch.tensor(9.0, dtype=dtype))
        assert not torch.equal(before, fingerprint(weights))


def test_a_failed_call_leaves_no_wrong_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    requests = make_requests(20, 31, each=2)
    later = next_turn(engine, requests, LIMITS, more=5)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "advance", interrupt)
        engine.generate(make_requests(25, 19, 30, each=3, seed=5), Sampling(), LIMITS)
    assert_same_responses(engine.generate(later, Sampling(), LIMITS), fresh_responses(engine, later))


def test_the_longest_stored_prefix_is_found() -> None:
    prefixes, source = PrefixIndex(), torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 2, (40,), generator=source) for _ in range(60)]
    for entry in range(0, 60, 2):
        prefixes.note({entry: texts[entry][:25]}, {entry: (entry, texts[entry][25:])})
    for text in texts:
        wanted = torch.cat([text[: int(torch.randint(17, 40, (), generator=source))], torch.tensor([0, 1])])
        common = max(
            next((n for n in range(40) if n >= len(wanted) - 1 or int(known[n]) != int(wanted[n])), 40)
            for known in texts[::2]
        )
        match = prefixes.longest_prefix(wanted)
        assert (0 if match is None else match.tokens) == (common if common >= FEWEST_REUSED else 0)
        if match is not None:
            known = texts[match.entry]
            assert torch.equal(known[: match.tokens], wanted[: match.tokens])
            assert match.response_tokens == max(0, match.tokens - 25)
    prefixes.drop([0], [2])
    assert (
        0 not in prefixes.prompts and 0 not in prefixes.responses and 2 not in prefixes.responses and 2 in prefixes.prompts
    )


def test_a_response_is_indexed_with_its_own_prompt_or_not_at_all() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4, graphs=False)
    first, second, third = make_requests(20, 20, 20, each=2)
    # All four responses end at once; the third request takes the second's entry and one of its two slots.
    requests = [first, second, Request(prompt=third.prompt, seeds=(1,))]
    responses = engine.generate(requests, Sampling(), Limits(max_response_tokens=5, end_tokens=()))
    assert len(engine.prefixes.responses) == 3
    for entry, text in engine.prefixes.responses.values():
        (row,) = [
            row for request, row in zip(requests, responses, strict=True) if request.prompt is engine.prefixes.prompts[entry]
        ]
        assert text.tolist() in [response.tokens[:-1].tolist() for response in row]


def test_a_growing_store_keeps_its_contents() -> None:
    engine = GraphedEngine(make_policy("gemma2"), 8, graphs=False)
    later = next_turn(engine, make_requests(60, 31, each=2), LIMITS, more=5)
    assert engine.store is not None
    before = engine.store.room
    longer = Limits(max_response_tokens=14, end_tokens=LIMITS.end_tokens)
    responses = engine.generate(later, Sampling(), longer)
    after = engine.store.room
    assert after.prompt_tokens > before.prompt_tokens and after.response_tokens > before.response_tokens
    assert engine.reused_tokens == sum(len(request.prompt) - 6 for request in later)
    assert_same_responses(responses, fresh_responses(engine, later, longer))
