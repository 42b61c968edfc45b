"""Several ranks over the same servers: each asks for its share; rank 0 alone publishes and brings servers back."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.core.world import OneProcess
from legato.errors import InputError
from legato.rollouts.engine import EnginePlace, Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers import fleet as fleets
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.http import HttpClient
from legato.rollouts.servers.settings import ServerSettings
from tests.fleet.serving import servers
from tests.serve.faults import FaultPlan
from tests.serve.running import chat_policy, plain_engine

LIMITS = Limits(max_response_tokens=5, end_tokens=(1,))
RANKS = 2
LOAD = "/collective_rpc"


@dataclass
class _Meeting:
    barrier: threading.Barrier
    values: list[Any] = field(default_factory=lambda: [None] * RANKS)


class ThreadRank(OneProcess):
    """A rank that is a thread of this process."""

    size = RANKS

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.meeting = rank, meeting

    def _exchange(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait(30)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(30)
        return values

    def gather(self, value: Any) -> Sequence[Any]:
        return self._exchange(json.loads(json.dumps(value)))

    def agree(self, choice: int) -> int:
        return max(self._exchange(choice))

    def gather_tensors(self, value: Any, tensors: Sequence[Tensor]) -> Sequence[tuple[Any, Sequence[Tensor]]]:
        return self._exchange((json.loads(json.dumps(value)), [tensor.clone() for tensor in tensors]))


@dataclass
class Ranks:
    """The fleets of all ranks, with their policies, and the servers that they ask."""

    fleets: list[Fleet]
    policies: list[Any]
    plans: list[FaultPlan]
    said: list[str]

    def together(self, function: Callable[[int], Any]) -> list[Any]:
        """What a function of the rank returns, called by all at once."""
        with ThreadPoolExecutor(RANKS) as pool:
            return [each.result(60) for each in [pool.submit(function, rank) for rank in range(RANKS)]]

    def publish(self, version: int) -> None:
        self.together(lambda rank: self.fleets[rank].publish(self.policies[rank].model.named_parameters(), version))

    def move(self) -> None:
        """An update: all ranks have the same new weights."""
        with torch.no_grad():
            for policy in self.policies:
                for weight in policy.model.parameters():
                    weight.mul_(1.1)

    def sample(self, rank: int, seeds: Sequence[int]) -> list[list[int]]:
        request = Request(prompt=torch.tensor([5, 6, 7]), seeds=tuple(seeds))
        return [each.tokens.tolist() for each in self.fleets[rank].generate([request], Sampling(), LIMITS)[0]]

    def expected(self, seeds: Sequence[int]) -> list[list[int]]:
        request = Request(prompt=torch.tensor([5, 6, 7]), seeds=tuple(seeds))
        return [each.tokens.tolist() for each in plain_engine(self.policies[0]).generate([request], Sampling(), LIMITS)[0]]

    def loads(self) -> list[int]:
        """How often each server was given weights."""
        return [sum(path == LOAD for path, _ in plan.requests) for plan in self.plans]


@contextmanager
def ranks_at_servers(folder: Path, count: int = 2, **options: Any) -> Iterator[Ranks]:
    policies = [chat_policy(3) for _ in range(RANKS)]
    meeting, said = _Meeting(threading.Barrier(RANKS)), list[str]()
    with servers([chat_policy(4 + number) for number in range(count)]) as (started, plans):
        settings = ServerSettings(urls=tuple(server.url for server in started), **{"request_seconds": 20.0, **options})

        def make(rank: int) -> Fleet:
            world = ThreadRank(rank, meeting)
            fleet = Fleet(policies[rank], Own(), settings, rows_at_once=8, context_tokens=64, seed=rank, world=world)
            fleet.open(EnginePlace(folder=folder, say=said.append if rank == 0 else lambda text: None))
            return fleet

        with ThreadPoolExecutor(RANKS) as pool:
            made = [each.result(60) for each in [pool.submit(make, rank) for rank in range(RANKS)]]
        try:
            yield Ranks(made, policies, plans, said)
        finally:
            for fleet in made:
                fleet.close()


def test_every_rank_samples_its_share_and_weights_are_published_once(tmp_path: Path) -> None:
    with ranks_at_servers(tmp_path) as ranks:
        ranks.publish(0)
        assert ranks.loads() == [1, 1]
        shares = [range(6), range(6, 12)]
        assert ranks.together(lambda rank: ranks.sample(rank, shares[rank])) == [ranks.expected(share) for share in shares]
        ranks.move()
        ranks.publish(1)
        assert ranks.loads() == [2, 2]
        assert ranks.together(lambda rank: ranks.sample(rank, shares[rank])) == [ranks.expected(share) for share in shares]
        assert [fleet.rows_at_once for fleet in ranks.fleets] == [4, 4], "both ranks together keep to rows_at_once"
        first, second = ranks.together(lambda rank: ranks.fleets[rank].metrics())
        assert first.keys() == second.keys() and first["servers/answering"] == second["servers/answering"] == 2
        tokens = [sum(each[f"servers/{number}/tokens"] for number in range(2)) for each in (first, second)]
        assert tokens[0] == tokens[1] > 20 and first["servers/drops"] == 0


def test_weights_that_a_server_does_not_take_end_all_ranks(tmp_path: Path) -> None:
    with ranks_at_servers(tmp_path) as ranks:
        ranks.publish(0)
        ranks.plans[1].add("stale", times=100)
        ranks.move()
        ranks.publish(1)
        for rank in range(RANKS):
            with pytest.raises(InputError, match="the server did not take the weights"):
                ranks.sample(rank, range(2))


class Reloading:
    """A process of the run that takes the weights with which it is started."""

    alive, starts = True, 0

    def __init__(self, client: HttpClient) -> None:
        self.client = client

    def start(self, folder: Path) -> None:
        self.starts += 1
        Own().load(self.client, folder, "started", adapters=False, seconds=20.0)

    def wait_until_ready(self, *_: Any) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("known_to", ["nobody", "rank 0"])
def test_ranks_agree_on_a_server_that_keeps_old_weights(tmp_path: Path, known_to: str) -> None:
    """Though one has failed in a request of its own, or another has found out when it brought the server back."""
    with ranks_at_servers(tmp_path) as ranks:
        process = Reloading(ranks.fleets[0].servers[1].client)
        ranks.fleets[0].servers[1].started = process  # type: ignore[assignment]
        for fleet in ranks.fleets:
            fleet.servers[1].is_own = True
        ranks.publish(0)
        ranks.move()
        ranks.plans[1].add("stale")
        if known_to == "nobody":
            ranks.fleets[1]._fail(InputError("a request of this rank was refused"))
        else:
            ranks.fleets[0].servers[1].reloads = False
        ranks.publish(1)
        if known_to == "nobody":
            assert process.starts == 0, "the run ends"
            with pytest.raises(InputError, match="a request of this rank was refused"):
                ranks.sample(1, range(2))
        else:
            assert process.starts == 1 and [fleet.servers[1].reloads for fleet in ranks.fleets] == [False, False]


@pytest.mark.slow
def test_a_server_that_loads_nothing_is_dropped_by_all_ranks_and_comes_back(tmp_path: Path) -> None:
    with ranks_at_servers(tmp_path) as ranks:
        ranks.publish(0)
        ranks.plans[1].add("status", times=2, path=LOAD)
        ranks.move()
        ranks.publish(1)
        assert [fleet.servers[1].takes for fleet in ranks.fleets] == [False, False]
        # Rank 1 samples; the thread of rank 0 brings the server back meanwhile.
        deadline = time.monotonic() + 30
        while not ranks.fleets[1].servers[1].takes and time.monotonic() < deadline:
            assert ranks.sample(1, range(3)) == ranks.expected(range(3))
        assert ranks.fleets[1].servers[1].takes and any("is back with version 1" in text for text in ranks.said)
        assert ranks.together(lambda rank: ranks.fleets[rank].metrics())[0]["servers/drops"] == 1, "it went once"


def test_the_only_server_comes_back_for_a_rank_while_rank_0_has_nothing_to_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, as after a restart by hand: rank 1 gets tokens of an unknown version, and only rank 0 may load."""
    monkeypatch.setattr(fleets, "LOOK_SECONDS", 0.2)
    with ranks_at_servers(tmp_path, count=1, pause_seconds=60.0) as ranks:
        ranks.publish(0)
        client = ranks.fleets[0].servers[0].client
        Own().rename(client, "somebody-else", 10.0)
        before = ranks.loads()
        assert ranks.sample(1, range(3)) == ranks.expected(range(3))
        assert ranks.loads()[0] == before[0] + 1 and any("it has other weights" in text for text in ranks.said)
