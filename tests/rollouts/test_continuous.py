"""Requests submitted and cancelled while others decode: on the slot engine, and wave by wave on the plain engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.policy.policy import Policy
from legato.rollouts.engine import Engine, Finished, Handle, Limits, Request, Response
from legato.rollouts.gpu import scheduler
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local import engine as plain
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts import in_torch
from tests.rollouts.families import END, assert_same_responses, forward_logprobs, make_policy, make_prompts, make_requests

LIMITS = Limits(max_response_tokens=40, end_tokens=(END,))
LONG = Limits(max_response_tokens=40, end_tokens=())


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


def slot_engine(policy: Policy, rows: int = 8, **options: Any) -> GraphedEngine:
    return GraphedEngine(policy, rows, graphs=False, **options)


def poll_until_empty(engine: Engine, polls: int = 1000) -> Iterator[Finished]:
    """Yield finished requests until a poll reports none, or after `polls` polls."""
    for _ in range(polls):
        reported = engine.poll()
        yield from reported
        if not reported:
            return


def expected_responses(
    policy: Policy, request: Request, limits: Limits = LIMITS, sampling: Sampling | None = None
) -> list[Response]:
    return LocalEngine(policy).generate([request], sampling or Sampling(), limits)[0]


def submit_and_poll(
    engine: GraphedEngine, requests: list[Request], limits: Limits = LIMITS
) -> tuple[list[Handle], list[Finished]]:
    """Submit requests and poll once: all handles, and the requests that have finished."""
    handles = engine.submit(requests, Sampling(), limits)
    return handles, engine.poll()


def test_a_request_joins_while_others_decode() -> None:
    policy = make_policy("qwen3")
    engine = slot_engine(policy)
    quick, slow, late = make_requests(5, 9, 7, each=2)
    # The KV store already has room for all requests, as after the first step of a run.
    engine.generate([quick, slow, late], Sampling(), LONG)
    short = Limits(max_response_tokens=4, end_tokens=())
    (first,) = engine.submit([quick], Sampling(), short)
    (second,) = engine.submit([slow], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [first]
    (third,) = engine.submit([late], Sampling(), short)
    # The late request overtakes the slow one, which has been decoding all the time.
    assert [one.handle for one in engine.poll()] == [third]
    (last,) = engine.poll()
    assert last.handle == second and engine.poll() == []
    assert_same_responses([last.responses], [expected_responses(policy, slow, LONG)])


def test_a_request_too_large_for_the_kv_store_waits_until_the_store_grows() -> None:
    policy = make_policy("qwen3")
    engine = slot_engine(policy, 16)
    requests = make_requests(5, 9, 200, 6, each=3)
    handles = engine.submit(requests[:2], Sampling(), LIMITS)
    responses = {one.handle: one.responses for one in engine.poll()}
    handles += engine.submit(requests[2:], Sampling(), LIMITS)
    responses |= {one.handle: one.responses for one in poll_until_empty(engine)}
    for handle, request in zip(handles, requests, strict=True):
        assert_same_responses([responses[handle]], [expected_responses(policy, request)])
    assert engine.store is not None and engine.store.room.prompt_tokens >= 200 and engine.store.room.slots >= 6


def test_requests_with_other_sampling_settings_are_decoded_in_submission_order() -> None:
    policy = make_policy("qwen3")
    engine, greedy = slot_engine(policy), Sampling(temperature=0)
    warm, cold, later = make_requests(5, 9, 7, each=2)
    engine.submit([warm], Sampling(), LIMITS)
    (second,) = engine.submit([cold], greedy, LIMITS)
    (third,) = engine.submit([later], Sampling(), LIMITS)
    finished = list(poll_until_empty(engine))
    # The third request has the sampling of the first, but does not overtake the second.
    assert [one.handle for one in finished][1:] == [second, third]
    assert_same_responses([finished[1].responses], [expected_responses(policy, cold, sampling=greedy)])


def test_responses_of_different_lengths_decode_together() -> None:
    policy = make_policy("qwen3")
    engine, (one, other) = slot_engine(policy), make_requests(5, 9, each=2)
    (short,) = engine.submit([one], Sampling(), Limits(max_response_tokens=3, end_tokens=()))
    engine.submit([other], Sampling(), LONG)
    (first,) = engine.poll()
    assert first.handle == short and [len(response.tokens) for response in first.responses] == [3, 3]
    (second,) = engine.poll()
    assert [len(response.tokens) for response in second.responses] == [40, 40]


@pytest.mark.parametrize("build", [slot_engine, LocalEngine])
def test_a_cancelled_request_is_never_reported(build: Any) -> None:
    policy = make_policy("qwen3")
    engine, requests = build(policy, 4), make_requests(5, 9, 7, each=3)
    handles = engine.submit(requests, Sampling(), LIMITS)
    engine.cancel(handles[1])
    finished = list(poll_until_empty(engine))
    assert {one.handle for one in finished} == {handles[0], handles[2]}
    for one in finished:
        assert_same_responses([one.responses], [expected_responses(policy, requests[handles.index(one.handle)])])
    engine.cancel(handles[0])  # finished already
    assert engine.poll() == []


def test_cancelling_a_decoding_request_frees_its_slots() -> None:
    policy = make_policy("qwen3")
    engine, requests = slot_engine(policy, 4), make_requests(5, 9, 7, each=2)
    (quick_handle,) = engine.submit(requests[:1], Sampling(), Limits(max_response_tokens=2, end_tokens=()))
    slow, waiting = engine.submit(requests[1:], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [quick_handle]
    scheduler = engine._scheduler
    assert scheduler is not None and slow in {row.job.handle for row in scheduler.active.values()}
    engine.cancel(slow)
    assert {row.job.handle for row in scheduler.active.values()} <= {waiting}
    (last,) = poll_until_empty(engine)
    assert_same_responses([last.responses], [expected_responses(policy, requests[2], LONG)])
    assert sorted(scheduler.free_slots) == [0, 1, 2, 3] and not scheduler.users


def test_a_next_turn_reuses_its_cached_prefix_while_others_decode() -> None:
    policy = make_policy("qwen3")
    engine = slot_engine(policy)
    short = Limits(max_response_tokens=6, end_tokens=())
    engine.generate(make_requests(60, 60, each=2, seed=5), Sampling(), LONG)  # room
    engine.prefixes.clear()
    first, slow = make_requests(30, 20, each=1)
    engine.submit([first], Sampling(), short)
    (handle,) = engine.submit([slow], Sampling(), LONG)
    (first_turn,) = engine.poll()
    grown = torch.cat([first.prompt, first_turn.responses[0].tokens, make_prompts(4, seed=3)[0]])
    engine.submit([Request(prompt=grown, seeds=(7,))], Sampling(), short)
    before = engine.reused_tokens
    (second,) = engine.poll()
    assert handle in engine.jobs, "the slow request still decodes"
    assert engine.reused_tokens - before == len(grown) - 5
    assert_same_responses([second.responses], [expected_responses(policy, Request(prompt=grown, seeds=(7,)), short)])


def test_requests_submitted_together_do_not_reuse_each_others_prefixes() -> None:
    engine = slot_engine(make_policy("qwen3"), 2)
    start = make_prompts(40)[0]
    requests = [Request(prompt=torch.cat([start, torch.tensor([token])]), seeds=(token, token + 1)) for token in range(3, 8)]
    engine.generate(requests, Sampling(), LIMITS)
    assert engine.reused_tokens == 0


def test_a_response_across_a_publish_has_two_versions_and_the_log_probs_of_each() -> None:
    policy = make_policy("qwen3")
    engine = slot_engine(policy)
    quick_one, *slow = make_requests(5, 9, 20, each=2)
    engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    handles = engine.submit(slow, Sampling(temperature=1.0), LONG)
    (first,) = engine.poll()
    assert all(response.version.tolist() == [0] * 4 for response in first.responses)
    old = make_policy("qwen3")
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.15)
    engine.publish(policy.model.named_parameters(), 3)
    assert engine.version == 3
    responses = {one.handle: one.responses for one in poll_until_empty(engine)}
    for handle, request in zip(handles, slow, strict=True):
        for response in responses[handle]:
            versions = response.version.tolist()
            assert response.version.dtype == torch.int64 and sorted(versions) == versions and set(versions) == {0, 3}
            new = response.version == 3
            before, after = (forward_logprobs(one, request.prompt, response) for one in (old, policy))
            assert torch.allclose(response.logprobs[~new], before[~new], atol=1e-5)
            assert torch.allclose(response.logprobs[new], after[new], atol=1e-5)
            assert not torch.allclose(response.logprobs[new], before[new], atol=1e-2)
    # Prefixes of the old weights must not be reused.
    assert all(prompt is not quick_one.prompt for prompt in engine.prefixes.prompts.values())


def test_moved_weights_restart_the_outstanding_requests() -> None:
    policy = make_policy("qwen3")
    engine = slot_engine(policy)
    quick_one, slow = make_requests(5, 9, each=2)
    engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    engine.submit([slow], Sampling(), LONG)
    engine.poll()
    body = policy.model.model
    body.norm.weight = torch.nn.Parameter(body.norm.weight.detach() * -1)
    engine.publish(policy.model.named_parameters(), 1)
    (finished,) = poll_until_empty(engine)
    assert all(set(response.version.tolist()) == {1} for response in finished.responses)
    assert_same_responses([finished.responses], [expected_responses(policy, slow, LONG)])


def test_running_out_of_memory_between_polls_restarts_the_outstanding_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, messages = make_policy("qwen3"), []
    engine = slot_engine(policy, say=messages.append)
    quick_one, slow = make_requests(5, 9, each=2)
    (first,) = engine.submit([quick_one], Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    (second,) = engine.submit([slow], Sampling(), LONG)
    assert [one.handle for one in engine.poll()] == [first]
    advance, failures = engine.advance, [True]

    def failing(*args: Any) -> None:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(*args)

    monkeypatch.setattr(engine, "advance", failing)
    (finished,) = poll_until_empty(engine)
    assert finished.handle == second and engine.rows_at_once == 2 and len(messages) == 1
    assert_same_responses([finished.responses], [expected_responses(policy, slow, LONG)])


@pytest.mark.parametrize("build", [slot_engine, LocalEngine])
def test_every_token_has_the_version_that_was_published_last(build: Any) -> None:
    policy = make_policy("qwen3")
    engine = build(policy)
    for version in (0, 5):
        engine.publish(policy.model.named_parameters(), version)
        for row in engine.generate(make_requests(5, 9), Sampling(), LIMITS):
            for response in row:
                assert response.version.dtype == torch.int64
                assert response.version.tolist() == [version] * len(response.tokens)


# The plain engine


def record_waves(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that receives the seeds of each wave as the engine decodes it."""
    waves: list[list[int]] = []
    run = engine._decode_rows

    def decode_and_record(parts: Any, *rest: Any) -> Any:
        waves.append([seed for _, seeds in parts for seed in seeds])
        return run(parts, *rest)

    engine._choose_way()
    monkeypatch.setattr(engine, "_decode_rows", decode_and_record)
    return waves


def test_a_request_submitted_between_polls_joins_the_next_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(make_policy("qwen3"), rows_at_once=4)
    waves = record_waves(engine, monkeypatch)
    first, second, third = make_requests(5, 9, 7, each=3)
    engine.submit([first, second], Sampling(), LIMITS)
    assert len(engine.poll()) == 1
    engine.submit([third], Sampling(), LIMITS)
    assert len(list(poll_until_empty(engine))) == 2
    assert waves == [[0, 1, 2, 100], [101, 102, 200, 201], [202]]


def test_decoder_weights_are_copied_once_per_burst_and_again_after_a_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("qwen3")
    engine = LocalEngine(policy, rows_at_once=2)
    engine._choose_way()
    copies: list[int] = []

    class Counted(plain.Unrolled):
        def __init__(self, body: Any) -> None:
            copies.append(1)
            super().__init__(body)

    monkeypatch.setattr(plain, "Unrolled", Counted)
    requests = make_requests(5, 9, 7, each=2)
    engine.generate(requests, Sampling(), LIMITS)
    assert len(copies) == 1 and engine._decoder_maker is None
    engine.submit(requests, Sampling(), LIMITS)
    engine.poll()
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.5)
    engine.publish(policy.model.named_parameters(), 1)
    (last,) = list(poll_until_empty(engine))[-1:]
    assert len(copies) == 3 and engine._decoder_maker is None
    monkeypatch.undo()
    assert_same_responses([last.responses], [expected_responses(policy, requests[-1])])


def test_single_requests_are_prefilled_together_and_wait_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gets its requests one by one; a pass for each would stop the decoding of all others that often."""
    prefills: list[int] = []
    plain_read = scheduler.read_prompts

    def counting(policy: Any, store: Any, openings: Any) -> None:
        prefills.append(len(openings))
        plain_read(policy, store, openings)

    monkeypatch.setattr(scheduler, "read_prompts", counting)
    engine = slot_engine(make_policy("qwen3"), 32)
    requests = make_requests(5, 9, 7, 6, 8, 4, 3, each=1)
    engine.reserve(16, 40)
    for request in requests[:2]:
        engine.submit([request], Sampling(), LONG)
        engine.decode_briefly()
    assert prefills == [1], "the second waits for others"
    engine.submit(requests[2:3], Sampling(), LONG)
    engine.decode_briefly()
    assert prefills == [1, 2], "and are not kept waiting"
    engine.submit(requests[3:], Sampling(), LONG)
    engine.decode_briefly()
    assert prefills == [1, 2, 4], "an eighth of the slots is enough at any time"
