"""SGLang's words, against a fake server with its request schema. benchmarks/gpu/with_sglang.py tries a real one on a GPU."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.rollout import StopReason
from legato.errors import InputError
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from legato.rollouts.servers.dialect import Ask
from legato.rollouts.servers.dialects.base import Reading, StartPlan
from legato.rollouts.servers.dialects.sglang import Sglang
from legato.rollouts.servers.errors import RefusedError, UnreachableError
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.http import HttpClient
from legato.rollouts.servers.member import State
from legato.rollouts.servers.settings import ServerSettings
from tests.fleet.fake_sglang import FakeSglang
from tests.serve.running import chat_policy, plain_engine

LIMITS = Limits(max_response_tokens=8, end_tokens=(1, 82))


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    server = FakeSglang(chat_policy(4))
    yield server
    server.close()


def fleet_of(server: FakeSglang, context_tokens: int = 64) -> Fleet:
    settings = ServerSettings(urls=(server.url,), pause_seconds=20.0)
    return Fleet(chat_policy(3), Sglang(), settings, rows_at_once=4, context_tokens=context_tokens)


def test_responses_and_weights_go_through_sglangs_endpoints(server: FakeSglang) -> None:
    fleet = fleet_of(server)
    batch = [Request(prompt=torch.tensor([5, 6, 7 + number]), seeds=(number, number + 50)) for number in range(3)]
    sampling = Sampling(temperature=0.8)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        for limits in (LIMITS, Limits(max_response_tokens=8, end_tokens=())):
            expected = plain_engine(fleet.policy).generate(batch, sampling, limits)
            for row, other in zip(fleet.generate(batch, sampling, limits), expected, strict=True):
                for one, two in zip(row, other, strict=True):
                    assert (one.tokens.tolist(), one.text, one.stop) == (two.tokens.tolist(), two.text, two.stop)
                    assert torch.allclose(one.logprobs, two.logprobs, atol=1e-4) and set(one.version.tolist()) == {4}
        order = [path for path in server.calls if "generation" in path or "weights" in path]
        assert order == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        server.takes_weights = False
        with torch.no_grad():
            fleet.policy.model.get_decoder().norm.weight.mul_(1.5)
        fleet.publish(fleet.policy.model.named_parameters(), 5)
        with pytest.raises(InputError, match="the server did not take the weights"):
            fleet.poll()
    finally:
        fleet.close()


def test_a_server_that_was_left_paused_gets_the_first_weights(server: FakeSglang) -> None:
    """The run before was killed during a publish. A health check would wait until somebody lets the server go on."""
    server.paused = True
    fleet = fleet_of(server)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        assert fleet.servers[0].state is State.UP and fleet.servers[0].version == 4 and not server.paused
        fleet.publish(fleet.policy.model.named_parameters(), 5)
        assert "/health" not in server.calls, "it takes a second at each publish"
    finally:
        fleet.close()


def test_a_server_that_was_dropped_while_it_was_paused_comes_back(server: FakeSglang) -> None:
    fleet = fleet_of(server)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        server.paused, server.health_seconds = True, 0.5
        fleet._drop(fleet.servers[0], "it did not go on")
        request = Request(prompt=torch.tensor([5, 6, 7]), seeds=(0,))
        assert len(fleet.generate([request], Sampling(), LIMITS)[0]) == 1
        assert fleet.metrics()["servers/rejoins"] == 1
    finally:
        fleet.close()


def test_a_server_that_has_only_just_started_gets_no_weights(server: FakeSglang) -> None:
    fleet = fleet_of(server)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        server.starting, server.weight_version = True, "default"
        fleet._drop(fleet.servers[0], "it was started again")
        fleet.submit([Request(prompt=torch.tensor([5, 6, 7]), seeds=(0,))], Sampling(), LIMITS)
        threading.Timer(2.0, lambda: setattr(server, "starting", False)).start()
        assert len(fleet.poll()) == 1
        assert fleet.servers[0].checks == 0 and fleet.metrics()["servers/rejoins"] == 1
        assert server.calls.count("/pause_generation") == 2
    finally:
        fleet.close()


def test_responses_continue_across_a_publish_with_a_version_for_every_token(server: FakeSglang) -> None:
    fleet, before = fleet_of(server), chat_policy(3)
    limits = Limits(max_response_tokens=24, end_tokens=())
    batch = [Request(prompt=torch.tensor([5, 6, 7 + number]), seeds=(number, number + 50)) for number in range(4)]
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        server.holds = True
        handles = fleet.submit(batch, Sampling(), limits)
        _wait_until(lambda: server.held == fleet.rows_at_once)
        with torch.no_grad():
            fleet.policy.model.get_decoder().norm.weight.mul_(1.5)
        fleet.publish(fleet.policy.model.named_parameters(), 5)
        finished: dict[Any, Sequence[Response]] = {}
        while len(finished) < len(handles):
            finished |= {each.handle: each.responses for each in fleet.poll()}
        both = 0
        for request, handle in zip(batch, handles, strict=True):
            for response in finished[handle]:
                assert len(response.tokens) == 24
                text = [torch.cat([request.prompt, response.tokens])]
                start = len(request.prompt) - 1
                old, new = (score_texts(policy, text)[0].logprobs[start:] for policy in (before, fleet.policy))
                expected = torch.where(response.version == 4, old, new)
                assert torch.allclose(response.logprobs, expected, atol=1e-4)
                assert response.version.tolist() == sorted(response.version.tolist())
                both += set(response.version.tolist()) == {4, 5}
        assert both == fleet.rows_at_once
        assert fleet.servers[0].counts.retries == fleet.servers[0].counts.drops == 0
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("replies", "tokens", "text", "stop"),
    [
        pytest.param(["ab", "cd"], 4, "abcd", StopReason.LENGTH, id="length"),
        pytest.param(["abcd"], 4, "abcd", StopReason.LENGTH, id="complete when it was ended"),
        pytest.param(["ab", "", "cd"], 4, "abcd", StopReason.LENGTH, id="a reply without tokens"),
        pytest.param(["a1"], 2, "a", StopReason.END_TOKEN, id="an end token when it was ended"),
        pytest.param(["aS", "Tc"], 3, "a", StopReason.STOP_STRING, id="a stop string in two replies"),
        pytest.param(["aST"], 3, "a", StopReason.STOP_STRING, id="a stop string when it was ended"),
        pytest.param(["abS", "T"], 4, "ab", StopReason.STOP_STRING, id="a stop string that ends with the last token"),
        pytest.param(["aS", "T1"], 3, "a", StopReason.STOP_STRING, id="an end token after a stop string"),
    ],
)
def test_what_a_publish_ended_is_completed(replies: list[str], tokens: int, text: str, stop: StopReason) -> None:
    client = _Replies(replies)
    limits = Limits(max_response_tokens=4, end_tokens=(ord("1"),), stop=("ST",))
    ask = Ask(prompt=[9, 8], seed=3, sampling=Sampling(), limits=limits, name="first")
    reading = Reading(tokenizer=_Letters(), vocabulary=128, version_of=int)
    response: Response = Sglang().sample(client, ask, reading, 10.0)
    assert (len(response.tokens), response.text, response.stop) == (tokens, text, stop)
    lengths = [number for number, reply in enumerate(replies) for _ in reply]
    assert response.version.tolist() == lengths[:tokens]
    so_far = [sum(len(each) for each in replies[:number]) for number in range(len(replies))]
    assert [len(prompt) for prompt in client.prompts] == [2 + each for each in so_far]
    assert client.most == [4 - each for each in so_far] and len(set(client.names)) == len(replies)


def test_a_response_fills_its_context_across_a_publish(server: FakeSglang) -> None:
    """SGLang leaves the last tokens of a context unused, and takes prompts that are shorter still."""
    limits = Limits(max_response_tokens=8, end_tokens=())
    with pytest.raises(InputError, match="expected a server with a context of 251 tokens"):
        fleet_of(server, context_tokens=251)
    prompt = torch.arange(2, 58)
    server.context = len(prompt) + 8 + 6
    fleet = fleet_of(server, context_tokens=len(prompt) + 8)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        server.holds, server.kept = True, 7
        fleet.submit([Request(prompt=prompt, seeds=(0,))], Sampling(), limits)
        _wait_until(lambda: server.held == 1)
        fleet.publish(fleet.policy.model.named_parameters(), 5)
        ((response,),) = [each.responses for each in fleet.poll()]
        assert response.version.tolist() == [4] * 7 + [5] and response.stop is StopReason.LENGTH
    finally:
        fleet.close()


def test_a_server_that_is_started_gets_the_context_that_it_leaves_unused_too() -> None:
    plan = StartPlan(
        python="python",
        model=Path("model"),
        port=1,
        key="key",
        dtype="bfloat16",
        context_tokens=100,
        sequences=1,
        lora_rank=0,
        device="cuda",
        arguments=(),
    )
    words, environment = Sglang().command(plan)
    assert words[words.index("--context-length") + 1] == "106"
    # The model's own limit may be 100.
    assert environment == {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def test_a_server_that_ends_every_request_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.rollouts.servers.dialects.sglang._BETWEEN_ASKS", 0.001)
    ask = Ask(prompt=[9], seed=0, sampling=Sampling(), limits=LIMITS, name="first")
    for reply in ("", RefusedError(499, "Request first was aborted")):
        client = _Replies([reply] * 1000)
        with pytest.raises(UnreachableError):
            Sglang().sample(client, ask, Reading(tokenizer=_Letters(), vocabulary=128, version_of=int), 0.05)


def test_a_long_response_that_a_publish_cut_is_decoded_a_few_times() -> None:
    """Decoding every beginning of it would take as long as sampling it."""
    tokenizer, limits = _Letters(), Limits(max_response_tokens=4096, end_tokens=(), stop=("ST",))
    client = _Replies(["a" * 1000, "b" * 3096])
    ask = Ask(prompt=[9], seed=0, sampling=Sampling(), limits=limits, name="first")
    response = Sglang().sample(client, ask, Reading(tokenizer=tokenizer, vocabulary=128, version_of=int), 10.0)
    assert len(response.tokens) == 4096 and tokenizer.calls < 30


def test_a_request_that_is_refused_for_another_reason_is_not_asked_again() -> None:
    ask = Ask(prompt=[9], seed=0, sampling=Sampling(), limits=LIMITS, name="first")
    client = _Replies([RefusedError(499, "Request first was aborted"), RefusedError(400, "the input is too long"), "ab"])
    with pytest.raises(RefusedError, match="too long"):
        Sglang().sample(client, ask, Reading(tokenizer=_Letters(), vocabulary=128, version_of=int), 10.0)
    assert len(client.names) == 2


class _Letters:
    calls = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return "".join(map(chr, tokens))


class _Replies(HttpClient):
    """A client whose server answers with these letters. A publish ended the only reply, and of several all but the last."""

    def __init__(self, replies: Sequence[str | Exception]) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.replies, self.prompts, self.most, self.names = list(replies), list[list[int]](), list[int](), list[str]()

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> dict[str, Any]:
        assert body is not None
        if seconds <= 0:
            raise UnreachableError("no answer in time")
        place = len(self.names)
        self.prompts.append(body["input_ids"])
        self.most.append(body["sampling_params"]["max_new_tokens"])
        self.names.append(body["rid"])
        reply = self.replies[place]
        if isinstance(reply, Exception):
            raise reply
        tokens = list(map(ord, reply))
        reason = "length" if 0 < place == len(self.replies) - 1 else "abort"
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": reason},
            "weight_version": str(place),
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}


def _wait_until(is_true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_an_old_sglang_is_refused(server: FakeSglang) -> None:
    server.version = "0.4.9"
    with pytest.raises(InputError, match=r"expected SGLang 0\.5\.11 or later at .*, got version '0\.4\.9'"):
        fleet_of(server)
