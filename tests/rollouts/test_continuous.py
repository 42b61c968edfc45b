"""Requests that come and go while others decode: on the engine with slots, and wave by wave on the plain one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.policy.policy import Policy
from legato.rollouts.engine import Engine, Finished, Handle, Limits, Request, Response
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local import engine as plain
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts import in_torch
from tests.rollouts.families import END, asked, plainly, policy, prompts, same

LIMITS = Limits(max_response_tokens=40, end_tokens=(END,))
LONG = Limits(max_response_tokens=40, end_tokens=())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


def slots(made: Policy, rows: int = 8, **options: Any) -> GraphedEngine:
    return GraphedEngine(made, rows, graphs=False, **options)


def polled(engine: Engine, polls: int = 1000) -> Iterator[Finished]:
    """What so many polls report, until there is nothing left."""
    for _ in range(polls):
        reported = engine.poll()
        yield from reported
        if not reported:
            return


def expected(made: Policy, request: Request, limits: Limits = LIMITS, sampling: Sampling | None = None) -> list[Response]:
    return LocalEngine(made).generate([request], sampling or Sampling(), limits)[0]


def started(engine: GraphedEngine, requests: list[Request], limits: Limits = LIMITS) -> tuple[list[Handle], list[Finished]]:
    """Handles of requests of which one has been reported already, and that report."""
    handles = engine.submit(requests, Sampling(), limits)
    return handles, engine.poll()


def test_a_request_joins_while_others_decode() -> None:
    made = policy("qwen3")
    engine = slots(made)
    quick, slow, late = asked(5, 9, 7, each=2)
    # Room for all of them was made before, as after the first step of a run.
    engine.generate([quick, slow, late], Sampling(), LONG)
    short = Limits(max_response_tokens=4, end_tokens=())
    (first,) = engine.submit([quick], Sampling(), short)
    (second,) = engine.submit([slow], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [first]
    (third,) = engine.submit([late], Sampling(), short)
    # It overtakes: the slow one has been decoding all along.
    assert [one.handle for one in engine.poll()] == [third]
    (last,) = engine.poll()
    assert last.handle == second and engine.poll() == []
    same([last.responses], [expected(made, slow, LONG)])


def test_a_request_too_large_for_the_room_waits_and_then_gets_its_room() -> None:
    made = policy("qwen3")
    engine = slots(made, 16)
    requests = asked(5, 9, 200, 6, each=3)
    handles = engine.submit(requests[:2], Sampling(), LIMITS)
    found = {one.handle: one.responses for one in engine.poll()}
    handles += engine.submit(requests[2:], Sampling(), LIMITS)
    found |= {one.handle: one.responses for one in polled(engine)}
    for handle, request in zip(handles, requests, strict=True):
        same([found[handle]], [expected(made, request)])
    assert engine.store is not None and engine.store.room.prompt_tokens >= 200 and engine.store.room.slots >= 6


def test_kinds_of_requests_are_decoded_in_the_order_they_came() -> None:
    made = policy("qwen3")
    engine, greedy = slots(made), Sampling(temperature=0)
    warm, cold, later = asked(5, 9, 7, each=2)
    engine.submit([warm], Sampling(), LIMITS)
    (second,) = engine.submit([cold], greedy, LIMITS)
    (third,) = engine.submit([later], Sampling(), LIMITS)
    found = list(polled(engine))
    # The third is sampled as the first is, but does not overtake the second.
    assert [one.handle for one in found][1:] == [second, third]
    same([found[1].responses], [expected(made, cold, sampling=greedy)])


def test_responses_of_different_lengths_decode_together() -> None:
    made = policy("qwen3")
    engine, (one, other) = slots(made), asked(5, 9, each=2)
    (short,) = engine.submit([one], Sampling(), Limits(max_response_tokens=3, end_tokens=()))
    engine.submit([other], Sampling(), LONG)
    (first,) = engine.poll()
    assert first.handle == short and [len(response.tokens) for response in first.responses] == [3, 3]
    (second,) = engine.poll()
    assert [len(response.tokens) for response in second.responses] == [40, 40]


@pytest.mark.parametrize("build", [slots, LocalEngine])
def test_a_cancelled_request_is_never_reported(build: Any) -> None:
    made = policy("qwen3")
    engine, requests = build(made, 4), asked(5, 9, 7, each=3)
    handles = engine.submit(requests, Sampling(), LIMITS)
    engine.cancel(handles[1])
    found = list(polled(engine))
    assert {one.handle for one in found} == {handles[0], handles[2]}
    for one in found:
        same([one.responses], [expected(made, requests[handles.index(one.handle)])])
    engine.cancel(handles[0])  # finished already
    assert engine.poll() == []


def test_cancelling_what_decodes_frees_its_slots() -> None:
    made = policy("qwen3")
    engine, requests = slots(made, 4), asked(5, 9, 7, each=2)
    (quick_handle,) = engine.submit(requests[:1], Sampling(), Limits(max_response_tokens=2, end_tokens=()))
    slow, waiting = engine.submit(requests[1:], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [quick_handle]
    scheduler = engine._scheduler
    assert scheduler is not None and slow in {row.job.handle for row in scheduler.active.values()}
    engine.cancel(slow)
    assert {row.job.handle for row in scheduler.active.values()} <= {waiting}
    (last,) = polled(engine)
    same([last.responses], [expected(made, requests[2], LONG)])
    assert sorted(scheduler.free_slots) == [0, 1, 2, 3] and not scheduler.users


def test_a_next_turn_is_recalled_while_others_decode() -> None:
    made = policy("qwen3")
    engine = slots(made)
    short = Limits(max_response_tokens=6, end_tokens=())
    engine.generate(asked(60, 60, each=2, seed=5), Sampling(), LONG)  # room
    engine.prefixes.clear()
    first, slow = asked(30, 20, each=1)
    engine.submit([first], Sampling(), short)
    (handle,) = engine.submit([slow], Sampling(), LONG)
    (turn,) = engine.poll()
    grown = torch.cat([first.prompt, turn.responses[0].tokens, prompts(4, seed=3)[0]])
    engine.submit([Request(prompt=grown, seeds=(7,))], Sampling(), short)
    before = engine.reused_tokens
    (second,) = engine.poll()
    assert handle in engine.jobs, "the slow request still decodes"
    assert engine.reused_tokens - before == len(grown) - 5
    same([second.responses], [expected(made, Request(prompt=grown, seeds=(7,)), short)])


def test_requests_submitted_together_do_not_read_from_each_other() -> None:
    engine = slots(policy("qwen3"), 2)
    start = prompts(40)[0]
    requests = [Request(prompt=torch.cat([start, torch.tensor([token])]), seeds=(token, token + 1)) for token in range(3, 8)]
    engine.generate(requests, Sampling(), LIMITS)
    assert engine.reused_tokens == 0


def test_a_response_across_a_publish_has_two_versions_and_the_log_probs_of_each() -> None:
    made = policy("qwen3")
    engine = slots(made)
    quick_one, *slow = asked(5, 9, 20, each=2)
    engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    handles = engine.submit(slow, Sampling(temperature=1.0), LONG)
    (first,) = engine.poll()
    assert all(response.version.tolist() == [0] * 4 for response in first.responses)
    old = policy("qwen3")
    with torch.no_grad():
        for weight in made.model.parameters():
            weight.mul_(1.15)
    engine.publish(made.model.named_parameters(), 3)
    assert engine.version == 3
    found = {one.handle: one.responses for one in polled(engine)}
    for handle, request in zip(handles, slow, strict=True):
        for response in found[handle]:
            versions = response.version.tolist()
            assert response.version.dtype == torch.int64 and sorted(versions) == versions and set(versions) == {0, 3}
            new = response.version == 3
            before, after = (plainly(one, request.prompt, response) for one in (old, made))
            assert torch.allclose(response.logprobs[~new], before[~new], atol=1e-5)
            assert torch.allclose(response.logprobs[new], after[new], atol=1e-5)
            assert not torch.allclose(response.logprobs[new], before[new], atol=1e-2)
    # What finished before is of the old weights: nothing may go on from it.
    assert all(prompt is not quick_one.prompt for prompt in engine.prefixes.prompts.values())


def test_weights_at_another_address_begin_what_is_outstanding_again() -> None:
    made = policy("qwen3")
    engine = slots(made)
    quick_one, slow = asked(5, 9, each=2)
    engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    engine.submit([slow], Sampling(), LONG)
    engine.poll()
    body = made.model.model
    body.norm.weight = torch.nn.Parameter(body.norm.weight.detach() * -1)
    engine.publish(made.model.named_parameters(), 1)
    (found,) = polled(engine)
    assert all(set(response.version.tolist()) == {1} for response in found.responses)
    same([found.responses], [expected(made, slow, LONG)])


def test_memory_that_runs_out_between_polls_starts_again_what_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = policy("qwen3"), []
    engine = slots(made, say=said.append)
    quick_one, slow = asked(5, 9, each=2)
    (first,) = engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    (second,) = engine.submit([slow], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [first]
    advance, failures = engine.advance, [True]

    def failing(*args: Any) -> None:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(*args)

    monkeypatch.setattr(engine, "advance", failing)
    (found,) = polled(engine)
    assert found.handle == second and engine.rows_at_once == 2 and len(said) == 1
    same([found.responses], [expected(made, slow, LONG)])


@pytest.mark.parametrize("build", [slots, LocalEngine])
def test_every_token_has_the_version_that_was_published_last(build: Any) -> None:
    made = policy("qwen3")
    engine = build(made)
    for version in (0, 5):
        engine.publish(made.model.named_parameters(), version)
        for row in engine.generate(asked(5, 9), Sampling(), LIMITS):
            for response in row:
                assert response.version.dtype == torch.int64
                assert response.version.tolist() == [version] * len(response.tokens)


# The plain engine


def counted_waves(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of each wave."""
    waves: list[list[int]] = []
    run = engine._decode_rows

    def noted(parts: Any, *rest: Any) -> Any:
        waves.append([seed for _, seeds in parts for seed in seeds])
        return run(parts, *rest)

    engine._choose_way()
    monkeypatch.setattr(engine, "_decode_rows", noted)
    return waves


def test_what_is_submitted_meanwhile_joins_the_next_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(policy("qwen3"), rows_at_once=4)
    waves = counted_waves(engine, monkeypatch)
    first, second, third = asked(5, 9, 7, each=3)
    engine.submit([first, second], Sampling(), LIMITS)
    assert len(engine.poll()) == 1
    engine.submit([third], Sampling(), LIMITS)
    assert len(list(polled(engine))) == 2
    assert waves == [[0, 1, 2, 100], [101, 102, 200, 201], [202]]


def test_packed_weights_are_copied_once_a_burst_and_again_after_a_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("qwen3")
    engine = LocalEngine(made, rows_at_once=2)
    engine._choose_way()
    copies: list[int] = []

    class Counted(plain.Unrolled):
        def __init__(self, body: Any) -> None:
            copies.append(1)
            super().__init__(body)

    monkeypatch.setattr(plain, "Unrolled", Counted)
    requests = asked(5, 9, 7, each=2)
    engine.generate(requests, Sampling(), LIMITS)
    assert len(copies) == 1 and engine._decoder_maker is None
    engine.submit(requests, Sampling(), LIMITS)
    engine.poll()
    with torch.no_grad():
        made.model.model.norm.weight.mul_(1.5)
    engine.publish(made.model.named_parameters(), 1)
    (last,) = list(polled(engine))[-1:]
    assert len(copies) == 3 and engine._decoder_maker is None
    monkeypatch.undo()
    same([last.responses], [expected(made, requests[-1])])
