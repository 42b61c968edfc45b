"""The step, in this order: collect groups; collate; probe the noise when due; compute advantages; plan the updates; score
the old policy; for each update: forward, objective, backward, optimizer; report.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from legato.algorithms.algorithm import Algorithm
from legato.core.batch import collate
from legato.core.fields import choice, flag, integer, number
from legato.core.rollout import Group
from legato.core.scope import Scope
from legato.core.settings import settings
from legato.core.sums import Sums, fetch
from legato.core.world import OneProcess, World, wait_for_all
from legato.diagnostics.metrics.repetition import repetition
from legato.objectives.slots import State
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.training.anchor import anchor, estimator_reads_anchor, first_update_anchors_itself
from legato.training.details import details, spread_marks
from legato.training.optimizer import Optimizer
from legato.training.plan import Update, plan
from legato.training.probe import Floor, UnsafeAnchorError, probe
from legato.training.ranks.join import DEADLINE_SECONDS
from legato.training.ranks.same import check_step, digest
from legato.training.report import (
    Clock,
    StepReport,
    UpdateNumbers,
    fetch_numbers,
    read_state,
    rollout_metrics,
    state_metrics,
    time_metrics,
    update_metrics,
)
from legato.training.source import RolloutSource, Tally
from legato.training.staleness import staleness
from legato.training.tables import Tables, needs, needs_router_shift
from legato.training.teacher import Teacher, reverse_kl
from legato.training.update import BREAK_EVEN, Look, Report, count_update, reads_whole_update, silent_rows, update_gradient


@settings()
class TrainingSettings:
    """The settings of a step."""

    seed: int = integer(default=0, says="The seed of everything random in the run.", minimum=0, resume="refused")
    prompts_per_step: int = integer(
        default=32, says="Problems of a step; each is sampled rollouts.samples_per_prompt times.", minimum=1
    )
    updates_per_step: int = integer(
        default=4, says="Optimizer steps into which the groups of a step are divided.", minimum=1
    )
    epochs_per_step: int = integer(default=1, says="How often each response is used.", minimum=1)
    minimum_scored: float = number(
        default=0.5,
        says="A step is not trained on if a smaller share of its rollouts could be scored.",
        minimum=0.0,
        maximum=1.0,
    )
    anchor: str = choice(
        "auto",
        "recompute",
        "sampler",
        default="auto",
        says="Where the old log-probs come from; auto decides by the measured noise floor and says so.",
    )
    accept_unsafe_anchor: bool = flag(
        default=False,
        says='Go on with anchor = "sampler" where the measured noise floor is above a third of the clip band; else the run'
        " ends.",
        resume="free",
    )
    probe_every_steps: int = integer(
        default=100,
        says="How often the noise floor of the ratio is measured; 0: before the first step only.",
        minimum=0,
        resume="free",
    )
    tokens_per_pack: int = integer(
        default=16384,
        says="Tokens in one forward pass: more is faster and needs more memory. It changes no result.",
        minimum=1,
    )
    update_passes: str = choice(
        "auto",
        "one",
        "two",
        default="auto",
        says="'one': every row forward and backward; 'two': rows without a gradient are skipped; auto: the cheaper.",
    )
    shard: str = choice(
        "optimizer",
        "layers",
        default="optimizer",
        says="What several processes divide among them: 'optimizer', masters and moments, while each has all weights; or"
        " 'layers', the weights and gradients of the layers too, for models that do not fit otherwise.",
        resume="free",
    )
    keep_layers: str = choice(
        "auto",
        "nothing",
        "weights",
        "gradients",
        default="auto",
        says="With shard = 'layers': what each process holds whole during the updates of a step: 'nothing' but the layer at"
        " work, the 'weights' of all layers, or their weights and 'gradients'; auto: the most that fits into memory.",
        resume="free",
    )
    rank_deadline_seconds: float = number(
        default=DEADLINE_SECONDS,
        says="With several processes: how long they may wait for one of them before the run ends and says what each did.",
        above=0.0,
        resume="free",
    )
    skip_silent_rows: bool = flag(
        default=True,
        says="Leaves out rows whose gradient is certainly 0: no advantage, no penalty. It changes no result.",
    )
    routing_replay: str = choice(
        "off",
        "R2",
        "R3",
        default="off",
        says="Forces the experts of 'R2' the old-policy pass or 'R3' the engine in every pass of an update (mixtures of"
        " experts).",
    )
    load_balance: float = number(
        default=0.0,
        says="Coefficient of the routers' load-balance loss, which is 1 where the load is even; 0: off. Takes two passes.",
        minimum=0.0,
    )
    router_noise: float = number(
        default=0.0,
        says="Standard deviation of noise that is added to the routers' logits in the updates and not in the old-policy"
        " pass, the same for a token in all updates of a step. An experiment: it makes experts flip.",
        minimum=0.0,
    )


def routing_options(algorithm: Algorithm, settings: TrainingSettings) -> list[str]:
    """The options of a run that need a mixture of experts, as texts for a message."""
    options = []
    if settings.routing_replay != "off":
        options.append(f"training.routing_replay = {settings.routing_replay!r}")
    if settings.load_balance:
        options.append(f"training.load_balance = {settings.load_balance:g}")
    if settings.router_noise:
        options.append(f"training.router_noise = {settings.router_noise:g}")
    if needs_router_shift(algorithm):
        options.append(f"algorithm {algorithm.name} with the part router-shift")
    return options


class Trainer:
    """Runs training steps. `state_dict` holds what must survive from one step to the next beside weights and optimizer."""

    def __init__(
        self,
        *,
        policy: Policy,
        algorithm: Algorithm,
        source: RolloutSource,
        optimizer: Optimizer,
        settings: TrainingSettings,
        reference: Reference | None = None,
        world: World | None = None,
        drop_cut: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        self.policy, self.algorithm, self.source, self.optimizer = policy, algorithm, source, optimizer
        self.settings, self.reference = settings, reference
        self.teacher = teacher
        self.drop_cut = drop_cut
        """Whether rollouts that a limit of their episode cut are not trained on."""
        self.world = OneProcess() if world is None else world
        for option in routing_options(algorithm, settings):
            policy.require_routers(option)
        self.steps_done = 0
        self.between_updates = True
        """Whether weights, optimizer and sampler are those of the last finished step: an error has not torn an update."""
        self.state: State = algorithm.initial()
        self.anchor_choice = settings.anchor if settings.anchor != "auto" else None
        self.probed = False
        """Whether the noise floor was measured with a settled sampler; until then every step measures it."""
        self.skipped: dict[int, float] = {}
        """The share of the tokens computed that had no gradient, per update index, averaged over the last steps."""
        self.look: Callable[[Look], None] | None = None
        """Called in every update with the signals and the outcome of the objective; it must not change them."""

    def step(self, detailed: int | None = None) -> StepReport:
        """Run one training step. `detailed`: the report also has advantages, and details of this many tokens."""
        clock = Clock()
        groups, tally = self.source.next(self.settings.prompts_per_step)
        clock.end("rollouts")
        if not groups or (tally.rollouts - tally.unscorable) < self.settings.minimum_scored * tally.rollouts:
            return self._report_without_update(tally, clock)
        batch = collate(groups, self.policy.dtype)
        tables = Tables.from_batch(batch, self.policy.device).with_routes(self.policy.routers, self.settings.routing_replay)
        if self.settings.router_noise:
            tables = tables.with_router_noise(self.settings.router_noise, self.settings.seed, self.steps_done)
        with self.optimizer.division.training():
            taught = None if self.teacher is None else self.teacher.score(tables, self.settings.tokens_per_pack, self.world)
            floor = self._probe(tables)
            # Where the estimator reads no scores, advantages come first: rows without one need no old log-probs.
            scores_first = estimator_reads_anchor(self.algorithm)
            tables = tables if scores_first else self._with_advantages(tables, taught)
            updates = self._plan(tables)
            tables = self._score_old_policy(tables, updates)
            tables = self._with_advantages(tables, taught) if scores_first else tables
            aged = self._staleness(tables, groups)
            silent = self._silent_rows(tables)
            self._compare_ranks(tables, updates)
            clock.end("anchor")
            done = [self._update(tables, update, silent, marked=bool(detailed)) for update in updates]
        numbers = fetch_numbers(done, self.world)
        self._note_savable(updates, numbers)
        self.source.on_publish(self.source.version + 1)
        self.steps_done += 1
        self.between_updates = True
        own = [self.world.sum_metrics(sums) for sums in fetch([report.sums for report, _ in done])]
        clock.end("update")
        sums = sum(own, start=Sums())
        return StepReport(
            step=self.steps_done,
            metrics={
                **aged,  # first: mismatch/k3 of the updates is over the rows that they read
                **update_metrics(sums, own, numbers, self.optimizer.lr),
                **state_metrics(self.state),
                **rollout_metrics(tally),
                **({} if taught is None else {"teacher/reverse_kl": reverse_kl(tables, taught)}),
                "rollouts/repetition": repetition(batch.texts.tokens, batch.texts.lengths),
                **time_metrics(self.world.gather(clock.seconds)[0], tally),
            },
            groups=tuple(groups),
            floor=floor,
            unscorable=dict(tally.reasons),
            sums=sums,
            details=() if detailed is None else self._details(tables, [report for report, _ in done], detailed),
            tensors=tables.evidence(),
        )

    def _with_advantages(self, tables: Tables, taught: torch.Tensor | None) -> Tables:
        tables = tables.with_advantages(self.algorithm, self.source.version, drop_cut=self.drop_cut)
        return tables if self.teacher is None or taught is None else self.teacher.add_to(tables, taught)

    def _staleness(self, tables: Tables, groups: list[Group]) -> dict[str, float]:
        """How old the responses are and what it does, where they can be older than the policy or come from servers."""
        servers = {member.rollout.server for group in groups for member in group.members}
        if not self.source.ahead and servers == {None}:
            return {}
        return staleness(self.algorithm, tables, groups, self.source.version, self.state)

    def _details(self, tables: Tables, reports: list[Report], most: int) -> tuple[dict[str, Any], ...]:
        marks = [spread_marks(report.marks, tables, self.world) for report in reports]
        known = [(number, mark) for number, mark in enumerate(marks) if mark is not None]
        return details(tables, known, self.policy.tokenizer, most)

    def _report_without_update(self, tally: Tally, clock: Clock) -> StepReport:
        """The report of a step whose rollouts cannot be trained on. Only the place in the data moves on."""
        self.steps_done += 1
        # Dynamic sampling drops groups that are all right: no update was lost then.
        applied = {} if tally.groups and tally.all_right == tally.groups else {"update/applied": 0.0}
        metrics = {**rollout_metrics(tally), **applied, **time_metrics(self.world.gather(clock.seconds)[0], tally)}
        return StepReport(step=self.steps_done, metrics=metrics, groups=(), floor=None, unscorable=dict(tally.reasons))

    def _compare_ranks(self, tables: Tables, updates: list[Update]) -> None:
        """End the run if ranks have come apart: in what they sampled and scored, in the plan, or in a choice."""
        if self.world.size == 1:
            return
        batch, texts = tables.batch, tables.texts
        facts = {
            "sampled tokens": digest(texts.prompts, texts.tokens, texts.lengths, texts.mask, batch.sampler_logprobs),
            "rewards": digest(batch.rewards),
            "advantages": digest(tables.advantages, tables.keep, tables.returns),
            "old log-probs": digest(tables.old_logprobs, tables.ref_logprobs, tables.old_values),
            "plan of updates": digest(*(rows for update in updates for rows in update.micro_batches)),
            "state of adaptive parts": read_state(self.state),
            "anchor": self.anchor_choice,
            "data position": self.source.drawn,
            "updates done": self.optimizer.updates,
        }
        check_step(self.world, self.steps_done, facts)

    def _plan(self, tables: Tables) -> list[Update]:
        return plan(
            tables.texts,
            updates=self.settings.updates_per_step,
            epochs=self.settings.epochs_per_step,
            tokens_per_pack=self.settings.tokens_per_pack,
            seed=self.settings.seed + 1_000_003 * self.steps_done,
            packing=self.policy.packing,
            ranks=self.world.size,
            silent=self._silent_rows(tables) if self.world.size > 1 and tables.advantages is not None else None,
        )

    def _probe(self, tables: Tables) -> Floor | None:
        every = self.settings.probe_every_steps
        if self.probed and (every == 0 or self.steps_done % every):
            return None
        floor = probe(self.policy, self.algorithm, tables, self.settings.tokens_per_pack, self.state)
        wanted = self.settings.anchor
        refuses = wanted == "sampler" and not self.probed and not self.settings.accept_unsafe_anchor
        if refuses and self.world.agree(int(floor.fills_the_band)):
            raise UnsafeAnchorError(floor)
        self.probed = self.probed or self.source.settled
        if wanted == "auto":
            # A mixture's old policy is always scored: how far its routers shift is measured against that pass.
            unsafe = self.world.agree(int(not floor.sampler_is_safe or self.policy.routers is not None))
            self.anchor_choice = "recompute" if unsafe else "sampler"
        if self.state:
            noise = max(self.world.gather(floor.noise(self.anchor_choice == "sampler")))
            self.state = self.algorithm.calibrated(self.state, noise=noise)
        return replace(floor, lag=self.source.ahead, reason=self._reason_to_recompute(floor))

    def _reason_to_recompute(self, floor: Floor) -> str:
        """Why old log-probs are recomputed, for messages; "" if they are not."""
        if self.anchor_choice == "sampler":
            return ""
        if self.source.ahead:
            return f"with rollouts.ahead = {self.source.ahead} responses may be older than the policy"
        if self.settings.anchor == "recompute":
            return "training.anchor = 'recompute' asks for it"
        if self.policy.routers is not None:
            return "the pass that recomputes them also measures how far a mixture's routers shift"
        if floor.band is None:
            return "without a clip band the engine's own would have to be equal to the bit"
        return "the engine's own are not exact enough"

    def _score_old_policy(self, tables: Tables, updates: list[Update]) -> Tables:
        """The tables with log-probs of the old and the reference policy, and old values."""
        algorithm, epochs = self.algorithm, self.settings.epochs_per_step
        # Rows that certainly have no gradient are not scored if only their own update would read the scores.
        alone = (
            not reads_whole_update(algorithm, tables)
            and algorithm.scope is Scope.ROW
            and not algorithm.objective.corrections
            and epochs == 1
        )
        silent = self._silent_rows(tables) if tables.advantages is not None and alone else None
        assert self.anchor_choice is not None
        return anchor(
            tables,
            self.policy,
            self.reference,
            updates,
            choice=self.anchor_choice,
            # With noise at the routers even the first update is not the old policy.
            skip_first=first_update_anchors_itself(algorithm, epochs) and not self.settings.router_noise,
            silent=silent,
            replay=self.settings.routing_replay,
            shift=needs_router_shift(algorithm),
            whole_update=reads_whole_update(algorithm, tables),
            world=self.world,
        )

    def _silent_rows(self, tables: Tables) -> torch.Tensor | None:
        skip = self.settings.skip_silent_rows and not self.settings.load_balance
        return silent_rows(self.algorithm, tables) if skip else None

    def _update(
        self, tables: Tables, update: Update, silent: torch.Tensor | None, *, marked: bool
    ) -> tuple[Report, torch.Tensor]:
        """Forward, objective and backward over the micro-batches, then the optimizer. Also returns the gradient's norm."""
        algorithm = self.algorithm
        if "uniform" in needs(algorithm):
            tables = tables.with_uniform(self.settings.seed, self.optimizer.updates)
        counts = count_update(algorithm, tables, update)  # every rank has the tables of all rows
        passes = {"one": 1, "two": 2}.get(self.settings.update_passes) or self.world.agree(
            self._cheaper_passes(update.index)
        )
        report = update_gradient(
            self.policy,
            algorithm,
            tables,
            update,
            counts,
            self.state,
            passes=passes,
            silent=silent,
            load_balance=self.settings.load_balance,
            marked=marked,
            look=self.look,
            world=self.world,
        )
        # A rank that failed in its passes is heard of here, while the last finished step can still be saved.
        wait_for_all(self.world)
        self.between_updates = False
        self.source.before_update()
        norm, _ = self.optimizer.step()
        # An update whose rows were all silent has no sums.
        if self.state and (sums := self.world.sum_metrics(report.sums)):
            self.state = algorithm.advance(self.state, sums, first=update.is_first)
        return report, norm

    def _note_savable(self, updates: list[Update], numbers: list[UpdateNumbers]) -> None:
        """Average the share of tokens a first pass would have saved; `_cheaper_passes` reads it in later steps."""
        for update, measured in zip(updates, numbers, strict=True):
            if measured.report.rows > measured.report.silent:
                before = self.skipped.get(update.index)
                self.skipped[update.index] = measured.savable if before is None else 0.8 * before + 0.2 * measured.savable

    def _cheaper_passes(self, index: int) -> int:
        """2 if enough tokens of this update had no gradient in the last steps, else 1."""
        return 2 if self.skipped.get(index, 0.0) > BREAK_EVEN else 1

    def state_dict(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint: everything beside weights and optimizer."""
        return {
            "steps_done": self.steps_done,
            "state": read_state(self.state),
            "anchor_choice": self.anchor_choice,
            "probed": self.probed,
            "skipped": {str(index): share for index, share in self.skipped.items()},
            "collector": self.source.state(),
        }

    def sampler_state(self) -> dict[str, torch.Tensor]:
        """The tensors a checkpoint must hold for the engine beside the policy's weights."""
        return self.source.tensors()

    def load_sampler(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `sampler_state` returned."""
        self.source.load_tensors(state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.steps_done = int(saved["steps_done"])
        # The algorithm may have changed: a new part starts with its initial state, the state of a removed part is dropped.
        self.state = {name: saved["state"].get(name, first) for name, first in self.algorithm.initial().items()}
        self.anchor_choice, self.probed = saved["anchor_choice"], bool(saved["probed"])
        self.skipped = {int(index): float(share) for index, share in saved["skipped"].items()}
        self.source.load(saved["collector"])
