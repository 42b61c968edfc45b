"""Hostile requests: whatever a client sends, the answer is never a 500, and the server goes on."""

import http.client
import json
import os
import socket
from random import Random
from typing import Any

import pytest

from tests.serve.running import KEY, RunningServer

ROUNDS = 3000 if os.environ.get("LEGATO_TEST_PROFILE") == "slow" else 250

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/collective_rpc", "/update_weight_version"),
    *("/abort_requests", "/reload_checkpoint", "/reset_prefix_cache"),
)
FIELDS = (
    *("model", "prompt", "messages", "token_ids", "sampling_params", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("echo", "stream", "stream_options", "logit_bias", "presence_penalty", "best_of", "suffix", "user", "tools", "method"),
    *("kwargs", "new_version", "request_ids", "step", "chat_template_kwargs", "response_format", "ignore_eos", "request_id"),
    *("return_token_ids", "include_stop_str_in_output", "output_mode", "add_special_tokens", "parse_special_tokens"),
)
SCALARS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        255,
        256,
        10**6,
        2**31,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**40,
        0.0,
        -0.0,
        0.5,
        1.5,
    ),
    *(1e-300, 1e300, -1e300, "", "a", "12+3=", "\x00", "\u202e", "é☃\U0001f600", "<|im_end|>", "{{ 7*7 }}", "a" * 5000),
    *("../../etc/passwd", "\ud7ff", "%s%n", "tiny", "user", "keep"),
)


def make_value(random: Random, depth: int = 0) -> Any:
    """A random JSON value, most of them close to something that is allowed."""
    kind = random.random()
    if depth > 4 or kind < 0.6:
        return random.choice(SCALARS)
    if kind < 0.75:
        return [make_value(random, depth + 1) for _ in range(random.randint(0, 4))]
    if kind < 0.85:
        return [random.choice([5, 6, 82, 83, -1, 3.0]) for _ in range(random.randint(0, 300))]
    if kind < 0.92:
        return [
            {"role": random.choice(["user", "system", "assistant", 3]), "content": make_value(random, depth + 1)}
            for _ in range(random.randint(0, 3))
        ]
    names = [random.choice(FIELDS) for _ in range(random.randint(0, 4))]
    return {name: make_value(random, depth + 1) for name in names}


def make_body(random: Random, path: str) -> Any:
    """A request that is right but for a few fields."""
    right = {
        "/v1/completions": {"prompt": "12+3=", "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "add"}], "max_tokens": 2},
        "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
        "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}},
        "/update_weight_version": {"new_version": "0"},
    }.get(path, {})
    body: dict[str, Any] = {name: value for name, value in right.items() if random.random() < 0.9}
    for _ in range(random.randint(0, 3)):
        body[random.choice(FIELDS)] = make_value(random)
    if path == "/inference/v1/generate" and random.random() < 0.5:
        body["sampling_params"] = {random.choice(FIELDS): make_value(random) for _ in range(random.randint(0, 4))}
    # The weights of this server stay as they are, whatever its fuzzing finds out.
    return body


def test_no_json_makes_the_server_fail(server: RunningServer) -> None:
    random = Random(0)
    statuses: dict[int, int] = {}
    for number in range(ROUNDS):
        path = random.choice(PATHS)
        body = make_body(random, path) if random.random() < 0.95 else make_value(random)
        reply = server.ask("POST", path, body)
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        assert reply.status in (200, 400, 404, 413, 429), (number, path, body, reply.body)
        if reply.status != 200:
            reply.error()
    assert statuses[200] > ROUNDS // 20 and statuses[400] > ROUNDS // 4, "both sides are tried"
    assert server.ask("GET", "/health").json()["status"] == "ok" and server.served.admission.taken == 0


def test_no_bytes_make_the_server_fail(server: RunningServer) -> None:
    random = Random(1)
    good = json.dumps({"prompt": "12+3=", "max_tokens": 2, "stop": ["é"]}).encode()
    for number in range(ROUNDS // 2):
        data = bytearray(good)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(data))
            change = random.random()
            if change < 0.5:
                data[place] = random.randrange(256)
            elif change < 0.75:
                del data[place:]
            else:
                data[place:place] = random.randbytes(random.randint(1, 20))
            data = data or bytearray(b"x")
        reply = server.ask("POST", random.choice(PATHS), bytes(data))
        assert reply.status in (200, 400, 404, 413), (number, bytes(data), reply.body)


@pytest.mark.parametrize("depth", [31, 33, 900, 20_000])
def test_deep_bodies_are_refused_or_read(server: RunningServer, depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        body = f'{{"prompt": {opening * depth}1{closing * depth}}}'.encode()
        assert server.ask("POST", "/v1/completions", body).status == 400


def test_a_million_token_ids_are_refused_quickly(server: RunningServer) -> None:
    body = b'{"prompt": [' + b"5," * 1_000_000 + b"5]}"
    assert server.ask("POST", "/v1/completions", body).error()["code"] == "context_length_exceeded"
    body = b'{"token_ids": [' + b"5," * 1_000_000 + b"5]}"
    assert server.ask("POST", "/inference/v1/generate", body).status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        bytes(range(256)) * 20,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_http_closes_the_connection_and_nothing_else(server: RunningServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        received = raw.recv(4096)
        assert not received or b" 500 " not in received
    assert server.ask("GET", "/health").status == 200


def test_odd_paths_and_headers_are_no_faults(server: RunningServer) -> None:
    for path in ("//", "/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..", "/v1/chat/completions?x=%ff", "/" + "a" * 5000):
        assert server.ask("GET", path).status in (400, 404, 405)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    for host in (f"127.0.0.1:{server.port}", "evil.example"):
        connection.putheader("Host", host)
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    connection.close()
