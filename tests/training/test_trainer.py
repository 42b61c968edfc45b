"""A whole step: what it updates and counts, when it does not train, and that the number of passes does not matter."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import legato
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.errors import InputError
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.reference import Reference
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.tasks.source import Pool
from legato.training.ahead import Ahead
from legato.training.anchor import needs_reference
from legato.training.collect import Collector, CollectorSettings
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.report import StepReport
from legato.training.step import Trainer, TrainingSettings
from legato.training.tables import needs

Judge = Callable[[Sequence[Rollout]], list[Score | Unscorable]]


def score_by_seed(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    """0 or 1 at random, fixed for each rollout; all rollouts of every third problem score the same."""
    scores: list[Score | Unscorable] = []
    for rollout in rollouts:
        flat = int(str(rollout.problem.prompt)[:1]) % 3 == 0
        right = 1.0 if flat else float(seed_of(rollout.rollout_id) % 2)
        scores.append(Score(reward=right, accuracy=right))
    return scores


def trainer(
    name: str = "gspo",
    judge: Judge = score_by_seed,
    changes: dict[str, Any] | None = None,
    experts: int = 0,
    **settings: Any,
) -> Trainer:
    value = legato.algorithm(name, changes)
    words = character_tokenizer()
    shape = TinyShape(hidden=32, heads=2, experts=experts or 8)
    model = tiny_model(shape, vocabulary=len(words), seed=1, mixture=experts > 0, dtype=torch.float64)
    loading = Loading(dtype="float64", device="cpu")
    policy: Policy = load_policy(model, loading, tokenizer=words, value_head="values" in needs(value))
    problems = [Problem(prompt=f"{a}+{b}=") for a in range(10) for b in range(6)]
    collector = Collector(
        source=Pool(problems, share=0.0, seed=0),
        runner=Runner(
            engine=LocalEngine(policy),
            rendering=Rendering(tokenizer=words),
            limits=Limits(max_response_tokens=5, end_tokens=(1,)),
        ),
        judge=judge,
        sampling=Sampling(),
        settings=CollectorSettings(samples_per_prompt=4, max_prompt_tokens=20),
        seed=0,
    )
    chosen = {"prompts_per_step": 8, "updates_per_step": 4, "anchor": "recompute", "tokens_per_pack": 60, **settings}
    return Trainer(
        policy=policy,
        algorithm=value,
        source=collector,
        optimizer=Optimizer(policy.parameters(), OptimizerSettings(lr=1e-3), total_updates=9),
        settings=TrainingSettings(**chosen),
        reference=Reference.from_policy(policy) if needs_reference(value) else None,
    )


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in of.policy.parameters().items()}


def max_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def run(this: Trainer, steps: int) -> list[StepReport]:
    return [this.step() for _ in range(steps)]


def same_metrics(left: StepReport, right: StepReport) -> bool:
    timed = {key for key in left.metrics if key.startswith("time/") or key.endswith("per_second")}
    return all(repr(left.metrics[key]) == repr(right.metrics[key]) for key in set(left.metrics) - timed)


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_the_same_seed_twice_is_equal_to_the_bit(name: str) -> None:
    one, two = trainer(name), trainer(name)
    reports = list(zip(run(one, 2), run(two, 2), strict=True))
    assert max_difference(weights(one), weights(two)) == 0.0
    assert all(same_metrics(a, b) for a, b in reports)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gspo", {}),
        ("ppo", {}),
        pytest.param("dapo", {}, marks=pytest.mark.slow),
        pytest.param("gepo", {}, marks=pytest.mark.slow),
        pytest.param("grpo", {"objective.penalties.kl.beta": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_passes_does_not_change_the_weights(name: str, changes: dict[str, Any]) -> None:
    """'one' skips nothing, 'two' skips clipped and silent rows, 'auto' decides: the weights after two steps agree."""
    final_weights = []
    for passes in ("one", "two", "auto"):
        this = trainer(name, changes=changes, update_passes=passes)
        run(this, 2)
        final_weights.append(weights(this))
    # Adam divides by the size of the gradient: where it is about 0, only rounding is left.
    assert (
        max_difference(final_weights[0], final_weights[1]) < 1e-7
        and max_difference(final_weights[0], final_weights[2]) < 1e-7
    )


def test_a_step_makes_as_many_updates_as_asked_for() -> None:
    this = trainer(epochs_per_step=2)
    report = this.step()
    assert this.optimizer.updates == 8 and this.steps_done == report.step == 1 and this.source.version == 1
    again = [report.metrics.get(f"ratio/sequence_mean@{k}", math.nan) for k in range(4, 8)]
    assert report.metrics["ratio/sequence_mean@0"] == 1.0 and any(math.isfinite(each) and each != 1.0 for each in again)


def test_the_first_update_of_a_step_has_ratio_1_and_the_later_ones_do_not() -> None:
    this = trainer()
    for report in run(this, 2):
        assert report.metrics["ratio/sequence_mean@0"] == 1.0 and report.metrics["clip/sequences@0"] == 0.0
        keys = [f"ratio/sequence_mean@{k}" for k in (1, 2, 3)]
        later = [report.metrics[key] for key in keys if key in report.metrics]
        assert later and all(mean != 1.0 for mean in later)


def test_updates_are_numbered_through_the_epochs_of_a_step() -> None:
    """The first of a second pass is not of a policy that nothing has moved, and must not be taken for it."""
    (report,) = run(trainer(updates_per_step=2, epochs_per_step=2), 1)
    ratios = [report.metrics[f"ratio/sequence_mean@{k}"] for k in range(4)]
    assert ratios[0] == 1.0 and all(each != 1.0 for each in ratios[1:])
    assert "ratio/sequence_mean@4" not in report.metrics


def test_the_weights_are_moved_in_place_and_served_from_where_they_are() -> None:
    this = trainer()
    before = {name: parameter.data_ptr() for name, parameter in this.policy.parameters().items()}
    run(this, 2)
    assert {name: parameter.data_ptr() for name, parameter in this.policy.parameters().items()} == before
    with this.policy.serving() as served:
        assert served is this.policy.model and not torch.is_grad_enabled()


def judge_some(share: float) -> Judge:
    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        bad = round(share * len(rollouts))
        return [Unscorable("hung")] * bad + score_by_seed(rollouts[bad:])

    return judge


def test_a_step_with_too_few_scored_rollouts_is_not_trained_on() -> None:
    this = trainer(judge=judge_some(0.75), minimum_scored=0.5)
    before = weights(this)
    report = this.step()
    assert max_difference(before, weights(this)) == 0.0 and this.optimizer.updates == 0 and this.steps_done == 1
    assert report.metrics["rollouts/unscorable"] == 0.75 and report.unscorable == {"hung": 24}
    assert this.source.drawn == 8 and this.source.version == 0


def test_a_step_with_just_enough_scored_rollouts_is_trained_on() -> None:
    this = trainer(judge=judge_some(0.5), minimum_scored=0.5)
    before = weights(this)
    this.step()
    assert max_difference(before, weights(this)) > 0.0


def test_a_first_step_with_too_few_scores_does_not_break_the_second() -> None:
    verdicts = iter([judge_some(0.75), score_by_seed])
    this = trainer(judge=lambda rollouts: next(verdicts)(rollouts), anchor="auto")
    this.step()
    report = this.step()
    assert report.floor is not None and this.optimizer.updates == 4


def test_a_first_step_without_any_score_is_an_error_and_moves_nothing() -> None:
    this = trainer(judge=judge_some(1.0))
    before = this.state_dict()
    with pytest.raises(InputError, match=r"no score for any of the first 32: hung \(32 rollouts\)"):
        this.step()
    assert this.state_dict() == before


@pytest.mark.parametrize(("score", "applied"), [(1.0, None), (0.0, 0.0)])
def test_a_step_without_groups_after_dynamic_sampling(score: float, applied: float | None) -> None:
    """A solved task does not report dropped updates, which would raise an alarm; a task that is too hard does."""
    this = trainer(judge=lambda rollouts: [Score(reward=score, accuracy=score) for _ in rollouts])
    this.source.settings = replace(this.source.settings, resampling="dynamic", max_refills=1)
    (report,) = run(this, 1)
    assert report.groups == () and report.metrics.get("update/applied") == applied


def test_a_step_of_flat_groups_still_steps_the_optimizer() -> None:
    this = trainer(judge=lambda rollouts: [Score(reward=1.0, accuracy=1.0) for _ in rollouts])
    report = this.step()
    assert this.optimizer.updates == 4 and report.metrics["gradient/norm"] == 0.0
    assert report.metrics["groups/zero_variance"] == 1.0 and report.metrics["update/silent_rows"] == 1.0


def test_the_probe_runs_before_the_first_update_and_then_as_often_as_asked() -> None:
    this = trainer(anchor="auto", probe_every_steps=2)
    floors = [report.floor is not None for report in run(this, 3)]
    assert floors == [True, False, True] and this.anchor_choice == "sampler"


def test_the_old_policy_of_a_mixture_is_always_scored_so_that_the_shift_of_its_routers_is_known() -> None:
    this = trainer(anchor="auto", experts=4)
    report = this.step()
    assert report.floor is not None and report.floor.sampler_is_safe and this.anchor_choice == "recompute"
    assert 0 < report.metrics["router/shift_mean"] <= 1


NARROW = {"objective.trust.clip.low": 1e-18, "objective.trust.clip.high": 1e-18}
"""A clip band that the rounding of float64 fills."""


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("", {}),
        ("the engine's own are not exact enough", {"changes": NARROW}),
        ("training.anchor = 'recompute' asks for it", {"changes": NARROW, "anchor": "recompute"}),
        ("the pass that recomputes them also measures how far a mixture's routers shift", {"changes": NARROW, "experts": 4}),
        ("without a clip band the engine's own would have to be equal to the bit", {"name": "reinforce"}),
    ],
)
def test_the_floor_says_why_old_log_probs_are_recomputed(reason: str, options: dict[str, Any]) -> None:
    this = trainer(**{"anchor": "auto", **options})
    floor = this.step().floor
    assert floor is not None and floor.reason == reason and floor.lag == 0
    assert floor.fills_the_band == ("changes" in options) and this.anchor_choice == ("recompute" if reason else "sampler")


def test_with_responses_ahead_the_reason_is_their_age_and_not_the_engine() -> None:
    this = trainer(changes=NARROW, anchor="recompute")
    given = {each.name: getattr(this.source, each.name) for each in fields(this.source) if not each.name.startswith("_")}
    this.source = Ahead(**given, steps_ahead=1)
    for report in run(this, 2):
        assert report.floor is not None and report.floor.fills_the_band and report.floor.lag == 1
        assert report.floor.reason == "with rollouts.ahead = 1 responses may be older than the policy"


def test_a_loaded_trainer_goes_on_to_the_bit() -> None:
    straight = trainer()
    run(straight, 1)
    memory, state = straight.state_dict(), straight.optimizer.state()
    saved = ({key: value.clone() for key, value in state[0].items()}, dict(state[1]))
    resumed = trainer()
    with torch.no_grad():
        for name, parameter in resumed.policy.parameters().items():
            parameter.copy_(straight.policy.parameters()[name])
    resumed.optimizer.load(*saved)
    resumed.load_state_dict(memory)
    assert all(same_metrics(a, b) for a, b in zip(run(straight, 1), run(resumed, 1), strict=True))
    assert max_difference(weights(straight), weights(resumed)) == 0.0


def test_metrics_do_not_depend_on_which_rows_were_left_out() -> None:
    """Silent rows are left out of the metrics of an update however it is passed; clipped ones never are."""
    one, two = trainer(update_passes="one").step().metrics, trainer(update_passes="two").step().metrics
    assert one["update/silent_rows"] == two["update/silent_rows"] > 0.2
    for key in ("clip/sequences", "ratio/sequence_mean", "loss/total"):
        assert abs(one[key] - two[key]) < 1e-6, key
