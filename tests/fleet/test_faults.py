"""A fleet over `legato serve` with faults: each is a retry, a drop or one clear error, and is counted."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.errors import ServerError
from legato.rollouts.servers.fleet import FAILURES, Fleet
from legato.rollouts.servers.member import State
from tests.fleet.serving import fleet_of, servers, two_servers
from tests.serve.running import chat_policy, make_served, plain_engine
from tests.serve.test_clients import wait_until

LIMITS = Limits(max_response_tokens=8, end_tokens=(1, 82))
SAMPLING = Sampling(temperature=0.8)


def requests(count: int, each: int = 2, salt: int = 0) -> list[Request]:
    source = torch.Generator().manual_seed(count + 100 * salt)
    return [
        Request(
            prompt=torch.randint(3, 80, (4 + place,), generator=source), seeds=tuple(range(10 * place, 10 * place + each))
        )
        for place in range(count)
    ]


def assert_right(fleet: Fleet, policy: Policy, batch: list[Request]) -> None:
    expected = plain_engine(policy).generate(batch, SAMPLING, LIMITS)
    for row, other in zip(fleet.generate(batch, SAMPLING, LIMITS), expected, strict=True):
        assert [each.tokens.tolist() for each in row] == [each.tokens.tolist() for each in other]
        assert all(torch.allclose(one.logprobs, two.logprobs, atol=1e-4) for one, two in zip(row, other, strict=True))


def test_passing_faults_cost_a_retry_and_no_response() -> None:
    """All in one fleet: each fault is injected alone, and counted."""
    kinds = ("slow", "silent", "status", "closed", "lost", "truncated", "foreign-tokens", "missing-token", "nan", "repeated")
    with two_servers(request_seconds=2.0) as (fleet, policy, _, plans):
        assert_right(fleet, policy, requests(4))
        for salt, kind in enumerate((*kinds, "garbage", "twice"), 1):
            while fleet.servers[0].state is not State.UP:
                fleet.generate(requests(1), SAMPLING, LIMITS)  # it is asked whether it is alive
            fleet.metrics()
            plans[0].done.clear()
            plans[0].add(kind, seconds=2.5 if kind == "silent" else 0.1)
            # Prompts that no server has seen: the first goes to the first server.
            assert_right(fleet, policy, requests(2, salt=salt))
            assert plans[0].done == [kind]
            counted = fleet.metrics()
            assert counted["servers/retries"] == (0 if kind in ("slow", "twice") else 1), kind
            assert counted["servers/drops"] == 0, kind


def test_a_busy_server_has_not_failed() -> None:
    """Others may use it for minutes. Only after `pause_seconds` is that an error."""
    with two_servers(pause_seconds=60.0) as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        for plan in plans:
            plan.add("status", status=429, headers={"retry-after": "0.01"}, times=8)
        assert_right(fleet, policy, requests(1, each=1))
        assert sum(len(plan.done) for plan in plans) > FAILURES
        assert [server.strikes for server in fleet.servers] == [0, 0] and fleet.metrics()["servers/drops"] == 0
        fleet.settings = replace(fleet.settings, pause_seconds=0.2)
        for plan in plans:
            plan.add("status", status=429, headers={"retry-after": "0.01"}, times=10**6)
        with pytest.raises(InputError, match=r"got that all were busy for \d+ s .*: a fault of the plan"):
            fleet.generate(requests(1, each=1, salt=1), SAMPLING, LIMITS)


def test_a_server_that_is_too_busy_for_the_probe_is_asked_again() -> None:
    """It has the weights already."""
    with two_servers(request_seconds=2.0) as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("status", status=429, headers={"retry-after": "0.01"}, times=3)
        plans[0].add("status", status=429, headers={"retry-after": "0"}, after=3)
        fleet.publish(policy.model.named_parameters(), 2)
        assert len(plans[0].done) == 4 and fleet.servers[0].version == 2 and fleet.metrics()["servers/drops"] == 0
        plans[0].add("status", status=429, headers={"retry-after": "0.5"}, times=10**6)
        fleet.publish(policy.model.named_parameters(), 3)
        assert fleet.servers[0].state is State.DOWN, "a publish does not wait for ever"
        plans[0].faults.clear()


def test_a_server_that_always_fails_is_dropped_and_taken_back() -> None:
    with two_servers() as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("nan", times=10**6)
        assert_right(fleet, policy, requests(8))
        assert fleet.servers[0].state is State.DOWN and fleet.metrics()["servers/drops"] == 1
        plans[0].faults.clear()
        for _ in range(200):
            assert_right(fleet, policy, requests(2))
            if fleet.servers[0].state is State.UP:
                break
        assert fleet.metrics()["servers/rejoins"] == 1


def test_a_server_that_restarts_comes_back_with_the_current_weights() -> None:
    with two_servers() as (fleet, policy, started, plans):
        fleet.publish(policy.model.named_parameters(), 3)
        handles = fleet.submit(requests(10), SAMPLING, LIMITS)
        started[0].restart(make_served(chat_policy(9)))
        finished: dict[Any, Any] = {}
        while len(finished) < len(handles):
            finished |= {one.handle: one.responses for one in fleet.poll()}
        expected = plain_engine(policy).generate(requests(10), SAMPLING, LIMITS)
        for handle, row in zip(handles, expected, strict=True):
            assert [each.tokens.tolist() for each in finished[handle]] == [each.tokens.tolist() for each in row]
            assert {int(each.version.unique()) for each in finished[handle]} == {3}
        for _ in range(200):
            assert_right(fleet, policy, requests(8))
            if fleet.servers[0].counts.rejoins:
                break
        assert fleet.servers[0].state is State.UP and plans is not None


def test_requests_in_flight_at_many_servers_are_not_too_many_files() -> None:
    """Each has a connection, and a system may allow 1024 files at first: those of 4 servers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    policy = chat_policy(3)
    with servers([chat_policy(4), chat_policy(5)]) as (started, _):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 50, hard))
            with fleet_of(policy, started, rows_at_once=40) as fleet:
                assert_right(fleet, policy, requests(40))
                assert fleet.metrics()["servers/retries"] == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_that_is_dropped_has_no_request_of_the_run_left() -> None:
    """It may be back within a second, and gets others then."""
    with two_servers() as (fleet, policy, started, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        started[0].post("/pause?mode=keep")
        handles = fleet.submit(requests(8), SAMPLING, LIMITS)
        wait_until(lambda: started[0].served.admission.taken == fleet.rows_at_once)
        plans[0].add("status", status=503, path="/weight_info")
        plans[0].add("status", status=503, path="/health", times=2)
        finished = 0
        while fleet.servers[0].state is not State.DOWN:
            finished += len(fleet.poll())
        wait_until(lambda: started[0].served.admission.taken == 0)
        while finished < len(handles):
            finished += len(fleet.poll())


def test_a_server_that_does_not_say_that_it_is_alive_is_given_no_weights() -> None:
    """A publish waits for all servers, and loading may take minutes."""
    with two_servers() as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].requests.clear()
        plans[0].add("status", status=503, path="/health")
        fleet.publish(policy.model.named_parameters(), 2)
        assert fleet.servers[0].state is State.DOWN and [path for path, _ in plans[0].requests] == ["/health"]
        assert_right(fleet, policy, requests(3))


def test_a_refused_check_says_nothing_of_the_weights() -> None:
    """A proxy says 404 while the server behind it restarts."""
    with two_servers() as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("status", status=404, path="/health")
        fleet.publish(policy.model.named_parameters(), 2)
        assert fleet.servers[0].state is State.DOWN
        for _ in range(200):
            assert_right(fleet, policy, requests(8))
            if fleet.servers[0].counts.rejoins:
                break
        assert fleet.servers[0].state is State.UP


def test_a_server_that_failed_to_go_on_after_a_publish_is_not_left_paused() -> None:
    with two_servers() as (fleet, policy, started, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("status", status=503, path="/resume")
        fleet.publish(policy.model.named_parameters(), 2)
        assert fleet.servers[0].state is State.DOWN and started[0].served.thread.mode == "paused"
        for _ in range(200):
            assert_right(fleet, policy, requests(8))
            if fleet.servers[0].counts.rejoins:
                break
        assert fleet.servers[0].state is State.UP and started[0].served.thread.mode == "running"


def test_steps_that_go_on_while_a_server_comes_back_leave_it_the_weights_that_it_reads() -> None:
    """It may take minutes to start and load, and every step writes a folder and deletes an older one."""
    with two_servers() as (fleet, policy, _, plans):
        problems: list[str] = []
        load = fleet.dialect.load

        def load_and_note(*words: Any, **options: Any) -> None:
            try:
                load(*words, **options)
            except ServerError as error:
                problems.append(str(error))
                raise

        fleet.dialect.load = load_and_note  # type: ignore[method-assign]
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("status", path="/pause")
        fleet.publish(policy.model.named_parameters(), 2)
        assert fleet.servers[0].state is State.DOWN and len(problems) == 1
        plans[0].add("slow", seconds=1.5, path="/pause")
        fleet.servers[0].next_check = 0.0
        fleet.generate(requests(1), SAMPLING, LIMITS)
        assert fleet.servers[0].checking and fleet._published is not None
        files = {path: path.stat().st_ino for path in fleet._published.folder.iterdir()}
        for version in (3, 2, 5):  # the run goes back to a checkpoint in between
            fleet.publish(policy.model.named_parameters(), version)
        assert {path: path.stat().st_ino for path in files} == files
        for _ in range(200):
            fleet.generate(requests(2), SAMPLING, LIMITS)
            if fleet.servers[0].state is State.UP:
                break
        assert fleet.servers[0].version == 5 and len(problems) == 1, problems


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("temperature", r"the server's log-probs are not those of its tokens at temperature 0\.7"),
        ("wrong-tokens", "the server's log-probs are not those of its tokens"),
        ("stale", r"the server did not take the weights: its log-probs differ from the trainer's by \S+ on average"),
    ],
)
def test_what_no_single_reply_shows_is_found_by_the_probe(kind: str, message: str) -> None:
    with two_servers() as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        with torch.no_grad():
            policy.model.get_decoder().norm.weight.mul_(1.3)
        # The probe scores three texts, then samples one response.
        plans[1].add(kind, times=1, after=0 if kind == "stale" else 3)
        fleet.publish(policy.model.named_parameters(), 2)  # a trainer in the middle of a step goes on
        with pytest.raises(InputError, match=message):
            fleet.submit(requests(1), SAMPLING, LIMITS)


def test_a_small_move_that_a_server_did_not_follow_is_found() -> None:
    """One update moves log-probs by less than the tolerance: the server's have not moved at all."""
    with two_servers(probe_tolerance=0.5) as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        for version, stale in ((2, False), (3, True)):
            with torch.no_grad():
                policy.model.get_decoder().norm.weight.mul_(1.001)
            if stale:
                plans[0].add("stale")
            fleet.publish(policy.model.named_parameters(), version)
        with pytest.raises(InputError, match=r"of the fixed texts moved by \S+ on average, the server's"):
            fleet.poll()


def test_a_server_that_cannot_load_is_dropped_and_one_that_refuses_ends_the_run() -> None:
    with two_servers() as (fleet, policy, _, plans):
        fleet.publish(policy.model.named_parameters(), 1)
        plans[0].add("status", path="/collective_rpc")
        fleet.publish(policy.model.named_parameters(), 2)
        assert fleet.servers[0].state is State.DOWN
        assert_right(fleet, policy, requests(3))
        plans[1].add("status", status=400, path="/collective_rpc")
        fleet.publish(policy.model.named_parameters(), 3)
        with pytest.raises(InputError, match="to load version 3, got status 400"):
            fleet.submit(requests(1), SAMPLING, LIMITS)
