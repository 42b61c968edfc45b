"""`legato doctor`: our runs, logs of TRL, misleading settings, and bad input."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from legato.health.rule import LEVELS
from legato.health.rules import RULES
from legato.records.directory import RunDirectory
from legato.run.doctor import examine
from tests.proof.command import Command, assert_refused
from tests.proof.logs import finding_names, make_records, write_run
from tests.proof.pages import assert_page, numbers


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def test_a_collapse_is_explained_most_important_first(tmp_path: Path) -> None:
    examination = examine(write_run(tmp_path, make_records(sick_from=61)))
    assert [LEVELS.index(each.level) for each in examination.found] == sorted(
        (LEVELS.index(each.level) for each in examination.found), reverse=True
    )
    assert {"drift", "reward-lost", "collapse", "reward-fall"} <= {*finding_names(examination)}
    drift = next(each for each in examination.found if each.name == "drift")
    assert drift.level == "alarm" and drift.first == 61 and "learning rate" in " ".join(drift.causes)
    (rate,) = (line for line in drift.evidence if line.startswith("optimizer/lr"))
    assert numbers(rate) == [0.0001, 0.0005, 0.0005, 0.0005]  # before, lowest and highest since, at the end
    assert all(each.causes and each.tries and each.evidence for each in examination.found)


def test_a_healthy_run_has_nothing_that_stands_out(tmp_path: Path) -> None:
    examination = examine(write_run(tmp_path, make_records(), end=False))
    assert examination.found == ()
    assert any("no end" in fact for fact in examination.facts) and [100, 100] in map(numbers, examination.facts)
    assert not any("no end" in fact for fact in examine(write_run(tmp_path / "ended", make_records())).facts)


def test_the_doctor_finds_what_the_watch_found(tmp_path: Path) -> None:
    """The doctor applies the rules to the metrics again, even if no finding was recorded."""
    from legato.health.watch import Watch

    records = make_records(sick_from=70)
    watch = Watch()
    watched = {finding.rule for record in records for finding in watch.observe(record["step"], record)}
    rules = set(finding_names(examine(write_run(tmp_path, records)))) - {"held-out", "no-progress", "settings"}
    assert watched and rules == watched


def test_steps_of_the_learning_rate_warm_up_are_no_baseline(tmp_path: Path) -> None:
    records = make_records()
    for record in records:
        record["ratio/sequence_std"] = 0.5 * min(1.0, record["step"] / 40) ** 4
    assert "ratio-spread" in finding_names(examine(write_run(tmp_path / "without", records)))
    assert "ratio-spread" not in finding_names(
        examine(write_run(tmp_path / "with", records, ["training.warm_up_updates=160"]))
    )


def test_a_finding_names_the_evidence_folder_of_the_watch(tmp_path: Path) -> None:
    alarm = {"kind": "finding", "rule": "drift", "level": "alarm", "step": 63, "evidence": "evidence/step-000063"}
    examination = examine(write_run(tmp_path, [*make_records(sick_from=61), alarm]))
    drift = next(each for each in examination.found if each.name == "drift")
    assert drift.evidence[-1].endswith(" evidence/step-000063")


def test_a_held_out_collapse_is_a_finding_although_the_reward_rises(tmp_path: Path) -> None:
    evaluations = [
        {"kind": "evaluation", "step": step, "eval/accuracy_sampled": v, "eval/accuracy_sampled_low": v - 0.05}
        | {"eval/accuracy_sampled_high": v + 0.05}
        for step, v in ((0, 0.3), (50, 0.8), (100, 0.1))
    ]
    examination = examine(write_run(tmp_path, [*make_records(), *evaluations]))
    assert finding_names(examination)[0] == "held-out" and "10.0%" in examination.found[0].says
    assert not any("export" in line for line in examination.found[0].tries)  # no checkpoint was kept
    run = tmp_path / "run"
    for step in (0, 50, 100):
        RunDirectory.open(run).checkpoint_path(step).mkdir(parents=True)
    assert f"legato export {run} FOLDER --step 50" in examine(run).found[0].tries[0]


def test_a_run_that_recorded_no_start_is_named_by_its_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path, [], ["algorithm=dapo"])
    (run / "metrics.jsonl").write_text(json.dumps(make_records(1)[0]) + "\n")
    assert examine(run).title == "run: dapo on tiny"


def test_a_folder_that_holds_runs_lists_them(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a", make_records(5)), write_run(tmp_path / "a" / "b", make_records(5))
    with pytest.raises(ValueError, match="holds 2 runs") as refusal:
        examine(tmp_path / "a")
    assert str(one) in str(refusal.value) and str(two) in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["algorithm.objective.trust.clip.low=0.2", "algorithm.objective.trust.clip.high=0.2"], "never clips"),
        (["algorithm.aggregate=token-mean"], "by its length"),
        (["training.updates_per_step=1"], "every ratio is 1"),
    ],
)
def test_misleading_settings_are_warnings(words: list[str], sentence: str, tmp_path: Path) -> None:
    examination = examine(write_run(tmp_path, make_records(), words))
    (diagnosis, *_) = (each for each in examination.found if each.name == "settings")
    assert sentence in diagnosis.says and diagnosis.level == "warning"
    assert "settings" not in finding_names(examine(write_run(tmp_path / "published", make_records())))


# Logs of TRL


def as_trl_log(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"step": r["step"], "reward": r["reward/mean"], "grad_norm": 1.0, "loss": 0.01, "learning_rate": r["optimizer/lr"]}
        | {"frac_reward_zero_std": 0.2, "entropy": 0.4, "completions/mean_length": 200.0, "clip_ratio/region_mean": 0.0}
        for r in records
    ]


def write_trainer_state(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": len(rows), "log_history": rows}))
    return folder


def test_trainer_state_of_trl_is_read(tmp_path: Path) -> None:
    rows = [*as_trl_log(make_records(sick_from=61)), {"step": 100, "train_runtime": 12.0}]
    examination = examine(write_trainer_state(tmp_path, rows))
    assert "reward-lost" in finding_names(examination) and "clip-never" in finding_names(examination)
    lost = next(each for each in examination.found if each.name == "reward-lost")
    (rate,) = (line for line in lost.evidence if line.startswith("optimizer/lr"))
    assert numbers(rate)[0] == 0.0001


def test_the_newest_checkpoint_of_a_folder_is_read(tmp_path: Path) -> None:
    write_trainer_state(tmp_path / "checkpoint-20", as_trl_log(make_records(20)))
    write_trainer_state(tmp_path / "checkpoint-100", as_trl_log(make_records(100)))
    examination = examine(tmp_path)
    assert examination.title.endswith("checkpoint-100/trainer_state.json")


def test_a_loss_that_is_not_a_number_is_a_finding(tmp_path: Path) -> None:
    rows = as_trl_log(make_records())
    rows[90]["loss"] = math.nan
    assert finding_names(examine(write_trainer_state(tmp_path, rows)))[0] == "not-finite"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_with_other_columns_is_read_through_a_mapping(kind: str, tmp_path: Path) -> None:
    rows = [{"global_step": r["step"], "train/score": r["reward/mean"], "H": 0.4} for r in make_records(sick_from=61)]
    path = tmp_path / f"log.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    examination = examine(path, columns={"reward/mean": "score", "entropy/mean": "H"})
    assert "reward-lost" in finding_names(examination) and numbers(examination.facts[0]) == [100, 100]


def test_evaluations_and_split_lines_do_not_count_as_steps(tmp_path: Path) -> None:
    """TRL logs an evaluation as a line of the preceding step; it must not interrupt rules over consecutive steps."""
    rows = as_trl_log(make_records())
    mixed: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.3, "eval_completions/mean_length": 200.0}]
    for row in rows:
        halves = ({"step": row["step"], "reward": row.pop("reward")}, row)
        mixed += [*halves, {"step": row["step"], "eval_reward": 0.4, "eval_completions/mean_length": 180.0}]
    examination = examine(write_trainer_state(tmp_path, mixed))
    assert numbers(examination.facts[0]) == [100, 100]
    assert "clip-never" in finding_names(examination)


def test_a_step_that_is_logged_twice_counts_once_with_its_last_values(tmp_path: Path) -> None:
    rows = [{"step": step, "reward": 0.1} for step in range(1, 31)] + [
        {"step": step, "reward": 0.5} for step in range(11, 41)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = examine(path).facts
    assert numbers(facts[0]) == [40, 40] and numbers(facts[1]) == [0.1, 10, 0.5, 0.5]


@pytest.mark.parametrize("column", ["score", "train/score"])
def test_a_column_may_be_named_with_or_without_its_prefix(column: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"Step": 10 * r["step"], "train/score": r["reward/mean"]} for r in make_records(sick_from=61)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examination = examine(path, columns={"reward/mean": column})
    assert "reward-lost" in finding_names(examination) and numbers(examination.facts[0]) == [100, 1000]


def test_an_unfinished_log_and_a_spreadsheet_export_are_read(tmp_path: Path) -> None:
    growing = tmp_path / "log.jsonl"
    growing.write_text("".join(json.dumps(row) + "\n" for row in as_trl_log(make_records(20))) + '{"step": 21, "rew')
    assert numbers(examine(growing).facts[0]) == [20, 20]
    sheet = tmp_path / "log.csv"
    sheet.write_text('\ufeffstep,note,reward\n7,"two\nlines",0.5\n', encoding="utf-8")
    assert numbers(examine(sheet).facts[0]) == [1, 7]


def test_a_reward_that_is_not_a_number_is_left_out_of_the_facts(tmp_path: Path) -> None:
    rows = as_trl_log(make_records(40))
    rows[0]["reward"] = rows[39]["clip_ratio/region_mean"] = math.nan
    examination = examine(write_trainer_state(tmp_path, rows), ["num_iterations=1"])
    assert "nan" not in " ".join([*examination.facts, *(line for each in examination.found for line in each.evidence)])


def test_unread_columns_are_an_error_and_a_clean_verdict_counts_the_rules_it_used(legato: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("iter,train_score,H,kl,len\n" + "".join(f"{step},0.5,0.3,0.1,9\n" for step in range(1, 30)))
    assert_refused(legato("doctor", str(path)), "which are H, iter, kl, len, train_score", "--column reward/mean=COLUMN")
    code, out, _ = legato("doctor", str(path), "--column", "entropy/mean=H")
    read = {"entropy-fall", "entropy-lost", "entropy-rise", "entropy-explosion"}
    assert code == 0 and f"{len(read)} of {len(RULES)} rules" in " ".join(out.split())


@pytest.mark.parametrize(
    ("rows", "tested", "head"),
    [(1, 0, "too early"), (3, 1, "Nothing stands out"), (100, 5, "Nothing stands out")],
)
def test_a_verdict_does_not_count_rules_that_need_more_steps(
    rows: int, tested: int, head: str, legato: Command, tmp_path: Path
) -> None:
    """The rule on truncated responses needs three steps; the four entropy rules compare with a baseline."""
    path = tmp_path / "m.csv"
    path.write_text("step,entropy,completions/clipped_ratio\n" + "".join(f"{n},0.3,0.1\n" for n in range(1, rows + 1)))
    code, out, _ = legato("doctor", str(path))
    text = " ".join(out.split())
    assert code == 0 and head in text and f"5 of {len(RULES)} rules" in text
    # Rules without enough steps are counted apart, with the number of steps.
    assert (f"{tested} of them" in text and f"({rows} step" in text) is (tested < 5)
    examination = examine(path)
    assert (examination.judged, examination.tested, examination.steps) == (5, tested, rows)


def test_findings_on_a_log_of_every_fifth_step_name_logged_steps_and_options_of_trl(tmp_path: Path) -> None:
    rows = [
        row | {"step": 5 * row["step"], "completions/clipped_ratio": 0.7} for row in as_trl_log(make_records(sick_from=61))
    ]
    examination = examine(write_trainer_state(tmp_path, rows))
    assert numbers(examination.facts[0]) == [100, 500]
    lost = next(each for each in examination.found if each.name == "reward-lost")
    steps = [int(number) for number in re.findall(r"(?:step|from) (\d+)", lost.evidence[0])]
    assert len(steps) == 3 and all(number % 5 == 0 for number in steps) and "rows" in lost.evidence[0]
    assert "5 logged steps" in lost.says
    cut = next(each for each in examination.found if each.name == "truncated")
    assert "raise rollouts.max_response_tokens (TRL: max_completion_length)" in cut.tries


def test_the_metrics_file_of_a_run_is_examined_as_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, make_records(sick_from=61))
    assert examine(run / "metrics.jsonl") == examine(run)
    copied = tmp_path / "copied.jsonl"
    copied.write_text('{"kind": "warm-up", "step": 400, "loss/total": 2.0}\n' + (run / "metrics.jsonl").read_text())
    assert numbers(examine(copied).facts[0]) == [100, 100]


SEQUENCE = "importance_sampling_level=sequence"
BAND = ("epsilon=3e-4", "epsilon_high=4e-4")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [SEQUENCE, "loss_type=grpo", "steps_per_generation=4"],
            ["clip.low (TRL: epsilon) = 0.2", "clip.high (TRL: epsilon_high) = 0.2"],
        ),
        ([SEQUENCE, *BAND, "steps_per_generation=4"], ["by its length"]),
        ([SEQUENCE, *BAND, "loss_type=grpo"], ["every ratio is 1"]),
        (["num_iterations=2"], []),
        ([SEQUENCE, "loss_type=sapo", "num_iterations=2"], []),
        (["loss_type=cispo", "num_iterations=2", "epsilon_high=5"], []),
        ([SEQUENCE, *BAND, "loss_type=dr_grpo", "num_iterations=2"], []),
        ([SEQUENCE, *BAND, "loss_type=grpo", "steps_per_generation=32", "gradient_accumulation_steps=8"], []),
    ],
)
def test_misleading_settings_of_trl_are_warnings(words: list[str], parts: list[str], tmp_path: Path) -> None:
    examination = examine(write_trainer_state(tmp_path, as_trl_log(make_records())), words)
    sentences = [each.says for each in examination.found if each.name == "settings"]
    assert len(sentences) == len(parts) and all(any(part in sentence for sentence in sentences) for part in parts)


def as_verl_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"critic/score/mean": r["reward/mean"], "critic/rewards/mean": r["reward/mean"], "actor/grad_norm": 1.0}
        | {"actor/pg_loss": 0.01, "actor/lr": r["optimizer/lr"], "actor/entropy": 0.4, "actor/pg_clipfrac": 0.0}
        | {"response_length/mean": 200.0, "response_length/clip_ratio": 0.0, "training/global_step": r["step"]}
        for r in records
    ]


def write_verl_log(folder: Path, kind: str, records: list[dict[str, Any]]) -> Path:
    """A log as verl's file logger writes it, or as its console prints it behind the name of a process."""
    rows = list(enumerate(as_verl_rows(records), start=1))
    if kind == "file":
        (folder / "verl.jsonl").write_text("".join(f"{json.dumps({'step': n, 'data': row})}\n" for n, row in rows))
        return folder / "verl.jsonl"
    lines = ["(TaskRunner pid=1) Training Progress:   0%|          | 0/90"]
    for number, row in rows:
        cells = [f"{key}:{f'np.float64({value})' if 'score' in key else value}" for key, value in row.items()]
        lines.append(" - ".join([f"(TaskRunner pid=1) step:{number}", *cells]))
    (folder / "verl.log").write_text("\n".join(lines))
    return folder / "verl.log"


@pytest.mark.parametrize("kind", ["file", "console"])
def test_logs_of_verl_are_read(kind: str, tmp_path: Path) -> None:
    examination = examine(write_verl_log(tmp_path, kind, make_records(sick_from=61)))
    assert "reward-lost" in finding_names(examination) and "clip-never" in finding_names(examination)
    assert examination.steps == len(make_records())


VERL_GSPO = ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "clip_ratio_low=0.0003", "clip_ratio_high=0.0004"]
VERL_BATCHES = ["data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=128"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*VERL_GSPO, "loss_agg_mode=seq-mean-token-mean", *VERL_BATCHES], []),
        ([*VERL_GSPO, "loss_agg_mode=token-mean", *VERL_BATCHES], ["length"]),
        ([VERL_GSPO[0], "loss_agg_mode=seq-mean-token-mean", *VERL_BATCHES], ["clip.low", "clip.high"]),
        ([*VERL_GSPO, "loss_agg_mode=seq-mean-token-mean"], ["every ratio is 1"]),
    ],
)
def test_misleading_settings_of_verl_are_warnings(words: list[str], parts: list[str], tmp_path: Path) -> None:
    examination = examine(write_verl_log(tmp_path, "file", make_records()), words)
    sentences = [each.says for each in examination.found if each.name == "settings"]
    assert len(sentences) == len(parts) and all(any(part in sentence for sentence in sentences) for part in parts)


@pytest.mark.parametrize(("lr", "warned"), [(1e-6, True), (1e-5, False)])
def test_lora_with_the_learning_rate_of_all_weights_is_a_warning(lr: float, warned: bool, tmp_path: Path) -> None:
    run = write_run(tmp_path, make_records(), ["policy.lora=true", f"training.lr={lr}"])
    assert any("LoRA with a learning rate" in each.says for each in examine(run).found) is warned
    full = write_run(tmp_path / "full", make_records(), [f"training.lr={lr}"])
    assert not any("LoRA" in each.says for each in examine(full).found)
    log = write_trainer_state(tmp_path / "trl", as_trl_log([{**r, "optimizer/lr": lr} for r in make_records()]))
    assert any("LoRA" in each.says for each in examine(log, ["use_peft=true", "num_iterations=2"]).found) is warned


# The command


def metrics_without_a_step(folder: Path) -> Path:
    """The metrics file of an interrupted run, without its run directory."""
    path = folder / "copied.jsonl"
    return (write_run(folder, []) / "metrics.jsonl").replace(path)


def test_the_printed_page_is_its_snapshot(legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of the doctor on a collapse; tests/proof/pages.py says how to renew the snapshot."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    code, out, _ = legato("doctor", str(write_run(tmp_path, make_records(sick_from=61)).relative_to(tmp_path)))
    assert code == 0
    assert_page("doctor", out)


def test_the_command_prints_and_writes(legato: Command, tmp_path: Path) -> None:
    run = write_run(tmp_path, make_records(sick_from=61))
    code, out, error = legato("doctor", str(run), "--output", str(tmp_path / "found.json"))
    assert code == 0, error
    assert "1. alarm" in out and "evidence" in out and "likely" in out and "try" in out
    stored = json.loads((tmp_path / "found.json").read_text())
    assert stored["found"][0]["level"] == "alarm"


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (lambda folder: folder / "nowhere", [], "does not exist"),
        (lambda folder: folder, [], "is no run directory"),
        (
            lambda folder: write_run(folder, make_records(5)) / "config.toml",
            [],
            "is a configuration",
        ),
        (lambda folder: write_trainer_state(folder, []), [], "holds no step"),
        (lambda folder: write_run(folder, [{"kind": "warm-up", "step": 10, "loss": 2.0}]), [], "holds no step"),
        (metrics_without_a_step, [], "holds no step"),
        (lambda folder: write_trainer_state(folder, [{"step": 1, "colour": 3}]), [], "which are colour, step"),
        (lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))), ["epsilom=0.2"], "epsilon"),
        (lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))), ["epsilon=much"], "a number above 0"),
        (
            lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))),
            ["loss_type=drgrpo"],
            "did you mean 'dr_grpo'",
        ),
        (
            lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))),
            ["--column", "reward=reward"],
            "no rule reads 'reward'",
        ),
        (lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))), ["--column", "reward/mean"], "KEY=COLUMN"),
        (
            lambda folder: write_trainer_state(folder, as_trl_log(make_records(5))),
            ["--column", "reward/mean=prize"],
            "has no column 'prize'",
        ),
        (lambda folder: write_run(folder, make_records(5)), ["epsilon=0.2"], "--column"),
    ],
)
def test_bad_input_is_one_line(legato: Command, make: Any, words: list[str], message: str, tmp_path: Path) -> None:
    assert_refused(legato("doctor", str(make(tmp_path)), *words), message)


def test_a_file_that_is_not_json_is_one_line(legato: Command, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{")
    assert_refused(legato("doctor", str(tmp_path)), "is not JSON")
