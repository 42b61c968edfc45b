"""Responses that join and leave while others decode, in the plain engine: every way of decoding, several families."""

import os
from collections.abc import Sequence
from random import Random

import pytest
import torch

from legato.rollouts.engine import Handle, Limits, Partial, Request, Response
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts.families import END, assert_same_responses, forward_logprobs, make_policy, make_requests

WAYS = [("qwen3", "blocks"), ("qwen3", "cached"), ("qwen3", "recomputed"), ("gemma2", "cached"), ("mistral", "cached")]
SEEDS = 8 if os.environ.get("LEGATO_TEST_PROFILE") == "slow" else 1
LIMITS = Limits(max_response_tokens=24, end_tokens=(END,))


def drive(
    engine: LocalEngine, arrivals: Sequence[tuple[int, Request, Sampling, Limits]], cancelled: dict[int, int]
) -> dict[int, dict[int, Response]]:
    """Submit each request at its round, cancel request i at round `cancelled[i]`, and return responses by request."""
    numbers: dict[Handle, int] = {}
    responses: dict[int, dict[int, Response]] = {number: {} for number in range(len(arrivals))}
    pieces: dict[tuple[int, int], list[Partial]] = {}
    for round_number in range(2000):
        for number, (when, request, sampling, limits) in enumerate(arrivals):
            if when == round_number:
                numbers[engine.submit([request], sampling, limits)[0]] = number
        for handle, number in numbers.items():
            if cancelled.get(number) == round_number:
                engine.cancel(handle)
        progress = engine.decode_briefly(list(numbers))
        for piece in progress.partial:
            pieces.setdefault((numbers[piece.handle], piece.place), []).append(piece)
        for ended in progress.ended:
            responses[numbers[ended.handle]][ended.place] = ended.response
        if not engine.jobs and all(when < round_number for when, *_ in arrivals):
            break
    for (number, place), reports in pieces.items():
        if place in responses[number]:
            tokens = torch.cat([report.tokens for report in reports])
            assert torch.equal(tokens, responses[number][place].tokens[: len(tokens)])
    assert not engine._streams and not engine.jobs
    return responses


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_random_arrivals_and_cancellations_change_no_response(family: str, way: str) -> None:
    policy = make_policy(family)
    for seed in range(SEEDS):
        random = Random(seed)
        requests = make_requests(*(random.randint(1, 20) for _ in range(8)), each=random.randint(1, 3), seed=seed)
        samplings = [random.choice([Sampling(), Sampling(), Sampling(temperature=0.7, top_k=9)]) for _ in requests]
        limits = [Limits(max_response_tokens=random.randint(1, 24), end_tokens=(END,)) for _ in requests]
        arrivals = [(random.randint(0, 30), *each) for each in zip(requests, samplings, limits, strict=True)]
        cancelled = {number: arrivals[number][0] + random.randint(0, 8) for number in (2, 5)}
        engine = LocalEngine(policy, random.choice([4, 8, 64]), way=way)
        responses = drive(engine, arrivals, cancelled)
        for number, (request, sampling, limit) in enumerate(zip(requests, samplings, limits, strict=True)):
            expected = LocalEngine(policy, way=way).generate([request], sampling, limit)[0]
            if number in cancelled:
                assert all(
                    response.tokens.tolist() == expected[k].tokens.tolist() for k, response in responses[number].items()
                )
            else:
                assert_same_responses([[responses[number][place] for place in range(len(expected))]], [expected])


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_a_request_that_is_alone_gets_the_bits_of_generate(family: str, way: str) -> None:
    policy = make_policy(family)
    for request in make_requests(1, 7, 19, each=4):
        (expected,) = LocalEngine(policy, way=way).generate([request], Sampling(), LIMITS)
        got = drive(LocalEngine(policy, way=way), [(0, request, Sampling(), LIMITS)], {})[0]
        for place, response in enumerate(expected):
            assert torch.equal(got[place].tokens, response.tokens) and torch.equal(got[place].logprobs, response.logprobs)


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_a_publish_in_the_middle_is_seen_from_the_next_token_on(family: str, way: str) -> None:
    policy = make_policy(family)
    engine = LocalEngine(policy, way=way)
    requests = make_requests(5, 11, each=2)
    endless = Limits(max_response_tokens=12, end_tokens=())
    handles = engine.submit(requests, Sampling(), endless)
    for _ in range(5):
        engine.decode_briefly()
    weight = policy.model.get_output_embeddings().weight
    old = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(0.5)
    engine.publish((), 7)
    responses = {}
    while engine.jobs:
        for ended in engine.decode_briefly().ended:
            responses[ended.handle, ended.place] = ended.response
    for (handle, _), response in responses.items():
        assert response.version.tolist() == [0] * 5 + [7] * 7
        prompt = requests[handles.index(handle)].prompt
        new = forward_logprobs(policy, prompt, response)
        with torch.no_grad():
            kept = weight.clone()
            weight.copy_(old)
            before = forward_logprobs(policy, prompt, response)
            weight.copy_(kept)
        assert torch.allclose(response.logprobs, torch.cat([before[:5], new[5:]]), atol=1e-5)


def test_a_long_stream_does_not_grow_with_the_responses_that_passed_through() -> None:
    """Rows come and go for ever: the KV cache holds no more columns than the longest of the rows in it."""
    for way in ("blocks", "cached"):
        engine = LocalEngine(make_policy("qwen3"), 8, way=way)
        limits = Limits(max_response_tokens=10, end_tokens=())
        requests = make_requests(*([6] * 30), each=1)
        columns = []
        for request in requests:
            engine.submit([request], Sampling(), limits)
            engine.decode_briefly()
            engine.decode_briefly()
            for stream in engine._streams.values():
                decoder = stream._decoder
                columns.append(decoder.column if way == "blocks" else decoder.cache.column)  # type: ignore[union-attr]
        assert max(columns[10:]) <= (10 if way == "blocks" else 16) + 2


def test_stop_strings_end_responses_of_a_stream() -> None:
    policy = make_policy("qwen3")
    (request,) = make_requests(6, each=4)
    free = LocalEngine(policy).generate([request], Sampling(), LIMITS)[0]
    stop = free[0].text[2:4]
    limits = Limits(max_response_tokens=24, end_tokens=(END,), stop=(stop,))
    expected = LocalEngine(policy).generate([request], Sampling(), limits)
    got = drive(LocalEngine(policy), [(0, request, Sampling(), limits)], {})[0]
    assert_same_responses([[got[place] for place in range(4)]], expected)


def test_polling_goes_on_with_what_decoding_briefly_began() -> None:
    policy = make_policy("qwen3")
    engine, requests = LocalEngine(policy), make_requests(5, 9)
    handles = engine.submit(requests, Sampling(), LIMITS)
    engine.decode_briefly()
    finished = {one.handle: one.responses for _ in range(2) for one in engine.poll()}
    expected = LocalEngine(policy).generate(requests, Sampling(), LIMITS)
    assert_same_responses([finished[handle] for handle in handles], expected)
