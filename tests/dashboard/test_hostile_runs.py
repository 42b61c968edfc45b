"""Run directories that are wrong in ways no trainer of ours leaves them: none may stop, fill or mislead the dashboard."""

import asyncio
import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from legato.dashboard import stored
from legato.dashboard.board import configs, curves
from legato.dashboard.guard import Guard
from legato.dashboard.runs import Folder
from legato.dashboard.series import MOST_KEYS, Series
from legato.dashboard.stored import PORTION, Filter, list_rollouts, show_rollout
from legato.records import tail
from legato.records.directory import RunDirectory
from legato.records.tail import LONGEST
from tests.dashboard.synthetic import synthetic_run


def run_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`; fail if it takes longer than `seconds`."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no end within {seconds} s"
    return results[0]


def rows_by_name(folder: Folder) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in (run.row() for run in folder.runs())}
    json.dumps(list(rows.values()), allow_nan=False)
    return rows


def write_raw(directory: RunDirectory, step: int, text: str) -> None:
    directory.rollouts_path(step).parent.mkdir(exist_ok=True)
    directory.rollouts_path(step).write_bytes(gzip.compress(text.encode()))


def test_a_key_is_used_up_by_get_and_not_by_head() -> None:
    guard = Guard(app=lambda *_: asyncio.sleep(0), port=8000, on_new_address=lambda address: None)

    def status(method: str, query: str, cookie: str = "") -> int:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        async def receive() -> dict[str, Any]:
            return {}

        scope = {"type": "http", "method": method, "path": "/", "query_string": query.encode()}
        headers = [(b"host", b"127.0.0.1:8000"), (b"cookie", cookie.encode())]
        asyncio.run(guard(scope | {"headers": headers}, receive, send))
        return int(messages[0]["status"])

    query = f"key={guard.key}"
    assert [status(method, query) for method in ("HEAD", "GET", "GET")] == [403, 200, 403]
    known, query = f"{guard._cookie_name}={guard._cookie}", f"key={guard.key}"
    assert status("GET", query, known) == 200 and guard.key not in query, "also by a browser that has entered before"


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_LARGEST", 10_000)
    directory = RunDirectory.create(tmp_path, "run")
    write_raw(directory, 1, json.dumps({"text": "x" * 9_000}))
    write_raw(directory, 2, json.dumps({"text": "x" * 11_000}))
    result = list_rollouts(directory, [1, 2], Filter())
    assert [row["step"] for row in result["rows"]] == [1]
    assert len(result["damaged"]) == 1 and "10,000 bytes" in result["damaged"][0]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    synthetic_run(tmp_path, steps=3, name="whole")
    odd = RunDirectory.create(tmp_path, "odd")
    odd.write_environment({})
    odd.write_config("")
    os.mkfifo(odd.metrics_path)
    (odd.path / "rollouts").mkdir()
    os.mkfifo(odd.rollouts_path(1))
    folder = Folder(tmp_path)
    assert set(run_within(10, lambda: rows_by_name(folder))) == {"whole", "odd"}
    result = run_within(10, lambda: curves(folder, ["whole", "odd"], ["reward/mean"], 300, False))
    assert [each["run"] for each in result["curves"]] == ["whole"]
    assert "does not exist" in run_within(10, lambda: list_rollouts(odd, [1], Filter()))["damaged"][0]
    odd.config_path.unlink()
    os.mkfifo(odd.config_path)
    assert run_within(10, lambda: configs(folder, ["odd"]))["same"] == []


@pytest.mark.parametrize("harm", ["zeros", "zeros and lines", "may not be read"])
def test_unreadable_metrics_are_not_retried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    good = b'{"kind":"step","step":1,"reward/mean":1}\n{"kind":"step","step":2,"reward/mean":2}\n'
    directory.metrics_path.write_bytes(b"\0" * (3 * LONGEST) + (b"\n" + good if harm == "zeros and lines" else b""))
    if harm == "may not be read":

        def refuse(path: Path) -> Any:
            raise PermissionError(path)

        monkeypatch.setattr(tail, "open_plain_file", refuse)
    folder = Folder(tmp_path)
    curves(folder, ["run"], ["reward/mean"], 300, False)
    assert folder._reader is not None
    folder._reader.join(10)
    assert not folder._reader.is_alive()
    if harm == "zeros and lines":
        result = curves(folder, ["run"], ["reward/mean"], 300, False)
        assert result["curves"][0]["mean"] == [1, 2] and result["damaged"]["run"] >= 3 and not result["reading"]


def test_a_long_file_that_was_cut_back_is_listed_as_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    line = '{"kind":"step","step":%d,"reward/mean":%d,"padding":"' + "x" * 1000 + '"}\n'
    directory.metrics_path.write_text("".join(line % (step, 1) for step in range(1, 1001)))
    folder = Folder(tmp_path)
    assert curves(folder, ["run"], ["reward/mean"], 300, False)["reading"] == []
    directory.metrics_path.write_text("".join(line % (step, 2) for step in range(1, 5001)))
    monkeypatch.setattr(folder, "read_in_background", lambda: None)
    assert curves(folder, ["run"], ["reward/mean"], 300, False)["reading"] == ["run"], "the page asks again"
    folder._read_all()
    result = curves(folder, ["run"], ["reward/mean"], 300, False)
    assert result["reading"] == [] and set(result["curves"][0]["mean"]) == {2.0}


def test_a_folder_of_someone_else_does_not_hide_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lost+found` at the root of a disk: asking for a file in it is refused, which tests that run as root do not meet."""
    synthetic_run(tmp_path, steps=2, name="whole")
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def refuse_in_lost_found(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse_in_lost_found)
    assert set(rows_by_name(Folder(tmp_path))) == {"whole"}


def test_numbers_too_large_for_a_float_are_left_out(tmp_path: Path) -> None:
    synthetic_run(tmp_path, steps=3, name="whole")
    odd = RunDirectory.create(tmp_path, "odd")
    odd.write_config(f"\n[training]\nseed = {'9' * 5000}\nsteps = 7\n")
    huge = "1" + "0" * 400
    lines = [
        '{"kind":"step","step":1,"reward/mean":0.5}',
        f'{{"kind":"step","step":2,"reward/mean":{huge}}}',
        '{"kind":"step","step":NaN,"reward/mean":9}',
        f'{{"kind":"step","step":{huge},"reward/mean":9}}',
    ]
    odd.metrics_path.write_text("\n".join(lines) + "\n")
    folder = Folder(tmp_path)
    assert rows_by_name(folder)["odd"]["steps"] == 7
    result = curves(folder, ["whole", "odd"], ["reward/mean"], 300, False)
    json.dumps(result, allow_nan=False)
    assert {each["run"]: each["x"] for each in result["curves"]} == {"whole": [1, 2, 3], "odd": [1]}
    write_raw(odd, 1, '{"text":"t","components":{"a":NaN,"b":"x","c":1}}')
    assert json.loads(json.dumps(show_rollout(odd, 1, 0, whole=True), allow_nan=False))["components"] == {
        "a": None,
        "b": None,
        "c": 1.0,
    }


@pytest.mark.parametrize("config", ["[a{}]\nx = 1", "[[a]]\n[a{}]\nx = 1", "a{} = 1"])
def test_a_config_that_is_nested_thousands_deep_is_shown_as_none(tmp_path: Path, config: str) -> None:
    synthetic_run(tmp_path, steps=3, name="whole")
    deep = RunDirectory.create(tmp_path, "deep")
    deep.write_config(config.format(".b" * 3000))
    deep.append_metrics({"kind": "step", "step": 1, "reward/mean": 0.5})
    result = configs(Folder(tmp_path), ["whole", "deep"])
    assert result["differ"] and {row["values"][1] for row in result["differ"]} == {None}
    assert len(curves(Folder(tmp_path), ["whole", "deep"], ["reward/mean"], 300, True)["curves"]) == 2


def test_the_list_stays_small_whatever_a_run_calls_itself(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    directory.append_metrics({"kind": "start", "algorithm": "x" * 500_000, "model": "tiny"})
    assert len(json.dumps(Folder(tmp_path).runs()[0].row())) < 2000


def test_the_number_of_quantities_of_a_run_is_bounded() -> None:
    series = Series()
    for start in range(0, 3000, 100):
        series.add([{"step": start, **{f"key/{number}": 1.0 for number in range(start, start + 100)}}])
    assert len(series.keys) == MOST_KEYS and series.curve("key/0") is not None and series.curve("key/2999") is None


def test_a_long_prompt_can_be_shown_whole_as_well(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_rollouts(1, [{"prompt": "p" * (PORTION + 7), "text": "short"}])
    assert show_rollout(directory, 1, 0, whole=False)["left"] == 7
    whole = show_rollout(directory, 1, 0, whole=True)
    assert len(whole["prompt"]) == PORTION + 7 and whole["left"] == 0


def test_ordering_all_steps_holds_no_more_than_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Row(dict[str, Any]):
        __hash__ = object.__hash__

    alive, most, make_row = WeakSet[Row](), [0], stored._row

    def make_counted_row(*arguments: Any) -> dict[str, Any]:
        row = Row(make_row(*arguments))
        alive.add(row)
        most[0] = max(most[0], len(alive))
        return row

    monkeypatch.setattr(stored, "MOST", 5)
    monkeypatch.setattr(stored, "_row", make_counted_row)
    directory = RunDirectory.create(tmp_path, "run")
    for step in range(1, 31):
        directory.write_rollouts(step, [{"text": "x", "reward": float(step * 10 + n)} for n in range(10)])
    result = list_rollouts(directory, range(1, 31), Filter(), "reward")
    assert [row["reward"] for row in result["rows"]] == [309, 308, 307, 306, 305]
    assert (result["more"], result["unsearched"]) == (295, 0)
    assert most[0] <= 25, "a run of a hundred thousand steps would not fit"


def test_steps_that_were_not_searched_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST", 5)
    directory = RunDirectory.create(tmp_path, "run")
    for step in range(1, 5):
        directory.write_rollouts(step, [{"text": "x"}] * 3)
    result = list_rollouts(directory, range(1, 5), Filter())
    assert [row["step"] for row in result["rows"]] == [4, 4, 4, 3, 3]
    assert (result["more"], result["unsearched"]) == (1, 2)
