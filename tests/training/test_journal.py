"""The journal and checkpoints of a run that samples ahead: 200 crashes lose no rollout and use none twice."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.core.rollout import Rollout, Score, Unscorable
from legato.rollouts.sampling import Sampling
from legato.training.ahead import Ahead
from legato.training.collect import Collector
from legato.training.journal import Journal
from legato.training.ranks.exchange import read_rollout, write_rollout
from legato.training.saved_groups import SavedGroup, fingerprint_of
from tests.training.test_ahead import COUNT, Delayed, alternate, make_judge, no_delay, prompts_of, source, tokens_of, train


class Crash(BaseException):
    """The process is killed."""


class Process:
    """A trainer in small: it draws, trains, publishes and saves now and then. `crash` may raise Crash at any place."""

    def __init__(self, folder: Path, chance: random.Random, ahead: int, flat: set[int]) -> None:
        self.folder, self.chance = folder, chance
        self.signature = 0
        """How many sampler processes there were: a rollout carries the one that sampled it in its log-prob."""
        self.ahead, self.flat = ahead, flat

    def start(self, session: int, crashes_at: int | None) -> Ahead:
        verdict = lambda prompt, sample: 1.0 if int(prompt[1:]) in self.flat else float(sample % 2)  # noqa: E731
        engine = Signing(session, self.chance)
        this = source(
            self.ahead,
            engine=engine,
            verdict=verdict,
            resampling="dynamic" if self.flat else "none",
            journal=CrashingJournal(self.folder / "journal", crashes_at),
        )
        if (self.folder / "state.json").exists():
            this.journal.read()
            this.load_tensors(load_file(self.folder / "groups.safetensors"))
            this.load(json.loads((self.folder / "state.json").read_text())["source"])
        else:
            self.save(this, 0)  # a run that is killed before its first checkpoint begins again, as another run
        return this

    def save(self, this: Ahead, step: int) -> None:
        state, tensors = this.state(), this.tensors()
        save_file(tensors, self.folder / "groups.new")
        (self.folder / "groups.new").rename(self.folder / "groups.safetensors")
        (self.folder / "state.json").write_text(json.dumps({"source": state, "step": step}))
        this.on_saved([state])


class Signing(Delayed):
    """Writes the number of its session and of the request into the log-probs, so that every sample is known again."""

    def __init__(self, session: int, chance: random.Random) -> None:
        super().__init__(lambda prompt: chance.choice([0.0, 0.0, 0.0005, 0.002]))
        self.session = session

    def _response(self, sample: int, versions: list[int]) -> Any:
        response = super()._response(sample, versions)
        return type(response)(
            tokens=response.tokens,
            logprobs=torch.tensor([-float(self.session), -0.2, -0.1]),
            kept_logmass=None,
            text=response.text,
            stop=response.stop,
            version=response.version,
        )


class CrashingJournal(Journal):
    """Tears the frame it writes as number `crashes_at`, at a random byte, and raises Crash."""

    def __init__(self, folder: Path, crashes_at: int | None) -> None:
        super().__init__(folder)
        self.written, self.crashes_at = 0, crashes_at

    def _append(self, frames: bytes) -> None:
        self.written += 1
        if self.crashes_at is not None and self.written >= self.crashes_at:
            super()._append(frames[: random.Random(self.written).randrange(len(frames))])
            raise Crash
        super()._append(frames)


def sessions_of(groups: Sequence[Any]) -> list[int]:
    return [int(-m.rollout.sampler_logprobs[0]) for group in groups for m in group.members]


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_a_killed_run_loses_no_rollout_and_uses_none_twice(tmp_path: Path, seed: int) -> None:
    """A run of six steps is killed up to three times: while a group is written, between two calls, or after an update.

    In the end every step has the problems of an undisturbed run, in their order. A step that is repeated after a crash gets
    the very rollouts that it had used before: they were in the journal, or the checkpoint had them.
    """
    chance = random.Random(seed)
    flat = {number for number in range(200) if chance.random() < 0.3} if seed % 2 else set()
    process = Process(tmp_path, chance, chance.randint(1, 3), flat)
    used: dict[int, list[tuple[list[str], list[int]]]] = {}
    step, steps, crashes = 0, 6, 0
    while step < steps:
        dies = crashes < 3 and chance.random() < 0.8
        this = process.start(crashes, chance.randint(1, 8) if dies and chance.random() < 0.5 else None)
        dies_after = chance.randint(0, 3) if dies else None
        saved = tmp_path / "state.json"
        step = json.loads(saved.read_text())["step"] if saved.exists() else 0
        try:
            while step < steps:
                groups, _ = this.next(COUNT)
                used.setdefault(step, []).append((prompts_of(groups), sessions_of(groups)))
                if dies_after is not None and (dies_after := dies_after - 1) < 0:
                    raise Crash
                this.on_publish(this.version + 1)
                step += 1
                if chance.random() < 0.4:
                    process.save(this, step)
        except Crash:
            crashes += 1
            step = 0
        finally:
            this.close()
    expected = [f"p{number}" for number in range(200) if number not in flat]
    for place in range(steps):
        for prompts, _ in used[place]:
            assert prompts == expected[place * COUNT : (place + 1) * COUNT]
        assert len({tuple(sessions) for _, sessions in used[place]}) == 1, f"step {place} was trained on other rollouts"


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_source_goes_on_with_the_groups_of_its_checkpoint(tmp_path: Path, background: bool) -> None:
    """What was complete is not asked for again; with an engine in the main thread, versions are equal to the token."""
    this = source(2, engine=Delayed(no_delay, background=background))
    train(this, 3)
    if background:
        this._thread.take([])
        while len(this._thread.finished([drawn.number for drawn in this._queue])) < len(this._queue):
            pass
    save_file(this.tensors(), tmp_path / "groups.safetensors")
    state = json.loads(json.dumps(this.state()))
    straight = train(this, 3)
    this.close()
    resumed = source(2, engine=Delayed(no_delay, background=background))
    resumed.load_tensors(load_file(tmp_path / "groups.safetensors"))
    resumed.load(state)
    again = train(resumed, 3)
    resumed.close()
    engine = resumed.runner.engine.shared.engine if background else resumed.runner.engine
    assert engine.asked[0][0] == f"p{5 * COUNT}"
    for one, two in zip(straight, again, strict=True):
        assert prompts_of(one) == prompts_of(two) and tokens_of(one) == tokens_of(two)
        if not background:
            versions = [[m.rollout.version.tolist() for g in step for m in g.members] for step in (one, two)]
            assert versions[0] == versions[1]


def test_a_run_that_samples_ahead_no_more_draws_the_waiting_problems_again() -> None:
    this = source(2)
    train(this, 2)
    state = this.state()
    this.close()
    synchronous = source(0, kind=Collector)
    synchronous.load_tensors(this.tensors())
    synchronous.load(state)
    assert prompts_of(synchronous.next(COUNT)[0]) == [f"p{number}" for number in range(2 * COUNT, 3 * COUNT)]


def test_a_recovery_uses_nothing_of_what_it_goes_back_from(tmp_path: Path) -> None:
    this = source(1, journal=Journal(tmp_path))
    train(this, 1)
    state, tensors = this.state(), this.tensors()
    train(this, 2)
    this.load_tensors(tensors)
    this.load(state)
    assert list(tmp_path.iterdir()) == []
    this.go_to(this.drawn + 5)
    assert prompts_of(this.next(COUNT)[0]) == [f"p{number}" for number in range(11, 14)]
    this.close()


def saved(number: int, length: int = 3) -> SavedGroup:
    this = source(1)
    problem = this.source.training(number)
    start = this._start(number, problem, this.runner.rendering.prompt(problem))
    rollouts = this.runner.play([start], Sampling())[0]
    scores = make_judge(alternate)(rollouts)
    return SavedGroup.of(
        number, start, fingerprint_of(start, Sampling(), this.runner.limits), list(zip(rollouts, scores, strict=True))
    )


def test_the_journal_reads_what_it_wrote_to_the_bit(tmp_path: Path) -> None:
    journal, groups = Journal(tmp_path), [saved(number) for number in range(3)]
    journal.write(groups[:2])
    journal.begin_segment()
    journal.write(groups[2:])
    other = Journal(tmp_path)
    other.read()
    replay = other.take_replay()
    assert replay is not None and sorted(replay) == [0, 1, 2] and other.number == 2 and other.take_replay() is None
    for number, group in enumerate(groups):
        assert replay[number].record == json.loads(json.dumps(group.record))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(replay[number].held, group.held, strict=True))


def test_every_torn_tail_costs_only_the_group_that_it_tears(tmp_path: Path) -> None:
    journal, groups = Journal(tmp_path), [saved(number) for number in range(2)]
    journal.write(groups[:1])
    (path,) = tmp_path.iterdir()
    first = path.stat().st_size
    journal.write(groups[1:])
    whole = path.read_bytes()
    for cut in [*range(first, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        torn = Journal(tmp_path)
        torn.read()
        assert list(torn.take_replay() or {}) == [0] and torn.notes == []


def test_a_damaged_frame_is_not_used_and_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write([saved(0), saved(1)])
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 40] ^= 1
    path.write_bytes(bytes(data))
    damaged = Journal(tmp_path)
    damaged.read()
    assert list(damaged.take_replay() or {}) == [0] and "SHA-256 differs" in damaged.notes[0]


def test_a_group_that_answers_another_request_is_not_used() -> None:
    group, this = saved(0), source(1)
    problem = this.source.training(0)
    start = this._start(0, problem, this.runner.rendering.prompt(problem))
    assert group.rows(start, fingerprint_of(start, Sampling(), this.runner.limits)) is not None
    assert group.rows(start, fingerprint_of(start, Sampling(temperature=0.7), this.runner.limits)) is None
    other = this._start(1, problem, start.prompt)
    assert group.rows(other, fingerprint_of(other, Sampling(), this.runner.limits)) is None


def test_segments_go_once_no_kept_checkpoint_needs_them(tmp_path: Path) -> None:
    this = source(1, journal=Journal(tmp_path))
    states = []
    for _ in range(4):
        train(this, 1)
        states.append(this.state())
        this.tensors()
        this.on_saved(states[-2:])
    numbers = sorted(int(path.name[:6]) for path in tmp_path.iterdir())
    this.close()
    assert numbers and min(numbers) >= states[-2]["ahead"]["journal"] and len(numbers) <= 3


def test_unscorable_rollouts_and_components_come_back() -> None:
    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        scores: list[Score | Unscorable] = [Unscorable("no answer")]
        return scores + [Score(reward=0.1, accuracy=1.0, components={"a": 0.1}) for _ in rollouts[1:]]

    this = source(1)
    problem = this.source.training(0)
    start = this._start(0, problem, this.runner.rendering.prompt(problem))
    rollouts = this.runner.play([start], Sampling())[0]
    rows = list(zip(rollouts, judge(rollouts), strict=True))
    again = SavedGroup.read(SavedGroup.of(0, start, "f", rows).tensors()).rows(start, "f")
    assert again is not None and [score for _, score in again] == [score for _, score in rows]


def test_the_prompt_with_an_opening_comes_back() -> None:
    this = source(1)
    problem = this.source.training(0)
    start = this._start(0, problem, this.runner.rendering.prompt(problem))
    (rollout, *_) = this.runner.play([start], Sampling())[0]
    opened = dataclasses.replace(rollout, problem=dataclasses.replace(problem, prompt=f"{problem.prompt} go"))
    tensors: list[Any] = []
    record = write_rollout((opened, Score(reward=0.0, accuracy=0.0)), start, tensors)
    again, _ = read_rollout(json.loads(json.dumps(record)), start, iter(tensors))
    assert again.problem.prompt == f"{problem.prompt} go" and again.problem.key == opened.problem.key
