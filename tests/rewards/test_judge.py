"""The judge: an endpoint of OpenAI's chat API is asked once per question, in parallel, within a budget; faults are named."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.rollout import Problem, Rollout, StopReason, Unscorable
from legato.errors import InputError
from legato.rewards.judge import _DESKS, JudgeReward
from legato.rewards.scoring import judge_all


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answers = [lambda text: f"It holds.\nSCORE: {0.5 if 'half' in text else 1}"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        answers = self.server.answers
        answer = (answers.pop(0) if len(answers) > 1 else answers[0])(body["messages"][0]["content"])
        if isinstance(answer, int):
            self.send_error(answer)
            return
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    _DESKS.clear()
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def rollout(text: str) -> Rollout:
    one = torch.ones(1)
    return Rollout(
        problem=Problem(prompt="2+3=", answer="5"), rollout_id=0, prompt_tokens=one.long(), tokens=one.long(),
        sampler_logprobs=-one, version=one.long(), text=text, stop=StopReason.END_TOKEN, temperature=1.0, mask=one.bool(),
        turn=0 * one.long(), author=0 * one.long(),
    )  # fmt: skip


def test_equal_questions_are_asked_once_and_scores_are_read(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    judge = JudgeReward(url=endpoint.url, model="m")
    scores = judge_all(judge, [rollout("5"), rollout("half {answer}"), rollout("5")])
    assert scores == [{"": 1.0}, {"": 0.5}, {"": 1.0}] and len(endpoint.asked) == 2
    assert endpoint.asked[0]["model"] == "m" and set(endpoint.keys) == {"Bearer secret"}
    contents = sorted(each["messages"][0]["content"] for each in endpoint.asked)
    assert all("2+3=" in text and "5" in text for text in contents) and "half {answer}" in "".join(contents)
    assert judge_all(judge, [rollout("5")]) == [{"": 1.0}] and len(endpoint.asked) == 2


def test_the_cache_outlives_the_process(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    judge = JudgeReward(url=endpoint.url, model="m", cache=str(file), scale=2.0)
    assert judge_all(judge, [rollout("5")]) == [{"": 0.5}]
    file.write_text(file.read_text() + '{"key": "cut')
    _DESKS.clear()
    assert judge_all(judge, [rollout("5")]) == [{"": 0.5}] and len(endpoint.asked) == 1


def test_a_budget_ends_the_questions_and_says_so(endpoint: Endpoint) -> None:
    judge = JudgeReward(url=endpoint.url, model="m", budget=2, parallel=1)
    scores = judge_all(judge, [rollout(str(number)) for number in range(4)])
    assert scores[:2] == [{"": 1.0}] * 2 and len(endpoint.asked) == 2
    assert scores[2] == Unscorable("the budget of the judge is spent (2 questions)")


def test_faults_are_asked_again_and_then_named(endpoint: Endpoint) -> None:
    endpoint.answers = [lambda text: 503, lambda text: "SCORE: 1"]
    judge = JudgeReward(url=endpoint.url, model="m", attempts=2)
    assert judge_all(judge, [rollout("a")]) == [{"": 1.0}]
    endpoint.answers = [lambda text: "I cannot say"]
    (verdict,) = judge_all(judge, [rollout("b")])
    assert isinstance(verdict, Unscorable) and verdict.reason == "the judge gave no score: 'I cannot say'"
    endpoint.answers = [lambda text: 500]
    (verdict,) = judge_all(judge, [rollout("c")])
    assert isinstance(verdict, Unscorable) and verdict.reason.startswith("the judge did not answer: ValueError: HTTP 500")


def test_an_endpoint_that_is_not_there_is_named() -> None:
    judge = JudgeReward(url="http://127.0.0.1:9/v1", model="m", attempts=1, seconds=1.0)
    (verdict,) = judge_all(judge, [rollout("a")])
    assert isinstance(verdict, Unscorable) and "the judge did not answer" in verdict.reason


def test_a_judge_may_score_each_turn(endpoint: Endpoint) -> None:
    judge = JudgeReward(url=endpoint.url, model="m", per="turn")
    talk = replace(rollout("5"), dialogue=("half", "no:", "5"))
    endpoint.answers = [lambda text: f"SCORE: {0.25 if text.count('no:') else 0.5}"]
    first, second = judge_all(judge, [talk, rollout("6")])
    assert (first.turns, second.turns) == ((0.5, 0.25), (0.5,))  # type: ignore[union-attr]
    asked = sorted([each["messages"][0]["content"] for each in endpoint.asked], key=len)
    assert len(asked) == 3 and "half\nno:\n5" in asked[-1] and "no:" not in asked[0] + asked[1]
    endpoint.answers = [lambda text: "no" if "no:" in text else "SCORE: 1"]
    (verdict,) = judge_all(judge, [replace(talk, text="7", dialogue=("7", "no:", "8"))])
    assert isinstance(verdict, Unscorable) and verdict.reason == "the judge gave no score: 'no'"


def test_all_questions_that_may_be_in_flight_are(endpoint: Endpoint) -> None:
    together = threading.Barrier(12)
    endpoint.answers = [lambda text: (together.wait(20), "SCORE: 1")[1]]
    judge = JudgeReward(url=endpoint.url, model="m", parallel=12)
    assert judge_all(judge, [rollout(str(number)) for number in range(12)]) == [{"": 1.0}] * 12


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "localhost"}, "expected http://... or https://..., got 'localhost'"),
        ({"question": "right?"}, "expected a text with {response}"),
        ({"score": r"\d+"}, "expected a group in parentheses"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("{", r"\{").replace("}", r"\}")):
        JudgeReward(**{"url": "http://x/v1", "model": "m", **options})
