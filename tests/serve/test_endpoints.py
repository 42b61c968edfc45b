"""What each endpoint answers: fields, defaults, and responses that are the engine's own to the bit."""

import json
import time
from typing import Any

import pytest
import torch

from legato.core.rollout import Problem
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from legato.rollouts.traces import rollout_of_traces, trace_of_answer
from legato.serve import engine_thread
from legato.serve.generation import derive_seeds
from tests.serve.running import RunningServer, plain_engine

PROMPT = [5, 9, 33, 40, 12]
CHAT = [{"role": "user", "content": "add 2 and 3"}]


def engine_response(
    server: RunningServer, prompt: list[int], seeds: tuple[int, ...], sampling: Sampling, most: int
) -> list[Response]:
    """What the engine itself answers, called directly."""
    limits = Limits(max_response_tokens=most, end_tokens=server.served.end_tokens)
    request = Request(prompt=torch.tensor(prompt), seeds=seeds)
    return plain_engine(server.served.policy).generate([request], sampling, limits)[0]


def generate(server: RunningServer, **parameters: Any) -> Any:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20, "logprobs": 0, **parameters}}
    return server.post("/inference/v1/generate", body)


# Tokens in, tokens out


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0), Sampling(top_p=0.8, top_k=20, min_p=0.01)]
)
def test_generate_gives_the_tokens_and_log_probs_of_the_engine_to_the_bit(server: RunningServer, sampling: Sampling) -> None:
    asked = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    for seed in (0, 7, -(2**63), 2**63 - 1):
        (choice,) = generate(server, seed=seed, **asked)["choices"]
        (expected,) = engine_response(server, PROMPT, (seed,), sampling, 20)
        assert choice["token_ids"] == expected.tokens.tolist()
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == expected.logprobs.tolist()
        assert [each["token_id"] for each in choice["logprobs"]["content"]] == choice["token_ids"]
        if expected.kept_logmass is not None:
            assert choice["kept_logmass"] == expected.kept_logmass.tolist()


def test_generate_answers_in_the_words_of_vllm(server: RunningServer) -> None:
    body = {"request_id": "mine", "token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 1, "logprobs": 1}}
    reply = server.post("/inference/v1/generate", {**body, "model": "tiny", "return_token_ids": True})
    assert reply["request_id"] == "mine" and reply["model"] == "tiny" and reply["prompt_token_ids"] == PROMPT
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (choice,) = reply["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    for entry in choice["logprobs"]["content"]:
        assert entry["token"] == f"token_id:{entry['token_id']}"
        assert [each["token_id"] for each in entry["top_logprobs"]] == [entry["token_id"]]


def test_alternatives_are_the_likeliest_tokens_at_the_temperature(server: RunningServer) -> None:
    (choice,) = generate(server, seed=3, logprobs=4, temperature=0.7)["choices"]
    text = torch.tensor(PROMPT + choice["token_ids"])
    (scores,) = score_texts(server.served.policy, [text], [0.7], 3)
    for place, entry in enumerate(choice["logprobs"]["content"]):
        scored = len(PROMPT) - 1 + place
        own, *others = entry["top_logprobs"]
        assert own["token_id"] == entry["token_id"] and own["rank"] == entry["rank"] == int(scores.ranks[scored])
        top = [token for token in scores.top[scored].tolist() if token != entry["token_id"]]
        assert [each["token_id"] for each in others] == top[: len(others)] and len(others) >= 2
        assert others[0]["logprob"] == pytest.approx(
            scores.top_logprobs[scored][scores.top[scored].tolist().index(top[0])].item(), abs=1e-5
        )


def test_prompt_log_probs_are_those_of_the_policy_at_temperature_one(server: RunningServer) -> None:
    reply = generate(server, seed=3, prompt_logprobs=0, temperature=0.7, max_tokens=1)
    (scores,) = score_texts(server.served.policy, [torch.tensor(PROMPT)])
    first, *rest = reply["prompt_logprobs"]
    assert first is None and len(rest) == len(PROMPT) - 1
    for token, table, expected in zip(PROMPT[1:], rest, scores.logprobs.tolist(), strict=True):
        assert table[str(token)]["logprob"] == pytest.approx(expected, abs=1e-6)


def test_n_samples_have_seeds_derived_from_the_first(server: RunningServer) -> None:
    choices = generate(server, seed=11, n=3)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for choice, seed in zip(choices, derive_seeds(11, 3), strict=True):
        alone = generate(server, seed=seed)["choices"][0]
        assert alone["token_ids"] == choice["token_ids"]
    assert derive_seeds(11, 3)[0] == 11


def test_without_a_seed_every_answer_differs_and_with_one_none_does(server: RunningServer) -> None:
    free = {tuple(generate(server)["choices"][0]["token_ids"]) for _ in range(4)}
    fixed = {tuple(generate(server, seed=5)["choices"][0]["token_ids"]) for _ in range(4)}
    assert len(free) == 4 and len(fixed) == 1


# Texts


def test_completions_continue_texts_and_token_ids(server: RunningServer) -> None:
    tokenizer = server.served.policy.tokenizer
    body = {"model": "tiny", "max_tokens": 8, "seed": 4, "return_token_ids": True}
    reply = server.post("/v1/completions", {**body, "prompt": "12+3="})
    (choice,) = reply["choices"]
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-") and reply["model"] == "tiny"
    assert choice["prompt_token_ids"] == tokenizer("12+3=")["input_ids"]
    assert choice["text"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    ids = server.post("/v1/completions", {**body, "prompt": choice["prompt_token_ids"]})["choices"][0]
    assert ids["text"] == choice["text"]
    several = server.post("/v1/completions", {**body, "prompt": ["12+3=", "ab"], "n": 2})
    assert [each["index"] for each in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] == choice["text"], "a prompt in a list gets what it gets alone"
    lists = server.post("/v1/completions", {**body, "prompt": [choice["prompt_token_ids"], [5, 6]]})
    assert [each["index"] for each in lists["choices"]] == [0, 1]


def test_the_default_length_of_a_completion_is_sixteen(server: RunningServer) -> None:
    choice = server.post("/v1/completions", {"prompt": "12", "ignore_eos": True, "return_token_ids": True})["choices"][0]
    assert len(choice["token_ids"]) == 16 and choice["finish_reason"] == "length"


def test_chat_renders_messages_with_the_template(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 6, "seed": 2, "return_token_ids": True})
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    tokenizer = server.served.policy.tokenizer
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert reply["prompt_token_ids"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    (expected,) = engine_response(server, reply["prompt_token_ids"], (2,), Sampling(), 6)
    assert choice["token_ids"] == expected.tokens.tolist() and choice["message"]["content"] == expected.text
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_text_parts_of_a_message_are_joined(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "add 2 "}, {"type": "text", "text": "and 3"}]
    asked = {"max_tokens": 2, "seed": 2, "return_token_ids": True}
    joined = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **asked})
    plain = server.post("/v1/chat/completions", {"messages": CHAT, **asked})
    assert joined["prompt_token_ids"] == plain["prompt_token_ids"]


def test_chat_log_probs_have_names_bytes_and_alternatives(server: RunningServer) -> None:
    body = {"messages": CHAT, "max_tokens": 5, "seed": 2, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    choice = server.post("/v1/chat/completions", body)["choices"][0]
    tokenizer = server.served.tokenizer
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == tokenizer.decode([token]) and bytes(entry["bytes"]).decode() == entry["token"]
        values = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True) and max(values) <= 0
    named = server.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True})["choices"][0]
    assert [each["token"] for each in named["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_echo_scores_the_prompt_as_lm_eval_asks_for_it(server: RunningServer) -> None:
    body = {"prompt": [PROMPT, [7, 8, 9]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    for prompt, choice in zip(body["prompt"], server.post("/v1/completions", body)["choices"], strict=True):  # type: ignore[call-overload]
        (scores,) = score_texts(server.served.policy, [torch.tensor(prompt)], count=1)
        table = choice["logprobs"]
        assert len(table["tokens"]) == len(table["token_logprobs"]) == len(table["top_logprobs"]) == len(prompt) + 1
        assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
        assert table["token_logprobs"][1:-1] == pytest.approx(scores.logprobs.tolist(), abs=1e-5)
        for own, top, rank in zip(table["token_logprobs"][1:-1], table["top_logprobs"][1:-1], scores.ranks, strict=True):
            assert (own == max(top.values())) == (int(rank) == 1)
        assert choice["text"].startswith(server.served.tokenizer.decode(prompt))
        assert table["text_offset"][:3] == [0, *[len(table["tokens"][0]), len("".join(table["tokens"][:2]))]]


def test_echo_without_new_tokens(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "logprobs": 0, "echo": True}
    reply = server.post("/v1/completions", body)
    (choice,) = reply["choices"]
    assert choice["text"] == server.served.tokenizer.decode(PROMPT) and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 5 and reply["usage"]["completion_tokens"] == 0


# Where responses end


def test_a_stop_string_ends_the_text_before_it(server: RunningServer) -> None:
    body = {"prompt": "12+3=", "max_tokens": 30, "seed": 9, "ignore_eos": True, "return_token_ids": True}
    free = server.post("/v1/completions", body)["choices"][0]
    stop = free["text"][7:9]
    cut = server.post("/v1/completions", {**body, "stop": ["~", stop]})["choices"][0]
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    count = len(cut["token_ids"])
    assert cut["token_ids"] == free["token_ids"][:count]
    decode = server.served.tokenizer.decode
    assert stop in decode(cut["token_ids"]) and stop not in decode(cut["token_ids"][:-1])
    kept = server.post("/v1/completions", {**body, "stop": stop, "include_stop_str_in_output": True})["choices"][0]
    assert kept["text"] == cut["text"] + stop


def test_a_stop_token_ends_the_response_and_is_no_text(server: RunningServer) -> None:
    body = {"prompt": "12+3=", "max_tokens": 30, "seed": 9, "ignore_eos": True, "return_token_ids": True}
    free = server.post("/v1/completions", body)["choices"][0]
    token = free["token_ids"][5]
    place = free["token_ids"].index(token)
    cut = server.post("/v1/completions", {**body, "stop_token_ids": [token]})["choices"][0]
    assert cut["token_ids"] == free["token_ids"][: place + 1] and cut["stop_reason"] == token
    assert cut["text"] == server.served.tokenizer.decode(free["token_ids"][:place], skip_special_tokens=True)


def test_an_end_token_may_be_asked_for_as_a_stop_token(server: RunningServer) -> None:
    end = server.served.end_tokens[0]
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 200, "seed": 1, "stop_token_ids": [end]}}
    usual = server.post("/inference/v1/generate", body)["choices"][0]
    alone = {**body, "sampling_params": {**body["sampling_params"], "ignore_eos": True}}  # type: ignore[dict-item]
    only = server.post("/inference/v1/generate", alone)["choices"][0]
    assert usual["finish_reason"] == only["finish_reason"] == "stop"
    assert only["token_ids"][-1] == end and only["stop_reason"] == end and end not in only["token_ids"][:-1]
    assert only["token_ids"][: len(usual["token_ids"]) - 1] == usual["token_ids"][:-1]


def test_samples_of_one_prompt_end_on_their_own(server: RunningServer) -> None:
    body = {"prompt": "12+3=", "max_tokens": 24, "seed": 9, "ignore_eos": True, "n": 6, "return_token_ids": True}
    free = server.post("/v1/completions", body)["choices"]
    stop = free[2]["text"][4]
    for before, after in zip(free, server.post("/v1/completions", {**body, "stop": stop})["choices"], strict=True):
        assert after["text"] == before["text"].partition(stop)[0]
        assert (after["finish_reason"] == "stop") == (stop in before["text"])


# Streams


STREAMED = [
    {"max_tokens": 12, "seed": 3},
    {"max_tokens": 12, "seed": 3, "n": 3},
    {"max_tokens": 40, "seed": 9, "ignore_eos": True, "stop": ["a", "Q1", "zz"]},
    {"max_tokens": 12, "seed": 5, "temperature": 0.6, "top_k": 9},
    {"max_tokens": 1, "seed": 5},
]


def report_each_token(patch: pytest.MonkeyPatch) -> None:
    """Let the engine wait for the event loop, which on a busy machine would write several tokens at once."""
    decode = engine_thread.EngineThread._decode

    def decode_when_written(thread: engine_thread.EngineThread) -> None:
        end = time.monotonic() + 1
        while thread._reporting and time.monotonic() < end:
            time.sleep(0.0005)
        decode(thread)

    patch.setattr(engine_thread, "REPORT_SECONDS", 0.0)
    patch.setattr(engine_thread, "SLOWEST_REPORT", 0.0)
    patch.setattr(engine_thread.EngineThread, "_decode", decode_when_written)


@pytest.mark.parametrize("asked", STREAMED, ids=str)
def test_a_streamed_completion_is_the_whole_one(
    server: RunningServer, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_each_token(monkeypatch)
    body = {"prompt": "12+3=", "logprobs": 0, "return_token_ids": True, **asked}
    whole = server.post("/v1/completions", body)
    events = server.events("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    assert len({event["id"] for event in events}) == 1 and {event["object"] for event in events} == {"text_completion"}
    for choice in whole["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for piece in pieces for value in piece["logprobs"][name]] == choice["logprobs"][name]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert pieces[-1]["weight_versions"] == choice["weight_versions"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert len(choice["token_ids"]) < 4 or len(pieces) > 2, "tokens are sent as they come"


@pytest.mark.parametrize("asked", STREAMED, ids=str)
def test_a_streamed_chat_is_the_whole_one(server: RunningServer, asked: dict[str, Any]) -> None:
    body = {"messages": CHAT, **asked, "logprobs": True}
    whole = server.post("/v1/chat/completions", body)
    events = server.events("/v1/chat/completions", {**body, "stream": True})
    for choice in whole["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        logprobs = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_streamed_generation_is_the_whole_one(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    report_each_token(monkeypatch)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12, "logprobs": 0, "seed": 3}}
    (choice,) = server.post("/inference/v1/generate", body)["choices"]
    pieces = [
        each for event in server.events("/inference/v1/generate", {**body, "stream": True}) for each in event["choices"]
    ]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
    joined = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    assert joined == choice["logprobs"]["content"]
    assert pieces[-1]["weight_versions"] == choice["weight_versions"] and pieces[0]["weight_versions"] is None


def test_a_streamed_echo_begins_with_the_prompt(server: RunningServer) -> None:
    events = server.events("/v1/completions", {"prompt": "12+3=", "max_tokens": 3, "echo": True, "stream": True})
    assert events[0]["choices"][0]["text"] == "12+3="


# Around it


def test_the_model_is_listed_with_its_version(server: RunningServer) -> None:
    (card,) = server.ask("GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("tiny", "model", "legato")
    assert card["max_model_len"] == 256 and card["weight_version"] == "0" and card["vocabulary"] == 83
    assert server.ask("GET", "/v1/models/tiny").json() == card
    missing = server.ask("GET", "/v1/models/gpt-5")
    assert missing.status == 404 and missing.error()["code"] == "model_not_found"


def test_health_needs_no_key_and_says_more_with_one(server: RunningServer) -> None:
    assert server.ask("GET", "/health", Authorization="").json() == {"status": "ok"}
    told = server.ask("GET", "/health").json()
    assert told["status"] == "ok" and told["sequences"] == 0 and told["weight_version"] == "0"
    assert server.ask("GET", "/version").json() == {"version": "test", "server": "legato"}


def test_answers_are_json_without_signs_that_json_does_not_know(server: RunningServer) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    reply = server.ask("POST", "/v1/completions", {"prompt": "12+3=", "max_tokens": 3, "logprobs": 5})
    json.loads(reply.body, parse_constant=refuse)
    assert reply.headers["content-type"] == "application/json" and reply.headers["x-content-type-options"] == "nosniff"


def test_the_answers_of_an_agents_own_loop_are_a_rollout(server: RunningServer) -> None:
    """The black box: an agent keeps its own messages; what the server sampled is trained on as it was sampled."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "add 2 and 3"}]
    traces = []
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 4, "seed": turn, "return_token_ids": True, "logprobs": True}
        answer = server.post("/v1/chat/completions", body)
        traces.append(trace_of_answer(answer, f"turn-{turn}"))
        messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        messages += [{"role": "user", "content": "again"}]
    rollout = rollout_of_traces(traces, problem=Problem(prompt="add 2 and 3"), rollout_id=0, rewards=1.0)
    sampled = [token for row in rollout.rows for token in row.tokens[row.mask].tolist()]
    assert sampled == [token for trace in traces for token in trace["completion_token_ids"]]
    assert rollout.turn_rewards == (0.0, 0.0, 1.0)
    for row in rollout.rows:
        text = torch.cat([row.prompt_tokens, row.tokens])
        (scores,) = score_texts(server.served.policy, [text], [1.0])
        trained = scores.logprobs[len(row.prompt_tokens) - 1 :][row.mask]
        assert torch.allclose(trained, row.sampler_logprobs[row.mask], atol=1e-4)
