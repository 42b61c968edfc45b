"""The experiments on a policy: what they measure holds against plain accounts, and they leave the policy as it was."""

import math
from pathlib import Path

import pytest
import torch

from legato.compare.jobs import differences, jobs
from legato.diagnostics.statistics.clipping import predicted_clip_fraction
from legato.lab import equivalence, failure, variance
from legato.lab.clipping import ArmResult, account
from legato.lab.equivalence import Pair, breaks
from legato.lab.recorder import DEFAULT, make_recorder, split_target, target_of
from legato.lab.sweep import EPSILONS, arms, course, define_comparison, inspect_run, prepare_start, read_epsilons


def quiet(text: str) -> None:
    pass


def test_what_is_seen_of_an_update_is_what_its_metrics_say(small: list[str]) -> None:
    recorder = make_recorder(target_of(small), quiet)
    report = recorder.step()
    assert [each.index for each in recorder.observed] == [0, 1, 2, 3]
    assert sum(len(each.rows) for each in recorder.observed) == 64
    # The engine's own log-probs are the anchor here, so the first update differs from it by rounding alone.
    assert (
        float(recorder.observed[0].log_ratios.abs().max()) < 1e-5 < 1e-3 < float(recorder.observed[3].log_ratios.abs().max())
    )
    for each in recorder.observed:
        assert report.metrics[f"ratio/sequence_mean@{each.index}"] == pytest.approx(float(each.log_s.exp().mean()), rel=1e-5)
        # The metric is over all responses; those without an advantage are never clipped.
        assert report.metrics[f"clip/sequences@{each.index}"] == pytest.approx(float(each.clipped.double().mean()))


def test_only_one_target_is_taken() -> None:
    assert split_target(["training.lr=1"]) == (str(DEFAULT), ["training.lr=1"])
    with pytest.raises(ValueError, match="one recipe, run or model"):
        split_target(["a.toml", "b.toml"])


def test_the_identity_holds_while_a_policy_is_trained(small: list[str]) -> None:
    found = equivalence.equivalence(target_of(small), steps=2, say=quiet)
    assert [found.checks[place].verdict for place in (0, 3)] == ["as expected"] * 2
    # Perplexities of 40, as a policy that hardly learnt has them, are where float32 reaches 1e-6.
    assert max(check.measured for check in found.checks[1:3]) < 2e-6
    assert [point["responses"] for point in found.data["course"]] == [64, 64]
    ends = next(sheet for sheet in found.sheets if sheet.name == "ends")
    # Responses of two steps are not the same ones: there is no ratio between them.
    assert [row[-1] is None for row in ends.rows] == [True, False, False, False]
    assert abs(found.data["mean_s"] - found.data["quotient_of_means"]) > 0


def test_what_breaks_the_identity_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(20, 16, generator=generator, dtype=torch.float64) * 3
    new = old + 0.01 * torch.randn(20, 16, generator=generator, dtype=torch.float64)
    mask = torch.arange(16) < torch.randint(2, 16, (20, 1), generator=generator)
    pair = Pair(old=old, new=new, mask=mask, full_old=-old, full_new=-old, new_hotter=new / 1.1)
    found = breaks(pair)
    assert found["float64"] < 1e-12 and found["float32"] < 1e-6
    assert all(error > 3e-4 for name, error in found.items() if not name.startswith("float"))


def test_the_spread_of_a_policy_is_measured_and_the_policy_put_back(small: list[str]) -> None:
    target = target_of(small)
    found = variance.variance(target, steps=2, rows=100, say=quiet)
    assert found.data["measured"]["sigma"] > 0
    assert set(found.data["by_update"]) == {"1", "2", "3"}
    with pytest.raises(ValueError, match="updates_per_step = 1"):
        variance.variance(target_of([*small, "training.updates_per_step=1"]), steps=1, rows=100, say=quiet)
    with pytest.raises(ValueError, match="responses were seen after the first update"):
        few = ["training.prompts_per_step=2", "training.updates_per_step=2"]
        variance.variance(target_of([*small, *few]), steps=1, rows=100, say=quiet)


def test_failures_are_constructed_and_looked_for(small: list[str]) -> None:
    found = failure.failure(target_of(small), steps=1, say=quiet)
    assert [check.what for check in found.checks if check.verdict != "as expected"] == []
    shifts = next(sheet for sheet in found.sheets if sheet.name == "shifts")
    last = {row[0]: row for row in shifts.rows}
    assert last["lr x 10"][4] > 2 * last["as configured"][4]  # the spread of log s in the last update


def test_a_course_reads_the_records_of_a_run() -> None:
    arm = arms([1e-3])[1]
    records = [{"kind": "start"}]
    for step in range(1, 11):
        clip = {f"clip/sequences@{k}": 0.1 * k for k in range(3)} | {f"ratio/sequence_std@{k}": 1e-3 * k for k in range(3)}
        records.append({"kind": "step", "step": step, "reward/mean": step / 10, "clip/tokens": 0.2, **clip})
    found = course(records, arm)
    assert found.by_update == pytest.approx((0, 0.1, 0.2))
    assert found.clipped == pytest.approx(0.15)
    expected = (predicted_clip_fraction(1e-3, 1e-3, 1e-3) + predicted_clip_fraction(1e-3, 1e-3, 2e-3)) / 2
    assert found.predicted == pytest.approx(expected)
    assert found.reward == pytest.approx(0.95) and found.clipped_tokens == pytest.approx(0.2)
    assert math.isnan(found.k3)


def test_the_arms_of_a_sweep_share_all_but_the_band(small: list[str], tmp_path: Path) -> None:
    words = [*small, "training.skip_silent_rows=false"]
    definition = define_comparison(words, arms(EPSILONS), folder=tmp_path, seeds=(0,), steps=3, say=quiet)
    assert (tmp_path / "start" / "config.json").is_file() and definition.options["policy.warm_up"] is False
    found = jobs(definition, tmp_path)
    assert len(found) == 14 and differences(found) == []
    assert {job.resolved.config.policy.model for job in found} == {str((tmp_path / "start").resolve())}
    # The share that is measured is of responses with an advantage, as that which is predicted.
    assert {(job.resolved.config.training.skip_silent_rows, job.resolved.config.training.steps) for job in found} == {
        (True, 3)
    }


def test_a_sweep_from_a_run_starts_at_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    recipes, options = prepare_start([str(run)], tmp_path, quiet)
    assert recipes == (run / "config.toml",)
    assert options["policy.model"].endswith("checkpoints/step-000004/model") and options["policy.warm_up"] is False


def test_a_finished_run_is_looked_at_once(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "looks" / "run.json"
    found = inspect_run(run, kept, quiet)
    assert sum(each["responses"] for each in found["quintiles"]) == found["responses"] > 0
    said: list[str] = []
    assert inspect_run(run, kept, said.append) == found and not said


def test_a_sweep_is_told_by_its_numbers() -> None:
    def made(clip: float, reward: float) -> list[dict[str, object]]:
        records: list[dict[str, object]] = []
        for step in range(1, 6):
            each = {"kind": "step", "step": step, "reward/mean": reward, "clip/tokens": clip, "drift/k3": 1e-3}
            records.append(each | {f"clip/sequences@{k}": clip * k for k in (0, 1)} | {"ratio/sequence_std@1": 1e-3})
        return records

    listed = arms([1e-3])
    clips = {"gspo": 0.3, "sequence-0.001": 0.16, "grpo": 0.003}
    found = [
        ArmResult(arm=arm, courses=(course(made(clips.get(arm.name, 0.1), 0.5), arm),), accuracy=0.6, start=0.3, collapsed=0,
              quintiles=())
        for arm in listed
    ]  # fmt: skip
    results = {"runs": [{"steps": 5}], "model": "tiny", "task": "x", "recipes": [], "seeds": [0]}
    told = account(found, results)
    assert "100 times as many" in told.sentences[0]
    # No more is said than the numbers say: a band that clips 16 % acts, and 0.1 points of difference are none.
    assert "the widest band, 0.001, clipped 16.00% of the responses" in told.sentences[3]
    assert "neither" not in told.sentences[2] and not any("load_balance" in sentence for sentence in told.sentences)
    assert "load_balance" in account(found, results | {"load_balance": 0.01}).sentences[-1]
    verdicts = {check.what: check.verdict for check in told.checks}
    assert verdicts["clipped at epsilon 0.001"] == "as expected"  # 15.9 % is predicted
    assert verdicts["clipped at the narrowest band, 0.001"] == "differs"
    assert verdicts["clipped in the first update of a step, any arm"] == "as expected"


def test_epsilons_are_read_and_refused() -> None:
    assert read_epsilons("1e-2,1e-4") == [1e-4, 1e-2]
    for word in ("", "x", "0", "1.5", "1e-3,-1"):
        with pytest.raises(ValueError, match="--epsilons"):
            read_epsilons(word)


@pytest.mark.slow
def test_a_sweep_runs_and_goes_on(small: list[str], tmp_path: Path) -> None:
    from legato.lab.clipping import clipping

    given = {"epsilons": [1e-2], "seeds": (0,), "steps": 2, "folder": tmp_path, "parallel": 2}
    said: list[str] = []
    found = clipping(small, **given, say=said.append)
    assert {each["arm"] for each in found.data["arms"]} == {"gspo", "sequence-0.01", "token-0.0003", "token-0.01", "grpo"}
    said.clear()
    clipping(small, **given, say=said.append)
    assert any("5 finished before" in each for each in said)
