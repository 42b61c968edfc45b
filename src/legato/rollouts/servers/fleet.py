"""An engine over one or many servers: requests are spread, failures are retried, dead servers are dropped and taken back.

    fleet = Fleet(policy, Vllm(), settings)          addresses are checked; servers of the run's own start with `open`
    fleet.publish(weights, version)                  a folder of weights, loaded by all servers, then compared (`probe.py`)
    fleet.submit(...); fleet.poll()                  one request a seed; each is answered once

Every response is asked for with its own seed, token ids in and out. A request that fails is sent again, after a pause, to
another server where there is one; the first answer counts and a later one is dropped. A server that fails is asked
whether it is alive, and so is every server now and then; one that is not is dropped, its requests go to the others, and it
is looked at again and again until it answers and has the weights of the current version. With fewer servers than the quorum
the run pauses, says so, and ends after `pause_seconds` with its state saved.

What blocks runs in threads (`transport.py`); all state is changed by the callers of `submit`, `poll` and `publish`, which
may be different threads.

Of several ranks each has a fleet over the same servers and asks them for its own share. Rank 0 alone starts them, publishes
and brings them back (`agreement.py`); a thread of its looks after them while it has nothing to sample itself.
"""

import math
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.core.open_files import raise_file_limit
from legato.core.user_code import RUN, StopRequestedError
from legato.core.world import OneProcess, World, on_first_rank
from legato.errors import InputError, shorten
from legato.policy.policy import Policy
from legato.rollouts.engine import (
    Capabilities,
    EnginePlace,
    Finished,
    Handle,
    JobEngine,
    Limits,
    Request,
    Response,
)
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.agreement import Loaded, merge_counts, share_loaded
from legato.rollouts.servers.backoff import JITTER, seconds_to_wait
from legato.rollouts.servers.dialect import UNKNOWN_VERSION, Ask
from legato.rollouts.servers.dialects.base import Dialect, Reading, ServerFacts, StartPlan
from legato.rollouts.servers.errors import BusyError, RefusedError, ServerError, TooManyFilesError, UnreachableError
from legato.rollouts.servers.folders import WeightFolders
from legato.rollouts.servers.http import HttpClient
from legato.rollouts.servers.member import Attempt, Check, Counts, Look, Published, Rejoin, Server, State, Ticket
from legato.rollouts.servers.probe import Probe, ProbeReply
from legato.rollouts.servers.settings import ServerSettings
from legato.rollouts.servers.spread import Spread
from legato.rollouts.servers.started import StartedServer, free_port, unused_devices
from legato.rollouts.servers.transport import Threads, Transport

KEY_VARIABLE = "LEGATO_SERVER_KEY"
"""The environment variable with the key of servers that are given by address."""
FAILURES = 10
"""How often a request may fail before the run ends."""
STRIKES = 5
"""Failures in a row after which a server is dropped although it says that it is alive."""
CONTACT_SECONDS = 30.0
FIRST_CHECK, LONGEST_CHECK = 0.5, 30.0
"""Seconds before a dropped server is looked at again; doubled each time."""
RESTARTS = 3
"""Attempts to bring back a server of the run's own that may fail in a row. All but the first restart it."""
LOOK_SECONDS = 5.0
"""How often servers are asked whether they are alive: one that hangs would else be noticed after `request_seconds`."""
SAY_SECONDS = 60.0
"""How often a pause is told again."""
WAKE_SECONDS = 0.5
"""The longest wait in one go: signals are handled in between."""


class NoServersError(InputError):
    """Too few servers have answered for too long."""


class Fleet(JobEngine):
    """Samples at servers that hold weights of their own."""

    def __init__(
        self,
        policy: Policy,
        dialect: Dialect,
        settings: ServerSettings,
        *,
        rows_at_once: int = 256,
        context_tokens: int = 0,
        transport: Transport | None = None,
        seed: int | None = None,
        world: World | None = None,
    ) -> None:
        """`context_tokens`: the most tokens of a prompt with its response. `seed`: of pauses, for tests.

        `world`: the ranks that ask the same servers; every rank makes its fleet, opens it and publishes together.
        """
        super().__init__()
        # Every request in flight has a connection of its own.
        raise_file_limit()
        self.policy, self.dialect, self.settings = policy, dialect, settings
        self.world = OneProcess() if world is None else world
        self._sequences, self.context_tokens = rows_at_once, context_tokens
        # What a server may have in flight is divided among the ranks.
        self.rows_at_once = -(-rows_at_once // self.world.size)
        self.name = dialect.name
        # One lock guards everything, and `poll` gives it up while it waits.
        self.capabilities = Capabilities(truncation=dialect.truncation, holds_weights=True, concurrent=True)
        self.transport: Transport = Threads() if transport is None else transport
        self.lora = hasattr(policy.model, "disable_adapter")
        self.servers: list[Server] = []
        self.place: EnginePlace | None = None
        self._random = random.Random(seed)  # the global generator belongs to the run
        self._token: str = on_first_rank(self.world, lambda: secrets.token_hex(4))
        """Part of all names of weights: two runs that publish to one server notice each other."""
        self._reading = Reading(tokenizer=policy.tokenizer, vocabulary=policy.vocabulary, version_of=self._version_of)
        self._lock = threading.RLock()
        self._pending: deque[Ticket] = deque()
        """Tickets that no server has."""
        self._taken = 0
        """How many requests servers have taken so far, whatever became of them."""
        self._spread = Spread()
        self._folders: WeightFolders | None = None
        self._probe: Probe | None = None
        self._published: Published | None = None
        """What servers load: one value, which other threads read."""
        self._publishes = 0
        self._base: Path | None = None
        """The weights without adapters, on which servers of the run's own start."""
        self._adapters = False
        self._own_folder: Path | None = None
        self._failure: Exception | None = None
        self._next_look = 0.0
        self._paused_since: float | None = None
        self._said_at = 0.0
        self._paused_seconds = 0.0
        self._publish_seconds = 0.0
        self._closed = threading.Event()
        key = os.environ.get(KEY_VARIABLE)
        for number, url in enumerate(settings.urls):
            self.servers.append(Server(number, HttpClient(url, key)))
        if settings.urls:
            try:
                self._contact()
            except BaseException:
                for server in self.servers:
                    server.client.close()
                raise

    # Start and end

    def _contact(self) -> None:
        """Check the servers given by address; InputError if one cannot be used, or too few answer."""
        facts = self._at_all(self.servers, lambda server: self.dialect.facts(server.client, CONTACT_SECONDS))
        for server, result in zip(self.servers, facts, strict=True):
            if isinstance(result, ServerFacts):
                self._accept(server, result)
                server.state = State.UP
            elif isinstance(result, RefusedError) and result.status in (401, 403):
                raise InputError(
                    f"expected a server at {server.client.url} that takes requests, got {result} (rollouts.servers.urls);"
                    f" give its key in {KEY_VARIABLE}"
                )
            elif isinstance(result, ServerError):
                server.problem = str(result)
            else:
                raise result
        self._check_quorum_at_start()
        # Ranks may have reached different servers.
        self._adapters = on_first_rank(self.world, self._decide_adapters)

    def _at_all(self, servers: Sequence[Server], work: Callable[[Server], Any]) -> list[Any]:
        """What `work` returns or raises for each server, all at once."""
        return self.transport.all([partial(work, server) for server in servers])

    def _check_quorum_at_start(self) -> None:
        answering = [server for server in self.servers if server.state is State.UP]
        if len(answering) < self.settings.quorum:
            problems = "; ".join(f"{s.client.url}: {s.problem}" for s in self.servers if s.state is not State.UP)
            raise InputError(
                f"expected at least {self.settings.quorum} of {len(self.servers)} servers to answer"
                f" (rollouts.servers.quorum), got {len(answering)}: {shorten(problems, 1500)}; correct"
                f" rollouts.servers.urls, or start the servers with {self.dialect.option}"
            )

    def _accept(self, server: Server, facts: ServerFacts) -> None:
        """InputError if a server cannot have the policy's model."""
        where = f"{server.client.url} ({facts.software}, {facts.model})"
        if facts.vocabulary is not None and facts.vocabulary != self.policy.vocabulary:
            raise InputError(
                f"expected a server of {self.policy.name}, whose vocabulary has {self.policy.vocabulary} tokens, got one"
                f" with {facts.vocabulary} at {where}; serve the model that is trained"
            )
        if facts.context_tokens is not None and facts.context_tokens < self.context_tokens:
            raise InputError(
                f"expected a server with a context of {self.context_tokens} tokens (policy.max_prompt_tokens +"
                f" rollouts.max_response_tokens), got {facts.context_tokens} at {where}; lower one of them, or start the"
                " server with a longer context"
            )
        server.facts = facts

    def _decide_adapters(self) -> bool:
        """Whether adapters are published as adapters. All servers get the same."""
        wanted, facts = self.settings.lora, [server.facts for server in self.servers if server.facts is not None]
        takes = bool(facts) and all(each.adapters for each in facts)
        if self.lora and wanted == "adapters" and not takes:
            raise InputError(
                f"expected servers that take adapters for rollouts.servers.lora = 'adapters', got {self.dialect.name}"
                " without; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or use"
                " rollouts.servers.lora=merged"
            )
        return self.lora and takes and wanted != "merged"

    def open(self, place: EnginePlace) -> None:
        """Start the servers of the run's own; weights and logs go to the run's folder."""
        with self._lock:
            self.place = place
            chosen = self.settings.folder
            root = place.folder / "weights" if chosen is None else Path(chosen).expanduser() / self._token
            root = root.absolute()
            self._folders = WeightFolders(self.policy, root, untied=self.dialect.reads_untied)
            self._probe = Probe(self.policy, self.settings.probe_tolerance, self._folders.dtype)
            if self.settings.start:
                self._start_servers(place)
            if self.world.size > 1 and self.world.rank == 0:
                threading.Thread(target=self._attend, name="fleet-attendant", daemon=True).start()

    def _start_servers(self, place: EnginePlace) -> None:
        """Start the servers on rank 0; the other ranks get their addresses."""
        hosts = sorted(set(self.world.gather(socket.gethostname())))
        if len(hosts) > 1:
            raise InputError(
                f"expected processes on one machine with rollouts.servers.start, got {', '.join(hosts)}: servers that a run"
                " starts listen on loopback alone; start them yourself and name them in rollouts.servers.urls"
            )
        weights = (place.weights or self.policy.model.named_parameters)()
        if self.world.rank == 0:
            self._start_processes(place, weights)
        else:
            deque(weights, maxlen=0)  # all ranks gather divided weights together
        told = on_first_rank(self.world, lambda: [[s.client.url, s.started.plan.key] for s in self.servers if s.started])
        if self.world.rank:
            for number, (url, key) in enumerate(told):
                self.servers.append(Server(number, HttpClient(url, key), is_own=True, state=State.UP))
        self._adapters = on_first_rank(self.world, lambda: self._adapters)

    def _start_processes(self, place: EnginePlace, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self._folders is not None
        # `legato serve` of a model folder takes whole weights alone.
        as_adapters = self.lora and self.settings.lora != "merged" and self.dialect.name != "legato"
        self._base = self._folders.write_base(weights) if as_adapters else None
        model = self._base or self._folders.write(weights, f"{self._token}.start")
        rank = max((max(each.r.values()) for each in _lora_layers(self.policy.model)), default=0) if as_adapters else 0
        plan = StartPlan(
            python=self.settings.python or sys.executable,
            model=model,
            port=0,
            key=secrets.token_urlsafe(24),
            dtype=str(self._folders.dtype).removeprefix("torch."),
            context_tokens=max(self.context_tokens, 64),
            sequences=self._sequences,
            lora_rank=rank,
            device=self.policy.device.type,
            arguments=self.settings.arguments,
        )
        count = self.settings.start
        devices = self.settings.devices or (unused_devices(count) if self.policy.device.type == "cuda" else ())
        place.say(f"starting {count} {self.dialect.name} server{'s' if count > 1 else ''}; logs in {place.folder}")
        for number in range(count):
            port = free_port()
            started = StartedServer(
                self.dialect,
                replace(plan, port=port),
                place.folder / f"server-{number}.log",
                devices[number % len(devices)] if devices else None,
            )
            client = HttpClient(f"http://127.0.0.1:{port}", plan.key)
            self.servers.append(Server(number, client, started, is_own=True))
        try:
            for server in self.servers:
                assert server.started is not None
                server.started.start(model)
            for server, result in zip(self.servers, self._at_all(self.servers, self._await_start), strict=True):
                if isinstance(result, ServerError):
                    remedy = "read its log"
                    if "No module named" in str(result) and self.settings.python is None:
                        remedy = f"name the Python that has {self.dialect.name} in rollouts.servers.python"
                    raise InputError(
                        f"expected a {self.dialect.name} server to start, got {result} (rollouts.servers.start); {remedy}"
                    )
                if isinstance(result, Exception):
                    raise result
                self._accept(server, result)
                server.state = State.UP
            self._adapters = self._decide_adapters()
        except BaseException:
            self._end_servers()
            raise
        place.say(f"{self.dialect.name}: {', '.join(s.facts.software for s in self.servers[:1] if s.facts)} is ready")

    def _await_start(self, server: Server) -> ServerFacts:
        assert server.started is not None
        server.started.wait_until_ready(server.client, self.settings.start_seconds, lambda: RUN.asked_to_end is not None)
        return self.dialect.facts(server.client, CONTACT_SECONDS)

    def _end_servers(self) -> None:
        started = [server.started for server in self.servers if server.started is not None]
        if started:
            self.transport.all([each.end for each in started])

    def close(self) -> None:
        """End the servers of the run's own and close all connections. Outstanding requests have no response."""
        self._closed.set()
        with self._lock:
            self.jobs.clear()
            self._pending.clear()
            self.transport.close()
            for server in self.servers:
                server.client.close()
            self._end_servers()
            if self._folders is not None and self.world.rank == 0:
                shutil.rmtree(self._folders.root, ignore_errors=True)
            if self._own_folder is not None:
                shutil.rmtree(self._own_folder, ignore_errors=True)

    def _ensure_open(self) -> None:
        if self.place is None:
            self._own_folder = Path(tempfile.mkdtemp(prefix="legato-fleet-"))
            self.open(EnginePlace(folder=self._own_folder))

    def _say(self, text: str) -> None:
        assert self.place is not None
        self.place.say(text)

    # Weights

    def _new_name(self, version: int) -> str:
        """A name for weights. Versions repeat when a run goes back to an earlier checkpoint; names do not."""
        self._publishes += 1
        return f"{self._token}.{version}.{self._publishes}"

    def _version_of(self, name: Any) -> int:
        """The version of the policy that a name of weights stands for; UNKNOWN_VERSION if this run did not give it."""
        token, _, rest = str(name).partition(".")
        number = rest.partition(".")[0]
        known = token == self._token and number.isascii() and number.isdigit() and len(number) < 19
        return int(number) if known else UNKNOWN_VERSION

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, let every server load them, and compare. Requests in flight go on with the new weights.

        A server that fails is dropped. What must end the run is raised by the next `submit` or `poll`: a trainer that
        publishes is in the middle of a step, and its state could not be saved.

        Of several ranks rank 0 writes and loads, and all compare: where layers are divided, all must score together.
        """
        self._ensure_open()
        with self._lock:
            assert self._folders is not None and self._probe is not None
            began = self.transport.now()
            name = self._new_name(version)
            if self.world.rank == 0:
                self._folders.write(weights, name, adapters=self._adapters)
            elif not self._adapters:
                deque(weights, maxlen=0)  # all ranks gather divided weights together
            # After the folder is whole: a server that comes back meanwhile reads both in its own thread.
            self.version = version
            self._published = Published(version, self._folders.path_of(name), name)
            self._probe.score()
            servers = self._servers_to_load()
            self._judge_all(servers, self._load_all(servers))
            self._publish_seconds += self.transport.now() - began

    def _servers_to_load(self) -> list[Server]:
        """The servers that get new weights: those that rank 0 reaches. All ranks know of them what rank 0 knows."""
        answering = [server.number for server in self.servers if server.state in (State.UP, State.SUSPECT)]
        told = on_first_rank(self.world, lambda: [self._describe_loads(self.servers[number]) for number in answering])
        numbers = [number for number, _, _ in told]
        for server in self.servers:
            if server.number in numbers and server.state is State.DOWN:
                server.state, server.checks, server.problem = State.UP, 0, ""
            elif server.number in answering and server.number not in numbers:
                self._drop(server, "rank 0 does not reach it")
        for number, reloads, scores in told:
            server = self.servers[number]
            server.reloads, server.scores = reloads, None if scores is None else torch.tensor(scores)
        return [self.servers[number] for number in numbers]

    @staticmethod
    def _describe_loads(server: Server) -> list[Any]:
        return [server.number, server.reloads, None if server.scores is None else server.scores.tolist()]

    def _load_all(self, servers: Sequence[Server]) -> list[Loaded]:
        """Load the current weights into servers, all at once; what became of each, on all ranks."""
        for server in servers:
            if not server.reloads:
                # It is restarted, which ends its requests: they are no failures of it.
                self._take_requests_back(server)
        results = self._at_all(servers, self._load) if self.world.rank == 0 else []
        for result in results:
            if not isinstance(result, ProbeReply | ServerError | InputError):
                raise result
        return share_loaded(self.world, results)

    def _load(self, server: Server) -> ProbeReply:
        """Load the current weights into a server and ask what it computes; in a thread."""
        assert self._published is not None
        if server.reloads:
            # One that hangs would hold up the run, and a signal to it, for `publish_seconds`.
            self._check_alive(server)
            self._load_folder(server, self._published)
        else:
            self._restart(server, self._published)
        return self._ask_probe(server)

    def _load_folder(self, server: Server, published: Published) -> None:
        seconds = self.settings.publish_seconds
        self.dialect.load(server.client, published.folder, published.name, adapters=self._adapters, seconds=seconds)

    def _restart(self, server: Server, published: Published) -> None:
        """Start a server of the run's own again, on published weights; in a thread."""
        assert server.started is not None
        server.client.drop_connections()
        server.started.start(self._base if self._adapters and self._base is not None else published.folder)
        if self._closed.is_set():
            server.started.end()  # `close` has run already and did not see this process
            raise ServerError("the run has ended")
        server.started.wait_until_ready(server.client, self.settings.start_seconds, lambda: RUN.asked_to_end is not None)
        if self._adapters:
            self._load_folder(server, published)
        else:
            self.dialect.rename(server.client, published.name, CONTACT_SECONDS)

    def _ask_probe(self, server: Server, *, sample: bool = True) -> ProbeReply:
        assert self._probe is not None
        seconds = min(self.settings.request_seconds, 120.0)
        name = f"probe-{uuid.uuid4().hex}"
        return self._probe.ask(self.dialect, server.client, self._reading, name, seconds, sample=sample)

    def _judge_all(self, servers: Sequence[Server], results: Sequence[Loaded]) -> None:
        """Take over servers that have the weights, drop those that failed, restart those that kept old weights."""
        again: list[tuple[Server, str]] = []
        problems: list[str | None] = []
        for server, result in zip(servers, results, strict=True):
            problems.append(self._judge(server, result, server.scores) if isinstance(result, ProbeReply) else None)
        problems = on_first_rank(self.world, lambda: problems)  # ranks that disagreed would wait for each other
        for server, result, problem in zip(servers, results, problems, strict=True):
            if not isinstance(result, ProbeReply):
                self._drop_after_load(server, result)
            elif problem is not None:
                again.append((server, problem))
        own = [(server, problem) for server, problem in again if server.is_own and server.reloads]
        for server, problem in again:
            if (server, problem) not in own:
                self._fail(self._not_taken(server, problem))
        # A rank may have failed alone, in a request of its own.
        if not own or self.world.agree(int(self._failure is not None)):
            return
        for server, problem in own:
            self._say(f"{server.client.url}: {problem}. It is restarted at every publish from now on")
            server.reloads = False
            server.counts.restarts += 1
        for (server, problem), result in zip(own, self._load_all([server for server, _ in own]), strict=True):
            if not isinstance(result, ProbeReply):
                self._drop_after_load(server, result)
            elif self._judge(server, result, None) is not None:
                self._fail(self._not_taken(server, f"{problem}; nor did it after a restart"))

    def _judge(self, server: Server, reply: ProbeReply, last: Tensor | None) -> str | None:
        """Note what a server computes; returns what is wrong with it."""
        assert self._probe is not None
        verdict = self._probe.judge(reply, last)
        server.gap = verdict.gap
        if verdict.problem is None:
            server.version, server.scores = self.version, reply.scores
            if server.state is State.SUSPECT:
                server.state = State.UP  # it has just answered, whatever a check that began before says
        return verdict.problem

    def _drop_after_load(self, server: Server, result: ServerError | InputError) -> None:
        if isinstance(result, InputError | RefusedError):
            # It will refuse the same weights again.
            self._fail(InputError(f"expected {server.client.url} to load version {self.version}, got {result}"))
        else:
            self._drop(server, f"it did not load version {self.version}: {result}")

    def _not_taken(self, server: Server, problem: str) -> InputError:
        software = server.facts.software if server.facts is not None else self.dialect.name
        assert self._folders is not None
        remedy = "see that the server reads the same folder and that nobody else loads weights into it"
        if "temperature" in problem:
            remedy = f"start it with {self.dialect.option}"
        elif not server.is_own and (self._folders.tied or self.policy.routers is not None):
            what = "mixtures of experts" if self.policy.routers is not None else "tied output layers"
            remedy = (
                f"some servers (vLLM on a CPU) do not reload {what}: let the run start and restart its servers"
                " (rollouts.servers.start) or serve a model without them"
            )
        return InputError(f"{problem} ({server.client.url}, {software}, version {self.version}); {remedy}")

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    # Requests

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        self._ensure_open()
        if self._published is None:
            self.publish(self.policy.model.named_parameters(), self.version)
        with self._lock:
            self._raise_failure()
            handles = super().submit(requests, sampling, limits)
            for handle in handles:
                job = self.jobs[handle]
                self._pending.extend(Ticket(job, place, self.version) for place in range(len(job.request.seeds)))
            self._dispatch(self.transport.now())
            return handles

    def cancel(self, handle: Handle) -> None:
        with self._lock:
            super().cancel(handle)

    def poll(self) -> list[Finished]:
        while True:
            with self._lock:
                self._raise_failure()
                if finished := self.report_complete():
                    return finished
                if not self.jobs:
                    return []
                now = self.transport.now()
                self._watch(now)
                self._dispatch(now)
                wait = self._seconds_to_wait(now)
            results = self.transport.wait(wait)
            with self._lock:
                for key, result in results:
                    self._take(key, result)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _seconds_to_wait(self, now: float) -> float:
        times = [ticket.not_before for ticket in self._pending if ticket.not_before > now]
        times += [server.next_check for server in self.servers if server.state is State.DOWN and not server.checking]
        return min(WAKE_SECONDS, max(0.0, min(times, default=now + WAKE_SECONDS) - now))

    def _dispatch(self, now: float) -> None:
        """Give waiting tickets to servers, and send what they may have in flight."""
        taking = {server.number: server for server in self.servers if server.takes}
        if not taking or self._answering() < self.settings.quorum:
            return
        taking = {number: server for number, server in taking.items() if server.busy_until <= now} or taking
        wanted = [ticket for ticket in self._pending if self._is_wanted(ticket)]
        self._pending = deque(ticket for ticket in wanted if ticket.not_before > now)
        due: dict[Handle, list[Ticket]] = {}
        for ticket in wanted:
            if ticket.not_before <= now:
                due.setdefault(ticket.job.handle, []).append(ticket)
        # A group stays together unless it is more than a server's share.
        share = -(-sum(map(len, due.values())) // len(taking))
        for tickets in due.values():
            for start in range(0, len(tickets), share):
                loads = {number: server.load for number, server in taking.items()}
                number = self._spread.choose(tickets[0].job.request.prompt, loads)
                taking[number].queue.extend(tickets[start : start + share])
        # Own requests first, so that a group stays together; then what waits for servers that are full.
        for source_of in (lambda server: server, lambda server: max(self.servers, key=lambda each: len(each.queue))):
            for server in taking.values():
                while len(server.running) < self.rows_at_once:
                    upcoming = self._next_ticket(source_of(server))
                    if upcoming is None:
                        break
                    self._send(server, upcoming, now)

    def _next_ticket(self, source: Server) -> Ticket | None:
        """The next ticket of a server's queue that is still wanted."""
        while source.queue:
            ticket = source.queue.popleft()
            if self._is_wanted(ticket):
                return ticket
        return None

    def _is_wanted(self, ticket: Ticket) -> bool:
        return not ticket.done and self.jobs.get(ticket.job.handle) is ticket.job

    def _send(self, server: Server, ticket: Ticket, now: float) -> None:
        attempt = Attempt(ticket, server, server.life, now)
        server.running.add(attempt)
        job = ticket.job
        ask = Ask(
            prompt=job.request.prompt.tolist(),
            seed=job.request.seeds[ticket.place],
            sampling=job.sampling,
            limits=job.limits,
            name=uuid.uuid4().hex,
        )
        self.transport.send(attempt, partial(self._sample, server, ask))

    def _sample(self, server: Server, ask: Ask) -> Response:
        """A response of a server; in a thread."""
        response = self.dialect.sample(server.client, ask, self._reading, self.settings.request_seconds)
        server.answered_at = self.transport.now()
        return response

    def _take(self, key: Attempt | Check | Look | Rejoin, result: Any) -> None:
        """Take a result over: of a request, of a check, or of a server that may come back."""
        if isinstance(result, Exception) and not isinstance(result, ServerError):
            raise result  # an error of this process
        match key:
            case Attempt():
                self._take_answer(key, result)
            case Check():
                self._take_check(key, result)
            case Look():
                self._take_look(key, result)
            case Rejoin():
                self._take_rejoin(key, result)

    def _take_answer(self, attempt: Attempt, result: Any) -> None:
        server, ticket = attempt.server, attempt.ticket
        server.running.discard(attempt)
        self._taken += not isinstance(result, BusyError)
        if not self._is_wanted(ticket):
            server.counts.duplicates += int(ticket.done and isinstance(result, Response))
            return
        if isinstance(result, Response):
            problem = self._wrong_version(result, ticket)
            if problem is None:
                ticket.done = True
                ticket.job.responses[ticket.place] = replace(result, server=str(server.number))
                counts = server.counts
                counts.responses += 1
                counts.tokens += len(result.tokens)
                counts.seconds += self.transport.now() - attempt.started
                server.strikes, server.busy_until = 0, -math.inf
                return
            result = _WrongVersionError(problem)
        server.counts.retries += 1
        if attempt.life == server.life:
            self._strike(server, result)
        if not attempt.over:
            self._retry(ticket, server, result)

    def _wrong_version(self, response: Response, ticket: Ticket) -> str | None:
        """What is wrong with the versions of a response; None if every token has one that it may have."""
        low, high = int(response.version.min()), int(response.version.max())
        if ticket.version <= low and high <= self.version:
            return None
        shown = "weights that this run did not name" if low == UNKNOWN_VERSION else f"versions {low} to {high}"
        return f"expected tokens of versions {ticket.version} to {self.version}, got tokens of {shown}"

    def _retry(self, ticket: Ticket, server: Server, error: ServerError) -> None:
        """Send a request again after a pause, or end the run if that does not help."""
        now = self.transport.now()
        if isinstance(error, BusyError):
            self._wait_for_busy(ticket, server, error, now)
            return
        ticket.refusals = 0
        ticket.failures += 1
        if isinstance(error, RefusedError):
            where = f"{server.client.url}, rollouts.engine = {self.dialect.name!r}"
            self._fail(InputError(f"expected a response, got a refusal: {error} ({where})"))
            return
        if ticket.failures >= FAILURES:
            self._fail(
                InputError(
                    f"expected a response from one of {len(self.servers)} servers, got none in {ticket.failures} attempts;"
                    f" the last, at {server.client.url}: {error}"
                )
            )
            return
        self._send_later(ticket, seconds_to_wait(error, ticket.failures), now)

    def _wait_for_busy(self, ticket: Ticket, server: Server, error: BusyError, now: float) -> None:
        """Send a request again later, if possible to another server. A busy server has not failed: others may use it."""
        if ticket.taken != self._taken:
            ticket.taken, ticket.waited = self._taken, 0.0
        if ticket.waited > self.settings.pause_seconds:
            self._fail(
                InputError(
                    f"expected a response from one of {len(self.servers)} servers, got that all were busy for"
                    f" {ticket.waited:.0f} s (rollouts.servers.pause_seconds); the last, at {server.client.url}: {error}"
                )
            )
            return
        ticket.refusals += 1
        wait = seconds_to_wait(error, ticket.refusals)
        ticket.waited += wait
        server.busy_until = max(server.busy_until, now + JITTER[1] * wait)
        self._send_later(ticket, wait, now)

    def _send_later(self, ticket: Ticket, wait: float, now: float) -> None:
        ticket.not_before = now + wait * self._random.uniform(*JITTER)
        self._pending.append(ticket)

    # Servers that fail and come back

    def _answering(self) -> int:
        return sum(server.state in (State.UP, State.SUSPECT) for server in self.servers)

    def _strike(self, server: Server, error: ServerError) -> None:
        """A request failed at a server. Ask the server whether it is alive; drop it if it fails again and again."""
        if isinstance(error, BusyError | RefusedError) or server.state not in (State.UP, State.SUSPECT):
            return
        server.strikes += 1
        if server.strikes >= STRIKES or isinstance(error, _WrongVersionError):
            self._drop(server, str(error))
        else:
            self._suspect(server)

    def _suspect(self, server: Server) -> None:
        """Send nothing new to a server until it has answered that it is alive."""
        if server.state is State.UP:
            server.state = State.SUSPECT
            self.transport.send(Check(server, server.life), partial(self._check_alive, server))

    @contextmanager
    def _must_answer(self, server: Server) -> Iterator[None]:
        """In a thread: UnreachableError if a question fails, unless the server answered a request meanwhile or is too busy.

        Where a server writes many long answers, a question waits behind them. Whatever else it answers to a question that
        every server answers (a proxy may say 404) is no answer.
        """
        asked_at = self.transport.now()
        try:
            yield
        except ServerError as error:
            if not isinstance(error, BusyError) and server.answered_at <= asked_at:
                raise UnreachableError(str(error)) from error

    def _check_alive(self, server: Server) -> None:
        """UnreachableError unless a server answers; in a thread."""
        with self._must_answer(server):
            self.dialect.check_alive(server.client)

    def _take_check(self, check: Check, result: Any) -> None:
        server = check.server
        if server.life != check.life or server.state is not State.SUSPECT:
            return
        if isinstance(result, ServerError):
            self._drop(server, str(result))
        else:
            server.state = State.UP

    def _drop(self, server: Server, why: str) -> None:
        """Send no more to a server; what it has in flight goes to others."""
        server.state, server.problem, server.version, server.scores = State.DOWN, why, None, None
        server.counts.drops += 1
        server.checks = 0
        server.next_check = self.transport.now() + FIRST_CHECK
        self._take_requests_back(server)
        # It may not have noticed, and would get others beside them when it is back.
        server.client.drop_connections()
        left = self._answering()
        self._say(f"{server.client.url} is dropped ({shorten(why, 400)}); {left} of {len(self.servers)} servers answer")

    def _take_requests_back(self, server: Server) -> None:
        """Let what a server has in flight be sent anew: it is dropped or restarted. Its failures so far are forgotten."""
        server.life += 1
        server.strikes = 0
        server.busy_until = -math.inf
        self._spread.forget(server.number)
        self._pending.extend(server.queue)
        server.queue.clear()
        for attempt in server.running:
            attempt.over = True
            if self._is_wanted(attempt.ticket):
                self._pending.append(attempt.ticket)
        server.running.clear()

    def _watch(self, now: float) -> None:
        """Look after servers that are down, and pause or end the run if too few are up."""
        self._watch_servers(now)
        self._watch_quorum(now)

    def _watch_servers(self, now: float) -> None:
        for server in self.servers:
            died = server.started is not None and not server.started.alive and not server.checking
            if died and server.state in (State.UP, State.SUSPECT):
                assert server.started is not None
                self._drop(server, f"its process ended: {server.started.describe_log()}")
            if server.state is State.UP and now >= self._next_look and self._published is not None:
                look = Look(server, server.life, self._published)
                self.transport.send(look, partial(self._look, server, self._published))
            if server.state is State.DOWN and not server.checking and now >= server.next_check:
                published = self._published
                assert published is not None and self._folders is not None, "a server is dropped only after a publish"
                server.checking = True
                # Steps go on while the server starts and loads.
                self._folders.hold(published.folder)
                self.transport.send(Rejoin(server, published), partial(self._rejoin, server, published))
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS

    def _attend(self) -> None:
        """Look after the servers while this rank has nothing to sample: the others may be waiting for one to come back."""
        while not self._closed.wait(WAKE_SECONDS):
            with self._lock:
                if self._closed.is_set() or self._published is None or self.jobs:
                    continue
                self._watch_servers(self.transport.now())
            results = self.transport.wait(0.0)
            with self._lock:
                for key, result in results:
                    try:
                        self._take(key, result)
                    except Exception as error:  # told by the next call of this rank
                        self._fail(error)

    def _look(self, server: Server, published: Published) -> str | None:
        """The name of the weights that a server has; in a thread. That of `published` if it answers, but not to this."""
        name: str | None = published.name
        with self._must_answer(server):
            if self.world.rank:  # rank 0 may be a publish ahead
                self.dialect.check_alive(server.client)
            else:
                name = self.dialect.weights_name(server.client)
        return name

    def _take_look(self, look: Look, result: Any) -> None:
        """Suspect a server that does not answer; drop one that has other weights than those that were published last."""
        server = look.server
        if server.life != look.life or server.state is not State.UP or look.published is not self._published:
            return
        if isinstance(result, ServerError):
            self._suspect(server)
        elif result != look.published.name:
            self._drop(server, "it has other weights")

    def _rejoin(self, server: Server, published: Published) -> ProbeReply:
        """Bring a server to published weights; in a thread. Returns what the server computes."""
        try:
            self._bring_back(server, published)
        except TooManyFilesError:
            raise
        except (InputError, OSError) as error:
            # Another model is served at its address, or its process cannot be started: that may pass.
            raise ServerError(str(error)) from error
        return self._ask_probe(server, sample=False)

    def _bring_back(self, server: Server, published: Published) -> None:
        if self.world.rank:
            self._check_alive(server)
            if self.dialect.weights_name(server.client) != published.name:
                raise ServerError("rank 0 has not brought it to the current weights yet")
        elif server.started is not None and (not server.started.alive or not server.reloads or server.checks):
            # It ended, keeps old weights, or hangs: it could not be brought back as it is.
            self._restart(server, published)
        else:
            self.dialect.resume(server.client)  # it may have failed while it was paused
            # One that has only just started may end itself if new weights interrupt its first request (SGLang).
            with self._must_answer(server):
                self.dialect.check_ready(server.client)
            self._accept(server, self.dialect.facts(server.client, CONTACT_SECONDS))
            if self.dialect.weights_name(server.client) != published.name:
                self._load_folder(server, published)

    def _take_rejoin(self, rejoin: Rejoin, result: Any) -> None:
        assert self._folders is not None
        server, published = rejoin.server, rejoin.published
        self._folders.release(published.folder)
        server.checking = False
        now = self.transport.now()
        if isinstance(result, ServerError):
            problem = str(result)
        elif published is not self._published:
            # It answers, and there are newer weights meanwhile.
            server.next_check, server.checks = now, 0
            return
        else:
            problem = self._judge(server, result, None) or ""
            server.reloads = server.reloads and not (problem and server.started is not None)
        if not problem:
            server.state, server.checks, server.problem = State.UP, 0, ""
            server.counts.rejoins += 1
            self._say(
                f"{server.client.url} is back with version {self.version}; {self._answering()} of {len(self.servers)}"
                " servers answer"
            )
            return
        server.problem, server.checks = problem, server.checks + 1
        if server.started is not None and server.checks >= RESTARTS:
            server.state = State.GONE
            self._say(f"{server.client.url} is given up after {RESTARTS} attempts to bring it back: {shorten(problem, 400)}")
        wait = min(LONGEST_CHECK, FIRST_CHECK * 2 ** min(server.checks, 20))
        server.next_check = now + wait * self._random.uniform(*JITTER)

    def _watch_quorum(self, now: float) -> None:
        answering, quorum = self._answering(), self.settings.quorum
        if answering >= quorum:
            if self._paused_since is not None:
                self._paused_seconds += now - self._paused_since
                self._say(f"sampling goes on after a pause of {now - self._paused_since:.0f} s")
                self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since, self._said_at = now, -SAY_SECONDS
        problems = shorten("; ".join(f"{s.client.url}: {shorten(s.problem, 200)}" for s in self.servers if s.problem), 900)
        status = f"{answering} of {len(self.servers)} servers answer, rollouts.servers.quorum = {quorum}: {problems}"
        left = self.settings.pause_seconds - (now - self._paused_since)
        possible = sum(server.state is not State.GONE for server in self.servers)
        if left <= 0 or possible < quorum:
            raise NoServersError(
                f"expected servers to sample at, got too few for {now - self._paused_since:.0f} s: {status}"
            )
        if RUN.asked_to_end is not None:
            raise StopRequestedError
        if now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            self._say(f"paused: {status}; waiting {left:.0f} s more for others to come back")

    # What it says of itself

    def metrics(self) -> dict[str, float]:
        with self._lock:
            every = merge_counts(self.world, [server.counts for server in self.servers])
            paused, answering = zip(*self.world.gather([self._paused_seconds, self._answering()]), strict=True)
            responses = sum(each.responses for each in every)
            metrics = {
                "servers/answering": float(min(answering)),
                "servers/retries": float(sum(each.retries for each in every)),
                "servers/drops": float(sum(each.drops for each in every)),
                "servers/rejoins": float(sum(each.rejoins for each in every)),
                "servers/restarts": float(sum(each.restarts for each in every)),
                "servers/duplicates": float(sum(each.duplicates for each in every)),
                "servers/publish_seconds": self._publish_seconds,
                "servers/paused_seconds": max(paused),
                "servers/probe_gap": max((server.gap for server in self.servers), default=0.0),
            }
            if responses:
                metrics["servers/response_seconds"] = sum(each.seconds for each in every) / responses
            for server, own in zip(self.servers, every, strict=True) if len(self.servers) > 1 else ():
                metrics |= {
                    f"servers/{server.number}/tokens": float(own.tokens),
                    f"servers/{server.number}/retries": float(own.retries),
                    f"servers/{server.number}/drops": float(own.drops),
                }
                if own.responses:
                    metrics[f"servers/{server.number}/response_seconds"] = own.seconds / own.responses
            for server in self.servers:
                server.counts = Counts()
            self._publish_seconds = self._paused_seconds = 0.0
            return metrics


class _WrongVersionError(ServerError):
    """The tokens are of weights that the server should not have."""


def _lora_layers(model: Any) -> list[Any]:
    """The modules of a model that have adapters."""
    return [module for module in model.modules() if getattr(module, "lora_A", None) and hasattr(module, "r")]
