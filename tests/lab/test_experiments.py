"""The experiments on a policy: their measurements agree with direct computations."""

import math
from pathlib import Path

import pytest
import torch

from legato.compare.jobs import differences, jobs
from legato.diagnostics.statistics.clipping import predicted_clip_fraction
from legato.lab import equivalence, failure, variance
from legato.lab.clipping import ArmResult, _arm_result, account
from legato.lab.equivalence import Pair, identity_errors
from legato.lab.recorder import DEFAULT, make_recorder, split_target, target_of
from legato.lab.sweep import EPSILONS, arms, course, define_comparison, inspect_run, prepare_start, read_epsilons


def ignore(text: str) -> None:
    pass


def test_observed_updates_agree_with_their_metrics(small: list[str]) -> None:
    recorder = make_recorder(target_of(small), ignore)
    report = recorder.step()
    assert [each.index for each in recorder.observed] == [0, 1, 2, 3]
    assert sum(len(each.rows) for each in recorder.observed) == 64
    # The engine's log-probs are the anchor here, so the first update differs from them only by rounding.
    assert (
        float(recorder.observed[0].log_ratios.abs().max()) < 1e-5 < 1e-3 < float(recorder.observed[3].log_ratios.abs().max())
    )
    for each in recorder.observed:
        assert report.metrics[f"ratio/sequence_mean@{each.index}"] == pytest.approx(float(each.log_s.exp().mean()), rel=1e-5)
        # The metric is over all responses; those without an advantage are never clipped.
        assert report.metrics[f"clip/sequences@{each.index}"] == pytest.approx(float(each.clipped.double().mean()))


def test_more_than_one_target_is_refused() -> None:
    assert split_target(["training.lr=1"]) == (str(DEFAULT), ["training.lr=1"])
    with pytest.raises(ValueError, match="one recipe, run or model"):
        split_target(["a.toml", "b.toml"])


def test_the_identity_holds_while_a_policy_is_trained(small: list[str]) -> None:
    report = equivalence.equivalence(target_of(small), steps=2, say=ignore)
    assert [report.checks[place].verdict for place in (0, 3)] == ["as expected"] * 2
    # At perplexities of 40, those of a barely trained policy, float32 reaches 1e-6.
    assert max(check.measured for check in report.checks[1:3]) < 2e-6
    assert [point["responses"] for point in report.data["course"]] == [64, 64]
    ends = next(sheet for sheet in report.sheets if sheet.name == "ends")
    # Different steps have different responses, so there is no ratio between them.
    assert [row[-1] is None for row in ends.rows] == [True, False, False, False]
    assert abs(report.data["mean_s"] - report.data["quotient_of_means"]) > 0


def test_violations_of_the_identity_are_detected() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(20, 16, generator=generator, dtype=torch.float64) * 3
    new = old + 0.01 * torch.randn(20, 16, generator=generator, dtype=torch.float64)
    mask = torch.arange(16) < torch.randint(2, 16, (20, 1), generator=generator)
    pair = Pair(old=old, new=new, mask=mask, full_old=-old, full_new=-old, new_hotter=new / 1.1)
    errors = identity_errors(pair)
    assert errors["float64"] < 1e-12 and errors["float32"] < 1e-6
    assert all(error > 3e-4 for name, error in errors.items() if not name.startswith("float"))


def test_the_spread_of_a_policy_is_measured_after_the_first_update(small: list[str]) -> None:
    target = target_of(small)
    report = variance.variance(target, steps=2, rows=100, say=ignore)
    assert report.data["measured"]["sigma"] > 0
    assert set(report.data["by_update"]) == {"1", "2", "3"}
    with pytest.raises(ValueError, match="updates_per_step = 1"):
        variance.variance(target_of([*small, "training.updates_per_step=1"]), steps=1, rows=100, say=ignore)
    with pytest.raises(ValueError, match="responses were seen after the first update"):
        few = ["training.prompts_per_step=2", "training.updates_per_step=2"]
        variance.variance(target_of([*small, *few]), steps=1, rows=100, say=ignore)


def test_constructed_failures_are_detected(small: list[str]) -> None:
    report = failure.failure(target_of(small), steps=1, say=ignore)
    assert [check.what for check in report.checks if check.verdict != "as expected"] == []
    shifts = next(sheet for sheet in report.sheets if sheet.name == "shifts")
    last = {row[0]: row for row in shifts.rows}
    assert last["lr x 10"][4] > 2 * last["as configured"][4]  # the spread of log s in the last update


def test_a_course_reads_the_records_of_a_run() -> None:
    arm = arms([1e-3])[1]
    records = [{"kind": "start"}]
    for step in range(1, 11):
        clip = {f"clip/sequences@{k}": 0.1 * k for k in range(3)} | {f"ratio/sequence_std@{k}": 1e-3 * k for k in range(3)}
        records.append({"kind": "step", "step": step, "reward/mean": step / 10, "clip/tokens": 0.2, **clip})
    result = course(records, arm)
    assert result.by_update == pytest.approx((0, 0.1, 0.2))
    assert result.clipped == pytest.approx(0.15)
    expected = (predicted_clip_fraction(1e-3, 1e-3, 1e-3) + predicted_clip_fraction(1e-3, 1e-3, 2e-3)) / 2
    assert result.predicted == pytest.approx(expected)
    assert result.reward == pytest.approx(0.95) and result.clipped_tokens == pytest.approx(0.2)
    assert math.isnan(result.k3)


def test_the_arms_of_a_sweep_differ_only_in_the_band(small: list[str], tmp_path: Path) -> None:
    words = [*small, "training.skip_silent_rows=false"]
    definition = define_comparison(words, arms(EPSILONS), folder=tmp_path, seeds=(0,), steps=3, say=ignore)
    assert (tmp_path / "start" / "config.json").is_file() and definition.options["policy.warm_up"] is False
    planned = jobs(definition, tmp_path)
    assert len(planned) == 14 and differences(planned) == []
    assert {job.resolved.config.policy.model for job in planned} == {str((tmp_path / "start").resolve())}
    # The measured and the predicted share both count responses with an advantage.
    assert {(job.resolved.config.training.skip_silent_rows, job.resolved.config.training.steps) for job in planned} == {
        (True, 3)
    }


def test_a_sweep_from_a_run_starts_at_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    recipes, options = prepare_start([str(run)], tmp_path, ignore)
    assert recipes == (run / "config.toml",)
    assert options["policy.model"].endswith("checkpoints/step-000004/model") and options["policy.warm_up"] is False


def test_a_finished_run_is_inspected_once(run: Path, tmp_path: Path) -> None:
    cache = tmp_path / "looks" / "run.json"
    measurements = inspect_run(run, cache, ignore)
    assert sum(each["responses"] for each in measurements["quintiles"]) == measurements["responses"] > 0
    messages: list[str] = []
    assert inspect_run(run, cache, messages.append) == measurements and not messages


def test_the_report_of_a_sweep_follows_from_its_numbers() -> None:
    def step_records(clip: float, reward: float) -> list[dict[str, object]]:
        records: list[dict[str, object]] = []
        for step in range(1, 6):
            each = {"kind": "step", "step": step, "reward/mean": reward, "clip/tokens": clip, "drift/k3": 1e-3}
            records.append(each | {f"clip/sequences@{k}": clip * k for k in (0, 1)} | {"ratio/sequence_std@1": 1e-3})
        return records

    tested_arms = arms([1e-3])
    clips = {"gspo": 0.3, "sequence-0.001": 0.16, "grpo": 0.003}
    arm_results = [
        ArmResult(arm=arm, courses=(course(step_records(clips.get(arm.name, 0.1), 0.5), arm),), accuracy=0.6, start=0.3,
                  collapsed=0, quintiles=())
        for arm in tested_arms
    ]  # fmt: skip
    results = {"runs": [{"steps": 5}], "model": "tiny", "task": "x", "recipes": [], "seeds": [0]}
    report = account(arm_results, results)
    assert "100 times as many" in report.sentences[0]
    # The sentences claim no more than the numbers: a band that clips 16 % has an effect, 0.1 points are no difference.
    assert "the widest band, 0.001, clipped 16.00% of the responses" in report.sentences[3]
    assert "neither" not in report.sentences[2] and not any("load_balance" in sentence for sentence in report.sentences)
    assert "load_balance" in account(arm_results, results | {"load_balance": 0.01}).sentences[-1]
    verdicts = {check.what: check.verdict for check in report.checks}
    assert verdicts["clipped at epsilon 0.001"] == "as expected"  # 15.9 % is predicted
    assert verdicts["clipped at the narrowest band, 0.001"] == "differs"
    assert verdicts["clipped in the first update of a step, any arm"] == "as expected"


def test_epsilons_are_read_and_refused() -> None:
    assert read_epsilons("1e-2,1e-4") == [1e-4, 1e-2]
    for word in ("", "x", "0", "1.5", "1e-3,-1"):
        with pytest.raises(ValueError, match="--epsilons"):
            read_epsilons(word)


@pytest.mark.slow
def test_a_sweep_runs_and_resumes(small: list[str], tmp_path: Path) -> None:
    from legato.lab.clipping import clipping

    options = {"epsilons": [1e-2], "seeds": (0,), "steps": 2, "folder": tmp_path, "parallel": 2}
    messages: list[str] = []
    report = clipping(small, **options, say=messages.append)
    assert {each["arm"] for each in report.data["arms"]} == {"gspo", "sequence-0.01", "token-0.0003", "token-0.01", "grpo"}
    messages.clear()
    clipping(small, **options, say=messages.append)
    assert any("5 finished before" in each for each in messages)


def test_a_run_without_room_is_no_part_of_its_arm(tmp_path: Path) -> None:
    arm = arms([1e-3])[0]
    runs = [
        {"arm": arm.name, "seed": seed, "name": f"run-{seed}", "status": status, "score": score, "start": 0.3}
        for seed, status, score in ((0, "failed", 0.4), (1, "no room", 0.1))
    ]
    result = _arm_result(arm, {"runs": runs}, tmp_path, [0, 1], print)
    assert (result.accuracy, result.start, result.collapsed) == (0.4, 0.3, 1)
