"""The slot engine on a CPU gives the plain engine's responses, for every family and any assignment of rows to slots."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu import scheduler
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts import in_torch
from tests.rollouts.families import (
    END,
    FAMILIES,
    OTHERS,
    assert_same_responses,
    forward_logprobs,
    make_policy,
    make_prompts,
    make_requests,
)

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))
MIXED = [(3, 9, 1, 17, 9), (2,), (30, 1, 1, 30, 2, 4, 5)]


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


# Together these use all kernel features: head norms and fused layers, windows and soft caps, sinks.
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss"])
@pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy
def test_interpreted_kernels_give_the_tokens_of_the_plain_engine(name: str) -> None:
    policy, requests, limits = (
        make_policy(name),
        make_requests(9, 2, each=2)[:2],
        Limits(max_response_tokens=4, end_tokens=(END,)),
    )
    responses = GraphedEngine(policy, rows_at_once=3, graphs=False).generate(requests, Sampling(), limits)
    assert_same_responses(responses, LocalEngine(policy).generate(requests, Sampling(), limits))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@pytest.mark.usefixtures("torch_kernels")
def test_slots_match_the_plain_engine_and_a_plain_forward(name: str) -> None:
    policy, requests = make_policy(name), make_requests(3, 9, 1, 17, each=3)
    responses = GraphedEngine(policy, rows_at_once=5, graphs=False).generate(requests, Sampling(temperature=0.8), LIMITS)
    assert_same_responses(responses, LocalEngine(policy).generate(requests, Sampling(temperature=0.8), LIMITS))
    for request, row in zip(requests, responses, strict=True):
        for response in row:
            assert torch.allclose(response.logprobs, forward_logprobs(policy, request.prompt, response, 0.8), atol=1e-5)


CHOSEN = Sampling(top_p=0.8, top_k=20)


@pytest.mark.parametrize(
    ("rows_at_once", "sampling"),
    [
        (1, Sampling(temperature=0)),
        (2, Sampling()),
        (7, CHOSEN),
        (64, Sampling()),
        *(
            pytest.param(rows, sampling, marks=pytest.mark.slow)
            for rows, sampling in product([1, 2, 7, 64], [Sampling(), Sampling(temperature=0), CHOSEN])
        ),
    ],
)
@pytest.mark.usefixtures("torch_kernels")
def test_assignment_of_rows_to_slots_changes_no_response(rows_at_once: int, sampling: Sampling) -> None:
    policy = make_policy("qwen3")
    engine = GraphedEngine(policy, rows_at_once, graphs=False)
    for lengths in MIXED:
        requests = make_requests(*lengths, each=3, seed=len(lengths))
        assert_same_responses(
            engine.generate(requests, sampling, LIMITS), LocalEngine(policy).generate(requests, sampling, LIMITS)
        )


@pytest.mark.usefixtures("torch_kernels")
def test_requests_without_seeds_and_calls_without_requests_return_empty_lists() -> None:
    engine = GraphedEngine(make_policy("llama"), 2, graphs=False)
    assert engine.generate([], Sampling(), LIMITS) == []
    nobody = Request(prompt=torch.tensor([3, 4]), seeds=())
    assert engine.generate([nobody], Sampling(), LIMITS) == [[]]
    mixed = [nobody, *make_requests(4, each=3), nobody]
    responses = engine.generate(mixed, Sampling(), LIMITS)
    assert [len(row) for row in responses] == [0, 3, 0]
    assert_same_responses(responses[1:2], LocalEngine(engine.policy).generate(mixed[1:2], Sampling(), LIMITS))


@pytest.mark.parametrize("longest", [1, 2, 8, 9, 10, 17, 18, 40])
@pytest.mark.usefixtures("torch_kernels")
def test_late_slot_copies_change_no_response_at_any_length(longest: int) -> None:
    policy, requests = make_policy("qwen2"), make_requests(3, 5, 1, 2, each=3)
    limits = Limits(max_response_tokens=longest, end_tokens=(END, 5))
    assert_same_responses(
        GraphedEngine(policy, 5, graphs=False).generate(requests, Sampling(), limits),
        LocalEngine(policy).generate(requests, Sampling(), limits),
    )


@pytest.mark.usefixtures("torch_kernels")
def test_stop_strings_end_responses_as_in_the_plain_engine() -> None:
    policy, requests = make_policy("llama"), make_requests(3, 5, 1, 2, each=4)
    limits = Limits(max_response_tokens=20, end_tokens=(END, 5), stop=("<6>", "<17><", "<3"))
    responses = GraphedEngine(policy, 6, graphs=False).generate(requests, Sampling(), limits)
    assert_same_responses(responses, LocalEngine(policy).generate(requests, Sampling(), limits))
    assert len({response.stop for row in responses for response in row}) >= 2


def record_steps(engine: GraphedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the engine's actions in order: 's' for each step, 'l' when it waits for a slot copy."""
    events: list[str] = []
    advance, wait = engine.advance, scheduler.SlotCopy.wait

    def advance_and_record(*args: Any) -> None:
        events.append("s")
        advance(*args)

    def wait_and_record(slot_copy: scheduler.SlotCopy) -> scheduler.SlotCopy:
        events.append("l")
        return wait(slot_copy)

    monkeypatch.setattr(engine, "advance", advance_and_record)
    monkeypatch.setattr(scheduler.SlotCopy, "wait", wait_and_record)
    return events


@pytest.mark.usefixtures("torch_kernels")
def test_the_next_steps_are_enqueued_before_waiting_for_the_last_slot_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    events = record_steps(engine, monkeypatch)
    engine.generate(make_requests(3, 4, each=2), Sampling(), Limits(max_response_tokens=25, end_tokens=()))
    # 24 steps after the first token: the engine takes no step in which no row could advance.
    assert "".join(events) == "s" * 16 + "l" + "s" * 8 + "l" + "l"


@pytest.mark.usefixtures("torch_kernels")
def test_a_finished_row_idles_for_at_most_two_slot_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(make_policy("qwen3"), 8, graphs=False)
    events = record_steps(engine, monkeypatch)
    everything = tuple(range(64))
    responses = engine.generate(
        make_requests(3, 4, each=2), Sampling(), Limits(max_response_tokens=100, end_tokens=everything)
    )
    assert all(len(response.tokens) == 1 for row in responses for response in row)
    assert events.count("s") == 16


@pytest.mark.usefixtures("torch_kernels")
def test_a_finished_row_writes_nothing_more() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4, graphs=False)
    engine.generate(make_requests(5, each=4), Sampling(), LIMITS)
    store = engine.store
    assert store is not None
    before = {name: value.clone() for name, value in vars(store).items() if isinstance(value, torch.Tensor)}
    bucket = engine.bucket(4)
    bucket.place([0, 1, 2, 3], [0, 0, 0, 0])
    with torch.no_grad():
        for _ in range(3):
            engine.advance(bucket, Sampling(), engine.end_tokens(LIMITS.end_tokens))
    for name, value in before.items():
        assert torch.equal(value[:4], getattr(store, name)[:4]), name


@pytest.mark.usefixtures("torch_kernels")
def test_a_group_larger_than_the_slots_reads_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("qwen3")
    read: list[int] = []
    hidden = type(policy).hidden

    def noted(self: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        read.append(tokens.numel())
        return hidden(self, tokens, positions)

    monkeypatch.setattr(type(policy), "hidden", noted)
    engine = GraphedEngine(policy, 4, graphs=False)
    engine.generate([Request(prompt=make_prompts(21)[0], seeds=tuple(range(11)))], Sampling(), LIMITS)
    assert read == [21]


@pytest.mark.usefixtures("torch_kernels")
def test_prompts_are_read_in_packs_of_a_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, requests = make_policy("qwen3"), make_requests(3, 9, 1, 17, 9, 30, each=1)
    monkeypatch.setattr("legato.rollouts.gpu.prefill.TOKENS_AT_ONCE", 20)
    sizes: list[int] = []
    hidden: Callable[..., torch.Tensor] = type(policy).hidden

    def noted(self: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sizes.append(tokens.numel())
        return hidden(self, tokens, positions)

    monkeypatch.setattr(type(policy), "hidden", noted)
    responses = GraphedEngine(policy, 64, graphs=False).generate(requests, Sampling(), LIMITS)
    assert sizes == [4, 18, 17, 30]
    monkeypatch.undo()
    assert_same_responses(responses, LocalEngine(policy).generate(requests, Sampling(), LIMITS))
