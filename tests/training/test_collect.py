"""The collector: which problems are drawn, their seeds, which groups are dropped or replaced, and exhausted tasks."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.core.batch import collate
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Handle, Limits, Request
from legato.rollouts.episodes import Runner
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.tasks.source import Pool
from legato.training.collect import Collector, CollectorSettings
from legato.training.source import ExhaustedError, RolloutSource

WORDS = character_tokenizer()
Verdict = Callable[[str, int], float | Unscorable]


class Listening(ScriptedEngine):
    """An engine that answers with the number of the sample and records its requests."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, sample: ([20 + sample, 1], [-0.5, -0.1]))
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        self.requests += requests
        return super().submit(requests, sampling, limits)


class Counted:
    """Problems `p0 p1 ...` in order, over and over."""

    def __init__(self, size: int | None, orders: Sequence[Sequence[int]] = ()) -> None:
        self.size, self.orders = size, orders

    def training(self, number: int) -> Problem:
        if self.size is None:
            return Problem(prompt=f"p{number}")
        epoch, place = divmod(number, self.size)
        return Problem(prompt=f"p{self.orders[epoch][place] if epoch < len(self.orders) else place}")

    def held_out(self, count: int) -> list[Problem]:
        return []


def make_judge(verdict: Verdict) -> Callable[[Sequence[Rollout]], list[Score | Unscorable]]:
    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        scores: list[Score | Unscorable] = []
        for rollout in rollouts:
            accuracy = verdict(str(rollout.problem.prompt), int(rollout.tokens[0]) - 20)
            scores.append(accuracy if isinstance(accuracy, Unscorable) else Score(reward=accuracy, accuracy=accuracy))
        return scores

    return judge


def alternate_score(prompt: str, sample: int) -> float:
    return float(sample % 2)


def collector(verdict: Verdict = alternate_score, size: int | None = None, **changes: Any) -> Collector:
    played = {
        "engine": Listening(),
        "rendering": Rendering(tokenizer=WORDS),
        "limits": Limits(max_response_tokens=4, end_tokens=(1,)),
    }
    arguments: dict[str, Any] = {
        "source": Counted(size),
        "runner": Runner(**{name: changes.pop(name, value) for name, value in played.items()}),
        "judge": make_judge(verdict),
        "sampling": Sampling(),
        "seed": 3,
    }
    named = {field.name for field in dataclasses.fields(CollectorSettings)}
    chosen = {"samples_per_prompt": 4, "max_prompt_tokens": 10}
    chosen |= {name: value for name, value in changes.items() if name in named}
    others = {name: value for name, value in changes.items() if name not in named}
    return Collector(**{**arguments, **others}, settings=CollectorSettings(**chosen))


def prompts_of(groups: Sequence[Any]) -> list[str]:
    return [str(group.problem.prompt) for group in groups]


def test_groups_come_in_the_order_their_problems_were_drawn() -> None:
    this = collector()
    first, _ = this.next(3)
    second, _ = this.next(2)
    assert prompts_of(first) == ["p0", "p1", "p2"] and prompts_of(second) == ["p3", "p4"]
    assert [int(m.rollout.tokens[0]) - 20 for m in first[0].members] == [0, 1, 2, 3]


def test_seeds_depend_on_run_problem_place_and_sample_and_on_nothing_else() -> None:
    one, two, other = collector(), collector(), collector(seed=4)
    one.next(6)
    for count in (1, 2, 3):
        two.next(count)
    other.next(6)
    assert [r.seeds for r in one.runner.engine.requests] == [r.seeds for r in two.runner.engine.requests]
    seeds = [seed for request in one.runner.engine.requests for seed in request.seeds]
    assert len(set(seeds)) == 24 and not set(seeds) & {s for r in other.runner.engine.requests for s in r.seeds}


def test_two_problems_at_one_place_of_two_orders_are_sampled_with_other_seeds() -> None:
    one, two = (collector(source=Counted(2, [order])) for order in ([0, 1], [1, 0]))
    one.next(2)
    two.next(2)
    assert not set(one.runner.engine.requests[0].seeds) & set(two.runner.engine.requests[0].seeds)


def test_a_problem_that_comes_again_is_sampled_with_other_seeds() -> None:
    this = collector(size=2)
    this.next(4)
    requests = this.runner.engine.requests
    assert torch.equal(requests[0].prompt, requests[2].prompt) and not set(requests[0].seeds) & set(requests[2].seeds)


def test_rollout_ids_are_unique_in_the_run() -> None:
    this = collector(size=2)
    ids = [m.rollout.rollout_id for _ in range(3) for group in this.next(3)[0] for m in group.members]
    assert len(set(ids)) == len(ids) == 36


def test_a_resumed_collector_draws_the_same_problems() -> None:
    straight = collector()
    straight.next(5)
    resumed = collector()
    resumed.load(straight.state())
    straight.runner.engine.requests.clear()
    assert prompts_of(straight.next(3)[0]) == prompts_of(resumed.next(3)[0])
    assert [r.seeds for r in straight.runner.engine.requests] == [r.seeds for r in resumed.runner.engine.requests]


def test_every_token_says_which_version_wrote_it() -> None:
    this = collector()
    this.on_publish(7)
    (group,), _ = this.next(1)
    assert all(m.rollout.version.tolist() == [7, 7] for m in group.members)


def test_the_policy_is_published_before_the_first_sampling_after_each_step_and_after_a_checkpoint() -> None:
    class Published(Listening):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[tuple[int, list[str]]] = []

        def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            self.heard.append((version, [name for name, _ in weights]))
            super().publish(weights, version)

    engine, evaluating = Published(), Published()
    this = collector(engine=engine)
    this.runner.weights = lambda: [("w", torch.zeros(1))]
    this.evaluation = replace(this.runner, engine=evaluating)
    this.next(1)
    this.next(1)
    assert engine.heard == [(0, ["w"])]
    this.on_publish(1)
    assert engine.heard[1:] == [(1, ["w"])] and evaluating.heard == [(1, ["w"])] and this.version == 1
    other = collector(engine=engine)
    other.load(this.state())
    assert engine.version == 1 and len(engine.heard) == 3 and other.version == 1 and other.drawn == 2
    other.next(1)
    assert len(engine.heard) == 3


def test_a_recovery_can_go_on_behind_the_problems_that_were_drawn() -> None:
    this = collector()
    this.next(2)
    this.go_to(5)
    assert prompts_of(this.next(2)[0]) == ["p5", "p6"] and this.drawn == 7


def test_checking_prompts_draws_no_problem() -> None:
    this = collector()
    this.check_prompts()
    assert this.drawn == 0 and prompts_of(this.next(1)[0]) == ["p0"]


def test_the_collector_is_a_source_of_rollouts() -> None:
    assert isinstance(collector(), RolloutSource)


def test_unscorable_rollouts_leave_their_group_and_are_never_scored_0() -> None:
    this = collector(lambda prompt, sample: Unscorable("hung") if sample == 1 else float(sample > 2))
    groups, tally = this.next(2)
    assert [len(group.members) for group in groups] == [3, 3]
    assert tally.unscorable == 2 and tally.reasons == {"hung": 2} and tally.rollouts == 8
    assert tally.rewards == [0.0, 0.0, 1.0] * 2


def test_a_group_with_fewer_than_two_scored_rollouts_is_dropped_and_counted() -> None:
    this = collector(lambda prompt, sample: float(sample) if sample == 0 or prompt == "p1" else Unscorable("no"))
    groups, tally = this.next(3)
    assert prompts_of(groups) == ["p1"] and tally.too_few == 2 and tally.groups == 3


def test_dynamic_sampling_replaces_flat_groups_by_fresh_problems() -> None:
    this = collector(lambda prompt, sample: 1.0 if int(prompt[1:]) % 3 else float(sample % 2), resampling="dynamic")
    groups, tally = this.next(4)
    assert prompts_of(groups) == ["p0", "p3", "p6", "p9"]
    assert tally.flat == tally.all_right == tally.groups - 4


def test_dynamic_sampling_gives_up_after_its_bound() -> None:
    this = collector(lambda prompt, sample: 0.0, resampling="dynamic", max_refills=2)
    groups, tally = this.next(5)
    assert groups == [] and tally.rounds == 3 and this.drawn == 15 and tally.all_wrong == 15


def test_dynamic_sampling_also_replaces_groups_that_could_not_be_scored() -> None:
    this = collector(lambda prompt, sample: Unscorable("no") if prompt == "p0" else float(sample % 2), resampling="dynamic")
    assert prompts_of(this.next(2)[0]) == ["p1", "p2"]


def test_without_resampling_flat_groups_stay() -> None:
    this = collector(lambda prompt, sample: 1.0)
    groups, tally = this.next(3)
    assert len(groups) == 3 and tally.flat == 3


def test_groups_are_flat_by_reward_and_replaced_by_accuracy() -> None:
    """Where no answer is right a shaping term still teaches: the health watch must not say that nothing is learnt."""

    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        return [Score(reward=0.1 * (int(rollout.tokens[0]) % 2), accuracy=0.0) for rollout in rollouts]

    groups, tally = collector(judge=judge).next(3)
    assert len(groups) == 3 and (tally.flat, tally.all_wrong) == (0, 3)
    assert collector(judge=judge, resampling="dynamic", max_refills=1).next(3)[0] == []


def test_history_skips_problems_that_all_rollouts_solved() -> None:
    this = collector(
        lambda prompt, sample: 1.0 if prompt in ("p0", "p2") else float(sample % 2), size=4, resampling="history"
    )
    assert prompts_of(this.next(4)[0]) == ["p0", "p1", "p2", "p3"]
    assert prompts_of(this.next(4)[0]) == ["p1", "p3", "p1", "p3"]


def test_history_keeps_problems_that_no_rollout_solved() -> None:
    this = collector(lambda prompt, sample: 0.0, size=2, resampling="history")
    assert prompts_of(this.next(4)[0]) == ["p0", "p1", "p0", "p1"]


def test_history_survives_a_checkpoint() -> None:
    this = collector(lambda prompt, sample: float(prompt == "p0" or sample % 2), size=3, resampling="history")
    this.next(3)
    resumed = collector(size=3, resampling="history")
    resumed.load(this.state())
    assert prompts_of(resumed.next(2)[0]) == ["p1", "p2"]


def test_history_raises_when_every_problem_is_solved() -> None:
    this = collector(lambda prompt, sample: 1.0, size=3, resampling="history")
    this.next(3)
    with pytest.raises(ExhaustedError):
        this.next(1)


MISSED = "a bug: size + 1 draws from the middle of an epoch can miss a problem that the next shuffle puts late"


def test_an_unsolved_problem_is_drawn_wherever_the_next_epoch_puts_it() -> None:
    this = collector(source=Counted(4, [[0, 1, 2, 3], [1, 2, 3, 0]]), resampling="history")
    solved = [Problem(prompt=f"p{number}").key for number in (1, 2, 3)]
    this.load({**this.state(), "solved": solved, "cursor": 1})
    assert prompts_of(this.next(1)[0]) == ["p0"]


def test_a_shuffled_pool_is_exhausted_only_when_everything_in_it_is_solved() -> None:
    problems = [Problem(prompt=f"p{number}") for number in range(6)]
    for seed in range(20):
        source = Pool(problems, share=0.0, seed=seed)
        this = collector(lambda prompt, sample: float(prompt != "p0" or sample % 2), source=source, resampling="history")
        for _ in range(12):
            this.next(1)
        assert prompts_of(this.next(1)[0]) == ["p0"]


def test_prompts_that_are_too_long_are_dropped_and_counted() -> None:
    this = collector(max_prompt_tokens=2, source=Counted(12), too_long="drop")
    groups, tally = this.next(11)
    assert prompts_of(groups) == [f"p{number}" for number in range(10)] + ["p0"] and tally.too_long == 2
    assert all(len(request.prompt) <= 2 for request in this.runner.engine.requests)


def test_prompts_that_are_too_long_are_an_error_where_asked_for() -> None:
    with pytest.raises(ValueError, match=r"problem 10.*3 tokens"):
        collector(max_prompt_tokens=2, source=Counted(12), too_long="error").next(11)


def test_a_task_without_a_prompt_that_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens = 1"):
        collector(max_prompt_tokens=1, source=Counted(5)).next(1)


def test_collating_pads_at_the_end_and_numbers_groups_from_0() -> None:
    this = collector()
    this.next(1)
    batch = collate(this.next(2)[0])
    assert batch.texts.group.tolist() == [0] * 4 + [1] * 4 and batch.texts.lengths.tolist() == [2] * 8
    assert batch.texts.mask.all() and batch.turn.tolist() == [[0, 0]] * 8 and batch.sampler_logprobs.dtype == torch.float32
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0, 1.0] * 2 and batch.rewards.dtype == torch.float64


@pytest.mark.parametrize("bad", [0.25, float("nan"), float("-inf")])
def test_an_impossible_logprob_from_the_engine_is_refused(bad: float) -> None:
    this = collector(engine=ScriptedEngine(lambda prompt, sample: ([20 + sample, 1], [bad, -0.1])))
    with pytest.raises(ValueError, match="log-prob"):
        collate(this.next(1)[0])


def test_greedy_rollouts_cannot_be_trained_on() -> None:
    with pytest.raises(ValueError, match="temperature"):
        collate(collector(sampling=Sampling(temperature=0.0)).next(1)[0])
