"""Several ranks beside servers: the first asks for all, the others get its rollouts and help where layers are divided."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.core.world import OneProcess
from legato.errors import InputError
from legato.rollouts.engine import Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.dialects.base import StartPlan
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.follower import Follower, Scorer
from legato.rollouts.servers.started import StartedServer, unused_devices
from legato.run.wire import _check_servers_of_ranks
from legato.training.ranks.exchange import count_samplers, places_of
from tests.fleet.test_folders import policy_of
from tests.fleet.test_started import LIMITS, until
from tests.serve.running import plain_engine


class TwoRanks(OneProcess):
    """One of two ranks in two threads; `gather` is all that they need."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self._meeting, self._table = rank, meeting, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._meeting.wait(10)
        told = list(self._table)
        self._meeting.wait(10)
        return told


def two_ranks() -> list[TwoRanks]:
    meeting, table = threading.Barrier(2), [None, None]
    return [TwoRanks(rank, meeting, table) for rank in range(2)]


@pytest.mark.parametrize(("samplers", "first"), [(1, 0), (1, 5), (3, 0), (3, 4)])
def test_every_start_is_sampled_by_one_rank(samplers: int, first: int) -> None:
    places = [list(places_of(rank, samplers, 7, first)) for rank in range(3)]
    assert sorted(place for each in places for place in each) == list(range(7))
    assert [bool(each) for each in places] == [rank < samplers for rank in range(3)]


def test_the_first_rank_alone_asks_servers(tmp_path: Path) -> None:
    policy = policy_of()
    follower = Follower(policy, Own(), two_ranks()[1])
    assert count_samplers(follower, two_ranks()[1]) == 1 and count_samplers(plain_engine(policy), two_ranks()[1]) == 2
    assert follower.submit([], Sampling(), LIMITS) == follower.poll() == []
    with pytest.raises(RuntimeError, match="the first rank asks"):
        follower.submit([Request(prompt=torch.tensor([3]), seeds=(1,))], Sampling(), LIMITS)


def test_ranks_with_divided_layers_score_and_gather_together() -> None:
    """A follower takes every weight and runs as many forward passes as the first rank, then goes on."""
    policies = [policy_of() for _ in range(2)]
    passes = [0, 0]
    for rank, policy in enumerate(policies):
        policy.divided = True

        def count(*_: object, rank: int = rank) -> None:
            passes[rank] += 1

        policy.model.get_input_embeddings().register_forward_hook(count)
    first, second = two_ranks()
    follower, taken = Follower(policies[1], Own(), second), []
    weights = ((name, taken.append(name)) for name in ("a", "b"))
    thread = threading.Thread(target=follower.publish, args=(weights, 7))
    thread.start()
    scorer, texts = Scorer(policies[0], first), [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    scores = [each.logprobs for each in scorer.score(texts)]
    scorer.score(texts[:1], [0.7])
    scorer.finish()
    thread.join(10)
    assert taken == ["a", "b"] and passes[0] == passes[1] == 2 and follower.version == 7
    alone = [each.logprobs for each in Scorer(policies[1], OneProcess()).score(texts)]
    assert all(torch.equal(one, two) for one, two in zip(scores, alone, strict=True))


@pytest.mark.parametrize(
    ("visible", "ranks", "servers", "expected"),
    [
        ("0,1,2,3", "2", 2, ["2", "3"]),
        ("4,5,6,7", "1", 1, ["5,6,7"]),
        ("0,1,2,3,4,5,6,7", "4", 2, ["4,5", "6,7"]),
        ("0,1,2", "2", 4, ["2"]),
        ("0,1", "2", 1, []),
    ],
)
def test_servers_get_the_gpus_that_no_rank_trains_on(
    monkeypatch: pytest.MonkeyPatch, visible: str, ranks: str, servers: int, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert unused_devices(servers) == expected


def test_a_server_is_not_told_that_it_is_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LEGATO_KEPT"):
        monkeypatch.setenv(name, "1")

    class Env(Own):
        def command(self, plan: StartPlan) -> tuple[list[str], dict[str, str]]:
            return ["env"], {"LEGATO_SERVER_KEY": plan.key}

    plan = StartPlan(
        python="", model=tmp_path, port=1, key="secret", dtype="", context_tokens=1, sequences=1, lora_rank=0, device="cpu",
        arguments=(),
    )  # fmt: skip
    server = StartedServer(Env(), plan, tmp_path / "log", "3")
    try:
        server.start(tmp_path)
        assert until(lambda: "LEGATO_KEPT" in (tmp_path / "log").read_text())
    finally:
        server.end()
    told = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines() if "=" in line)
    assert told["LEGATO_SERVER_KEY"] == "secret" and told["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & told.keys()
    assert os.environ["RANK"] == "1"


def test_a_pause_longer_than_the_deadline_of_ranks_is_refused() -> None:
    words = ["rollouts.engine=legato", "rollouts.servers.start=1", "training.rank_deadline_seconds=60"]
    config = load((), words).config
    with pytest.raises(InputError, match=r"expected rollouts\.servers\.pause_seconds below training\.rank_deadline_seconds"):
        _check_servers_of_ranks(config, two_ranks()[0])
