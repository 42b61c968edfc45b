"""Many clients at once: nothing is lost or mixed up, and who leaves frees its place."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch

from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from legato.serve.server import listen, serve_until_interrupted
from tests.serve.running import KEY, RunningServer, chat_policy, make_served, plain_engine, running

GENERATE = "/inference/v1/generate"


def test_sixty_four_clients_with_random_requests_each_get_their_own_responses(server: RunningServer) -> None:
    """Streams and whole answers, three kinds of sampling, lengths and prompts at random, on connections that are kept."""
    policy, ends = server.served.policy, server.served.end_tokens
    samplings = [Sampling(), Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.9, top_k=12)]

    def client(number: int) -> list[tuple[Any, ...]]:
        random, http_client, results = Random(number), server.client(), []
        for _ in range(3):
            prompt = [random.randrange(3, 81) for _ in range(random.randint(1, 40))]
            sampling, most = random.choice(samplings), random.randint(1, 30)
            seed, count = random.getrandbits(60), random.choice([1, 1, 1, 2])
            parameters = {"max_tokens": most, "seed": seed, "n": count, "logprobs": 0, "temperature": sampling.temperature}
            body = {"token_ids": prompt, "sampling_params": {**parameters, "top_k": sampling.top_k}}
            if random.random() < 0.3:
                events = list(http_client.stream(GENERATE, {**body, "stream": True}, seconds=60))
                choices = [each for event in events for each in event["choices"] if each["index"] == 0]
                tokens = [token for choice in choices for token in choice["token_ids"]]
                logprobs = [each["logprob"] for choice in choices for each in choice["logprobs"]["content"]]
            else:
                choice = http_client.post(GENERATE, body, seconds=60)["choices"][0]
                tokens, logprobs = choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]
            results.append((prompt, sampling, most, seed, tokens, logprobs))
        http_client.close()
        return results

    with ThreadPoolExecutor(64) as pool:
        answers = [answer for results in pool.map(client, range(64)) for answer in results]
    assert len(answers) == 192 and server.served.admission.taken == 0 and server.served.thread.running == 0
    engine = plain_engine(policy, 256)
    for sampling in set(samplings):
        mine = [answer for answer in answers if answer[1] == sampling]
        limits = Limits(max_response_tokens=30, end_tokens=ends)
        requests = [Request(prompt=torch.tensor(prompt), seeds=(seed,)) for prompt, _, _, seed, _, _ in mine]
        for answer, (expected,) in zip(mine, engine.generate(requests, sampling, limits), strict=True):
            most = answer[2]
            assert answer[4] == expected.tokens[:most].tolist()
            gap = (torch.tensor(answer[5]) - expected.logprobs[:most]).abs().max()
            assert float(gap) <= 1e-4


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_client_that_leaves_frees_its_place() -> None:
    """In a stream, before a whole answer, and while it waits: the engine forgets the request."""
    served = make_served(chat_policy(), context_tokens=4096)
    with running(served) as server:
        endless = {"max_tokens": 4000, "ignore_eos": True, "n": 2}
        stream = {"prompt": "12", **endless, "stream": True}
        whole = {"prompt": "12", **endless}
        for body in (stream, whole):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            wait_until(lambda: served.thread.running == 1)
            if body is stream:
                connection.getresponse().readline()
            assert connection.sock is not None
            connection.sock.close()
            connection.close()
            wait_until(lambda: served.thread.running == 0 and served.admission.taken == 0)
            assert not served.thread.engine.jobs  # type: ignore[attr-defined]
        # The next client is served as if nobody had been there.
        assert len(server.post("/v1/completions", {"prompt": "12", "max_tokens": 3})["choices"]) == 1


def test_a_client_that_leaves_while_its_prompt_waits_to_be_scored_harms_nobody() -> None:
    served = make_served(chat_policy())
    with running(served) as server:
        blocked, go = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go.wait(10)

        served.thread._commands.put(block)
        assert blocked.wait(10)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = {"prompt": "12+3=", "max_tokens": 0, "echo": True, "logprobs": 1}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_until(lambda: served.thread._commands.qsize() == 1)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        wait_until(lambda: served.admission.taken == 0)
        go.set()
        assert server.post("/v1/completions", body)["choices"] and served.thread.fault is None


def test_a_stopped_response_frees_its_place_at_once() -> None:
    served = make_served(chat_policy(), context_tokens=4096)
    with running(served) as server:
        body = {"prompt": "12", "max_tokens": 4000, "ignore_eos": True, "seed": 1}
        text = server.post("/v1/completions", {**body, "max_tokens": 20})["choices"][0]["text"]
        started = time.monotonic()
        server.post("/v1/completions", {**body, "stop": text[10:12]})
        assert time.monotonic() - started < 3, "4,000 tokens take longer"
        wait_until(lambda: served.thread.running == 0)


def test_a_new_client_does_not_wait_for_the_responses_of_others() -> None:
    served = make_served(chat_policy(), context_tokens=4096)
    with running(served) as server:
        body = {"prompt": "12", "max_tokens": 3000, "ignore_eos": True}
        slow = threading.Thread(target=server.post, args=("/v1/completions", body))
        slow.start()
        wait_until(lambda: served.thread.running == 1)
        for _ in range(3):
            server.post("/v1/completions", {"prompt": "34", "max_tokens": 5})
        assert served.thread.running == 1, "the long response still decodes"
        server.post("/abort_requests", {})
        slow.join(10)


def test_an_engine_that_fails_answers_500_and_goes_on() -> None:
    policy = chat_policy()

    class Failing(LocalEngine):
        broken = False

        def decode_briefly(self, watched: Any = ()) -> Any:
            if self.broken:
                raise RuntimeError("the device is gone")
            return super().decode_briefly(watched)

    engine = Failing(policy, 8)
    with running(make_served(policy, engine=engine)) as server:
        engine.broken = True
        reply = server.ask("POST", "/v1/completions", {"prompt": "12"})
        assert reply.status == 500 and reply.error()["type"] == "server_error"
        assert "the device is gone" in reply.error()["message"]
        assert server.ask("GET", "/health").status == 503
        stream = server.events("/v1/completions", {"prompt": "12", "stream": True})
        assert "the device is gone" in stream[-1]["error"]["message"]
        engine.broken = False
        server.post("/v1/completions", {"prompt": "12"})
        assert server.ask("GET", "/health").status == 200


def test_a_server_that_is_ended_answers_the_requests_in_flight(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also during a pause, with errors of OpenAI's shape and no report of a cancelled handler."""
    import uvicorn

    served, ready, servers = make_served(chat_policy()), threading.Event(), list[Any]()

    class NotedServer(uvicorn.Server):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", NotedServer)
    monkeypatch.setattr("legato.serve.server.END_SECONDS", 0.5)
    listening = listen("127.0.0.1", 0)
    client = RunningServer(served, port=listening.getsockname()[1])
    serving = threading.Thread(
        target=lambda: serve_until_interrupted(served, listening, "127.0.0.1", key=KEY, on_ready=ready.set), daemon=True
    )
    serving.start()
    assert ready.wait(30)
    body = {"prompt": "1+1=", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        client.post("/pause?mode=keep")
        plain = [pool.submit(client.ask, "POST", "/v1/completions", body) for _ in range(2)]
        stream = pool.submit(client.events, "/v1/completions", {**body, "stream": True})
        wait_until(lambda: served.admission.taken == served.thread.waiting == 3)
        servers[0].should_exit = True
        for each in plain:
            assert each.result().status == 500 and each.result().error()["message"] == "the server is shutting down"
        assert stream.result()[-1]["error"]["message"] == "the server is shutting down"
    serving.join(30)
    assert not serving.is_alive() and "Traceback" not in capfd.readouterr().err
