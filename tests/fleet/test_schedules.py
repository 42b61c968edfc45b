"""Random schedules in simulated time: no response is lost, none is used twice, whatever servers and the network do."""

import heapq
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from legato.core.rollout import StopReason
from legato.policy.policy import Policy
from legato.rollouts.engine import EnginePlace, Handle, Limits, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.dialect import Ask
from legato.rollouts.servers.dialects.base import CHECK_SECONDS, Dialect, Reading, ServerFacts
from legato.rollouts.servers.errors import (
    BadReplyError,
    BusyError,
    FailedError,
    ServerError,
    TooManyFilesError,
    UnreachableError,
)
from legato.rollouts.servers.fleet import LOOK_SECONDS, Fleet, NoServersError
from legato.rollouts.servers.member import Attempt, State
from legato.rollouts.servers.probe import Probe, ProbeReply
from legato.rollouts.servers.settings import ServerSettings

LIMITS = Limits(max_response_tokens=4, end_tokens=(1,))


@dataclass
class Fake:
    """A server that exists in this test only."""

    alive: bool = True
    hangs: bool = False
    """Whether it takes requests and answers none."""
    name: str = "default"
    weights: int = -1
    """The version whose weights it really has."""
    sampled: list[int] = field(default_factory=list)


class World:
    """Simulated time, servers and network."""

    def __init__(self, seed: int, servers: int, *, faults: float) -> None:
        self.random, self.faults, self.time = random.Random(seed), faults, 0.0
        self.fakes = {f"http://127.0.0.1:{9000 + number}": Fake() for number in range(servers)}
        self.events: list[tuple[float, int, Any, Any]] = []
        self.sent = 0
        self.calm = False

    # The transport

    def now(self) -> float:
        return self.time

    def send(self, key: Any, work: Callable[[], Any]) -> None:
        result = self._run(work)
        if isinstance(key, Attempt) and self.fakes[key.server.client.url].hangs:
            self.sent += 1
            heapq.heappush(self.events, (self.time + 600.0, self.sent, key, UnreachableError("no answer in time")))
            return
        self._deliver(key, result)
        if self._chance(0.5) and isinstance(key, Attempt):
            self._deliver(key, result)  # the network repeats it

    def _deliver(self, key: Any, result: Any) -> None:
        self.sent += 1
        slow = 30.0 if self._chance(0.5) else 1.0
        heapq.heappush(self.events, (self.time + slow * self.random.expovariate(1.0), self.sent, key, result))

    def wait(self, seconds: float) -> list[tuple[Any, Any]]:
        if self._chance(0.3):
            self._crash_or_restart()
        if not self.events or self.events[0][0] > self.time + seconds:
            self.time += max(seconds, 1e-3)
            return []
        self.time, _, key, result = heapq.heappop(self.events)
        return [(key, result)]

    def all(self, works: list[Callable[[], Any]]) -> list[Any]:
        self.time += self.random.random()
        return [self._run(work) for work in works]

    def close(self) -> None:
        pass

    @staticmethod
    def _run(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            return error

    # What goes wrong

    def _chance(self, share: float) -> bool:
        return not self.calm and self.random.random() < share * self.faults

    def _crash_or_restart(self) -> None:
        url, fake = self.random.choice(list(self.fakes.items()))
        fake.alive = not fake.alive or self.random.random() < 0.3
        if not fake.alive:
            fake.name, fake.weights = "default", -1
            lost = UnreachableError("the server died")
            self.events = [
                (when, number, key, lost if isinstance(key, Attempt) and key.server.client.url == url else result)
                for when, number, key, result in self.events
            ]

    def fake(self, client: Any) -> Fake:
        fake = self.fakes[client.url]
        if not fake.alive or fake.hangs:
            raise UnreachableError("connection refused" if not fake.alive else "no answer in time")
        if self._chance(0.2):
            faults: list[ServerError] = [
                FailedError(500, "a fault"),
                UnreachableError("no answer in time"),
                BadReplyError("log-probs of NaN"),
                BusyError("too many", self.random.random()),
            ]
            raise self.random.choice(faults)
        return fake


def version_in(folder: Path) -> int:
    """The version of the weights in a folder: it has the name of a publish."""
    return int(folder.name.split(".")[1])


class FakeDialect(Dialect):
    """Words without HTTP."""

    name = "fake"

    def __init__(self, world: World) -> None:
        self.world = world

    def facts(self, client: Any, seconds: float) -> ServerFacts:
        self.world.fake(client)
        return ServerFacts(software="fake 1", model="fake")

    def check_ready(self, client: Any, seconds: float = 1.0) -> None:
        self.world.fake(client)

    def weights_name(self, client: Any, seconds: float = 1.0) -> str | None:
        return self.world.fake(client).name

    def sample(self, client: Any, ask: Ask, reading: Reading, seconds: float) -> Response:
        fake = self.world.fake(client)
        fake.sampled.append(ask.seed)
        tokens = torch.tensor([ask.prompt[0], ask.seed])
        return Response(
            tokens=tokens,
            logprobs=torch.full((2,), -0.5 - fake.weights),
            kept_logmass=None,
            text="",
            stop=StopReason.LENGTH,
            version=torch.full((2,), reading.version_of(fake.name)),
        )

    def score(self, client: Any, tokens: Sequence[int], name: str, seconds: float) -> list[float]:
        return [float(self.world.fake(client).weights)]

    def load(self, client: Any, folder: Path, name: str, *, adapters: bool, seconds: float) -> None:
        fake = self.world.fake(client)
        if self.world._chance(0.1):
            raise UnreachableError("it died while it loaded")
        fake.weights, fake.name = version_in(folder), name

    def resume(self, client: Any, seconds: float = 1.0) -> None:
        self.world.fake(client)

    def rename(self, client: Any, name: str, seconds: float) -> None:
        self.world.fake(client).name = name


class FakeProbe(Probe):
    """Compares the version that a server really has."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.tolerance = fleet, 0.1
        self.texts = [torch.tensor([1, 2])]
        self.expected = self.before = None

    def score(self) -> None:
        self.expected = torch.tensor([float(self.fleet.version)])

    def ask(self, dialect: Any, client: Any, reading: Any, name: str, seconds: float, *, sample: bool = True) -> ProbeReply:
        return ProbeReply(scores=torch.tensor(dialect.score(client, [1, 2], name, seconds)), response=None)


class FakeFolders:
    tied = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def path_of(self, name: str) -> Path:
        return self.root / name

    def write(self, weights: Any, name: str, *, adapters: bool = False) -> Path:
        return self.path_of(name)

    def hold(self, folder: Path) -> None:
        pass

    def release(self, folder: Path) -> None:
        pass


class FakeFleet(Fleet):
    def open(self, place: EnginePlace) -> None:
        self.place = place
        self._folders, self._probe = FakeFolders(Path("/nowhere")), FakeProbe(self)  # type: ignore[assignment]


class FakePolicy(Policy):
    """A policy without weights: the fleet only asks for its vocabulary and hands its parameters to fakes."""

    vocabulary = 100  # type: ignore[assignment]

    def __init__(self) -> None:
        self.model = SimpleNamespace(named_parameters=lambda: iter(()))
        self.tokenizer, self.routers, self.name = None, None, "fake"


def make_fleet(world: World, said: list[str], **options: Any) -> FakeFleet:
    policy = FakePolicy()
    world.calm = True  # all servers answer at the start
    settings = ServerSettings(urls=tuple(world.fakes), **{"pause_seconds": 1e6, **options})
    fleet = FakeFleet(policy, FakeDialect(world), settings, rows_at_once=3, transport=world, seed=1)
    fleet.open(EnginePlace(folder=Path("/nowhere"), say=said.append))
    fleet.publish((), 0)
    world.calm = False
    return fleet


@pytest.mark.parametrize("block", range(10))
def test_no_response_is_lost_or_used_twice(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.rollouts.servers.fleet.FAILURES", 10**6)  # a schedule may be as bad as it likes
    faults_met = 0
    for seed in range(20 * block, 20 * (block + 1)):
        world, said = World(seed, 1 + seed % 4, faults=(seed % 5) / 8), list[str]()
        fleet = make_fleet(world, said, quorum=1 + (seed % 4) // 3)
        outstanding: dict[Handle, tuple[int, ...]] = {}
        asked_at: dict[Handle, int] = {}
        reported: set[Handle] = set()
        number = 0
        for step in range(4):
            batch = []
            for _ in range(world.random.randint(1, 6)):
                seeds = tuple(range(number, number + world.random.randint(0, 5)))
                number += len(seeds)
                batch.append(Request(prompt=torch.tensor([len(outstanding) + len(batch), 7]), seeds=seeds))
            for request, handle in zip(batch, fleet.submit(batch, Sampling(), LIMITS), strict=True):
                outstanding[handle], asked_at[handle] = request.seeds, fleet.version
            if world.random.random() < 0.5 and outstanding.keys() - reported:
                cancelled = world.random.choice(sorted(outstanding.keys() - reported, key=lambda each: each.number))
                fleet.cancel(cancelled)
                del outstanding[cancelled]
            # Some requests stay in flight while the next version is published.
            left = world.random.randint(0, 2) if step < 3 else 0
            while len(outstanding.keys() - reported) > left:
                finished = fleet.poll()
                assert finished, "poll reports something while requests are outstanding"
                for one in finished:
                    assert one.handle not in reported, "a request is reported once"
                    reported.add(one.handle)
                    assert [int(each.tokens[1]) for each in one.responses] == list(outstanding[one.handle])
                    for each in one.responses:
                        version = int(each.version[0])
                        assert asked_at[one.handle] <= version <= fleet.version
                        assert float(each.logprobs[0]) == -0.5 - version, "the weights are those of the version"
            fleet.publish((), fleet.version + 1)
        assert fleet.poll() == [] and reported == set(outstanding)
        sent, measured = sum(len(fake.sampled) for fake in world.fakes.values()), fleet.metrics()
        faults_met += int(measured["servers/retries"] + measured["servers/drops"] + measured["servers/duplicates"])
        assert sent >= sum(map(len, outstanding.values()))
        assert measured["servers/rejoins"] <= measured["servers/drops"]
    assert faults_met > 50


def test_too_few_servers_are_an_error_after_the_pause_and_never_a_hang() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said, quorum=2, pause_seconds=100.0)
    for fake in world.fakes.values():
        fake.alive = False
    fleet.submit([Request(prompt=torch.tensor([1, 2]), seeds=(1, 2))], Sampling(), LIMITS)
    with pytest.raises(NoServersError, match=r"got too few for 1[0-9][0-9] s: [01] of 2 servers answer"):
        fleet.poll()
    assert sum(text.startswith("paused:") for text in said) == 2, "told at once and every minute"


def test_a_server_with_other_weights_is_dropped_and_comes_back_with_the_right_ones() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    first = next(iter(world.fakes.values()))
    first.name, first.weights = "another-run.5", 5
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=(number,)) for number in range(12)]
    rows = fleet.generate(batch, Sampling(), LIMITS)
    assert {float(row[0].logprobs[0]) for row in rows} == {-0.5}
    while fleet.metrics()["servers/answering"] < 2:
        fleet.generate(batch[:1], Sampling(), LIMITS)
        world.time += 1.0
    assert first.weights == 0 and any("weights that this run did not name" in text for text in said)


def test_a_server_that_hangs_is_dropped_long_before_its_requests_end() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=(number,)) for number in range(12)]
    next(iter(world.fakes.values())).hangs = True
    rows = fleet.generate(batch, Sampling(), LIMITS)
    assert [int(row[0].tokens[1]) for row in rows] == list(range(12)) and world.time < 60
    assert fleet.servers[0].state is State.DOWN and fleet.metrics()["servers/drops"] == 1


@pytest.mark.parametrize("dropped", [False, True])
def test_a_request_that_a_server_took_and_lost_has_not_waited_for_a_busy_one_since(dropped: bool) -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said, pause_seconds=100.0)
    sample, replies = fleet.dialect.sample, iter(["busy", "lost", "busy", "answer"])

    def reply(client: Any, *words: Any) -> Response:
        match next(replies):
            case "busy":
                raise BusyError("too many", 1.0)
            case "lost":
                world.events.clear()  # looks at servers end before
                world.time += 500.0
                if dropped:
                    fleet._drop(next(each for each in fleet.servers if each.client is client), "lost")
                raise UnreachableError("no answer in time")
        return sample(client, *words)

    fleet.dialect.sample = reply  # type: ignore[method-assign]
    ((response,),) = fleet.generate([Request(prompt=torch.tensor([1, 2]), seeds=(1,))], Sampling(), LIMITS)
    assert response.tokens.tolist() == [1, 1] and next(replies, None) is None


@pytest.mark.parametrize("busy", [0, 1])
def test_requests_go_to_a_server_that_is_not_busy(busy: int) -> None:
    """Though the other one had their prefixes first."""
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said, pause_seconds=100.0)
    sample, counts = fleet.dialect.sample, [0, 0]

    def reply(client: Any, *words: Any) -> Response:
        counts[client is not fleet.servers[busy].client] += 1
        if client is fleet.servers[busy].client:
            raise BusyError("full", 1.0)
        return sample(client, *words)

    fleet.dialect.sample = reply  # type: ignore[method-assign]
    batch = [Request(prompt=torch.tensor([n, 2]), seeds=tuple(range(4 * n, 4 * n + 4))) for n in range(4)]
    fleet.generate(batch, Sampling(), LIMITS)
    assert world.time < 40.0 and counts[0] < counts[1] == 16 and fleet.metrics()["servers/drops"] == 0


def test_a_server_that_takes_other_requests_is_not_busy() -> None:
    """One request may wait for longer than the run would wait for servers that take none."""
    world, said = World(1, 1, faults=0.0), list[str]()
    fleet = make_fleet(world, said, pause_seconds=20.0)
    sample, others = fleet.dialect.sample, list[int]()

    def reply(client: Any, ask: Ask, *words: Any) -> Response:
        if ask.seed == 0 and len(others) < 60:
            raise BusyError("full", 1.0)
        return sample(client, ask, *words)

    def request(seed: int) -> Request:
        return Request(prompt=torch.tensor([1, 2]), seeds=(seed,))

    fleet.dialect.sample = reply  # type: ignore[method-assign]
    fleet.submit([request(0)], Sampling(), LIMITS)
    for seed in range(1, 61):
        fleet.submit([request(seed)], Sampling(), LIMITS)
        others += [int(one.responses[0].tokens[1]) for one in fleet.poll()]
    assert world.time > 40.0 and others == list(range(1, 61))
    assert len(fleet.poll()) == 1


def test_time_in_which_nobody_asks_is_not_time_in_which_servers_are_busy() -> None:
    world, said = World(1, 1, faults=0.0), list[str]()
    fleet = make_fleet(world, said, pause_seconds=100.0)
    sample, replies = fleet.dialect.sample, iter(["busy", "busy"])

    def reply(client: Any, *words: Any) -> Response:
        if next(replies, None):
            raise BusyError("full", 1.0)
        return sample(client, *words)

    fleet.dialect.sample = reply  # type: ignore[method-assign]
    fleet.submit([Request(prompt=torch.tensor([1, 2]), seeds=(1,))], Sampling(), LIMITS)
    while not fleet._pending:
        for each in world.wait(1.0):
            fleet._take(*each)
    world.time += 150.0
    fleet.publish((), 1)
    assert len(fleet.poll()) == 1 and next(replies, None) is None


def test_a_server_that_is_too_busy_to_say_that_it_is_alive_is_not_dropped() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)

    def refuse(client: Any, seconds: float = 1.0) -> Any:
        raise BusyError("too many", 1.0)

    fleet.dialect.check_alive = fleet.dialect.weights_name = refuse  # type: ignore[method-assign]
    batch = [Request(prompt=torch.tensor([1, 2]), seeds=(1,))]
    for _ in range(10):
        fleet.generate(batch, Sampling(), LIMITS)
        world.time += 5.0
    fleet.publish((), 1)
    fleet._suspect(fleet.servers[0])
    fleet.generate(batch, Sampling(), LIMITS)
    assert said == [] and fleet.metrics()["servers/drops"] == 0


def test_a_server_is_not_blamed_for_files_that_this_process_may_not_open() -> None:
    fleet = make_fleet(World(1, 2, faults=0.0), [])

    def fail(client: Any, seconds: float = 1.0) -> Any:
        raise TooManyFilesError("expected to open a connection")

    fleet.dialect.check_alive = fail  # type: ignore[method-assign]
    fleet._suspect(fleet.servers[0])
    with pytest.raises(TooManyFilesError):
        fleet.generate([Request(prompt=torch.tensor([1, 2]), seeds=(1,))], Sampling(), LIMITS)
    assert fleet.metrics()["servers/drops"] == 0


def test_a_server_that_answers_is_not_dropped_because_it_is_slow_to_say_that_it_is_alive() -> None:
    """Where it writes many long answers, a question waits behind them for longer than CHECK_SECONDS."""
    world, said, answers = World(1, 1, faults=0.0), list[str](), [True]
    fleet = make_fleet(world, said, pause_seconds=100.0)
    server = fleet.servers[0]

    def time_out(client: Any, seconds: float = CHECK_SECONDS) -> Any:
        if answers[0]:
            server.answered_at = world.time + 1e-6
        raise UnreachableError("no answer in time")

    fleet.dialect.check_alive = fleet.dialect.weights_name = time_out  # type: ignore[method-assign]
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=(number,)) for number in range(200)]
    fleet.generate(batch, Sampling(), LIMITS)
    assert world.time > 5 * LOOK_SECONDS and said == []
    fleet._suspect(server)  # a request has failed, and a later one is answered
    fleet.generate(batch[:1], Sampling(), LIMITS)
    fleet.publish((), 1)
    assert said == [] and server.state is State.UP and server.version == 1
    world.time += 1.0
    answers[0] = False
    fleet._suspect(server)  # nothing is answered any more
    fleet.submit(batch[:1], Sampling(), LIMITS)
    while server.state is State.SUSPECT:
        for each in world.wait(CHECK_SECONDS):
            fleet._take(*each)
    assert server.state is State.DOWN


def test_a_server_that_took_new_weights_is_not_dropped_for_a_check_that_began_before() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    fake = next(iter(world.fakes.values()))
    fake.hangs = True
    fleet._suspect(fleet.servers[0])
    fake.hangs = False
    fleet.publish((), 1)
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=(number,)) for number in range(20)]
    fleet.generate(batch, Sampling(), LIMITS)
    assert said == [] and fleet.servers[0].state is State.UP


def test_a_server_may_be_away_for_a_day() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    first = next(iter(world.fakes.values()))
    first.hangs = True
    fleet._drop(fleet.servers[0], "its machine is switched off")
    fleet.servers[0].checks = 1020  # looks for 8 hours
    batch = [Request(prompt=torch.tensor([1, 2]), seeds=(1,))]
    while fleet.servers[0].checks < 1030:
        fleet.generate(batch, Sampling(), LIMITS)
        world.time += 50.0
    first.hangs = False
    while fleet.servers[0].state is not State.UP:
        fleet.generate(batch, Sampling(), LIMITS)
        world.time += 50.0


def test_a_server_of_the_run_that_hangs_is_started_again() -> None:
    world, said = World(1, 2, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    fake = next(iter(world.fakes.values()))

    class Process:
        alive, starts = True, 0

        def start(self, folder: Path) -> None:
            self.starts += 1
            fake.hangs, fake.weights = False, version_in(folder)

        def wait_until_ready(self, *_: Any) -> None:
            pass

    process = Process()
    fleet.servers[0].started = process  # type: ignore[assignment]
    fake.hangs = True
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=(number,)) for number in range(12)]
    fleet.generate(batch, Sampling(), LIMITS)
    for _ in range(60):
        fleet.generate(batch[:1], Sampling(), LIMITS)
        fleet.publish((), fleet.version + 1)  # steps go on while it starts
        world.time += 1.0
    assert fleet.servers[0].state is State.UP and process.starts == 1


def test_requests_at_a_server_that_is_restarted_for_new_weights_are_no_failures_of_it() -> None:
    """It keeps old weights, so every publish restarts it and ends what it samples ahead: eight requests each time."""
    world, said = World(1, 1, faults=0.0), list[str]()
    fleet = make_fleet(world, said)
    fleet.rows_at_once = 8
    server, fake = fleet.servers[0], next(iter(world.fakes.values()))
    ended = UnreachableError("the connection was closed by this process")

    class Process:
        alive, starts = True, 0

        def start(self, folder: Path) -> None:
            self.starts += 1
            fake.weights = version_in(folder)
            world.events = [
                (when, number, key, ended if isinstance(key, Attempt) else result)
                for when, number, key, result in world.events
            ]

        def wait_until_ready(self, *_: Any) -> None:
            pass

    process = Process()
    server.started, server.is_own, server.reloads = process, True, False  # type: ignore[assignment]
    request = Request(prompt=torch.tensor([1, 2]), seeds=tuple(range(8)))
    for version in range(1, 4):
        fleet.submit([request], Sampling(), LIMITS)
        fleet.publish((), version)
        assert len(fleet.poll()) == 1
    assert process.starts == 3 and server.state is State.UP and said == []
    measured = fleet.metrics()
    assert measured["servers/drops"] == 0 and measured["servers/duplicates"] == 0


def test_a_server_that_is_started_again_while_the_run_ends_does_not_outlive_it() -> None:
    """Its process would keep a GPU for as long as this process lives."""
    fleet = make_fleet(World(1, 1, faults=0.0), [])
    starting, closed = threading.Event(), threading.Event()

    class Process:
        alive = False

        def start(self, folder: Path) -> None:
            starting.set()
            assert closed.wait(10)
            self.alive = True

        def end(self) -> None:
            self.alive = False

        def wait_until_ready(self, *_: Any) -> None:
            pass

    process = fleet.servers[0].started = Process()  # type: ignore[assignment]
    results: list[Any] = []
    published = fleet._published
    assert published is not None
    coming_back = threading.Thread(
        target=lambda: results.append(World._run(lambda: fleet._rejoin(fleet.servers[0], published)))
    )
    coming_back.start()
    assert starting.wait(10)
    fleet.close()
    closed.set()
    coming_back.join(10)
    assert not process.alive and isinstance(results[0], ServerError)


def test_a_group_goes_to_one_server_and_load_is_spread() -> None:
    world = World(1, 3, faults=0.0)
    fleet = make_fleet(world, [])
    fleet.rows_at_once = 100
    groups = [tuple(range(8 * number, 8 * number + 8)) for number in range(9)]
    batch = [Request(prompt=torch.tensor([number, 2]), seeds=seeds) for number, seeds in enumerate(groups)]
    fleet.generate(batch, Sampling(), LIMITS)
    shares = [len(fake.sampled) for fake in world.fakes.values()]
    assert max(shares) <= 2 * min(shares)
    homes = [sum(any(seed // 8 == number for seed in fake.sampled) for fake in world.fakes.values()) for number in range(9)]
    assert sum(homes) <= 11, "most groups have one server"
