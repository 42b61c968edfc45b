"""Every command that README, docs and recipes tell a person to type does what it says, on a small scale."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legato.rollouts.servers.errors import UnreachableError
from legato.rollouts.servers.http import HttpClient
from legato.run.serve import ServeOptions, build_served
from legato.run.target import find
from tests.proof.command import Command
from tests.proof.published import small_table
from tests.serve.running import KEY, RunningServer, running

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(?:\w*)\n(.*?)```", re.DOTALL)
SMALL = [
    *("training.steps=1", "training.prompts_per_step=4", "training.updates_per_step=2", "training.warm_up_updates=0"),
    *("policy.tiny.hidden=32", "policy.tiny.layers=2", "policy.warm_up.steps=2", "rollouts.max_response_tokens=24"),
    *("evaluation.every_steps=1", "task.held_out=4"),
]
SHORT = ["training.steps=2", "training.prompts_per_step=4", "task.held_out=4"]
NEEDS_A_HUB = ("qwen3-", "smollm2")
"""Their recipes are loaded and resolved here; what they name is not on every machine."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"
"""The address of a server in the pages."""
FIRST_RUN, MIGRATING = ROOT / "docs" / "first-run.md", ROOT / "docs" / "migrating.md"


def commands() -> list[str]:
    lines = []
    for page in PAGES:
        if page in (FIRST_RUN, MIGRATING):
            continue  # their commands build on each other: below and in test_migrating.py they run in their order
        for block in BLOCK.findall(page.read_text()):
            lines += [line.split("  #")[0].strip() for line in block.splitlines()]
    for recipe in [*sorted((ROOT / "recipes").rglob("*.toml")), *sorted((ROOT / "studies").glob("*.toml"))]:
        lines += re.findall(r"^# Command: (.*)$", recipe.read_text(), re.MULTILINE)
    pieces = [piece.strip() for line in lines for piece in line.split("&&")]
    return sorted({piece for piece in pieces if re.match(r"(\.venv/bin/)?legato |make ", piece)})


def contract_commands() -> list[str]:
    """The commands of the pages that run a contract on one of our examples."""
    lines = [line for page in PAGES for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("python -m pytest") and "examples/" in line})


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the verbs that need one, made by a process as a user would."""
    folder = tmp_path_factory.mktemp("commands")
    words = ["train", "recipes/tiny.toml", *SMALL, f"output.directory={folder}", "output.name=NAME"]
    subprocess.run([sys.executable, "-m", "legato.cli.main", *words], check=True, cwd=ROOT)
    return folder / "NAME"


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_every_make_target_exists(command: str) -> None:
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command


@pytest.mark.parametrize(
    "command",
    # An engine in another process is slow to start; tests/examples/test_piped_engine.py trains with it.
    [
        pytest.param(c, marks=[pytest.mark.slow] if "piped_engine" in c else [])
        for c in commands()
        if not c.startswith("make ")
    ],
)
def test_every_legato_command_runs(
    command: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    words = [str(run / "checkpoints/step-000001/model") if word == "FOLDER" else word for word in words]
    words = [str(run) if word == "runs/NAME" else str(tmp_path / word) if word == "my-model" else word for word in words]
    if words[0] == "train":
        if any(name in word for word in words for name in NEEDS_A_HUB):
            from legato.config.load import load

            load([ROOT / word for word in words[1:] if word.endswith(".toml")], [w for w in words[1:] if "=" in w])
            return
        words += [*SMALL, f"output.directory={tmp_path}"]
    if words[0] == "eval" and any(word.endswith("math-table.toml") for word in words):
        second = run / "checkpoints/step-000001/model"
        words = [str(second) if word == str(tmp_path / "my-model") else word for word in words] + small_table(tmp_path)
    if words[0] == "compare":
        if "--arm" not in words:
            from legato.compare.definition import from_file
            from legato.compare.jobs import differences, jobs

            assert differences(jobs(from_file(Path(words[1]), {}), tmp_path)) == []
            return
        words += [*SMALL, "--seeds", "0", "--out", str(tmp_path)]
    if words[0] == "study":
        from legato.compare.jobs import differences, jobs
        from legato.compare.registration import read_study

        study = read_study(Path(words[1]))
        if study.measure is not None:
            return  # it trains nothing; tests/lab runs the measurement
        definition = study.definition
        assert differences(jobs(replace(definition, seeds=definition.seeds[:1]), tmp_path)) == []
        return
    if words[0] == "lab":
        words += ["--no-png", "--out", str(tmp_path)]
    legato = Command(monkeypatch, capsys)
    if words[0] == "serve":
        assert serve_and_ask(legato, words) == 130
        return
    if "--server" in words:
        monkeypatch.setenv("LEGATO_SERVER_KEY", KEY)
        words = [request.getfixturevalue("server").url if word == ADDRESS else word for word in words]
    code, _, error = legato(*words)
    assert code == 0, error


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[RunningServer]:
    """The run behind a server, in a thread of this process."""
    with running(build_served(find(str(run)), str(run), ServeOptions())) as server:
        yield server


def serve_and_ask(legato: Command, words: Sequence[str]) -> int:
    """Run `legato serve` in this process until it has listed its model; returns its exit code after Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: list[Any] = []

    def ask() -> None:
        client = HttpClient(f"http://127.0.0.1:{port}", KEY)
        for _ in range(600):
            with suppress(UnreachableError):
                answers.append(client.get("/v1/models", seconds=10.0)["data"][0]["id"])
                client.close()
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    code, _, error = legato(*words, "--port", str(port), "--key", KEY)
    asking.join()
    assert answers, error
    return code


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_curl_command_of_the_pages_is_answered(server: RunningServer) -> None:
    lines = [line for page in PAGES for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    asked = [line for line in lines if line.startswith("curl ")]
    assert asked
    for line in asked:
        words = shlex.split(line.replace(ADDRESS, server.url).replace("Bearer KEY", f"Bearer {KEY}"))
        answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        assert "choices" in json.loads(answer), answer


def test_the_first_run_page_works_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are written and its commands run in their order, in an empty directory beside recipes/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    legato, ran = Command(monkeypatch, capsys), []
    for block in BLOCK.findall(FIRST_RUN.read_text()):
        file = re.match(r"# (\w+\.(?:py|toml))\n", block)
        if file:
            (tmp_path / file[1]).write_text(block)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            if words[:1] == ["python"]:
                runpy.run_path(words[1])
            elif words[:1] == ["legato"]:
                small = {"train": SHORT if "first.toml" in words else SMALL, "resume": ["training.steps=3"]}.get(
                    words[1], []
                )
                code, _, error = legato(*words[1:], *small)
                assert code == 0, (line, error)
                ran.append(words[1])
    assert ran == ["train", "export", "sample", "train", "doctor", "eval", "resume", "export"]
    assert (tmp_path / "runs/first/report.html").is_file() and (tmp_path / "trained-model/config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", contract_commands())
def test_every_contract_command_of_the_pages_passes(command: str) -> None:
    subprocess.run([sys.executable, *shlex.split(command)[1:], "-q"], check=True, cwd=ROOT)


def test_the_contract_commands_name_files_that_exist() -> None:
    assert len(contract_commands()) >= 4
    for command in contract_commands():
        for word in shlex.split(command)[3:]:
            assert word.startswith("--") or (ROOT / word.partition(":")[0]).exists(), command


def test_every_extra_a_page_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        name
        for page in PAGES
        for extra in re.findall(r"(?:legato|\.)\[([a-z,0-9]+)\]", page.read_text())
        for name in extra.split(",")
    ]
    assert named and set(named) <= set(extras)
