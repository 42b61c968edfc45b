"""`legato serve` over a run, and `sample` and `eval` that sample at it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import legato
from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.run.remote import policy_and_engine
from legato.run.serve import KEY_VARIABLE, ServeOptions, build_served, build_served_of_running
from legato.run.target import Target, find
from tests.proof.command import Command, assert_refused
from tests.serve.running import KEY, RunningServer, running

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "policy.tiny.hidden": 32,
    "policy.tiny.heads": 2,
    "rollouts.max_response_tokens": 6,
    "rollouts.samples_per_prompt": 2,
    "training.prompts_per_step": 4,
    "training.updates_per_step": 1,
    "training.lr": 1e-2,
    "training.steps": 2,
    "training.warm_up_updates": 0,
    "output.checkpoint_every_steps": 1,
    "task.held_out": 4,
    "evaluation.every_steps": 100,
    "health.action": "say",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("serve")
    options = {**OPTIONS, "output.directory": str(folder), "output.name": "served", "reward.kind": "length"}
    (folder / "early.py").write_text("def early(rollout):\n    return float((rollout.tokens < 40).float().mean())\n")
    options["reward.kind"] = f"{folder}/early.py:early"
    return legato.train("tiny", algorithm="grpo", progress=False, **options).directory


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[RunningServer]:
    with running(build_served(find(str(run), step=1), str(run), ServeOptions())) as server:
        yield server


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return Command(monkeypatch, capsys)


def test_a_run_is_served_by_its_name_and_step(server: RunningServer) -> None:
    (card,) = server.ask("GET", "/v1/models").json()["data"]
    assert (card["id"], card["weight_version"], card["max_model_len"]) == ("served", "1", 4096)
    choice = server.post("/v1/completions", {"prompt": "1+2=", "max_tokens": 3})["choices"][0]
    assert choice["weight_versions"][0]["version"] == "1"


def test_the_newer_checkpoint_of_the_run_is_taken_over(run: Path, server: RunningServer) -> None:
    before = server.post("/v1/completions", {"prompt": "1+2=", "logprobs": 0, "seed": 1})["choices"][0]["logprobs"]
    assert server.post("/reload_checkpoint") == {"weight_version": "2", "changed": True}
    after = server.post("/v1/completions", {"prompt": "1+2=", "logprobs": 0, "seed": 1})["choices"][0]["logprobs"]
    assert before["token_logprobs"] != after["token_logprobs"]
    policy = find(str(run), step=2).policy()
    weight, own = (each.model.get_decoder().norm.weight for each in (policy, server.served.policy))
    assert torch.equal(weight, own)
    assert server.post("/reload_checkpoint", {"step": 1})["weight_version"] == "1"
    assert "there are: 1, 2" in server.ask("POST", "/reload_checkpoint", {"step": 7}).error()["message"]


def test_sampling_at_a_server_gives_what_sampling_here_gives(run: Path, server: RunningServer, command: Command) -> None:
    server.post("/reload_checkpoint", {"step": 2})
    words = ["sample", str(run), "1+2=", "7+5=", "--samples", "3", "--temperature", "0.7"]
    code, here, error = command(*words)
    assert code == 0, error
    code, there, error = command(*words, "--server", server.url)
    assert code == 0, error
    assert there == here and f"sampling at {server.url}: served, version 2" in error


def test_weights_that_change_while_a_server_samples_are_told(
    run: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    request, limits = Request(prompt=torch.tensor([4, 5]), seeds=(1,)), Limits(max_response_tokens=3, end_tokens=(1,))
    for steps, versions in (((2, 2), None), ((2, 1), "1 and 2"), ((1, 2), "1 and 2")):
        server.post("/reload_checkpoint", {"step": steps[0]})
        lines: list[str] = []
        with policy_and_engine(find(str(run)), server.url, lines.append) as (_, engine):
            for step in steps:
                server.post("/reload_checkpoint", {"step": step})
                engine.generate([request], Sampling(), limits)
        changed = [line for line in lines if line.startswith("warning: ")]
        expected = f"warning: the server changed its weights meanwhile: responses are of version {versions}"
        assert changed == ([] if versions is None else [expected])


@pytest.mark.parametrize(("later", "told"), [("1f3a.4.4", []), ("1f3a.5.5", ["1f3a.4.4 and 1f3a.5.5"])])
def test_weights_that_a_run_names_are_compared_by_name(
    run: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch, later: str, told: list[str]
) -> None:
    """A run that publishes to the server names them so; none of these names is a number."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    request, limits = Request(prompt=torch.tensor([4, 5]), seeds=(1,)), Limits(max_response_tokens=3, end_tokens=(1,))
    lines: list[str] = []
    server.post("/update_weight_version", {"new_version": "1f3a.4.4"})
    with policy_and_engine(find(str(run)), server.url, lines.append) as (_, engine):
        for name in ("1f3a.4.4", later):
            server.post("/update_weight_version", {"new_version": name})
            engine.generate([request], Sampling(), limits)
    changed = [line.rpartition("of version ")[2] for line in lines if line.startswith("warning: ")]
    assert changed == told


def test_evaluating_at_a_server_gives_what_evaluating_here_gives(
    run: Path, server: RunningServer, command: Command, tmp_path: Path
) -> None:
    server.post("/reload_checkpoint", {"step": 2})
    results = []
    for name, more in (("here", []), ("there", ["--server", f"{server.url}/v1"])):
        file = tmp_path / f"{name}.json"
        code, _, error = command("eval", str(run), "--samples", "2", "--problems", "3", "--output", str(file), *more)
        assert code == 0, error
        results.append(json.loads(file.read_text()))
    assert results[0] == results[1]
    sets = ["evaluation.sets.extra.task.kind=reversal", "evaluation.sets.extra.problems=2"]
    code, _, error = command("eval", str(run), *sets, "--samples", "1", "--problems", "2", "--server", server.url)
    assert code == 0, error


def test_a_server_that_cannot_be_used_is_an_error_that_says_why(
    run: Path, server: RunningServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(command("sample", str(run), "1", "--server", "localhost:1"), "expected the address of a server")
    assert_refused(command("sample", str(run), "1", "--server", "http://127.0.0.1:9"), "no answer", "(--server)")
    assert_refused(
        command("eval", str(run), str(run), "--sets", "aime-24", "--server", server.url), "expected one target with --server"
    )
    monkeypatch.setenv(KEY_VARIABLE, "another-key")
    assert_refused(command("sample", str(run), "1", "--server", server.url), "status 401", KEY_VARIABLE)


def test_options_that_cannot_be_served_are_refused(run: Path, command: Command, tmp_path: Path) -> None:
    any_port = ("serve", "--port", "0")
    assert_refused(command(*any_port, "tiny", "--follow"), "expected a run directory to follow", "(--follow)")
    assert_refused(command(*any_port, str(run), "--follow", "--step", "1"), "expected --step or --follow, got both")
    assert_refused(command(*any_port, "tiny", "--key", "short"), "expected a key of at least 8")
    assert_refused(command(*any_port, "tiny", "--context", "5000"), "expected at most 4096 tokens", "(--context)")
    assert_refused(command(*any_port, "tiny", "--context", "50", "--max-tokens", "50"), "(--max-tokens)")
    assert_refused(command(*any_port, str(tmp_path / "nowhere")), "there is no such folder")
    shutil.copytree(run, tmp_path / "early", ignore=shutil.ignore_patterns("step-*"))
    assert_refused(
        command(*any_port, str(tmp_path / "early"), "--follow"),
        "no whole checkpoint; a run writes one every",
        "and when it ends",
    )


def test_a_taken_port_is_refused_before_a_model_is_loaded(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("legato.run.serve.build_served_of_running", load)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        assert_refused(command("serve", "tiny", "--port", port), f"port {port} of 127.0.0.1 cannot be used")
    assert_refused(command("serve", "tiny", "--host", "no.such.host.invalid"), "(--host)")


def test_limits_follow_the_target_and_the_options(run: Path) -> None:
    served = build_served(find(str(run)), str(run), ServeOptions(name="mine", sequences=5, response_tokens=9))
    assert (served.name, served.limits.sequences, served.limits.response_tokens) == ("mine", 5, 9)
    assert served.weights.name == "2" and served.limits.context_tokens == 4096
    bare = build_served(find("tiny"), "tiny", ServeOptions(context_tokens=100))
    assert (bare.name, bare.weights.name, bare.limits.context_tokens) == ("tiny", "0", 100)
    assert bare.limits.response_tokens == 99 and bare.weights.checkpoints is None
    with pytest.raises(InputError, match="--follow"):
        build_served(find("tiny"), "tiny", ServeOptions(follow_seconds=1.0))


def test_a_checkpoint_that_is_pruned_while_it_is_loaded_is_looked_for_again(run: Path) -> None:
    """As of a run that trains faster than a model loads."""
    asked: list[int] = []

    def find_target() -> Target:
        asked.append(len(asked))
        target = find(str(run))
        assert target.saved is not None
        gone = target.saved.parents[1] / "step-000001-pruned" / "model"
        return replace(target, saved=gone) if len(asked) < 3 else target

    assert build_served_of_running(find_target, str(run), ServeOptions()).weights.name == "2"
    assert len(asked) == 3
    with pytest.raises(InputError):
        build_served_of_running(lambda: replace(find(str(run)), saved=run / "x" / "y"), str(run), ServeOptions())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(run: Path, end: signal.Signals) -> None:
    words = [sys.executable, "-m", "legato.cli.main", "serve", str(run), "--port", "0", "--follow"]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    line, key = process.stdout.readline(), process.stdout.readline()
    assert "served (version 2) is served at http://127.0.0.1:" in line and key.startswith("key: ")
    from legato.rollouts.servers.http import HttpClient

    client = HttpClient(line.split()[-1], key.split()[1])
    assert client.get("/health", seconds=10.0)["model"] == "served"
    assert client.post("/v1/completions", {"prompt": "1+1="}, seconds=10.0)["choices"]
    client.close()
    process.send_signal(end)
    assert process.wait(30) in (130, 143, -15)
    process.stdout.close()
