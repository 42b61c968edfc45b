"""The tables of a step's rollouts, and the signals that an objective reads from some of their rows."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from legato.advantages.estimator import Scores
from legato.advantages.filters import Overlong, Samples
from legato.algorithms.algorithm import Algorithm
from legato.core.batch import Batch
from legato.core.mask import Mask
from legato.core.row_table import RowTable
from legato.core.segments import renumber
from legato.core.signals import RouterSignals, Signals
from legato.core.texts import Texts
from legato.diagnostics.metrics.routing import router_shift
from legato.errors import InputError
from legato.policy.experts.routers import Routers
from legato.policy.experts.routing import Record, Routed
from legato.policy.policy import Channels
from legato.rollouts.randomness import seed_of, uniform
from legato.training.conversations import Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """[B, T] tables on the policy's device. `old_logprobs` is None if the first update uses its own as anchor."""

    batch: Batch
    """On the host, where packs are laid out."""
    mask: Tensor
    """This and the next three are copies of the batch's tables on the device, so that updates wait for no transfer."""
    sampler_logprobs: Tensor
    kept_logmass: Tensor | None
    turn: Tensor
    old_logprobs: Tensor | None = None
    anchored: Tensor | None = None
    """[B] bool, on the CPU: which rows of `old_logprobs` are filled."""
    ref_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    advantages: Tensor | None = None
    """[B, 1] or [B, T]"""
    returns: Tensor | None = None
    keep: Tensor | None = None
    """[B, 1], 0 where a filter dropped the response."""
    routers: Routers | None = None
    old_experts: RowTable | None = None
    """[B, T, M, K]: which experts the old policy chose at the position that predicts a token, for the rows that this process
    trains on and whose update is not their own anchor."""
    old_router_logprobs: RowTable | None = None
    """[B, T, M, K]: log-probs of `old_experts`; None if the engine is the anchor, since it reports none."""
    sampler_experts: Tensor | None = None
    """[B, T, M, K]: the experts the engine chose, if it records them."""
    sampler_known: Tensor | None = None
    """[B, T] bool: where `sampler_experts` has a record."""
    replay: Record | None = None
    """Routes to force in every pass of an update; under R3 the engine's, which are forced in the old-policy pass too."""
    router_noise: Tensor | None = None
    """[G * P + B * T, M, E]: noise on the routers' logits in the updates of this step."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Signals that only some parts read: uniform."""

    @classmethod
    def from_batch(cls, batch: Batch, device: torch.device) -> "Tables":
        return cls(
            batch=batch,
            mask=batch.texts.mask.to(device),
            sampler_logprobs=batch.sampler_logprobs.to(device),
            kept_logmass=None if batch.kept_logmass is None else batch.kept_logmass.to(device),
            turn=batch.turn.to(device),
        )

    @property
    def texts(self) -> Texts:
        return self.batch.texts

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def evidence(self) -> dict[str, Tensor]:
        """The tensors that explain a step, by name, without copies."""
        batch, texts = self.batch, self.texts
        tensors = {"tokens": texts.tokens, "lengths": texts.lengths, "mask": texts.mask}
        tensors["group"] = texts.siblings
        tensors |= {"rewards": batch.rewards, "sampler_logprobs": batch.sampler_logprobs, "rollout_id": batch.rollout_id}
        known = {"old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "advantages": self.advantages}
        return tensors | {name: tensor for name, tensor in known.items() if tensor is not None}

    def anchors_itself(self, rows: Tensor) -> bool:
        """Whether these rows (on the CPU) have no old log-probs: their update is the first to move the policy."""
        if self.old_logprobs is None or self.anchored is None:
            return True
        known = self.anchored[rows]
        assert bool(known.all()) or not bool(known.any()), "an update of which some rows have an anchor and some have none"
        return not bool(known.all())

    def with_advantages(self, algorithm: Algorithm, version: int | None = None, *, drop_cut: bool = False) -> "Tables":
        """The tables with advantages, returns and the filters' `keep`, computed over the whole step.

        `version` is that of the policy; None: that of the newest token.
        `drop_cut`: rollouts that a limit cut are dropped too, whatever the filters of the algorithm.
        """
        batch, texts, pieces = self.batch, self.texts, Pieces.of(self.batch)
        estimate = pieces.split(
            algorithm.estimate(
                Scores(
                    rewards=pieces.first(batch.rewards),
                    group=pieces.first(texts.siblings),
                    mask=Mask(pieces.join(texts.mask), torch.float64),
                    values=pieces.join_known(_to_float64(self.old_values)),
                    turn=pieces.join(batch.turn, padding=-1),
                    turn_rewards=pieces.first_known(batch.turn_rewards),
                    turn_states=pieces.first_known(batch.turn_states),
                    components=pieces.first_known(_component_table(batch)),
                    old_logprobs=pieces.join_known(_to_float64(self.old_logprobs)),
                    ref_logprobs=pieces.join_known(_to_float64(self.ref_logprobs)),
                )
            )
        )
        device, dtype = self.device, batch.sampler_logprobs.dtype
        advantages = estimate.advantages.to(dtype)
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else torch.where(texts.mask, advantages, 0.0)
        samples = Samples(
            accuracy=batch.accuracy,
            group=texts.siblings,
            truncated=batch.truncated,
            version_lag=_version_lag(batch, version),
        )
        keep = algorithm.keep(samples, dtype)
        if drop_cut:
            whole = Overlong().keep(samples).to(dtype)
            keep = whole if keep is None else keep * whole
        return replace(
            self,
            advantages=advantages.to(device),
            returns=None if estimate.returns is None else estimate.returns.to(device, dtype),
            keep=None if keep is None else keep.unsqueeze(1).to(device),
        )

    def with_routes(self, routers: Routers | None, replay: str) -> "Tables":
        """The tables with the engine's recorded routes, checked against the trainer's routers; R3 replays them."""
        routes = self.batch.routes
        if routers is None or routes is None:
            if replay == "R3":
                raise InputError(
                    "training.routing_replay = 'R3' replays the routes of the engine, but it recorded none; 'R2' replays"
                    " those of the trainer's own old-policy pass"
                )
            return replace(self, routers=routers)
        record = Record.from_engine(routes, routers, self.device)
        experts, known = record.predicting(self.texts)
        return replace(
            self,
            routers=routers,
            sampler_experts=experts,
            sampler_known=known,
            replay=record if replay == "R3" else None,
        )

    def with_router_noise(self, scale: float, seed: int, step: int) -> "Tables":
        """The tables with normal noise for the routers, drawn anew for each step."""
        assert self.routers is not None, "checked before the run began"
        generator = torch.Generator(self.device).manual_seed(seed_of(seed, "router-noise", step) % 2**63)
        tokens = self.texts.prompts.numel() + self.texts.tokens.numel()
        shape = (tokens, len(self.routers.modules), self.routers.experts)
        return replace(self, router_noise=scale * torch.randn(shape, generator=generator, device=self.device))

    def with_uniform(self, seed: int, update: int) -> "Tables":
        """The tables with a uniform number per token for random selections, derived from (seed, update, row)."""
        seeds = torch.tensor([seed_of("selection", seed, update, row) for row in self.batch.rollout_id.tolist()])
        places = torch.arange(self.texts.tokens.shape[1])
        table = uniform(seeds.unsqueeze(1), places).to(self.batch.sampler_logprobs.dtype)
        return replace(self, extra={**self.extra, "uniform": table.to(self.device)})

    def signals(
        self,
        rows: Tensor,
        group: Tensor | None,
        channels: Channels | None,
        own_anchor: bool = False,
        first: bool = False,
    ) -> Signals:
        """The signals of some rows. Without channels (for counting) the new log-probs are 0."""
        assert self.advantages is not None
        width = self.texts.tokens.shape[1] if channels is None else channels.logprobs.shape[1]
        device = self.device
        mask = self.mask[rows, :width]
        dtype = self.batch.sampler_logprobs.dtype
        logprobs = torch.zeros((), dtype=dtype, device=device).expand(mask.shape) if channels is None else channels.logprobs

        def part(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows, :width]

        # The first update of the step: the policy has not moved yet, so the new log-probs are the old ones.
        old = channels.logprobs.detach() if channels is not None and own_anchor else part(self.old_logprobs)
        advantages = self.advantages[rows]
        routed = None if channels is None else channels.routed
        router = None if routed is None else self._router(routed, rows, own_anchor, first)
        return Signals(
            mask=Mask(mask, logprobs.dtype),
            logprobs=logprobs,
            advantages=advantages if advantages.shape[1] == 1 else advantages[:, :width],
            old_logprobs=old,
            sampler_logprobs=part(self.sampler_logprobs),
            kept_logmass=part(self.kept_logmass),
            ref_logprobs=part(self.ref_logprobs),
            entropy=None if channels is None else channels.entropy,
            values=None if channels is None else channels.values,
            old_values=part(self.old_values),
            returns=part(self.returns),
            router_shift=None if routed is None else self._shift(routed, rows, own_anchor),
            router=router,
            uniform=part(self.extra.get("uniform")),
            keep=None if self.keep is None else self.keep[rows],
            group=group,
            turn=part(self.turn),
            rollout=self._rollouts(rows),
        )

    def _rollouts(self, rows: Tensor) -> Tensor | None:
        """[rows]: the rollout of each row, dense from 0; None where each row is a rollout."""
        pieces = self.batch.pieces
        if pieces is None:
            return None
        owner = torch.arange(len(pieces)).repeat_interleave(torch.tensor(pieces))
        return renumber(owner.to(rows.device)[rows])

    def _shift(self, routed: Routed, rows: Tensor, own_anchor: bool) -> Tensor | None:
        """[rows, width]: gamma; 1 where the policy has not moved."""
        if own_anchor:
            return torch.ones_like(routed.entropy)
        if self.old_router_logprobs is None:
            return None
        return router_shift(self.old_router_logprobs.part(rows, routed.logprobs.shape[1]), routed.logprobs)

    def _router(self, routed: Routed, rows: Tensor, own_anchor: bool, first: bool) -> RouterSignals:
        """The routers' choices now, under the old policy and in the engine."""
        assert self.routers is not None
        width = routed.experts.shape[1]

        def part(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows, :width]

        recomputed = self.old_router_logprobs is not None
        old = routed.experts if own_anchor else None
        if not own_anchor and self.old_experts is not None:
            old = self.old_experts.part(rows, width)
        return RouterSignals(
            experts=routed.experts,
            entropy=routed.entropy,
            count=self.routers.experts,
            old=old,
            old_known=None if own_anchor or recomputed else part(self.sampler_known),
            sampler=part(self.sampler_experts),
            sampler_known=part(self.sampler_known),
            trainer=old if own_anchor or recomputed else routed.experts if first else None,
        )

    def dense_groups(self, rows: Tensor) -> Tensor:
        """Group ids of an update's rows (on the host), dense from 0."""
        return renumber(self.texts.siblings[rows])


def _component_table(batch: Batch) -> Tensor | None:
    return torch.stack(list(batch.components.values()), 1) if batch.components else None


def _version_lag(batch: Batch, version: int | None) -> Tensor:
    """[B]: policy versions between a response's oldest token and the policy, or the newest token of the step."""
    mask = batch.texts.mask
    newest = torch.where(mask, batch.version, 0).max() if version is None else torch.tensor(version)
    return newest - torch.where(mask, batch.version, newest).min(1).values


def _to_float64(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.cpu().double()


def needs(algorithm: Algorithm) -> set[str]:
    """Every signal that some part of the objective reads."""
    return {signal for signals in algorithm.objective.needs().values() for signal in signals}


def needs_router_shift(algorithm: Algorithm) -> bool:
    return "router_shift" in needs(algorithm)
