"""The client against servers that misbehave: each fault is a retry or one clear error, and no response is wrong."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.dialect import PATH, Ask, read_reply, read_versions, version_number
from legato.rollouts.servers.engine import ATTEMPTS, ServerEngine, ask_model
from legato.rollouts.servers.errors import (
    BadReplyError,
    BusyError,
    FailedError,
    RefusedError,
    ServerError,
    UnreachableError,
)
from legato.rollouts.servers.http import HttpClient, read_address
from tests.serve.faults import KINDS, FaultPlan
from tests.serve.running import RunningServer, chat_policy, make_served, plain_engine, running
from tests.serve.test_clients import wait_until

LIMITS = Limits(max_response_tokens=12, end_tokens=(1, 82))
SAMPLING = Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def plan() -> FaultPlan:
    return FaultPlan()


@pytest.fixture(scope="module")
def faulty(plan: FaultPlan) -> Iterator[RunningServer]:
    served = make_served(chat_policy())
    with running(served, wrap=plan.wrap(served)) as server:
        yield server


def requests(count: int, each: int = 2) -> list[Request]:
    source = torch.Generator().manual_seed(count)
    return [
        Request(
            prompt=torch.randint(3, 80, (4 + place,), generator=source), seeds=tuple(range(10 * place, 10 * place + each))
        )
        for place in range(count)
    ]


def engine_for(server: RunningServer, **options: Any) -> ServerEngine:
    policy = server.served.policy
    engine = ServerEngine(server.client(), policy.tokenizer, policy.vocabulary, **{"threads": 4, "seconds": 20.0, **options})
    engine._jitter.uniform = lambda low, high: 0.1  # type: ignore[method-assign]
    return engine


def assert_right(server: RunningServer, engine: ServerEngine, batch: list[Request]) -> None:
    """The responses through the server are those of the engine itself."""
    expected = plain_engine(server.served.policy).generate(batch, SAMPLING, LIMITS)
    for got_row, expected_row in zip(engine.generate(batch, SAMPLING, LIMITS), expected, strict=True):
        for got, one in zip(got_row, expected_row, strict=True):
            assert got.tokens.tolist() == one.tokens.tolist() and (got.text, got.stop) == (one.text, one.stop)
            assert float((got.logprobs - one.logprobs).abs().max()) <= 1e-4
            assert set(got.version.tolist()) == {0}


def test_responses_through_a_server_are_those_of_the_engine(faulty: RunningServer) -> None:
    engine = engine_for(faulty)
    assert_right(faulty, engine, requests(6))
    assert engine.retries == 0 and ask_model(faulty.client()).vocabulary == 83
    stop = plain_engine(faulty.served.policy).generate(requests(1), SAMPLING, LIMITS)[0][0].text[3:5]
    limits = Limits(max_response_tokens=12, end_tokens=(1, 82), stop=(stop,))
    for sampling in (Sampling(top_p=0.7), Sampling(temperature=0)):
        local = plain_engine(faulty.served.policy).generate(requests(2), sampling, limits)
        for got_row, one_row in zip(engine.generate(requests(2), sampling, limits), local, strict=True):
            for got, one in zip(got_row, one_row, strict=True):
                assert (got.tokens.tolist(), got.text, got.stop) == (one.tokens.tolist(), one.text, one.stop)
                assert (got.kept_logmass is None) == (one.kept_logmass is None)


PASSING = ("slow", "status", "closed", "lost", "truncated", "foreign-tokens", "missing-token", "nan", "repeated", "garbage")


@pytest.mark.parametrize("kind", [*PASSING, "silent", "twice"])
def test_a_passing_fault_costs_a_retry_and_no_response(faulty: RunningServer, plan: FaultPlan, kind: str) -> None:
    plan.done.clear()
    engine = engine_for(faulty, threads=1)
    plan.add(kind, after=1, seconds=0.2)
    assert_right(faulty, engine, requests(3, each=1))
    assert plan.done == [kind]
    assert engine.retries == (0 if kind in ("slow", "twice") else 1), kind


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("status", FailedError),
        ("closed", UnreachableError),
        ("lost", UnreachableError),
        ("truncated", UnreachableError),
        ("silent", UnreachableError),
        ("garbage", BadReplyError),
        ("nan", BadReplyError),
        ("foreign-tokens", BadReplyError),
        ("missing-token", BadReplyError),
    ],
)
def test_each_fault_is_one_clear_error(faulty: RunningServer, plan: FaultPlan, kind: str, error: type[ServerError]) -> None:
    client, ask = faulty.client(), Ask(prompt=[5, 6, 7], seed=1, sampling=SAMPLING, limits=LIMITS, name="unique")
    plan.add(kind, seconds=0.3)
    started = time.monotonic()
    with pytest.raises(error):
        read_reply(
            client.post(PATH, ask.body(), seconds=0.2 if kind == "silent" else 10.0), ask, faulty.served.tokenizer, 83
        )
    assert time.monotonic() - started < 5
    plan.add("truncated")
    with pytest.raises(UnreachableError):
        list(client.stream(PATH, {**ask.body(), "stream": True}, seconds=10.0))
    # The connection of the failed request is not used again.
    assert read_reply(client.post(PATH, ask.body(), seconds=10.0), ask, faulty.served.tokenizer, 83).tokens.numel()


def test_faults_that_no_single_reply_shows(faulty: RunningServer, plan: FaultPlan) -> None:
    """Other tokens and other temperatures look right: they are for probes and comparisons to find."""
    client, ask = faulty.client(), Ask(prompt=[5, 6, 7], seed=1, sampling=SAMPLING, limits=LIMITS, name="unique")
    right = read_reply(client.post(PATH, ask.body(), seconds=10.0), ask, faulty.served.tokenizer, 83)
    plan.add("temperature", temperature=1.6)
    other = read_reply(client.post(PATH, ask.body(), seconds=10.0), ask, faulty.served.tokenizer, 83)
    assert other.tokens.tolist() == right.tokens.tolist() and not torch.allclose(other.logprobs, right.logprobs, atol=1e-2)
    plan.add("wrong-tokens")
    wrong = client.post(PATH, ask.body(), seconds=10.0)["choices"][0]["token_ids"]
    assert wrong != right.tokens.tolist()
    plan.add("stale")
    before = faulty.served.weights.name
    reload = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
    assert client.post("/collective_rpc", reload, seconds=10.0) == {"results": [None]}
    assert faulty.served.weights.name == before
    with pytest.raises(RefusedError):
        client.post("/collective_rpc", reload, seconds=10.0)


def test_every_kind_of_fault_is_tried() -> None:
    tried = {*PASSING, "silent", "twice", "temperature", "wrong-tokens", "stale"}
    assert tried == set(KINDS)


def test_a_busy_server_is_asked_again_when_it_says(faulty: RunningServer, plan: FaultPlan) -> None:
    plan.add("status", status=429, headers={"retry-after": "0.2"}, path="/v1/models")
    with pytest.raises(BusyError) as busy:
        faulty.client().get("/v1/models", seconds=5.0)
    assert busy.value.seconds == 0.2
    engine = engine_for(faulty, threads=1)
    plan.add("status", status=429, headers={"retry-after": "0.1"}, times=ATTEMPTS + 2)
    assert_right(faulty, engine, requests(1, each=1))
    assert engine.retries == ATTEMPTS + 2, "a busy server has not failed"
    plan.add("silent", seconds=1.2)
    plan.add("status", status=429, headers={"retry-after": "0.01"})
    # The time of an attempt that failed is not time for which the server was busy.
    assert_right(faulty, engine_for(faulty, threads=1, seconds=1.0), requests(1, each=1))
    assert plan.faults == []
    plan.add("status", status=429, headers={"retry-after": "0.1"}, times=1000)
    try:
        with pytest.raises(InputError, match=r"expected a response of the server \S+, got a fault of the plan"):
            engine_for(faulty, threads=1, seconds=0.2).generate(requests(1, each=1), SAMPLING, LIMITS)
    finally:
        plan.faults.clear()


def test_a_busy_server_that_asks_for_no_wait_is_not_asked_in_a_loop(faulty: RunningServer, plan: FaultPlan) -> None:
    plan.add("status", status=429, headers={"retry-after": "0"}, times=10**6)
    engine = engine_for(faulty, threads=1, seconds=3.0)
    try:
        with pytest.raises(InputError, match=r"expected a response of the server \S+, got a fault of the plan"):
            engine.generate(requests(1, each=1), SAMPLING, LIMITS)
    finally:
        plan.faults.clear()
    assert engine.retries == 4, "0.1 + 0.2 + 0.4 + 0.8 s"


def test_an_engine_that_was_closed_asks_for_nothing_again() -> None:
    """The server would sample every response once more, for nobody."""
    plan, served = FaultPlan(), make_served(chat_policy())
    with running(served, wrap=plan.wrap(served)) as server:
        engine, others = engine_for(server), set(threading.enumerate())
        server.post("/pause?mode=keep")
        engine.submit(requests(4, each=1), SAMPLING, LIMITS)
        wait_until(lambda: served.admission.taken == 4)
        plan.requests.clear()
        engine.close()
        wait_until(lambda: served.admission.taken == 0)
        server.post("/resume")
        time.sleep(1.0)
        assert [path for path, _ in plan.requests if path == PATH] == [] and engine.retries == 0
        assert not {each for each in threading.enumerate() if each.name.startswith("server-")} - others


def test_a_server_that_never_answers_is_an_error_that_says_so(faulty: RunningServer, plan: FaultPlan) -> None:
    engine = engine_for(faulty, threads=2)
    plan.add("status", status=503, times=1000)
    try:
        with pytest.raises(InputError, match=r"expected a response of the server \S+, got status 503: .* \(--server\)"):
            engine.generate(requests(2), SAMPLING, LIMITS)
    finally:
        plan.faults.clear()
    refused = engine_for(faulty)
    refused.client = HttpClient(faulty.url, "another-key")
    with pytest.raises(InputError, match="status 401"):
        refused.generate(requests(1), SAMPLING, LIMITS)
    assert refused.retries == 0, "asking again does not help"
    with pytest.raises(UnreachableError):
        HttpClient("http://127.0.0.1:9", "key").get("/health", seconds=2.0)


def test_a_server_that_restarts_in_the_middle_loses_no_response() -> None:
    policy = chat_policy()
    served = make_served(policy)
    with running(served) as server:
        engine = engine_for(server, threads=8)
        batch = requests(12, each=2)
        handles = engine.submit(batch, SAMPLING, LIMITS)
        finished = {one.handle: one.responses for one in engine.poll()}
        server.restart(make_served(policy))
        while len(finished) < len(handles):
            finished |= {one.handle: one.responses for one in engine.poll()}
        expected = plain_engine(policy).generate(batch, SAMPLING, LIMITS)
        for handle, row in zip(handles, expected, strict=True):
            assert [one.tokens.tolist() for one in finished[handle]] == [one.tokens.tolist() for one in row]


def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    policy = chat_policy()
    with running(make_served(policy)) as server:
        client = server.client()
        assert client.get("/health", seconds=5.0)["status"] == "ok"
        server.restart(make_served(policy))
        assert client.get("/health", seconds=5.0)["status"] == "ok"


def test_dropping_the_connections_of_a_client_ends_its_requests_in_flight() -> None:
    """The threads that wait for them go on, and the server forgets them."""
    served, errors = make_served(chat_policy()), list[ServerError]()
    with running(served) as server:
        client = server.client()

        def ask() -> None:
            try:
                client.post(PATH, {"token_ids": [5], "sampling_params": {"max_tokens": 3}}, seconds=60.0)
            except ServerError as error:
                errors.append(error)

        server.post("/pause?mode=keep")
        asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in asking:
            thread.start()
        wait_until(lambda: served.admission.taken == len(asking))
        client.drop_connections()
        wait_until(lambda: served.admission.taken == 0)
        for thread in asking:
            thread.join(10)
        assert [type(error) for error in errors] == [UnreachableError] * len(asking)
        assert client.get("/health", seconds=5.0)["status"] == "ok"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://host.example/v1", "https://host.example"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_are_read_with_and_without_a_path(url: str, expected: str) -> None:
    assert read_address(url) == expected


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://h:99999", "http://h/x", "http://u:p@h/", "x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="expected"):
        read_address(url)


def test_versions_of_all_tokens_are_read() -> None:
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    assert read_versions(spans, 3).tolist() == [7, 7, 8]
    assert read_versions(None, 2).tolist() == [-1, -1] and version_number("default") == -1
    for bad in (spans[:1], spans[1:], [{}], "x", [{"version": "1", "start": 0, "end": 4}], []):
        with pytest.raises(BadReplyError):
            read_versions(bad, 3)
