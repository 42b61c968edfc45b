"""Servers that a run starts: they answer, come back after a kill, and end with the run, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from legato.errors import InputError
from legato.rollouts.engine import EnginePlace, Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers import leash
from legato.rollouts.servers.dialects.base import StartPlan
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.member import State
from legato.rollouts.servers.settings import ServerSettings
from legato.rollouts.servers.started import StartedServer, unused_devices
from tests.fleet.test_folders import policy_of
from tests.serve.running import plain_engine

LIMITS = Limits(max_response_tokens=6, end_tokens=(1,))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("way", ["kill", "close"])
def test_a_leashed_process_ends_with_its_parent(tmp_path: Path, way: str) -> None:
    """The parent is killed with SIGKILL, or closes the pipe; the grandchildren of the leash end too."""
    script = tmp_path / "server.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pids')!r})\n"
        "time.sleep(100)\n"
    )
    words = [sys.executable, "-I", "-S", leash.__file__, sys.executable, str(script)]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; p = subprocess.Popen({words!r}, stdin=subprocess.PIPE)\n"
         f"time.sleep(100 if {way!r} == 'kill' else 2); p.stdin.close(); p.wait()"]
    )  # fmt: skip
    try:
        assert until((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        if way == "kill":
            parent.send_signal(signal.SIGKILL)
        assert until(lambda: not any(map(is_alive, pids)))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.slow
def test_a_server_of_the_run_is_started_killed_and_started_again(tmp_path: Path) -> None:
    policy, said = policy_of(), list[str]()
    fleet = Fleet(policy, Own(), ServerSettings(start=1, pause_seconds=120.0), rows_at_once=8, context_tokens=64)
    try:
        fleet.open(EnginePlace(folder=tmp_path, say=said.append))
        batch = [Request(prompt=torch.tensor([5, 6, 7]), seeds=tuple(range(8)))]
        expected = [each.tokens.tolist() for each in plain_engine(policy).generate(batch, Sampling(), LIMITS)[0]]
        assert [each.tokens.tolist() for each in fleet.generate(batch, Sampling(), LIMITS)[0]] == expected
        started = fleet.servers[0].started
        assert started is not None and started.process is not None
        leashed = int(Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()[0])
        os.kill(leashed, signal.SIGKILL)
        assert until(lambda: not started.alive)
        assert [each.tokens.tolist() for each in fleet.generate(batch, Sampling(), LIMITS)[0]] == expected
        assert any("its process ended" in text for text in said) and any("is back with version 0" in text for text in said)
        assert any(text.startswith("paused: 0 of 1") for text in said) and fleet.servers[0].state is State.UP
        pid = started.process.pid
    finally:
        fleet.close()
    assert not is_alive(pid) and (tmp_path / "server-0.log").exists() and not (tmp_path / "weights").exists()


def test_a_server_that_does_not_start_is_one_error_with_its_log(tmp_path: Path) -> None:
    settings = ServerSettings(start=1, python="/bin/false")
    fleet = Fleet(policy_of(), Own(), settings, rows_at_once=8, context_tokens=64)
    with pytest.raises(InputError, match=r"expected a legato server to start, got the server that was started ended"):
        fleet.open(EnginePlace(folder=tmp_path))
    fleet.close()


def test_a_server_whose_software_is_not_installed_says_where_to_name_it(tmp_path: Path) -> None:
    fleet = Fleet(policy_of(), Absent(), ServerSettings(start=1), rows_at_once=8, context_tokens=64)
    with pytest.raises(InputError, match=r"'absent.*; name the Python that has absent in rollouts\.servers\.python"):
        fleet.open(EnginePlace(folder=tmp_path))
    fleet.close()


class Absent(Own):
    name = "absent"

    def command(self, plan: StartPlan) -> tuple[list[str], dict[str, str]]:
        return [plan.python, "-m", "absent.server"], {}


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
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    for name in (*ranks, "LEGATO_KEPT"):
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
        assert until(lambda: "LEGATO_SERVER_KEY" in (tmp_path / "log").read_text())
        assert until(lambda: not server.alive)
    finally:
        server.end()
    told = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines() if "=" in line)
    assert told["LEGATO_SERVER_KEY"] == "secret" and told["LEGATO_KEPT"] == "1" and told["CUDA_VISIBLE_DEVICES"] == "3"
    assert not ranks & told.keys()
