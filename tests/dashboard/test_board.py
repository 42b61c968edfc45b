"""The dashboard's answers without a browser: access, files that grow, curves, rollouts and torn runs."""

import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from legato.dashboard.board import configs, curves, findings
from legato.dashboard.runs import Folder
from legato.dashboard.stored import PORTION, Filter, list_rollouts, newest_measured_step, show_rollout
from legato.errors import InputError
from legato.health.rules import RULES
from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock, is_locked
from tests.dashboard.browser import dashboard
from tests.dashboard.synthetic import synthetic_run
from tests.proof.pages import numbers

# Access


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    folder = tmp_path_factory.mktemp("served")
    synthetic_run(folder, steps=5, name="one")
    with dashboard(folder) as (process, address):
        port, key = urlsplit(address).port, urlsplit(address).query
        assert port
        response = get(port, f"/?{key}")
        assert response[0] == 200
        cookie = response[1]["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert get(port, f"/?{key}")[0] == 403, "a key works once"
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("For another browser: ") and key not in line
        again = get(port, f"/?{urlsplit(line.rpartition(' ')[2].strip()).query}")
        assert again[0] == 200
        yield port, cookie.partition(";")[0]


def get(
    port: int, path: str, cookie: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()} | (
        {"cookie": cookie} if cookie else {}
    )
    connection.request(method, path, headers=request_headers)
    answer = connection.getresponse()
    response = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return response


PATHS = ("/", "/board.js", "/plotly.js", "/board.css", "/api/runs", "/api/curves?run=one&key=reward/mean", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_every_route_checks_cookie_host_and_origin(server: tuple[int, str], path: str) -> None:
    port, cookie = server
    assert get(port, path)[0] == 403
    assert get(port, path, cookie="legato-1=x")[0] == 403
    assert get(port, path, cookie=cookie, host="evil.example")[0] == 403
    assert get(port, path, cookie=cookie, host=f"evil.example:{port}")[0] == 403
    assert get(port, path, cookie=cookie, origin="http://evil.example")[0] == 403
    assert get(port, path, cookie=cookie, origin="null")[0] == 403
    assert get(port, path, cookie=cookie, sec_fetch_site="cross-site", sec_fetch_mode="cors")[0] == 403
    assert get(port, path, cookie=cookie, method="POST")[0] == 405
    status, headers, _ = get(port, path, cookie=cookie, origin=f"http://127.0.0.1:{port}", sec_fetch_site="same-origin")
    assert status == (404 if path == "/nothing" else 200)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_the_dashboard_listens_on_this_machine_only(server: tuple[int, str]) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [fields[1] for fields in listening if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == server[0]]
    assert mine == [f"0100007F:{server[0]:04X}"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/rollout?run=../../etc&step=1&index=0",
        "/api/rollout?run=one&step=-1&index=0",
        "/api/rollout?run=one&step=1&index=99",
        "/api/rollouts?run=one&step=abc",
        "/api/steps",
        "/api/curves?run=nobody",
    ],
)
def test_a_malformed_request_is_refused_with_a_sentence(server: tuple[int, str], path: str) -> None:
    status, _, body = get(server[0], path, cookie=server[1])
    assert status == 400 and json.loads(body)["error"]


def test_a_curve_requested_twice_is_answered_once(server: tuple[int, str]) -> None:
    result = json.loads(get(server[0], "/api/curves?run=one&run=one&key=reward/mean&key=reward/mean", cookie=server[1])[2])
    assert len(result["curves"]) == 1


def test_a_folder_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        Folder(tmp_path / "nothing")


def append(directory: RunDirectory, steps: range, **more: Any) -> None:
    for step in steps:
        directory.append_metrics({"kind": "step", "step": step, "reward/mean": step / 10, **more})


def curves_by_run(folder: Folder, *names: str, key: str = "reward/mean", join: bool = False) -> dict[str, Any]:
    result = curves(folder, names, [key], 300, join)
    return {each["run"]: each for each in result["curves"]}


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "live")
    folder = Folder(tmp_path)
    assert folder.runs() == []
    directory.write_config("[training]\nseed = 3\nsteps = 9\n")
    append(directory, range(1, 4))
    folder._searched_at = 0.0
    (run,) = folder.runs()
    # Only the lock tells a run that goes on from one that was killed a second ago.
    assert run.row()["state"] == "no end recorded" and not run.row()["running"]
    with hold_lock(directory):
        row = run.row()
    assert (row["step"], row["running"], row["state"]) == (3, True, "running")
    assert curves_by_run(folder, "live")["live"]["x"] == [1, 2, 3]
    position = run.metrics.position
    append(directory, range(4, 6))
    assert run.row()["version"] != row["version"]
    assert curves_by_run(folder, "live")["live"]["x"] == [1, 2, 3, 4, 5]
    assert run.metrics.position > position
    with directory.metrics_path.open("ab") as file:
        file.write(b'{"kind":"step","step":6,"rew')
    assert curves_by_run(folder, "live")["live"]["x"] == [1, 2, 3, 4, 5]
    append(directory, range(6, 7))  # the writer mends what it finds torn
    directory.append_metrics({"kind": "end", "reason": "all steps done"})
    assert curves_by_run(folder, "live")["live"]["x"] == [1, 2, 3, 4, 5, 6]
    assert run.row()["state"] == "all steps done" and not run.row()["running"]


def test_without_locks_a_run_goes_on_for_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    append(directory, range(1, 2))
    monkeypatch.setattr("legato.dashboard.runs.is_locked", lambda path: None)
    (run,) = Folder(tmp_path).runs()
    assert run.row()["running"]
    os.utime(directory.metrics_path, (0, time.time() - 301))
    assert run.row()["state"] == "no end recorded"


def test_a_lock_is_seen_and_outlives_a_look(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    assert is_locked(directory.path) is False
    with hold_lock(directory):
        assert is_locked(directory.path) is True
        (directory.path / ".lock").unlink()
        assert is_locked(directory.path) is True
        with pytest.raises(InputError, match="in use by another process"), hold_lock(directory):
            pass
    assert is_locked(directory.path) is False and is_locked(tmp_path / "nothing") is None


def test_a_resumed_run_is_read_again_from_where_it_was_cut(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "resumed")
    directory.write_config("")
    append(directory, range(1, 4))
    position = directory.metrics_file.position()
    append(directory, range(4, 8))
    folder = Folder(tmp_path)
    assert curves_by_run(folder, "resumed")["resumed"]["mean"][-1] == 0.7
    directory.metrics_file.truncate(position)
    for step in range(4, 12):
        directory.append_metrics({"kind": "step", "step": step, "reward/mean": -1.0})
    assert curves_by_run(folder, "resumed")["resumed"]["mean"] == [0.1, 0.2, 0.3] + [-1.0] * 8


def test_a_long_run_gives_an_overview_before_it_is_read_whole(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "long")
    directory.write_config("")
    line = json.dumps({"kind": "step", "step": 0, "reward/mean": 0, "padding": "x" * 2000}, separators=(",", ":"))
    lines = (line.replace(":0,", f":{step},", 1).replace('mean":0', f'mean":{step % 7}') for step in range(1, 3001))
    directory.metrics_path.write_text("\n".join(lines) + "\n")
    folder = Folder(tmp_path)
    first = curves(folder, ["long"], ["reward/mean"], 300, False)
    assert first["reading"] == ["long"] and 150 < len(first["curves"][0]["x"]) <= 210
    assert folder._reader is not None
    folder._reader.join(timeout=20)
    whole = curves(folder, ["long"], ["reward/mean"], 1000, False)
    run = folder.run("long")
    assert whole["reading"] == [] and run.series["step"].records == 3000
    assert run.metrics.position == directory.metrics_path.stat().st_size
    assert whole["curves"][0]["x"][-1] == 3000


@pytest.mark.parametrize("harm", ["nothing but a folder", "config only", "empty", "zeros", "damaged", "unreadable rollouts"])
def test_a_torn_run_does_not_stop_the_others(tmp_path: Path, harm: str) -> None:
    synthetic_run(tmp_path, steps=4, name="whole")
    torn = tmp_path / "torn"
    torn.mkdir()
    if harm != "nothing but a folder":
        (torn / "config.toml").write_text('[training]\nseed = "')
        (torn / "environment.json").write_text("{")
    if harm == "empty":
        (torn / "metrics.jsonl").write_bytes(b"")
    if harm == "zeros":
        (torn / "metrics.jsonl").write_bytes(b"\0" * 5000)
    if harm == "damaged":
        lines = b'{"kind":"start"}\n{"kind":"step","step":1,"reward/mean":1}\n{"ki\n\xff\xfe\n[]\n{"kind":"step"}\n'
        (torn / "metrics.jsonl").write_bytes(lines + b'{"kind":"step","step":2,"reward/mean":2}\n{"kind"')
        (torn / "health.jsonl").write_bytes(b'{"level":"alarm","words":"it fell","step":2}\n{"level":"loud"}\n{"le')
    if harm == "unreadable rollouts":
        (torn / "metrics.jsonl").write_bytes(b"")
        (torn / "rollouts").mkdir()
        (torn / "rollouts" / "step-000001.jsonl.gz").write_bytes(b"\x1f\x8b\x08nonsense")
    folder = Folder(tmp_path)
    rows = {row["name"]: row for row in (run.row() for run in folder.runs())}
    assert set(rows) == {"whole"} | ({"torn"} if harm != "nothing but a folder" else set())
    assert rows["whole"]["step"] == 4
    if harm == "nothing but a folder":
        return
    by_run = curves_by_run(folder, "whole", "torn")
    assert by_run["whole"]["x"] == [1, 2, 3, 4]
    assert configs(folder, ["whole", "torn"])["differ"]
    if harm == "damaged":
        assert by_run["torn"]["mean"] == [1, 2] and folder.run("torn").damaged == 3
        assert (rows["torn"]["health"], rows["torn"]["findings"], rows["torn"]["step"]) == ("alarm", 1, 2)
    if harm == "unreadable rollouts":
        directory = folder.run("torn").directory
        assert "damaged" in list_rollouts(directory, [1], Filter())["damaged"][0]


def test_a_finding_comes_with_causes_and_a_run_with_counts(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "a run")
    directory.append_metrics({"kind": "step", "step": 1})
    for level in ("warning", "alarm", "warning", "alarm", "warning"):
        directory.health.append({"kind": "finding", "step": 1, "level": level, "rule": "reward-fall", "words": "fell"})
    directory.health.append({"kind": "recovery", "from": 2, "rule": "reward-fall", "words": "went back"})
    folder = Folder(tmp_path)
    row = folder.runs()[0].row()
    assert (row["health"], row["findings"], numbers(row["found"])) == ("alarm", 2, [2, 3, 1])
    rule = next(rule for rule in RULES if rule.name == "reward-fall")
    first, last = findings(folder, ["a run"])[0], findings(folder, ["a run"])[-1]
    assert (first["causes"], first["tries"]) == (rule.causes, rule.tries) and rule.causes and rule.tries
    assert first["doctor"].endswith("/a run'") and (last["what"], last["causes"]) == ("recovery", ())


def test_rollouts_open_on_the_newest_step_with_measured_tokens(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    assert newest_measured_step(directory) is None
    for step in (1, 2, 3):
        directory.write_rollouts(step, [{"text": "x", "details": {"pieces": ["x"]}}] if step < 3 else [{"text": "x"}])
    assert newest_measured_step(directory) == 2
    directory.rollouts_path(2).write_bytes(b"torn")
    assert newest_measured_step(directory) == 1


def test_runs_that_differ_in_the_seed_are_joined(tmp_path: Path) -> None:
    for seed in range(3):
        directory = RunDirectory.create(tmp_path, f"gspo-{seed}")
        directory.write_config(f'[training]\nseed = {seed}\n[output]\nname = "gspo-{seed}"\n')
        for step in range(1, 6 + seed):
            directory.append_metrics({"kind": "step", "step": step, "reward/mean": step + seed})
    other = RunDirectory.create(tmp_path, "grpo")
    other.write_config('[algorithm]\nname = "grpo"\n[training]\nseed = 0\n')
    append(other, range(1, 3))
    by_run = curves_by_run(Folder(tmp_path), "gspo-0", "gspo-1", "gspo-2", "grpo", join=True)
    assert set(by_run) == {"gspo-0", "grpo"}
    assert by_run["gspo-0"] | {"key": ""} == {
        "key": "",
        "run": "gspo-0",
        "name": "gspo-0, 3 seeds",
        "x": [1, 2, 3, 4, 5],
        "mean": [2, 3, 4, 5, 6],
        "low": [1, 2, 3, 4, 5],
        "high": [3, 4, 5, 6, 7],
        "breaks": [],
        "last": 5,
    }


def test_a_curve_has_the_last_step_of_its_run_and_every_key_a_title(tmp_path: Path) -> None:
    """An evaluation every 5 steps ends at step 10 of 12: the share of the run is of 12."""
    directory = RunDirectory.create(tmp_path, "run")
    directory.append_metrics({"kind": "warm-up", "step": 40, "loss": 1.0})
    for step in range(1, 13):
        directory.append_metrics({"kind": "step", "step": step, "reward/mean": 0.5, "<b>/odd_key": 1})
    directory.append_metrics({"kind": "evaluation", "step": 10, "eval/accuracy_sampled": 0.5})
    answer = curves(Folder(tmp_path), ["run"], ["reward/mean", "eval/accuracy_sampled", "loss"], 300, join=False)
    assert {each["key"]: each["last"] for each in answer["curves"]} == {
        "reward/mean": 12,
        "eval/accuracy_sampled": 12,
        "loss": 40,
    }
    assert set(answer["titles"]) == set(answer["keys"])
    assert answer["titles"]["eval/accuracy_sampled"] == "Held-out accuracy, sampled"
    assert answer["titles"]["<b>/odd_key"] == "<b> odd key"


def test_equal_findings_of_a_run_are_one_with_all_its_steps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        directory = RunDirectory.create(tmp_path, name)
        directory.append_metrics({"kind": "start"})
        for step in (9, 3):
            directory.health.append({"kind": "finding", "step": step, "level": "note", "rule": "drift", "words": "it moves"})
    directory.health.append({"kind": "finding", "step": 4, "level": "note", "rule": "drift", "words": "it stays"})
    rows = findings(Folder(tmp_path), ["a", "b"])
    assert sorted((row["run"], row["words"], row["step"], row["steps"]) for row in rows) == [
        ("a", "it moves", 9, [3, 9]),
        ("b", "it moves", 9, [3, 9]),
        ("b", "it stays", 4, [4]),
    ]


def test_configs_are_compared_option_by_option(tmp_path: Path) -> None:
    for name, rate in (("a", "1e-3"), ("b", "1e-4")):
        synthetic = RunDirectory.create(tmp_path, name)
        synthetic.write_config(f'[training]\nlr = {rate}\nseed = 0\n[policy]\nmodel = "<i>tiny</i>"\n')
        append(synthetic, range(1, 2))
    comparison = configs(Folder(tmp_path), ["a", "b"])
    assert comparison["differ"] == [{"path": "training.lr", "values": ["0.001", "0.0001"]}]
    assert {row["path"] for row in comparison["same"]} == {"training.seed", "policy.model"}


# Rollouts


def store_rollouts(parent: Path) -> RunDirectory:
    directory = RunDirectory.create(parent, "run")
    rows = [
        {"prompt": f"{n}+1=", "text": f"answer {n}", "answer": str(n + 1), "reward": float(n % 2), "accuracy": float(n % 2)}
        | {"tokens": n, "stop": "length" if n == 3 else "end_token", "group": n // 2, "advantage": n - 2.5, "key": "k"}
        for n in range(6)
    ]
    directory.write_rollouts(1, rows)
    directory.write_rollouts(2, [rows[0] | {"held_out": True, "text": "A\u202eB\x1b[31m" + "x" * 50_000}])
    return directory


@pytest.mark.parametrize(
    ("rollout_filter", "expected"),
    [
        (Filter(), [0, 1, 2, 3, 4, 5]),
        (Filter(text="ANSWER 4"), [4]),
        (Filter(text="3+1"), [3]),
        (Filter(verdict="right"), [1, 3, 5]),
        (Filter(verdict="wrong", longest=2), [0, 2]),
        (Filter(stop="length"), [3]),
        (Filter(shortest=2, longest=3), [2, 3]),
        (Filter(group=1), [2, 3]),
        (Filter(verdict="held-out"), []),
    ],
)
def test_rollouts_are_filtered(tmp_path: Path, rollout_filter: Filter, expected: list[int]) -> None:
    assert [row["index"] for row in list_rollouts(store_rollouts(tmp_path), [1], rollout_filter)["rows"]] == expected


def test_rollouts_are_ordered_over_all_steps(tmp_path: Path) -> None:
    rows = list_rollouts(store_rollouts(tmp_path), [1, 2], Filter(), "length")["rows"]
    assert [(row["step"], row["index"]) for row in rows] == [(1, 5), (1, 4), (1, 3), (1, 2), (1, 1), (2, 0), (1, 0)]


def test_a_rollout_comes_with_its_group_and_in_portions(tmp_path: Path) -> None:
    directory = store_rollouts(tmp_path)
    rollout = show_rollout(directory, 1, 2, whole=False)
    assert [each["index"] for each in rollout["siblings"]] == [2, 3] and rollout["left"] == 0
    long = show_rollout(directory, 2, 0, whole=False)
    assert long["text"].startswith("A\\u202eB\\x1b[31mx") and long["left"] == 50_000 + 8 - PORTION
    assert len(show_rollout(directory, 2, 0, whole=True)["text"]) > 50_000


def test_a_step_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    directory = store_rollouts(tmp_path)
    assert show_rollout(directory, 2, 0, whole=False)["reward"] == 0
    directory.write_rollouts(2, [{"text": "new", "reward": 7.0}])
    os.utime(directory.rollouts_path(2), ns=(1, 1))
    assert show_rollout(directory, 2, 0, whole=False)["reward"] == 7
