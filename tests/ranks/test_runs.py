"""Whole runs under torchrun: records, checkpoints on any number of ranks, signals, lost and hanging ranks, restarts."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.trust.ranks import ranks_of
from legato.cli.processes import exit_code, start_processes, torchrun_words
from legato.config.load import load
from legato.config.resolved import dump
from legato.core.world import OneProcess
from legato.run.ranks import describe
from legato.run.train import resume as resume_run
from legato.training import checkpoint
from tests.ranks.world import ROOT, words_of

SMALL: dict[str, Any] = {
    "policy.tiny.hidden": 32,
    "policy.tiny.layers": 2,
    "policy.tiny.heads": 2,
    "policy.max_prompt_tokens": 16,
    "task.left_digits": 1,
    "task.held_out": 4,
    "reward.kind": "tests.proof.verdicts:early",
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 6,
    "training.prompts_per_step": 4,
    "training.updates_per_step": 2,
    "training.lr": 3e-3,
    "evaluation.every_steps": 2,
    "output.checkpoint_every_steps": 1,
    "output.keep_last": 100,
}


def start(folder: Path, *words: str, ranks: int = 2, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Begin a run on several processes; `words` follow the verb."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    command = [sys.executable, "-m", "legato", *words, f"--processes={ranks}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=variables, cwd=folder, **pipes)


def finish(process: subprocess.Popen[str], code: int = 0, seconds: float = 120) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, output[-3000:]
    return output


def train(folder: Path, ranks: int = 2, code: int = 0, **changes: Any) -> str:
    options = {**SMALL, "output.name": "run", **{path.replace("__", "."): value for path, value in changes.items()}}
    return finish(start(folder, "train", *words_of(options), ranks=ranks), code)


def resume(folder: Path, *words: str, ranks: int = 2) -> str:
    if ranks > 1:
        return finish(start(folder, "resume", "runs/run", *words, ranks=ranks))
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "legato", "resume", "runs/run", *words]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert path.exists(), "the run did not come so far"


def test_a_run_on_two_processes_shows_and_writes_like_one(tmp_path: Path) -> None:
    output = train(tmp_path, training__steps=2)
    assert output.count("run: gspo on tiny") == 1 and "2 processes, which divide" in output
    kinds = [each["kind"] for each in records(tmp_path)]
    assert kinds.count("start") == 1 and kinds.count("step") == 2 and kinds[-1] == "end"
    folder = tmp_path / "runs/run/checkpoints/step-000002"
    checkpoint.verify(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert "optimizer-00001-of-00002.safetensors" in names and "optimizer-00002-of-00002.safetensors" in names
    parts = [load_file(folder / f"optimizer-0000{rank}-of-00002.safetensors") for rank in (1, 2)]
    assert not {*parts[0]} & {*parts[1]}, "each rank saves its own pieces"
    assert (tmp_path / "runs/run/report.html").is_file()


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_run_goes_on_with_any_number_of_ranks_and_either_way_of_dividing(tmp_path: Path, dtype: str) -> None:
    train(tmp_path, ranks=2, training__steps=2, policy__dtype=dtype)
    resume(tmp_path, "training.steps=3", ranks=1)
    resume(tmp_path, "training.steps=4", ranks=3)
    resume(tmp_path, "training.steps=5", "training.shard=layers", ranks=2)
    resume(tmp_path, "training.steps=6", "training.shard=layers", ranks=3)
    resume(tmp_path, "training.steps=7", "training.shard=optimizer", ranks=2)
    (tmp_path / "alone").mkdir()
    options = {**SMALL, "output.name": "run", "training.steps": 7, "policy.dtype": dtype}
    finish(start(tmp_path / "alone", "train", *words_of(options), ranks=1))
    moved, alone = records(tmp_path), records(tmp_path / "alone")
    assert [each["step"] for each in moved if each["kind"] == "step"] == list(range(1, 8))
    if dtype == "float64":
        rewards = [[each["reward/mean"] for each in told if each["kind"] == "step"] for told in (moved, alone)]
        assert rewards[0] == pytest.approx(rewards[1], abs=1e-9)
        # Norms of transformers compute in float32 whatever the dtype.
        models = [
            each / "runs/run/checkpoints/step-000007/model/model.safetensors" for each in (tmp_path, tmp_path / "alone")
        ]
        ends, expected = (load_file(path) for path in models)
        assert ends.keys() == expected.keys()
        assert max(float((ends[name] - expected[name]).abs().max()) for name in ends) < 1e-7


@pytest.mark.ranks
@pytest.mark.parametrize(("shard", "keep"), [("optimizer", "auto"), ("layers", "auto"), ("layers", "nothing")])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    tmp_path: Path, victim: int, shard: str, keep: str
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    train(straight, training__steps=5, training__shard=shard, training__keep_layers=keep)
    options = {**SMALL, "output.name": "run", "training.steps": 5, "training.shard": shard, "training.keep_layers": keep}
    process = start(killed, "train", *words_of(options))
    wait_for(killed / "runs/run/checkpoints/step-000002", process)
    began = time.monotonic()
    os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
    output = finish(process, 4)
    assert time.monotonic() - began < 30
    assert output.count(f"rank {victim} (process") == 1 and "is gone" in output
    resume(killed)
    assert same_bits(straight, killed)


@pytest.mark.ranks
@pytest.mark.parametrize(("shard", "ahead"), [("layers", 0), ("optimizer", 1)])
def test_ranks_sample_at_the_servers_of_the_run(tmp_path: Path, shard: str, ahead: int) -> None:
    """The same rewards as on one process with the local engine, also after a resume on another number of ranks."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    options = {**SMALL, "output.name": "run", "training.steps": 3, "rollouts.ahead": ahead, "policy.dtype": "float32"}
    finish(start(here, "train", *words_of(options), ranks=1))
    servers = {"rollouts.engine": "legato", "rollouts.servers.start": 2, "training.shard": shard, "training.steps": 2}
    finish(start(there, "train", *words_of({**options, **servers}), ranks=2))
    resume(there, "training.steps=3", ranks=3)
    steps = [[each for each in records(folder) if each["kind"] == "step"] for folder in (here, there)]
    assert [each["servers/answering"] for each in steps[1]] == [2.0] * 3
    if not ahead:  # what is ahead has the weights of its moment at servers, and those of the step before at the local engine
        rewards, norms = ([[each[key] for each in side] for side in steps] for key in ("reward/mean", "gradient/norm"))
        assert rewards[0] == rewards[1] and norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert not (there / "runs/run/servers/weights").exists(), "published weights are removed at the end"


def same_bits(left: Path, right: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same weights and the same optimizer state."""
    folders = [max((each / "runs/run/checkpoints").glob("step-*"), key=lambda path: path.name) for each in (left, right)]
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")) for folder in folders]
    return names[0] == names[1] and all((folders[0] / n).read_bytes() == (folders[1] / n).read_bytes() for n in names[0])


@pytest.mark.ranks
def test_torchrun_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    options = {**SMALL, "output.name": "run", "training.steps": 6}
    process = start(tmp_path, "train", *words_of(options), "--restarts=2")
    for step, victim in ((1, 1), (3, 0)):
        wait_for(tmp_path / f"runs/run/checkpoints/step-00000{step}", process)
        before = ranks_of(process.pid)
        os.kill(before[victim], signal.SIGKILL)
        end = time.monotonic() + 60
        while {*before.values()} & {*ranks_of(process.pid).values()} and time.monotonic() < end:
            time.sleep(0.05)
    output = finish(process, seconds=180)
    assert output.count("run: resumed at step") == 2
    steps = [each["step"] for each in records(tmp_path) if each["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6], "each step is recorded once"


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path, "train", *words_of({**SMALL, "output.name": "run", "training.steps": 200}))
    wait_for(tmp_path / "runs/run/checkpoints/step-000002", process)
    os.kill(ranks_of(process.pid)[1], number)
    output = finish(process, code)
    assert f"stopped by {number.name}; the state is saved" in output
    assert records(tmp_path)[-1]["kind"] == "end"


@pytest.mark.ranks
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_hangs_is_found_with_its_stack(tmp_path: Path, late: int) -> None:
    (tmp_path / "hanging.py").write_text(
        f"import os, time\n\n\ndef score(rollout):\n    if os.environ['RANK'] == '{late}' and rollout.rollout_id > 20:\n"
        "        time.sleep(1000)\n    return float((rollout.tokens < 40).float().mean())\n"
    )
    changes: dict[str, Any] = {
        "training__steps": 4,
        "reward__kind": "hanging.py:score",
        "training__rank_deadline_seconds": 4,
        "reward__timeout_seconds": False,
    }
    output = train(tmp_path, code=4, **changes)
    assert output.count(f"rank {late} hangs") == 1 and "training.rank_deadline_seconds" in output
    assert "hanging.py" in (tmp_path / "runs/run/stacks.txt").read_text()


@pytest.mark.ranks
def test_a_rank_that_hangs_inside_a_pass_over_divided_layers_is_found(tmp_path: Path) -> None:
    """FSDP2 waits for it, outside of our own exchanges."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "hanging.py").write_text(
        "import os, time\nfrom legato.policy.policy import Policy\n\nrun_body = Policy._run_body\n\n\n"
        "def hang(self, packed):\n    if os.environ['RANK'] == '1' and os.path.exists('runs/run/checkpoints/step-000001'):\n"
        "        time.sleep(1000)\n    return run_body(self, packed)\n\n\nPolicy._run_body = hang\n"
    )
    (site / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    import hanging\n")
    changes = {"training.steps": 5, "training.shard": "layers", "training.keep_layers": "nothing"}
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "src")])
    words = words_of({**SMALL, "output.name": "run", "training.rank_deadline_seconds": 4, **changes})
    output = finish(start(tmp_path, "train", *words, environment={"PYTHONPATH": path}), 4)
    assert output.count("rank 1 hangs: the others have waited") == 1 and "all ranks hang" not in output
    stacks = (tmp_path / "runs/run/stacks.txt").read_text()
    assert "hanging.py" in stacks.partition("rank 1, process")[2]


_SLOW = """
import os
import time
from contextlib import contextmanager

import torch

from legato.policy.policy import Policy

run_body = Policy._run_body


def rest():
    with open(f"slow-{os.environ['RANK']}", "a") as file:
        file.write("x")
    time.sleep(6)


@contextmanager
def be_slow(self, packed):
    learns = self.exchanges and torch.is_grad_enabled()
    if learns:
        rest()
    with run_body(self, packed) as hidden:
        if learns:
            hidden.register_hook(lambda gradient: rest())
        yield hidden


Policy._run_body = be_slow
"""


@pytest.mark.ranks
@pytest.mark.parametrize("keep", ["nothing", "weights"])
def test_passes_that_are_slow_on_all_ranks_are_no_hang(tmp_path: Path, keep: str) -> None:
    """A forward and a backward that take longer than ranks may wait for one another, though nobody waits."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "slow.py").write_text(_SLOW)
    (site / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    import slow\n")
    changes = {"training.steps": 1, "training.updates_per_step": 1, "training.shard": "layers", "training.keep_layers": keep}
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "src")])
    words = words_of({**SMALL, "output.name": "run", "training.rank_deadline_seconds": 4, **changes})
    output = finish(start(tmp_path, "train", *words, environment={"PYTHONPATH": path}), seconds=280)
    assert " hang" not in output and not (tmp_path / "runs/run/stacks.txt").exists()
    assert records(tmp_path)[-1]["kind"] == "end"
    assert all(len((tmp_path / f"slow-{rank}").read_text()) >= 2 for rank in range(2))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sys.argv.append('training.lr=2e-3')", "the option training.lr"),
        ("import legato.training.ranks.same as s; s.code_digest = lambda: 'other'", "the code of Legato"),
    ],
)
def test_ranks_that_differ_are_refused_naming_what_differs(tmp_path: Path, change: str, words: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    late = "import legato" in change
    body = f"    {change}\n"
    if late:
        body = f"    import builtins\n    exec({change!r})\n"
    (site / "sitecustomize.py").write_text(f"import os, sys\nif os.environ.get('RANK') == '1':\n{body}")
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "src")])
    process = start(tmp_path, "train", *words_of({**SMALL, "training.steps": 1}), environment={"PYTHONPATH": path})
    output = finish(process, 2)
    assert words in output and "rank 1" in output
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


@pytest.mark.ranks
@pytest.mark.parametrize("fails", ["RANK", "LOCAL_WORLD_SIZE"], ids=["rank 1", "all ranks"])
def test_what_a_rank_finds_wrong_before_it_joins_is_told_once(tmp_path: Path, fails: str) -> None:
    """The others wait for it, or find the same."""
    site = tmp_path / "site"
    site.mkdir()
    value = {"RANK": "1", "LOCAL_WORLD_SIZE": "2"}[fails]
    (site / "sitecustomize.py").write_text(f"import os\nif os.environ.get({fails!r}) == {value!r}:\n    import change\n")
    (site / "change.py").write_text("import os\nos.chdir('site')\n")
    (tmp_path / "there.toml").write_text("[training]\nlr = 1e-3\n")
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "src")])
    words = ["there.toml", *words_of({**SMALL, "training.steps": 1})]
    output = finish(start(tmp_path, "train", *words, environment={"PYTHONPATH": path}), 2)
    assert output.count("there.toml") >= 1 and output.count("legato: ") == 1
    assert ("legato: rank 1: " in output) is (fails == "RANK")


@pytest.mark.ranks
def test_a_fault_of_one_rank_saves_the_last_step_of_all(tmp_path: Path) -> None:
    (tmp_path / "callback.py").write_text(
        "import os\n\nfrom legato.tasks.procedural import Arithmetic\n\n\nclass Broken(Arithmetic):\n"
        "    def problem(self, random):\n"
        "        if os.environ['RANK'] == '1' and os.path.exists('runs/run/checkpoints/step-000002'):\n"
        "            raise KeyError('gone')\n        return super().problem(random)\n"
    )
    options = {path: value for path, value in SMALL.items() if path != "task.left_digits"}
    words = words_of({**options, "output.name": "run", "training.steps": 400, "task.kind": "callback.py:Broken"})
    output = finish(start(tmp_path, "train", *words), 2)
    assert output.count("legato:") == 1 and "legato: rank 1: " in output and "is saved: resume with" in output


_OUT_OF_MEMORY = """
import os
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from legato.policy.policy import Policy

run_body = Policy._run_body


def is_due():
    return os.environ["RANK"] == "1" and os.path.exists("runs/run/checkpoints/step-000002")


@contextmanager
def fail_on_rank_1(self, packed):
    if os.environ["WHERE"] == "pass" and torch.is_grad_enabled() and is_due():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with run_body(self, packed) as hidden:
        yield hidden


Policy._run_body = fail_on_rank_1
unshard = FSDPModule.unshard


def fail_to_gather(self, *arguments, **options):
    if os.environ["WHERE"] == "gathering" and self.self_attn.layer_idx == 1 and is_due():
        raise torch.OutOfMemoryError("CUDA out of memory")
    return unshard(self, *arguments, **options)


FSDPModule.unshard = fail_to_gather
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "keep", "where"),
    [
        ("optimizer", "auto", "pass"),
        ("layers", "nothing", "pass"),
        ("layers", "gradients", "pass"),
        ("layers", "gradients", "gathering"),
    ],
)
def test_out_of_memory_on_one_rank_ends_all_and_is_told_by_rank_0(tmp_path: Path, shard: str, keep: str, where: str) -> None:
    """While layers are exchanged the other rank waits where no message reaches it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "breaking.py").write_text(_OUT_OF_MEMORY)
    (site / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    import breaking\n")
    changes = {"training.steps": 200, "training.shard": shard, "training.keep_layers": keep}
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "src")])
    words = words_of({**SMALL, "output.name": "run", **changes})
    output = finish(start(tmp_path, "train", *words, environment={"PYTHONPATH": path, "WHERE": where}), 2)
    assert output.count("legato: rank 1: expected more room on the GPU, got out of memory") == 1
    assert "a fault of ours" not in output and "hangs" not in output
    steps = [each["step"] for each in records(tmp_path) if each["kind"] == "step"]
    saved = max(int(path.name[-6:]) for path in (tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert f"the state after step {saved} is saved: resume with" in output
    # Where the ranks can still meet, the last finished step is saved; else the newest checkpoint is the last whole one.
    assert saved == steps[-1] if where == "pass" and keep != "nothing" else saved >= 2


@pytest.mark.ranks
def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os\nfrom dataclasses import replace\n\nfrom legato.tasks.procedural import Arithmetic\n\n\n"
        "class Own(Arithmetic):\n    def problem(self, random):\n        each = super().problem(random)\n"
        "        return replace(each, prompt=f'{each.prompt}{os.environ[\"RANK\"]}')\n"
    )
    options = {path: value for path, value in SMALL.items() if path != "task.left_digits"}
    output = finish(start(tmp_path, "train", *words_of({**options, "training.steps": 1, "task.kind": "own.py:Own"})), 2)
    assert "differ in the problem" in output and "rank 0 has" in output and ", rank 1 " in output
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_the_words_of_torchrun_are_those_typed_without_its_own() -> None:
    words = ["train", "tiny", "--processes", "4", "training.steps=2", "--restarts=3", "--dry-run"]
    assert torchrun_words(4, 3, words)[-4:] == ["train", "tiny", "training.steps=2", "--dry-run"]
    assert torchrun_words(4, 3, words)[:3] == ["--standalone", "--nproc-per-node=4", "--max-restarts=3"]


@pytest.mark.parametrize("own", [None, "60"])
def test_torchrun_waits_for_a_long_step_to_be_saved(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """Its usual 30 s are less than a step of a large model takes. What the user has set stays."""
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import config_from_args

    configs: list[LaunchConfig] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: configs.append(config_from_args(arguments)[0]))
    monkeypatch.setattr(sys, "argv", ["legato", "train", "tiny", "--processes", "2"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # Set first, so that what `start_processes` sets is undone.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", own or "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")
    del os.environ["PET_SIGNALS_TO_HANDLE"]
    if own is None:
        del os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    logger = logging.getLogger("torch.distributed.elastic")
    monkeypatch.setattr(logger, "level", logger.level)
    with pytest.raises(SystemExit) as ended:
        start_processes(2, 0)
    assert ended.value.code == 0 and configs[0].shutdown_timeout == (3600 if own is None else 60)
    assert configs[0].signals_to_handle.endswith(",SIGUSR1")


@pytest.mark.parametrize(("words", "seconds"), [([], 7200), (["training.rank_deadline_seconds=9000"], 9000)])
def test_ranks_of_a_resumed_run_wait_as_long_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: float
) -> None:
    """The limit of torch's process group follows from it: the usual one would end such a run after half an hour."""
    (tmp_path / "config.toml").write_text(dump(load([], ["training.rank_deadline_seconds=7200"])))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    class JoinedError(Exception):
        pass

    def join(*, deadline: float, **_: object) -> None:
        raise JoinedError(deadline)

    monkeypatch.setattr("legato.run.train.joined", join)
    with pytest.raises(JoinedError, match=str(seconds)):
        resume_run(tmp_path, words)


def test_one_process_that_is_to_divide_layers_says_that_it_divides_nothing() -> None:
    notes = [describe(OneProcess(), load([], [f"training.shard={shard}"]).config) for shard in ("optimizer", "layers")]
    assert notes == [[], ["one process divides nothing: training.shard = 'layers' takes --processes, or torchrun"]]


def test_the_exit_code_is_what_a_rank_decided() -> None:
    assert exit_code([-9, 4]) == 4 and exit_code([2, 2]) == 2 and exit_code([-9]) == 137 and exit_code([-15, 143]) == 143


def server_processes(folder: Path) -> list[int]:
    """The processes of the servers that a run in this folder has started, each without its leash."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # processes come and go
            words = path.read_bytes().split(b"\0")
            if words[1:4] == [b"-m", b"legato", b"serve"] and str(folder).encode() in words[4]:
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.ranks
def test_ranks_that_sample_ahead_at_servers_outlive_the_kill_of_a_server_and_of_all_ranks(tmp_path: Path) -> None:
    servers = {"rollouts.engine": "legato", "rollouts.servers.start": 2, "rollouts.ahead": 1}
    options = {**SMALL, **servers, "output.name": "run", "training.steps": 12}
    process = start(tmp_path, "train", *words_of(options))
    wait_for(tmp_path / "runs/run/checkpoints/step-000002", process)
    os.kill(server_processes(tmp_path)[0], signal.SIGKILL)
    wait_for(tmp_path / "runs/run/checkpoints/step-000006", process)
    for pid in [*ranks_of(process.pid).values(), process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert "is dropped" in process.communicate(timeout=30)[0]
    end = time.monotonic() + 20
    while server_processes(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not server_processes(tmp_path), "servers end with the run"
    resume(tmp_path, "training.shard=layers")
    steps = [each for each in records(tmp_path) if each["kind"] == "step"]
    assert [each["step"] for each in steps] == list(range(1, 13)) and max(each["lag/max"] for each in steps) == 1
    state = json.loads((tmp_path / "runs/run/checkpoints/step-000012/trainer.json").read_text())["trainer"]["collector"]
    assert state["cursor"] == 12 * 4 and state["ahead"]["waiting"] == [], "every group that was drawn is used, and no more"
