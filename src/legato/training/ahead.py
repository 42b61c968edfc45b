"""A rollout source that samples ahead: while a step trains, the groups of the next steps are being sampled.

With `rollouts.ahead = k` there are (1 + k) steps of groups in flight: those of the step that waits, and those of k more.
Groups are drawn, asked for and used in one order, so slow groups keep their share and none is dropped. They are drawn when
a step begins, as many as the k steps after it can need: a group that is trained on in step t was asked for after step
t - k - 1 had ended, so its weights are at most k versions old.

- An engine that samples in the background is polled by a thread (`background.py`); sampling overlaps training.
- Another engine samples from the weights that are trained, which must not change under a response. Then groups are still
  drawn k steps early and sampled at once: a step trains on groups that are exactly k versions old. That saves no time. It
  shows what running ahead costs, and its results do not depend on timing.
- Of several ranks every rank draws all problems. A rank samples and scores its share, and ranks exchange what a step uses.

`next` behaves as that of the synchronous source, in which it is inherited: rounds of refills take the next groups of the
same order. A problem counts as solved ('history') once the group that shows it was used.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from legato.core.fields import integer
from legato.core.rollout import Group
from legato.core.settings import settings
from legato.rollouts.engine import Engine
from legato.rollouts.episodes import Start
from legato.rollouts.shared import SharedEngine
from legato.training.background import Background, Sampled, Turns
from legato.training.collect import SAVED_GROUPS, Collector
from legato.training.journal import Journal
from legato.training.play import score_rollouts
from legato.training.ranks.exchange import ScoredRollout, exchange
from legato.training.saved_groups import SavedGroup, fingerprint_of, pack_groups, unpack_groups
from legato.training.source import ExhaustedError, Tally


@settings()
class AheadSettings:
    """How far sampling may run ahead of training."""

    ahead: int = integer(
        default=0,
        says="Steps by which sampling may be ahead of training: 1 + ahead steps of groups are in flight, and weights are at"
        " most so many versions old (docs/ahead.md). 0: a step samples, then trains.",
        minimum=0,
        maximum=64,
    )


def samples_in_background(engine: Engine) -> bool:
    """Whether a thread may poll the engine while the policy trains."""
    can = engine.capabilities
    return can.holds_weights if can.in_background is None else can.in_background


@dataclass(slots=True, eq=False)
class _Drawn:
    """A group that was drawn and not used yet."""

    number: int
    """Which problem of the run it is."""
    start: Start
    rows: list[ScoredRollout] | None = None
    """Its scored rollouts; None while it is in flight, or if another rank samples it."""
    asked: bool = False


@dataclass(slots=True, kw_only=True)
class Ahead(Collector):
    """A rollout source that samples up to `steps_ahead` steps ahead."""

    steps_ahead: int
    total_steps: int | None = None
    """Steps of the run: nothing is drawn beyond them. None: for ever."""
    journal: Journal | None = None
    """Where complete groups are written before they are used; None: nowhere."""
    _queue: deque[_Drawn] = field(default_factory=deque)
    _used: list[_Drawn] = field(default_factory=list)
    """The groups of the last call of `next`: a step that fails after it is begun again with them."""
    _position: int = 0
    """How many groups have been used: the place of the first of the queue among all groups. It decides who samples it."""
    _known: dict[int, SavedGroup] = field(default_factory=dict)
    """Groups that a checkpoint or a journal holds, by number, until they are drawn again."""
    _thread: Background | None = None

    _turns: Turns = field(default_factory=Turns)
    _shared: SharedEngine | None = None
    """The engine if a thread polls it, for that thread and for evaluations; None: no thread does."""

    def __post_init__(self) -> None:
        if samples_in_background(self.runner.engine):
            self._shared = SharedEngine(self.runner.engine)
            self.runner.engine = self._shared.client()
            self.runner.turns = self._turns
            if self.evaluation is not None:
                self.evaluation.turns = self.runner.turns

    @property
    def ahead(self) -> int:
        return self.steps_ahead

    @property
    def overlaps(self) -> bool:
        """Whether sampling overlaps training."""
        return self._shared is not None

    def _next(self, count: int) -> tuple[list[Group], Tally]:
        groups: list[Group] = []
        tally = Tally()
        step = self._steps_begun
        self._steps_begun += 1
        self._used = []
        while len(groups) < count and tally.rounds < self._rounds:
            tally.rounds += 1
            wanted = count - len(groups)
            self._draw_ahead(step, wanted, count, tally)
            groups += [group for group in self._use(wanted, tally) if group is not None]
        tally.sampler = self.runner.engine.metrics()
        self._check_scored(tally)
        return groups, tally

    def _draw_ahead(self, step: int, wanted: int, count: int, tally: Tally) -> None:
        """Draw and ask for what the step still wants, and for `count` groups of each later step that is in reach."""
        later = self.ahead if self.total_steps is None else min(self.ahead, max(0, self.total_steps - step - 1))
        while len(self._queue) < wanted + later * count:
            place = len(self._queue)
            # A refill takes groups of later steps, so this is the last step that can come to this one.
            self._begin_stage(step if place < wanted else step + 1 + (place - wanted) // count)
            before = self._drawn
            try:
                start = self._draw(tally)
            except ExhaustedError:
                if place < wanted:
                    raise
                self._drawn = before
                break  # the groups in flight may still show that a problem is not solved
            self._queue.append(self._enqueue(start))
        self._ask()

    def _enqueue(self, start: Start) -> _Drawn:
        drawn = _Drawn(start.ids[0] // self.settings.samples_per_prompt, start)
        known = self._known.pop(drawn.number, None)
        if known is not None:
            drawn.rows = known.rows(start, self._fingerprint(start))
        return drawn

    def _is_own(self, place: int) -> bool:
        """Whether this rank samples the group at a place of the queue."""
        return (self._position + place) % self.world.size == self.world.rank

    def _ask(self) -> None:
        """Ask for the groups of the queue that this rank samples and has not asked for."""
        new = [
            drawn
            for place, drawn in enumerate(self._queue)
            if drawn.rows is None and not drawn.asked and self._is_own(place)
        ]
        for drawn in new:
            drawn.asked = True
        if self._shared is not None:
            if self._thread is None:
                runner = self.runner.on_client(self._shared.client())
                self._thread = Background(runner, self.judge, self.sampling, self._store)
            self._thread.ask({drawn.number: drawn.start for drawn in new})
        elif new:
            played = self.runner.play([drawn.start for drawn in new], self.sampling)
            scores = iter(score_rollouts(self.judge, [rollout for row in played for rollout in row]))
            rows = [[(rollout, next(scores)) for rollout in row] for row in played]
            self._store([(drawn.number, drawn.start, row) for drawn, row in zip(new, rows, strict=True)])
            for drawn, row in zip(new, rows, strict=True):
                drawn.rows = row

    def _store(self, sampled: Sequence[Sampled]) -> None:
        """Write complete groups to the journal. The thread calls this."""
        if self.journal is not None:
            self.journal.write(
                [SavedGroup.of(number, start, self._fingerprint(start), rows) for number, start, rows in sampled]
            )

    def _fingerprint(self, start: Start) -> str:
        return fingerprint_of(start, self.sampling, self.runner.limits)

    def _use(self, count: int, tally: Tally) -> list[Group | None]:
        """Use the next groups of the queue, each as soon as all before it are complete."""
        own = [drawn for place, drawn in enumerate(list(self._queue)[:count]) if self._is_own(place)]
        missing = [drawn for drawn in own if drawn.rows is None]
        if missing:
            assert self._thread is not None
            for drawn, row in zip(missing, self._thread.take([each.number for each in missing]), strict=True):
                drawn.rows = row
        used = [self._queue.popleft() for _ in range(count)]
        first, self._position = self._position, self._position + count
        self._used += used
        mine = [drawn.rows for drawn in own if drawn.rows is not None]
        starts = [drawn.start for drawn in used]
        rows = mine if self.world.size == 1 else exchange(mine, starts, self.world, first)
        return [self._group(drawn.start.problem, row, tally) for drawn, row in zip(used, rows, strict=True)]

    @property
    def settled(self) -> bool:
        """Whether weights are as old as they will be."""
        return self._steps_begun > self.ahead and self.runner.engine.settled

    def wait_for_main_thread(self) -> None:
        """Called where code of the user's does not return: wait until the main thread is in no update, and stays so.

        It comes to wait for the very group that the code was called for, or for its turn to call the user's code.
        """
        while self._thread is not None and self._turns.is_held_elsewhere:
            if self._thread.is_waited_for or self._turns.is_waited_for:
                return
            time.sleep(0.05)

    def go_to(self, drawn: int) -> None:
        if drawn != self._drawn:
            self._give_up()
            self._queue.clear()
            self._used = []
            self._drawn = drawn

    # Checkpoints

    def state(self) -> dict[str, Any]:
        if self._before is not None:
            return self._before
        waiting = [drawn.number for drawn in self._queue]
        more = {"waiting": waiting, "position": self._position, "journal": self.journal.number if self.journal else None}
        return Collector.state(self) | {"ahead": more}

    def _set(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Groups that are at hand or in flight stay so; others are asked for again."""
        more = state.get("ahead", {})
        Collector._set(self, {**state, "ahead": {}})
        held = {drawn.number: drawn for drawn in [*self._used, *self._queue]}
        self._used = []
        self._position = int(more.get("position", 0))
        numbers = [int(number) for number in more.get("waiting", ())]
        self._queue = deque(held.get(number) or self._draw_again(number) for number in numbers)

    def _draw_again(self, number: int) -> _Drawn:
        problem = self.source.training(number)
        return self._enqueue(self._start(number, problem, self.runner.rendering.prompt(problem)))

    def load(self, state: Mapping[str, Any]) -> None:
        self._give_up()
        self._queue.clear()
        self._used = []
        if self.journal is not None:
            self._replay_journal(self.journal, state)
        self._set(state)
        self.on_publish(int(state["version"]))

    def _replay_journal(self, journal: Journal, state: Mapping[str, Any]) -> None:
        """Know the groups that were completed after the checkpoint, if the run goes on as it did then."""
        replay = journal.take_replay()
        if replay is None:
            journal.clear()  # the run has gone back to other settings
        else:
            expected = set(state.get("ahead", {}).get("waiting", ()))
            later = {number: each for number, each in replay.items() if number in expected or number >= state["cursor"]}
            self._known = {**later, **self._known}
        journal.go_to_segment(self.world.agree(journal.number))

    def _give_up(self) -> None:
        """Stop sampling what is in flight."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def forget_sampled(self) -> None:
        """Use nothing that an earlier session has sampled: the run goes on with other settings, and asks for all again."""
        self._known = {}
        if self.journal is not None:
            self.journal.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The complete groups of all ranks, and the engine's own tensors."""
        everything = [*self._used, *self._queue]
        done = {} if self._thread is None else self._thread.finished([drawn.number for drawn in everything])
        groups = []
        for drawn in everything:
            rows = drawn.rows if drawn.rows is not None else done.get(drawn.number)
            if rows is not None:
                groups.append(SavedGroup.of(drawn.number, drawn.start, self._fingerprint(drawn.start), rows))
        if self.world.rank == 0:
            # Groups of an earlier session that are still to be drawn: the segment they stand in may be deleted.
            groups += self._known.values()
        groups = groups if self.world.size == 1 else self._gather(groups)
        if self.journal is not None:
            self.journal.begin_segment()
        return {**self.runner.engine.state(), **pack_groups(groups, SAVED_GROUPS)}

    def _gather(self, groups: Sequence[SavedGroup]) -> list[SavedGroup]:
        """The groups of all ranks."""
        records = [[group.record, len(group.held)] for group in groups]
        tensors = [tensor for group in groups for tensor in group.held]
        gathered: dict[int, SavedGroup] = {}
        for told, held in self.world.gather_tensors(records, tensors):
            rest = iter(held)
            for record, count in told:
                group = SavedGroup(record, [next(rest) for _ in range(count)])
                gathered[group.number] = group
        return list(gathered.values())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        Collector.load_tensors(self, tensors)
        self._known = unpack_groups(tensors, SAVED_GROUPS)

    def on_saved(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Delete the journal that no checkpoint needs any more."""
        needed = [state.get("ahead", {}).get("journal") for state in states]
        if self.journal is not None and needed and all(number is not None for number in needed):
            self.journal.prune(min(needed))

    def close(self) -> None:
        self._give_up()
