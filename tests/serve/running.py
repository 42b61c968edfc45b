"""Servers for tests: a small random model behind `legato serve`, in a thread of this process, on a free port."""

import asyncio
import contextlib
import copy
import functools
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import uvicorn

from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.render import Rendering
from legato.rollouts.servers.http import HttpClient
from legato.serve.app import application
from legato.serve.limits import ServeLimits
from legato.serve.served import Served
from legato.serve.server import allowed_hosts, listen, uvicorn_config
from legato.serve.weights import Checkpoints, Weights

KEY = "a-key-for-tests"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
END = 1
"""The id of <end>."""


def chat_tokenizer() -> Any:
    """The tokenizer of tiny models with a chat template and its two special tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_policy(seed: int = 3) -> Policy:
    """A tiny model whose distributions are neither flat nor certain, with a chat template. Its weights are its own."""
    made = _make_policy(seed)
    return replace(made, model=copy.deepcopy(made.model), tokenizer=copy.deepcopy(made.tokenizer), notes=[])


@functools.cache
def _make_policy(seed: int) -> Policy:
    tokenizer = chat_tokenizer()
    model = tiny_model(TinyShape(hidden=32, heads=2), vocabulary=len(tokenizer), seed=0)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.08 * torch.randn(weight.shape, generator=source))
    return load_policy(model, Loading(device="cpu", dtype="float32"), tokenizer=tokenizer)


def plain_engine(policy: Policy, rows: int = 64) -> LocalEngine:
    """The plain engine without its self-check, which tests/rollouts makes."""
    return LocalEngine(policy, rows, way="blocks")


def make_served(
    policy: Policy,
    *,
    engine: Engine | None = None,
    name: str = "tiny",
    version: str = "0",
    checkpoints: Checkpoints | None = None,
    **limits: Any,
) -> Served:
    engine = engine or plain_engine(policy)
    return Served(
        name=name,
        policy=policy,
        engine=engine,
        rendering=Rendering(tokenizer=policy.tokenizer),
        end_tokens=(END, policy.tokenizer.convert_tokens_to_ids("<|im_end|>")),
        limits=ServeLimits(**{"context_tokens": 256, "response_tokens": 64, **limits}),
        weights=Weights(policy, engine, version, checkpoints=checkpoints),
        software="test",
    )


@dataclass(slots=True)
class RunningServer:
    """A server that answers. `wrap` puts an ASGI app around it, as faults.py does."""

    served: Served
    wrap: Callable[[Any], Any] = lambda app: app
    key: str = KEY
    port: int = 0
    follow_seconds: float | None = None
    _clients: list[HttpClient] = field(default_factory=list)
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    def start(self) -> "RunningServer":
        listening = listen("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        hosts = allowed_hosts("127.0.0.1", self.port)
        app = application(self.served, key=self.key, hosts=hosts, follow_seconds=self.follow_seconds)
        config = uvicorn_config(self.wrap(app))
        config.timeout_graceful_shutdown = 1
        server = self._server = uvicorn.Server(config)

        def run() -> None:
            with contextlib.closing(listening):
                asyncio.run(server.serve(sockets=[listening]))

        self._thread = threading.Thread(target=run, name="test-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        return self

    def stop(self, *, hard: bool = False) -> None:
        """Stop the server; `hard`: without waiting for requests in flight, as a crash would."""
        if self._server is not None and self._thread is not None:
            self._server.force_exit = hard
            self._server.should_exit = True
            self._thread.join(30)
            assert not self._thread.is_alive(), "the server did not stop"
        self._server = None
        if not hard:
            for client in self._clients:
                client.drop_connections()

    def restart(self, served: Served) -> None:
        """Stop and start again on the same port, with another `Served` over the same or other weights."""
        self.stop(hard=True)
        self.served = served
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> HttpClient:
        """A client whose connections are closed with the server."""
        self._clients.append(HttpClient(self.url, self.key))
        return self._clients[-1]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Reply":
        """One request on a connection of its own; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, data, {name: value for name, value in sent.items() if value})
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON of a POST that must succeed."""
        reply = self.ask("POST", path, body, **headers)
        assert reply.status == 200, reply.body
        return reply.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """The JSON of all events of a stream, which must end with [DONE]."""
        reply = self.ask("POST", path, body)
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.body
        lines = reply.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str] = field(repr=False)
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error of an answer, after checking that it has the shape of OpenAI's."""
        body = self.json()
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
        assert isinstance(body["error"]["message"], str) and body["error"]["message"]
        found: dict[str, Any] = body["error"]
        return found


@contextlib.contextmanager
def running(served: Served, **options: Any) -> Iterator[RunningServer]:
    server = RunningServer(served, **options).start()
    try:
        yield server
    finally:
        server.stop()
