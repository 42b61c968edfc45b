"""Sampling ahead: what is drawn when, how old it may be, in which order it is used, and what two threads may do to it."""

import dataclasses
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.rollout import Problem, Rollout, Score, StopReason, Unscorable
from legato.core.user_code import RUN, StopRequestedError
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Capabilities, EnginePlace, Finished, Handle, JobEngine, Limits, Request, Response
from legato.rollouts.episodes import Reply, Runner, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.shared import SharedEngine
from legato.tasks.source import Joined
from legato.training import background as background_module
from legato.training.ahead import Ahead
from legato.training.background import Background, Turns
from legato.training.collect import Collector, CollectorSettings
from legato.training.source import ExhaustedError, RolloutSource

WORDS = character_tokenizer()
COUNT = 3


class Delayed(JobEngine):
    """An engine with weights of its own, whose requests take as long as `delay(prompt)` says, in seconds.

    A response is three tokens: at its submission, after half of its time and at its end, each of the version of then.
    """

    name = "delayed"

    def __init__(self, delay: Callable[[str], float], *, concurrent: bool = True, background: bool = True) -> None:
        super().__init__()
        self.delay = delay
        self.capabilities = Capabilities(
            truncation=False, holds_weights=True, concurrent=concurrent, in_background=background
        )
        self.asked: list[tuple[str, int]] = []
        """(prompt, version that was the newest) in the order of submission"""
        self.versions: list[tuple[float, int]] = [(0.0, 0)]
        self._lock = threading.Condition()
        self._ends: dict[Handle, tuple[float, float]] = {}

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        with self._lock:
            handles = super().submit(requests, sampling, limits)
            now = time.monotonic()
            for handle, request in zip(handles, requests, strict=True):
                prompt = WORDS.decode(request.prompt.tolist())
                self.asked.append((prompt, self.version))
                self._ends[handle] = (now, now + self.delay(prompt))
            self._lock.notify_all()
        return handles

    def poll(self) -> list[Finished]:
        with self._lock:
            while self.jobs:
                now = time.monotonic()
                for handle in [each for each in self.jobs if self._ends[each][1] <= now]:
                    begin, end = self._ends[handle]
                    job = self.jobs[handle]
                    moments = [begin, (begin + end) / 2, end]
                    for place in range(len(job.request.seeds)):
                        job.responses[place] = self._response(place, [self._version_at(each) for each in moments])
                if finished := self.report_complete():
                    return finished
                first = min(self._ends[each][1] for each in self.jobs)
                self._lock.wait(max(1e-4, first - time.monotonic()))
        return []

    def cancel(self, handle: Handle) -> None:
        with self._lock:
            super().cancel(handle)
            self._lock.notify_all()

    def publish(self, weights: Any, version: int) -> None:
        with self._lock:
            self.version = version
            self.versions.append((time.monotonic(), version))

    def _version_at(self, moment: float) -> int:
        return next(version for since, version in reversed(self.versions) if since <= moment)

    def _response(self, sample: int, versions: list[int]) -> Response:
        return Response(
            tokens=torch.tensor([20 + sample, 20, 1]),
            logprobs=torch.tensor([-0.5, -0.2, -0.1]),
            kept_logmass=None,
            text=str(sample),
            stop=StopReason.END_TOKEN,
            version=torch.tensor(versions),
        )


class Counted:
    """Problems `p0 p1 ...`, over and over if there are `size` of them."""

    def __init__(self, size: int | None = None, letter: str = "p") -> None:
        self.size, self.letter = size, letter

    def training(self, number: int) -> Problem:
        return Problem(prompt=f"{self.letter}{number if self.size is None else number % self.size}")

    def held_out(self, count: int) -> list[Problem]:
        return []


def alternate(prompt: str, sample: int) -> float:
    return float(sample % 2)


def make_judge(verdict: Callable[[str, int], float]) -> Callable[[Sequence[Rollout]], list[Score | Unscorable]]:
    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        accuracy = [verdict(str(each.problem.prompt), int(each.tokens[0]) - 20) for each in rollouts]
        return [Score(reward=value, accuracy=value) for value in accuracy]

    return judge


def no_delay(prompt: str) -> float:
    return 0.0


def source(
    ahead: int,
    delay: Callable[[str], float] = no_delay,
    verdict: Callable[[str, int], float] = alternate,
    kind: type[Collector] = Ahead,
    **changes: Any,
) -> Any:
    """A source that samples ahead; `kind=Collector`: the synchronous one with the same parts."""
    named = {field.name for field in dataclasses.fields(CollectorSettings)}
    chosen = {"samples_per_prompt": 4, "max_prompt_tokens": 12}
    chosen |= {name: changes.pop(name) for name in list(changes) if name in named}
    engine = changes.pop("engine", None) or Delayed(delay)
    runner = Runner(
        engine=engine,
        rendering=Rendering(tokenizer=WORDS),
        limits=changes.pop("limits", Limits(max_response_tokens=4, end_tokens=(1,))),
        **({"environment": changes.pop("environment")} if "environment" in changes else {}),
    )
    arguments: dict[str, Any] = {
        "source": Counted(),
        "runner": runner,
        "judge": make_judge(verdict),
        "sampling": Sampling(),
        "seed": 3,
        "settings": CollectorSettings(**chosen),
        **({} if kind is Collector else {"steps_ahead": ahead}),
    }
    return kind(**{**arguments, **changes})


def prompts_of(groups: Sequence[Any]) -> list[str]:
    return [str(group.problem.prompt) for group in groups]


def train(this: Any, steps: int, count: int = COUNT, seconds: float = 0.0) -> list[list[Any]]:
    """The groups of some steps, each of which trains for a while and publishes a version."""
    used = []
    for _ in range(steps):
        groups, _ = this.next(count)
        used.append(groups)
        time.sleep(seconds)
        this.on_publish(this.version + 1)
    return used


def tokens_of(groups: Sequence[Any]) -> list[list[int]]:
    return [member.rollout.tokens.tolist() for group in groups for member in group.members]


def test_it_is_a_rollout_source() -> None:
    assert isinstance(source(1), RolloutSource) and isinstance(source(1), Collector)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_groups_are_those_of_the_synchronous_source_in_the_same_order(ahead: int, background: bool) -> None:
    this, other = source(ahead, engine=Delayed(no_delay, background=background)), source(0, kind=Collector)
    mine, others = train(this, 5), train(other, 5)
    this.close()
    for one, two in zip(mine, others, strict=True):
        assert prompts_of(one) == prompts_of(two) and tokens_of(one) == tokens_of(two)
        assert [m.rollout.rollout_id for g in one for m in g.members] == [
            m.rollout.rollout_id for g in two for m in g.members
        ]


@pytest.mark.parametrize("ahead", [1, 2])
def test_one_and_k_steps_are_in_flight(ahead: int) -> None:
    """While the groups of a step are waited for, those of k more have been asked for, and no others."""
    this = source(ahead, lambda prompt: 0.01)
    engine = this.runner.engine.shared.engine
    this.next(COUNT)
    assert [prompt for prompt, _ in engine.asked] == [f"p{number}" for number in range(COUNT * (1 + ahead))]
    this.on_publish(1)
    assert len(engine.asked) == COUNT * (1 + ahead)
    this.next(COUNT)
    this.close()
    assert [version for _, version in engine.asked[-COUNT:]] == [1] * COUNT and len(engine.asked) == COUNT * (2 + ahead)


def test_nothing_is_drawn_beyond_the_last_step() -> None:
    this = source(3, total_steps=4)
    engine = this.runner.engine.shared.engine
    train(this, 4)
    this.close()
    assert len(engine.asked) == 4 * COUNT


def test_an_engine_that_samples_from_the_trained_weights_is_k_versions_behind_to_the_token() -> None:
    this = source(2, engine=Delayed(no_delay, background=False))
    assert not this.overlaps
    versions = [{int(v) for g in step for m in g.members for v in m.rollout.version} for step in train(this, 6)]
    assert versions == [{0}, {0}, {0}, {1}, {2}, {3}]


def test_sampling_overlaps_training() -> None:
    """Sampling a step takes as long as training on it: together they take little longer than one of them."""
    seconds = 0.06
    this = source(1, lambda prompt: seconds)
    train(this, 1)
    begun = time.monotonic()
    train(this, 8, seconds=seconds)
    spent = time.monotonic() - begun
    this.close()
    assert spent < 8 * seconds * 1.6


def test_a_response_across_a_publish_keeps_both_versions() -> None:
    this = source(1, lambda prompt: 0.0 if int(prompt[1:]) < COUNT else 0.2)
    this.next(COUNT)
    time.sleep(0.05)
    this.on_publish(1)
    groups, _ = this.next(COUNT)
    this.close()
    assert [m.rollout.version.tolist() for g in groups for m in g.members] == [[0, 1, 1]] * 12


def lags(groups: Sequence[Any], version: int) -> list[int]:
    return [version - int(v) for group in groups for member in group.members for v in member.rollout.version]


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 200))])
def test_random_delays_never_exceed_the_lag_nor_change_the_order(seed: int) -> None:
    """Random delays of groups and of training; dynamic resampling in half of the schedules. Every problem is used once, in
    the order drawn, and none of its tokens is more than k versions old."""
    chance = random.Random(seed)
    ahead, count, steps = chance.randint(1, 4), chance.randint(1, 4), chance.randint(3, 5)
    delays = [chance.choice([0.0, 0.0, 0.0003, 0.001, 0.004]) for _ in range(400)]
    flat = {number for number in range(400) if chance.random() < 0.3} if seed % 2 else set()
    this = source(
        ahead,
        engine=Delayed(lambda prompt: delays[int(prompt[1:])], concurrent=chance.random() < 0.5),
        verdict=lambda prompt, sample: 1.0 if int(prompt[1:]) in flat else float(sample % 2),
        resampling="dynamic" if seed % 2 else "none",
    )
    seen: list[str] = []
    for step in range(steps):
        groups, tally = this.next(count)
        assert len(groups) == count or tally.rounds == 9
        seen += prompts_of(groups)
        worst = max(lags(groups, this.version))
        assert min(lags(groups, this.version)) >= 0 and worst <= ahead, f"step {step}: a lag of {worst} with ahead = {ahead}"
        time.sleep(chance.choice([0.0, 0.0003, 0.0015]))
        this.on_publish(this.version + 1)
    this.close()
    numbers = [int(prompt[1:]) for prompt in seen]
    assert numbers == [number for number in range(400) if number not in flat][: len(numbers)]


def test_slow_groups_keep_their_share() -> None:
    """Every third problem takes ten times as long: it is every third of the groups that are used, too."""
    this = source(3, lambda prompt: 0.02 if int(prompt[1:]) % 3 == 0 else 0.002)
    used = [int(prompt[1:]) for step in train(this, 10) for prompt in prompts_of(step)]
    this.close()
    assert sum(number % 3 == 0 for number in used) == len(used) // 3 == 10


@pytest.mark.parametrize("resampling", ["dynamic", "history"])
@pytest.mark.parametrize("background", [True, False])
def test_refills_take_the_next_groups_of_the_same_order(resampling: str, background: bool) -> None:
    """`dynamic` gives the very groups of the synchronous source. `history` may only learn later that a problem is solved."""
    verdict = lambda prompt, sample: 1.0 if int(prompt[1:]) % 4 == 1 else float(sample % 2)  # noqa: E731
    options = {"verdict": verdict, "resampling": resampling, "source": Counted(12)}
    this = source(2, engine=Delayed(no_delay, background=background), **options)
    other = source(0, kind=Collector, **options)
    mine, others = train(this, 12), train(other, 12)
    this.close()
    if resampling == "dynamic":
        assert [prompts_of(step) for step in mine] == [prompts_of(step) for step in others]
    last = [prompt for step in mine[-4:] for prompt in prompts_of(step)]
    assert all(int(prompt[1:]) % 4 != 1 for prompt in last) and all(len(step) == COUNT for step in mine)


def test_a_task_whose_problems_are_all_solved_ends_after_the_groups_in_flight() -> None:
    this = source(1, verdict=lambda prompt, sample: 1.0, resampling="history", source=Counted(4))
    with pytest.raises(ExhaustedError, match="answered right"):
        train(this, 6, count=2)
    this.close()
    assert this.drawn <= 8


def test_the_second_stage_begins_with_its_step() -> None:
    stages = Joined(first=Counted(letter="a"), second=Counted(letter="b"), after_steps=3)
    this, other = source(2, source=stages), source(0, kind=Collector, source=dataclasses.replace(stages))
    mine, others = train(this, 6), train(other, 6)
    this.close()
    assert [prompts_of(step) for step in mine] == [prompts_of(step) for step in others]
    assert any(prompt.startswith("b") for prompt in prompts_of(mine[3])) and not any(
        prompt.startswith("b") for step in mine[:3] for prompt in prompts_of(step)
    )


class Asking:
    """An environment that asks once more, and records which threads call it."""

    max_turns, deterministic = 2, True

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.inside = 0
        self.most = 0

    def episode(self, problem: Problem) -> "Asking":
        return self

    def reply(self, text: str, stop: StopReason) -> Reply:
        self.threads.add(threading.current_thread().name)
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.0005)
        self.inside -= 1
        return Reply(content="x", reward=1.0)


def test_episodes_of_several_turns_are_played_by_the_thread_and_evaluations_beside_them() -> None:
    environment = Asking()
    this = source(1, environment=environment, limits=Limits(max_response_tokens=12, end_tokens=(1,)))
    from legato.training.evaluate import Evaluator

    evaluator = Evaluator(runner=this.runner, judge=this.judge)
    for step in range(3):
        groups, _ = this.next(COUNT)
        assert all(len(m.rollout.turn_rewards) == 2 for g in groups for m in g.members)
        this.on_publish(step + 1)
        answers = evaluator.answer([Problem(prompt=f"h{n}") for n in range(3)], Sampling(), 2, seed=0)
        versions = {int(v) for row in answers for a in row for v in a.rollout.version if v >= 0}
        assert versions == {step + 1}
    this.close()
    assert environment.threads == {"sampling ahead", "MainThread"} and environment.most == 1


def test_a_failure_of_the_thread_is_raised_by_next_and_the_state_is_that_before() -> None:
    class Broken(Delayed):
        def poll(self) -> list[Finished]:
            finished = super().poll()
            if len(self.asked) > 2 * COUNT:
                raise OSError("the server is gone")
            return finished

    this = source(1, engine=Broken(lambda prompt: 0.0 if int(prompt[1:]) < COUNT else 0.1))
    train(this, 1)
    before = this.state()
    with pytest.raises(OSError, match="the server is gone"):
        this.next(COUNT)
    this.close()
    assert this.state() == before


def test_a_signal_ends_the_wait_for_slow_groups_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.training.background.GRACE_SECONDS", 0.05)
    this = source(1, lambda prompt: 0.0 if int(prompt[1:]) < COUNT else 30.0)
    train(this, 1)
    before = this.state()
    timer = threading.Timer(0.05, RUN.ask_to_end, [signal.SIGTERM])
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises(StopRequestedError):
            this.next(COUNT)
    finally:
        RUN.forget()
        this.close()
    assert time.monotonic() - begun < 5 and this.state() == before


def test_the_users_code_that_hangs_in_the_thread_lets_the_main_thread_come_to_rest() -> None:
    """`wait_for_main_thread` returns only once the main thread waits, so that no update is saved half done."""
    begun, release = threading.Event(), threading.Event()

    def hang(prompt: str, sample: int) -> float:
        if prompt == f"p{COUNT}":
            begun.set()
            release.wait(10)
        return float(sample % 2)

    this = source(1, lambda prompt: 0.0 if int(prompt[1:]) < COUNT else 0.1, hang)
    this.next(COUNT)
    assert begun.wait(5)
    rested = threading.Event()

    def wait() -> None:
        this.wait_for_main_thread()
        rested.set()

    watch = threading.Thread(target=wait)
    watch.start()
    time.sleep(0.2)
    assert not rested.is_set()  # the main thread trains
    threading.Timer(0.3, release.set).start()
    this.next(COUNT)
    watch.join(5)
    this.close()
    assert rested.is_set()


def test_turns_of_the_users_code_do_not_overlap() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(50):
            with turns, turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0002)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most[0] == 1 and not turns.is_held_elsewhere


def test_new_requests_do_not_wait_for_the_slowest_response_in_flight() -> None:
    """With a concurrent engine, the groups of a later step are asked for while one response of an earlier one hangs on."""
    this = source(2, lambda prompt: 0.4 if prompt == "p8" else 0.0)
    begun = time.monotonic()
    this.next(3)
    this.on_publish(1)
    this.next(3)
    early = time.monotonic() - begun
    asked = [prompt for prompt, _ in this.runner.engine.shared.engine.asked]
    this.close()
    assert early < 0.3 and "p11" in asked


def test_a_closed_source_leaves_no_thread() -> None:
    this = source(1, lambda prompt: 5.0 if int(prompt[1:]) >= COUNT else 0.0)
    this.next(COUNT)
    assert any(thread.name == "sampling ahead" for thread in threading.enumerate())
    this.close()
    assert not any(thread.name == "sampling ahead" for thread in threading.enumerate())


def test_a_background_needs_no_polling_while_nothing_is_in_flight() -> None:
    stored: list[Any] = []
    this = source(1)
    background = Background(this.runner, this.judge, this.sampling, stored.extend)
    starts = {number: this._start(number, *_problem(this, number)) for number in range(2)}
    background.ask(starts)
    assert len(background.take([0, 1])) == 2 and [number for number, _, _ in stored] == [0, 1]
    background.ask({2: this._start(2, *_problem(this, 2))})
    assert len(background.take([2])) == 1
    background.close()


def _problem(this: Any, number: int) -> tuple[Problem, torch.Tensor]:
    problem = this.source.training(number)
    return problem, this.runner.rendering.prompt(problem)


class Refusing(Delayed):
    """An engine that takes no request."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        raise RuntimeError("no")


def session_on(engine: JobEngine) -> tuple[Any, list[Start]]:
    """A session of single turns, and a start for it."""
    limits = Limits(max_response_tokens=4, end_tokens=(WORDS.eos_token_id,))
    runner = Runner(engine=engine, rendering=Rendering(tokenizer=WORDS), limits=limits)
    prompt = runner.rendering.prompt(Problem(prompt="1+1="))
    start = Start(problem=Problem(prompt="1+1="), prompt=prompt, seeds=(1, 2), ids=range(2))
    return runner.session(Sampling()), [start]


def test_a_request_that_the_engine_refuses_leaves_nothing_outstanding() -> None:
    session, starts = session_on(Refusing(lambda prompt: 0.0))
    with pytest.raises(RuntimeError, match="no"):
        session.add(starts)
    assert not session.outstanding


def test_a_session_that_was_given_up_submits_nothing_and_reports_nothing() -> None:
    engine = Delayed(lambda prompt: 0.0)
    session, starts = session_on(engine)
    session.add(starts)
    session.cancel()
    session.add(starts)
    assert not engine.jobs and not session.outstanding and session.advance() == {}


def test_the_thread_passes_on_what_the_engine_is_told_and_says() -> None:
    told: list[str] = []

    class Told(Delayed):
        def open(self, place: Any) -> None:
            told.append("open")

        def close(self) -> None:
            told.append("close")

        def metrics(self) -> dict[str, float]:
            return {"servers/answering": 1.0}

    client = SharedEngine(Told(lambda prompt: 0.0)).client()
    client.open(EnginePlace(folder=Path()))
    client.close()
    assert told == ["open", "close"] and client.metrics() == {"servers/answering": 1.0}
    assert isinstance(client.innermost, Told)


def test_a_save_does_not_wait_for_a_group_that_hangs_while_it_is_submitted() -> None:
    """The opening of an episode is the user's code."""
    leave, inside = threading.Event(), threading.Event()

    class Hanging(Delayed):
        def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
            inside.set()
            leave.wait(20)
            return super().submit(requests, sampling, limits)

    this = source(1, engine=Hanging(no_delay))
    background = Background(this.runner, this.judge, this.sampling, lambda sampled: None)
    asking = threading.Thread(target=background.ask, args=({0: this._start(0, *_problem(this, 0))},))
    asking.start()
    assert inside.wait(10)
    began = time.monotonic()
    assert background.finished([0]) == {} and time.monotonic() - began < 5
    leave.set()
    asking.join(10)
    background.close()


def test_closing_does_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "_CLOSE_SECONDS", 0.2)
    leave, inside = threading.Event(), threading.Event()

    class Hanging(Delayed):
        def poll(self) -> list[Finished]:
            inside.set()
            leave.wait(20)
            return super().poll()

    this = source(1, engine=Hanging(no_delay, concurrent=False))
    background = Background(this.runner, this.judge, this.sampling, lambda sampled: None)
    background.ask({0: this._start(0, *_problem(this, 0))})
    assert inside.wait(10)
    began = time.monotonic()
    background.close()
    assert time.monotonic() - began < 5
    leave.set()
