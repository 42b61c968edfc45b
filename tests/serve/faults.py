"""A server that misbehaves on purpose, for tests of its clients.

    plan = FaultPlan()
    with running(make_served(policy), wrap=plan.wrap(served)) as server:
        plan.add("status", status=500, times=2)          the next two requests to generate are answered with 500
        plan.add("slow", seconds=1.0, path="/resume")    so is the next request to that path, after a second
        ...
        assert plan.done == ["status", "status"]

Faults apply in the order in which they were added, each to the next `times` requests to its path, after letting `after` of
them pass. The app behind is the real one: what it answers is right until a fault changes it.

    slow            waits `seconds`, then answers
    silent          takes the request and never answers, for `seconds`
    status          answers with `status` and an error, without asking the app
    closed          closes the connection without asking the app
    lost            lets the app do the work, then closes the connection without an answer
    truncated       sends `share` of the answer (of a whole one or of a stream), then closes the connection
    wrong-tokens    other token ids than were sampled, in the vocabulary
    foreign-tokens  token ids beyond the vocabulary
    missing-token   one token less than log-probs
    nan             log-probs of null, as JSON writes NaN
    temperature     log-probs at `temperature` instead of that of the request
    repeated        the answer to the last request to this path once more, in place of its own
    twice           lets the app answer the request twice and sends the second answer
    stale           answers 200 to a reload of weights and loads nothing
    garbage         bytes that are no JSON
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from legato.rollouts.scoring import score_texts
from legato.serve.served import Served

GENERATE = "/inference/v1/generate"
KINDS = (
    *("slow", "silent", "status", "closed", "lost", "truncated", "wrong-tokens", "foreign-tokens", "missing-token", "nan"),
    *("temperature", "repeated", "twice", "stale", "garbage"),
)


@dataclass(slots=True)
class Fault:
    """One kind of misbehaviour for some requests."""

    kind: str
    path: str = GENERATE
    times: int = 1
    after: int = 0
    """How many requests to the path pass unharmed first."""
    seconds: float = 0.5
    status: int = 500
    share: float = 0.5
    temperature: float = 1.5
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class FaultPlan:
    """What is going to happen, what has happened, and which requests arrived."""

    faults: list[Fault] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """The kinds of faults that were applied, in order."""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """(path, JSON body) of every request."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, **options: Any) -> "FaultPlan":
        assert kind in KINDS, kind
        if kind == "stale":
            options.setdefault("path", "/collective_rpc")
        with self._lock:
            self.faults.append(Fault(kind, **options))
        return self

    def wrap(self, served: Served) -> Callable[[Any], Any]:
        """The wrapper for `RunningServer`."""
        return lambda app: Faulty(app, self, served)

    def take(self, path: str, body: Any) -> Fault | None:
        """The fault of the next request to a path; None: it is served as it should be."""
        with self._lock:
            self.requests.append((path, body))
            for fault in self.faults:
                if fault.path != path:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    return None
                fault.times -= 1
                if fault.times == 0:
                    self.faults.remove(fault)
                self.done.append(fault.kind)
                return fault
        return None


@dataclass(slots=True)
class _Answer:
    """An answer of the app, held back."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self.parts.append(message.get("body", b""))

    def replace(self, body: bytes) -> None:
        self.parts = [body]
        self.headers = [pair for pair in self.headers if pair[0].lower() != b"content-length"]
        self.headers.append((b"content-length", str(len(body)).encode()))


class Faulty:
    """An ASGI app around that of the server."""

    def __init__(self, app: Any, plan: FaultPlan, served: Served) -> None:
        self.app, self.plan, self.served = app, plan, served
        self._last: dict[str, _Answer] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        data = await _read(receive)
        try:
            body = json.loads(data) if data else None
        except ValueError:
            body = None
        fault = self.plan.take(scope["path"], body)
        if fault is None:
            answer = _Answer()

            async def send_and_keep(message: Any) -> None:
                await answer.take(message)
                await send(message)

            await self.app(scope, _again(data, receive), send_and_keep)
            self._last[scope["path"]] = answer
            return
        await self._misbehave(fault, body, data, scope, receive, send)

    async def _misbehave(self, fault: Fault, body: Any, data: bytes, scope: Any, receive: Any, send: Any) -> None:
        if fault.kind in ("slow", "silent"):
            await asyncio.sleep(fault.seconds)
        if fault.kind in ("silent", "closed"):
            send.__self__.transport.abort()  # uvicorn's own: ASGI has no word for it
            return
        answer = _Answer()
        if fault.kind == "status":
            error = {"error": {"message": "a fault of the plan", "type": "server_error", "param": None, "code": None}}
            headers = [(name.encode(), value.encode()) for name, value in fault.headers.items()]
            answer.status, answer.headers = fault.status, [(b"content-type", b"application/json"), *headers]
            answer.replace(json.dumps(error).encode())
        elif fault.kind == "stale":
            answer.status, answer.headers = 200, [(b"content-type", b"application/json")]
            answer.replace(b'{"results": [null]}')
        else:
            await self.app(scope, _again(data, receive), answer.take)
            if fault.kind == "twice":
                answer = _Answer()
                await self.app(scope, _again(data, receive), answer.take)
        if fault.kind == "lost":
            send.__self__.transport.abort()
            return
        if fault.kind == "repeated" and scope["path"] in self._last:
            answer = self._last[scope["path"]]
        if fault.kind == "garbage":
            answer.replace(b"\xff\xfe{not json")
        await self._change(fault, body, answer)
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        whole = b"".join(answer.parts)
        if fault.kind == "truncated":
            await send({"type": "http.response.body", "body": whole[: int(len(whole) * fault.share)], "more_body": True})
            await asyncio.sleep(0.05)
            send.__self__.transport.abort()
            return
        await send({"type": "http.response.body", "body": whole})

    async def _change(self, fault: Fault, body: Any, answer: _Answer) -> None:
        """Change the tokens or the log-probs of an answer of generate."""
        if fault.kind not in ("wrong-tokens", "foreign-tokens", "missing-token", "nan", "temperature"):
            return
        reply = json.loads(b"".join(answer.parts))
        for choice in reply["choices"]:
            tokens, entries = choice["token_ids"], choice["logprobs"]["content"]
            if fault.kind == "wrong-tokens":
                choice["token_ids"] = [(token + 7) % 60 + 3 for token in tokens]
                for entry, token in zip(entries, choice["token_ids"], strict=True):
                    entry["token_id"], entry["token"] = token, f"token_id:{token}"
            elif fault.kind == "foreign-tokens":
                choice["token_ids"] = [10**6, *tokens[1:]]
            elif fault.kind == "missing-token":
                choice["token_ids"] = tokens[:-1]
            elif fault.kind == "nan":
                entries[0]["logprob"] = None
            else:
                text = torch.tensor([*body["token_ids"], *tokens])
                policy = self.served.policy
                (scores,) = await self.served.thread.run(
                    lambda text=text, policy=policy: score_texts(policy, [text], [fault.temperature])
                )
                for entry, value in zip(entries, scores.logprobs[len(body["token_ids"]) - 1 :].tolist(), strict=True):
                    entry["logprob"] = value
        answer.replace(json.dumps(reply).encode())


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(data: bytes, receive: Any) -> Any:
    """A `receive` that gives the body once more, then what comes after it."""
    given = False

    async def receive_again() -> Any:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": data, "more_body": False}
        return await receive()

    return receive_again
