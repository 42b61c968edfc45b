"""The watch over ranks: who is gone, who hangs, and what is not overdue."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.errors import LOST_RANK, LostRankError
from legato.training.ranks import watch as watching
from legato.training.ranks.layers import _Followed, _in_pass
from legato.training.ranks.process_group import ProcessGroup
from legato.training.ranks.watch import Watch, describe_threads, find_late_ranks
from tests.training.test_pieces import Ranks


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def beat(**changes: Any) -> dict[str, Any]:
    here: dict[str, Any] = {"process": os.getpid(), "host": "elsewhere", "beats": 1, "operations": 5, "waits": False}
    return {**here, "seconds": 0.0, "paused": None, "state": "running", **changes}


def test_a_rank_is_late_if_others_wait_for_it_beyond_the_deadline() -> None:
    waiting = beat(waits=True, seconds=11.0, operations=6)
    assert find_late_ranks([waiting, beat(), waiting], 10.0) == [1]
    assert find_late_ranks([waiting, beat(), waiting], 12.0) == []
    assert find_late_ranks([waiting, beat(paused="the disk is full"), waiting], 10.0) == []
    assert find_late_ranks([waiting, beat(state="done")], 10.0) == []
    assert find_late_ranks([beat(), beat()], 10.0) == []


def test_all_ranks_are_late_if_none_comes_out_of_the_same_exchange() -> None:
    """What carries their numbers is broken, or a device hangs: no rank can be told from the others."""
    waiting = beat(waits=True, seconds=11.0)
    assert find_late_ranks([waiting, waiting], 10.0) == [0, 1]
    assert find_late_ranks([waiting, beat(waits=True, seconds=9.0)], 10.0) == []
    assert find_late_ranks([waiting, beat()], 10.0) == []
    assert find_late_ranks([waiting, beat(waits=True, seconds=11.0, operations=4)], 10.0) == [1]


def test_only_the_waits_of_those_that_are_ahead_count() -> None:
    """A beat is up to a second old: a rank whose last one tells of a long wait may have gone on."""
    behind, ahead = beat(waits=True, seconds=60.5, operations=5), beat(waits=True, seconds=0.1, operations=6)
    assert find_late_ranks([ahead, behind], 60.0) == []
    assert find_late_ranks([ahead, behind, beat(waits=True, seconds=60.5, operations=6)], 60.0) == [1]
    # One that computes has what it waited for.
    assert find_late_ranks([beat(operations=6), behind], 60.0) == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(watching, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(watching, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(watching, "_STACK_SECONDS", 0.05)


class Ended:
    """Records with which code a watch ends its process, and what it says."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.said: list[str] = []

    def wait(self) -> None:
        end = time.monotonic() + 5
        while not self.codes and time.monotonic() < end:
            time.sleep(0.01)


def watch(store: Store, ended: Ended, **changes: Any) -> Watch:
    options: dict[str, Any] = {"deadline": 60.0, "say": ended.said.append, "leave": ended.codes.append, **changes}
    return Watch(store, 0, 2, **options)


@pytest.mark.usefixtures("quick")
def test_a_rank_that_falls_silent_ends_the_others() -> None:
    store, ended = Store(), Ended()
    store.set("beat/1", json.dumps(beat()))
    with watch(store, ended):
        ended.wait()
    assert set(ended.codes) == {LOST_RANK}
    assert ended.said[0].startswith("rank 1 (process") and "is gone" in ended.said[0]


@pytest.mark.usefixtures("quick")
def test_a_killed_process_on_the_same_machine_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_SILENT_SECONDS", 1000.0)
    store, ended = Store(), Ended()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    store.set("beat/1", json.dumps(beat(process=process.pid, host=watching.socket.gethostname())))
    with watch(store, ended) as rank:
        time.sleep(0.2)
        assert not ended.codes
        process.kill()
        assert rank.explain_loss() is not None
        ended.wait()
    process.wait()
    assert ended.codes


@pytest.mark.usefixtures("quick")
def test_a_rank_that_cannot_tell_the_others_ends_them_with_its_reason() -> None:
    store, ended = Store(), Ended()
    store.set("beat/1", json.dumps(beat(process=1)))
    failed = Ended()
    with Watch(store, 1, 2, deadline=60.0, say=failed.said.append, leave=failed.codes.append) as other:
        other.end_all("rank 1: OutOfMemoryError: no room")
        time.sleep(0.4)
    assert not failed.codes, "it ends by itself, with its own exit code"
    with watch(store, ended) as rank:
        ended.wait()
        assert rank.explain_loss() == "rank 1: OutOfMemoryError: no room"
    assert set(ended.codes) == {LOST_RANK} and ended.said[0] == "rank 1: OutOfMemoryError: no room; all ranks end"


@pytest.mark.usefixtures("quick")
def test_ranks_that_have_ended_are_not_missed() -> None:
    store, ended = Store(), Ended()
    store.set("beat/1", json.dumps(beat(state="done")))
    with watch(store, ended):
        time.sleep(0.6)
    assert not ended.codes
    assert json.loads(store.values["beat/0"])["state"] == "done"


@pytest.mark.usefixtures("quick")
def test_a_rank_that_hangs_is_named_with_what_every_thread_was_doing(tmp_path: Path) -> None:
    store, ended = Store(), Ended()
    with watch(store, ended, deadline=0.2) as rank:
        rank.folder = tmp_path
        rank.begin("gather")
        rank.begin("gather")
        for number in range(60):
            store.set("beat/1", json.dumps(beat(beats=number, operations=1)))
            store.set("stack/1", "thread MainThread\n  in a reward")
            time.sleep(0.02)
            if ended.codes:
                break
    assert ended.codes and ended.said[0].startswith("rank 1 hangs") and "rank_deadline_seconds" in ended.said[0]
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "in a reward" in stacks and "test_a_rank_that_hangs" in stacks


class TimedStore(Store):
    """Remembers how many beats rank 0 had sent when stacks were wanted, and when the verdict came."""

    def __init__(self) -> None:
        super().__init__()
        self.beats: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key in ("stacks", "verdict"):
            self.beats[key] = json.loads(self.values["beat/0"])["beats"]


@pytest.mark.usefixtures("quick")
def test_a_rank_that_reports_a_hang_stays_alive_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that saw old beats of rank 0 would take it for late, or gone, and give a second verdict."""
    monkeypatch.setattr(watching, "_STACK_SECONDS", 0.6)  # longer than a rank may be silent
    monkeypatch.setattr(watching, "_GRACE_SECONDS", 0.6)
    store, ended, other = TimedStore(), Ended(), Ended()
    with watch(store, ended, deadline=0.1) as rank:
        rank.begin("gather")
        rank.begin("gather")
        with Watch(store, 1, 2, deadline=0.1, say=other.said.append, leave=other.codes.append) as reader:
            reader.begin("compute")
            reader.end()
            ended.wait()
            other.wait()
    assert store.beats["verdict"] - store.beats["stacks"] > 10
    assert {line.partition(":")[0] for line in ended.said + other.said} == {"rank 1 hangs"}
    assert store.values["verdict"].startswith("rank 1 hangs")


@pytest.mark.usefixtures("quick")
def test_the_first_verdict_stays() -> None:
    store, ended = Store(), Ended()
    store.set("verdict", "rank 3 hangs: the others have waited")
    assert watch(store, ended)._agree_on("rank 2 is gone") == "rank 3 hangs: the others have waited"
    assert store.values["verdict"].startswith("rank 3 hangs")


class Recorded(Ranks):
    """Ranks that note when they begin and end to wait."""

    def __init__(self) -> None:
        super().__init__(2)
        self.noted: list[str] = []

    @contextmanager
    def exchanging(self, operation: str) -> Iterator[None]:
        self.begin_exchange(operation)
        yield
        self.end_exchange()

    def begin_exchange(self, operation: str) -> None:
        self.noted.append("begin")

    def end_exchange(self) -> None:
        self.noted.append("end")


@pytest.mark.parametrize(
    ("on_host", "noted"),
    [
        (True, ["begin", "exchange", "end", "compute", "begin", "exchange", "end", "compute", "end"]),
        (False, ["begin", "exchange", "compute", "begin", "exchange", "compute", "end"]),
    ],
)
def test_a_rank_waits_in_the_exchanges_of_a_pass_and_not_while_it_computes(on_host: bool, noted: list[str]) -> None:
    """Where the device waits and not the host, a rank may wait until the next exchange begins, or the pass ends."""
    ranks, table = Recorded(), torch.zeros(1)
    collective = _Followed(lambda *_, **__: ranks.noted.append("exchange"), ranks, on_host=on_host)
    with _in_pass(ranks):
        for _ in range(2):
            collective(output_tensor=table, input_tensor=table, group=None)
            ranks.noted.append("compute")
    assert ranks.noted == noted


class Interrupted:
    """An observer that a signal interrupts while it asks who is gone."""

    def __init__(self) -> None:
        self.asked = 0

    def begin(self, operation: str) -> None:
        pass

    def end(self) -> None:
        pass

    def explain_loss(self) -> str | None:
        self.asked += 1
        if self.asked == 1:
            raise KeyboardInterrupt
        return "rank 0 (process 7 on here) is gone: it was killed, or its machine was"

    def end_all(self, reason: str) -> None:
        pass


def test_a_signal_of_torchrun_does_not_hide_which_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends what is left of a run that lost a rank; before the first step SIGTERM raises KeyboardInterrupt."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    world = ProcessGroup(observer=Interrupted())
    with pytest.raises(LostRankError, match=r"^rank 0 \(process 7 on here\) is gone"):
        world.agree(0)
    # Rank 1 tells of rank 0: it must know which rank is gone whatever it was doing last.
    with pytest.raises(LostRankError, match=r"^rank 0 \(process 7 on here\) is gone"):
        world.agree(0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("operations", "reporters", "words"), [(6, [1], "rank 0 hangs"), (5, [0], "all ranks hang")])
def test_one_rank_reports_a_hang(tmp_path: Path, operations: int, reporters: list[int], words: str) -> None:
    """Rank 0 does so, unless it alone is late."""
    late, other = beat(waits=True, operation="a pass", seconds=11.0), beat(waits=True, seconds=11.0, operations=operations)
    reports = []
    for rank in (0, 1):
        store, folder = Store(), tmp_path / str(rank)
        folder.mkdir()
        here = Watch(store, rank, 2, deadline=10.0, say=print)
        here.folder = folder
        store.set("beat/0", json.dumps(late))
        store.set("beat/1", json.dumps(other))
        verdict = here._look_at_others(time.monotonic())
        if verdict is not None:
            assert verdict.startswith(words)
            assert (folder / "stacks.txt").is_file()
            reports.append(rank)
    assert reports == reporters


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("verdict", "speakers"),
    [
        ("rank 0 (process 7 on here) is gone: it was killed, or its machine was", [1]),
        ("rank 2 (process 9 on here) is gone: it was killed, or its machine was", [0]),
        ("rank 0 hangs: the others have waited for more than 4 s", [0]),
        ("ranks 0, 2 hang: the others have waited for more than 4 s", [0]),
        (watching._STORE_LOST, [0, 1, 2]),
    ],
)
def test_one_rank_shows_why_all_end(verdict: str, speakers: list[int]) -> None:
    spoke = []
    for rank in range(3):
        ended = Ended()
        Watch(Store(), rank, 3, deadline=10.0, say=ended.said.append, leave=ended.codes.append)._end(verdict)
        assert ended.codes == [LOST_RANK]
        spoke += [rank] * len(ended.said)
    assert spoke == speakers


def test_the_stacks_name_this_function() -> None:
    assert "test_the_stacks_name_this_function" in describe_threads()
