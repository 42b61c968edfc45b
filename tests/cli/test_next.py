"""The next useful command after a run and after `legato doctor`; bars of other libraries stay out of logs."""

from pathlib import Path

import pytest

from legato.cli import commands
from legato.cli.doctor import next_command
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock
from tests.proof.runs import Listener, run_small


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_config("")
    directory.append_metrics({"kind": "start"})
    return directory


def test_doctor_names_the_next_command(run: RunDirectory, tmp_path: Path) -> None:
    path = run.path
    assert next_command(path, [], False) == f"legato train {path}/config.toml"
    run.checkpoint_path(2).mkdir(parents=True)
    assert next_command(path, [], False) == f"legato resume {path}"
    assert next_command(path, [], True).startswith(f"legato report {path}, then legato resume {path}")
    run.write_rollouts(1, [])
    assert next_command(path, [], True).startswith(f"legato rollouts {path} --worst, then legato resume {path}")
    with hold_lock(run):
        assert next_command(path, [], False).startswith(f"legato dashboard {path}")
    run.append_metrics({"kind": "end", "reason": "all steps done", "seconds": 1.0})
    assert next_command(path, [], False) == f"legato sample {path}"
    assert next_command(path / "metrics.jsonl", [], True) == f"legato rollouts {path} --worst"
    assert next_command(tmp_path / "log.csv", [], True).startswith(f"legato doctor {tmp_path / 'log.csv'} epsilon=")


def test_a_run_with_findings_or_without_a_checkpoint_points_at_doctor(run: RunDirectory) -> None:
    assert commands._next_command(run) == f"legato doctor {run.path}", "there are no weights to sample from"
    run.checkpoint_path(2).mkdir(parents=True)
    assert commands._next_command(run) == f"legato sample {run.path}"
    run.health.append({"kind": "finding", "level": "note", "step": 1})
    assert commands._next_command(run) == f"legato sample {run.path}"
    run.health.append({"kind": "finding", "level": "warning", "step": 1})
    assert commands._next_command(run) == f"legato doctor {run.path}"


def test_loading_a_model_prints_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    tokenizer = character_tokenizer()
    model = tiny_model(TinyShape(layers=1), vocabulary=len(tokenizer), seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    capfd.readouterr()
    load_policy(str(tmp_path), Loading(), seed=0)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("lightly")
def test_the_verdict_on_the_numerics_is_printed_once(tmp_path: Path) -> None:
    listener = Listener()
    run = run_small(
        tmp_path, {"training.steps": 2, "training.probe_every_steps": 1, "evaluation.every_steps": 0}, watcher=listener
    )
    probes = [record for record in RunDirectory.open(run.directory).metrics() if record["kind"] == "probe"]
    assert len(probes) == 2 and all("max |s - 1|" in record["words"] for record in probes)
    assert len([text for text in listener.messages if text.startswith("numerics are fine")]) == 1
    assert "max |s - 1|" not in listener.said
