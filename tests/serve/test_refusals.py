"""What a server refuses, and how: the key, the host, sizes, numbers, fields that it cannot honour."""

import socket
import threading
import time
from typing import Any

import pytest

from tests.serve.running import KEY, RunningServer, chat_policy, make_served, running

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "add"}]


def refused(server: RunningServer, status: int, path: str, body: Any, **headers: str) -> dict[str, Any]:
    reply = server.ask("POST", path, body, **headers)
    assert reply.status == status, reply.body
    return reply.error()


# Who may ask


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"])
def test_without_the_key_nothing_but_health_is_answered(server: RunningServer, given: str) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/pause"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
    ):
        reply = server.ask(method, path, Authorization=given)
        assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert reply.error()["code"] == "invalid_api_key"
    assert server.ask("GET", "/health", Authorization=given).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_foreign_host_name_is_refused_even_with_the_key(server: RunningServer, host: str) -> None:
    reply = server.ask("GET", "/v1/models", Host=host.format(port=server.port) or " ")
    assert reply.status == 403 and reply.error()["type"] == "invalid_request_error"
    assert server.ask("GET", "/health", Host="evil.example").status == 403
    assert server.ask("GET", "/v1/models", Host=f"localhost:{server.port}").status == 200


def test_a_page_of_another_site_is_refused(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/models", Origin="http://evil.example").status == 403
    assert server.ask("GET", "/v1/models", Origin=f"http://127.0.0.1:{server.port}").status == 200


# Paths and bodies


def test_unknown_paths_and_methods_are_answered_as_openai_does(server: RunningServer) -> None:
    unknown = server.ask("GET", "/v1/embeddings")
    assert unknown.status == 404 and unknown.error()["code"] == "unknown_url"
    method = server.ask("GET", CHAT)
    assert method.status == 405 and method.error()["code"] == "method_not_supported"
    assert server.ask("POST", "/v1/models/").status == 404 or server.ask("POST", "/v1/models/").status == 405


def test_a_body_must_be_json_of_a_bounded_size() -> None:
    with running(make_served(chat_policy(), body_bytes=1000, body_seconds=0.3)) as server:
        assert refused(server, 413, COMPLETIONS, b"x" * 1001)
        assert refused(server, 400, COMPLETIONS, b"{not json")["message"].startswith("We could not parse the JSON body")
        assert refused(server, 415, COMPLETIONS, b"{}", Content_Encoding="gzip")
        assert refused(server, 415, COMPLETIONS, b"{}", Content_Type="text/plain")
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {KEY}\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(1000)
        with socket.create_connection(("127.0.0.1", server.port)) as long_head:
            long_head.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000)
            assert b" 400 " in long_head.recv(1000)
        assert server.ask("GET", "/health").status == 200


# Fields


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [83]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 1000}, "n"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": 1e-9}, None),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, None),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": "a" * 300}, "stop"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "best_of": 4}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "logprobs": 3}, "stream"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "made_up": 1}, "made_up"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (GENERATE, {"token_ids": []}, "token_ids"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"n": "x"}}, "sampling_params.n"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"made_up": 1}}, "sampling_params.made_up"),
        (GENERATE, {"token_ids": [5], "sampling_params": 3}, "sampling_params"),
        ("/collective_rpc", {"method": "exec"}, "method"),
        ("/collective_rpc", {"method": "reload_weights"}, "kwargs.weights_path"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}, "weights_path"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
        ("/pause?mode=sleep", None, "mode"),
        ("/abort_requests", {"request_ids": [3]}, "request_ids"),
        ("/reload_checkpoint", {}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_fields_are_named(server: RunningServer, path: str, body: Any, param: str | None) -> None:
    error = refused(server, 400, path, body)
    assert error["param"] == param and error["type"] == "invalid_request_error", error


def test_another_model_is_not_found(server: RunningServer) -> None:
    error = refused(server, 404, COMPLETIONS, {"model": "gpt-5", "prompt": "a"})
    assert error["code"] == "model_not_found" and "tiny" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 300, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [5] * 256, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 256}),
        (COMPLETIONS, {"prompt": "a" * 1_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 10**15}}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_in_the_context_is_refused(server: RunningServer, path: str, body: Any) -> None:
    assert refused(server, 400, path, body)["code"] == "context_length_exceeded"


def test_a_prompt_that_just_fits_is_served(server: RunningServer) -> None:
    reply = server.post(GENERATE, {"token_ids": [5] * 255, "sampling_params": {"max_tokens": 1}})
    assert len(reply["choices"][0]["token_ids"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "streams"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}, {"logprobs": 0}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}, {"top_logprobs": 0}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"logprobs": 2}}, {"sampling_params": {"logprobs": 1}}),
    ],
)
def test_alternatives_do_not_stream_and_the_answer_says_what_does(
    server: RunningServer, path: str, body: dict[str, Any], streams: dict[str, Any]
) -> None:
    error = refused(server, 400, path, {**body, "stream": True})
    assert (error["param"], error["code"]) == ("stream", "unsupported_parameter")
    (name, value) = next(iter(streams.get("sampling_params", streams).items()))
    assert error["message"].endswith(f"{name} = {value} streams")
    assert server.events(path, {**body, "stream": True, **streams})


def test_a_model_without_a_chat_template_says_what_to_do() -> None:
    policy = chat_policy()
    policy.tokenizer.chat_template = None
    with running(make_served(policy)) as server:
        assert "/v1/completions" in refused(server, 400, CHAT, {"messages": MESSAGES})["message"]


# How many


def test_more_responses_than_the_server_takes_are_told_to_wait() -> None:
    with running(make_served(chat_policy(), sequences=4, context_tokens=4096)) as server:
        # A client that is told to wait sends such a request again for ever.
        never = refused(server, 400, GENERATE, {"token_ids": [5], "sampling_params": {"n": 5}})
        assert "expected at most 4 responses of one request" in never["message"] and "got 5" in never["message"]
        assert refused(server, 400, COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2})["param"] == "n"
        server.post("/pause?mode=keep")
        body = {"token_ids": [5], "sampling_params": {"n": 3, "max_tokens": 5}}
        waiting = threading.Thread(target=server.post, args=(GENERATE, body))
        waiting.start()
        while server.served.admission.taken < 3:
            time.sleep(0.01)
        full = server.ask("POST", GENERATE, {"token_ids": [5], "sampling_params": {"n": 2}})
        assert full.status == 429 and full.headers["retry-after"] == "1" and full.error()["type"] == "rate_limit_error"
        assert full.error()["code"] == "rate_limit_exceeded"
        one = threading.Thread(target=server.post, args=(GENERATE, {**body, "sampling_params": {"max_tokens": 5}}))
        one.start()
        server.post("/resume")
        waiting.join(30)
        one.join(30)
        assert server.served.admission.taken == 0 and server.ask("GET", "/health").json()["refused"] == 3
        server.post(GENERATE, {"token_ids": [5], "sampling_params": {"n": 4, "max_tokens": 2}})
