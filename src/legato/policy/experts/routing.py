"""The routers during a pass: recording their choices, Routing Replay and the load-balance loss.

Forward hooks at the routers live as long as a pass, its backward included: layers that gradient checkpointing recomputes are
forced again, and recorded once. Shapes: M layers with a router, E experts, K active ones. The choice for token t is
made at the token before it, so tables beside log-probs are [B, T, M, K]. Records for replay are indexed by the token that is
read, prompts included: [G * P + B * T, M, K], the prompt of a group once.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from legato.core.device import to_device
from legato.core.rollout import Routes
from legato.core.row_table import RowTable
from legato.core.texts import Texts
from legato.errors import InputError
from legato.policy.experts.routers import Routers
from legato.policy.layout.packs import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The experts of each token of a step: R2 records them in the old-policy pass, R3 takes them from the engine."""

    experts: Tensor
    """[G * P + B * T, M, K]: prompts [G, P] flattened, then responses [B, T]."""
    tokens: Tensor
    """[G * P + B * T]: the token of each entry; -1 where there is no record."""
    of_sampler: bool = False
    """R3: replayed in the old-policy pass too, and in the first update whatever its anchor is."""

    @classmethod
    def empty(cls, texts: Texts, routers: Routers, device: torch.device) -> "Record":
        places = texts.prompts.numel() + texts.tokens.numel()
        return cls(
            experts=torch.zeros(places, *routers.shape, dtype=routers.index, device=device),
            tokens=torch.full((places,), -1, device=device),
        )

    @classmethod
    def from_engine(cls, routes: Routes, routers: Routers, device: torch.device) -> "Record":
        """The routes an engine recorded; InputError if its model has other experts than the trainer's."""
        layers, active = routes.experts.shape[1:]
        engine_sizes, policy_sizes = (layers, active, routes.count), (*routers.shape, routers.experts)
        if engine_sizes != policy_sizes:
            raise InputError(
                f"the engine recorded {active} of {routes.count} experts in {layers} layers, the trainer's model has"
                f" {policy_sizes[1]} of {policy_sizes[2]} in {policy_sizes[0]}: they are not one model"
            )
        experts, tokens = (to_device(table, device) for table in (routes.experts.to(routers.index), routes.tokens))
        return cls(experts=experts, tokens=tokens, of_sampler=True)

    def predicting(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """([B, T, M, K], [B, T] bool): the experts at the position that predicts each token, and where they are known."""
        rows, width = texts.tokens.shape
        last = texts.group * texts.prompts.shape[1] + texts.prompt_lengths[texts.group] - 1
        own = texts.prompts.numel() + torch.arange(rows)[:, None] * width + torch.arange(width - 1)
        places = to_device(torch.cat([last[:, None], own], 1), self.tokens.device)
        return self.experts[places], self.tokens[places] >= 0

    def note(self, traffic: "Traffic") -> None:
        """Record the routes of a pass."""
        self.experts.index_copy_(0, traffic.source, traffic.experts)
        self.tokens.index_copy_(0, traffic.source, traffic.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The load-balance loss, scale * E / (M N) * sum over layers and experts of share * sum over tokens of probability.

    It equals `scale` if every expert of every layer gets 1 / E of the choices. The shares are of the whole update and
    detached, so the loss is a sum over tokens: any split into micro-batches has the same gradient.
    """

    shares: Tensor
    """[M, E]: the share of each expert in the update's choices at positions that predict a token; the sum over E is 1."""
    tokens: Tensor
    """N: how many tokens the update predicts."""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """What a pass records and forces at its routers. Without directions a pass runs without router hooks."""

    old: RowTable | None = None
    """[B, T, M, K]: experts whose log-probs are computed; None: those the routers choose now."""
    replay: Record | None = None
    noise: Tensor | None = None
    """[G * P + B * T, M, E]: added to the routers' logits, by the token that is read. For experiments on flips."""
    balance: Balance | None = None
    record: bool = True
    count: bool = False
    """Whether choices are counted, for a load-balance loss in the next pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The experts of every token of a pack."""

    experts: Tensor
    """[N, M, K]: the routers' own choices, even where others were forced."""
    tokens: Tensor
    """[N]"""
    source: Tensor
    """[N]: the place of each token in a record."""
    missing: Tensor
    """How many of the N tokens had no recorded route to replay."""
    choices: Tensor | None = None
    """[M, E]: how often each expert was used at positions that predict a token, if the directions say `count`."""
    mass: Tensor | None = None
    """[M, E]: the sum of the routers' probabilities at those positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The routers' outputs at the positions that predict the tokens of some rows, without a gradient."""

    experts: Tensor
    """[R, width, M, K]: the routers' own choices, even where others were forced."""
    logprobs: Tensor
    """[R, width, M, K]: router log-probs (softmax over all E) of the old experts if there are any, else of `experts`."""
    entropy: Tensor
    """[R, width]: the entropy of that softmax, mean over the layers."""

    def rows(self, part: range) -> "Routed":
        chosen = slice(part.start, part.stop)
        return Routed(experts=self.experts[chosen], logprobs=self.logprobs[chosen], entropy=self.entropy[chosen])

    def widen(self, width: int) -> "Routed":
        more = width - self.experts.shape[1]
        if not more:
            return self

        def pad(table: Tensor) -> Tensor:
            return nn.functional.pad(table, (0, 0) * (table.dim() - 2) + (0, more))

        return Routed(experts=pad(self.experts), logprobs=pad(self.logprobs), entropy=pad(self.entropy))

    @staticmethod
    def join(parts: "list[Routed]") -> "Routed":
        return Routed(
            experts=torch.cat([part.experts for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            entropy=torch.cat([part.entropy for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Which token of a pack is in each cell of the padded rows."""

    token: Tensor
    """[rows * width]: which of the N tokens each cell holds; arbitrary in the padding."""
    inside: Tensor
    """[rows * width] bool: the cells that are not padding."""
    read: Tensor
    """[K]: the cells that predict a token."""


class Tap:
    """Hooks that record and force the routers' choices during one pass."""

    def __init__(self, routers: Routers, packed: Pack, cells: Cells | None, directions: Directions) -> None:
        self.routers, self.packed, self.cells, self.directions = routers, packed, cells, directions
        self.read = packed.read if cells is None else cells.read
        count = len(routers.modules)
        self.logits: list[Tensor | None] = [None] * count
        self.chosen: list[Tensor | None] = [None] * count
        self.forced, self.known = self._look_up_routes()
        self.noise = self._look_up_noise()
        self.weight = self._weights() if directions.balance is not None else None

    def _look_up_routes(self) -> tuple[Tensor | None, Tensor | None]:
        """The routes to force on each token the body reads, [C, M, K], and [C] whether there is a record of that token."""
        replay, packed = self.directions.replay, self.packed
        if replay is None:
            return None, None
        forced = replay.experts.index_select(0, packed.source)
        known = replay.tokens.index_select(0, packed.source) == packed.tokens
        if self.cells is not None:
            forced, known = forced[self.cells.token], known[self.cells.token] & self.cells.inside
        return forced, known

    def _look_up_noise(self) -> Tensor | None:
        """The noise for each token the body reads, [C, M, E]."""
        if self.directions.noise is None:
            return None
        noise = self.directions.noise.index_select(0, self.packed.source)
        return noise if self.cells is None else noise[self.cells.token]

    def _weights(self) -> Tensor:
        """[C]: how many tokens each token the body reads predicts; a prompt's last token predicts one per response."""
        count = len(self.packed.tokens) if self.cells is None else len(self.cells.token)
        ones = torch.ones(len(self.read), dtype=torch.float32, device=self.read.device)
        return ones.new_zeros(count).index_add_(0, self.read, ones)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the context, the hooks are registered at the routers."""
        with ExitStack() as stack:
            for number, module in enumerate(self.routers.modules):
                handle = module.register_forward_hook(partial(self._on_router_forward, number))
                stack.callback(handle.remove)
            yield

    def _on_router_forward(self, layer: int, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, gates, experts = output
        if self.noise is not None:
            logits = logits + self.noise[:, layer].to(logits.dtype)
            experts = logits.topk(self.routers.active).indices
            gates = self.routers.gates(logits, experts)
        if self.chosen[layer] is None:
            self.chosen[layer] = experts.detach()
            if self.directions.record:
                self.logits[layer] = logits.detach()
        if self.forced is None and self.weight is None:
            return None if self.noise is None else (logits, gates, experts)
        if self.forced is not None and self.known is not None:
            experts = torch.where(self.known.unsqueeze(1), self.forced[:, layer].to(experts.dtype), experts)
            gates = self.routers.gates(logits, experts)
        balance = self.directions.balance
        if balance is not None and self.weight is not None and torch.is_grad_enabled():
            gates = _Balanced.apply(gates, logits, self.weight, balance, layer)  # type: ignore[no-untyped-call]
        return logits, gates, experts

    def results(self) -> tuple[Routed, Traffic]:
        """The recorded choices, after the forward of the body."""
        packed, read, index = self.packed, self.read, self.routers.index
        chosen = torch.stack([layer for layer in self.chosen if layer is not None], 1).to(index)
        at_reads = chosen.index_select(0, read)
        logits = torch.stack([layer for layer in self.logits if layer is not None], 1).index_select(0, read)
        self.logits.clear()
        assert logits.shape[1] == len(self.routers.modules), "a router of the body was not passed"
        logprobs, probabilities = _softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        old, shape = self.directions.old, (len(packed.counts), packed.width)
        scored = at_reads if old is None else old.part(packed.rows, shape[1]).flatten(0, 1).index_select(0, packed.place)
        routed = Routed(
            experts=_spread(at_reads, packed.place, shape),
            logprobs=_spread(logprobs.gather(-1, scored.long()), packed.place, shape),
            entropy=_spread((probabilities * logprobs).sum((1, 2)).div_(-logits.shape[1]), packed.place, shape),
        )
        counted = self._count_choices(at_reads, probabilities) if self.directions.count else (None, None)
        return routed, self._traffic(chosen, *counted)

    def _count_choices(self, at_reads: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """[M, E] twice: choices used (forced ones included) and sums of probabilities, at positions that predict a token."""
        used, experts = at_reads, self.routers.experts
        if self.forced is not None and self.known is not None:
            known = self.known.index_select(0, self.read)[:, None, None]
            used = torch.where(known, self.forced.index_select(0, self.read), at_reads)
        layers = torch.arange(used.shape[1], device=used.device)[:, None] * experts
        choices = torch.zeros(used.shape[1] * experts, dtype=torch.float64, device=used.device)
        choices.index_add_(0, (used.long() + layers).reshape(-1), choices.new_ones(used.numel()))
        return choices.reshape(-1, experts), probabilities.sum(0).double()

    def _traffic(self, chosen: Tensor, choices: Tensor | None, mass: Tensor | None) -> Traffic:
        packed, known, cells = self.packed, self.known, self.cells
        if cells is not None:
            # All copies of a shared prompt have the same routes but for rounding; one of them is recorded.
            count = len(packed.tokens)
            places = torch.where(cells.inside, cells.token, count)
            of_token = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
            of_token.index_copy_(0, places, torch.arange(len(places), device=chosen.device))
            chosen = chosen.index_select(0, of_token[:count])
            known = None if known is None else known | ~cells.inside
        none = torch.zeros((), dtype=torch.float64, device=chosen.device)
        return Traffic(
            experts=chosen,
            tokens=packed.tokens,
            source=packed.source,
            missing=none if known is None else (~known).sum(dtype=torch.float64),
            choices=choices,
            mass=mass,
        )


class _Balanced(torch.autograd.Function):
    """The identity on gates; its backward adds the gradient of the load-balance loss to the router's logits.

    With p the router's probabilities and f the shares, d/dz of weight * sum_e f_e p_e is weight * p_e (f_e - sum_j f_j p_j).
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, logits: Tensor, weight: Tensor, balance: Balance, layer: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.weight, ctx.balance, ctx.layer = weight, balance, layer
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        balance: Balance = ctx.balance
        exact = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.to(exact).softmax(-1)
        shares = balance.shares[ctx.layer].to(exact)
        factor = balance.scale * balance.shares.shape[1] / len(balance.shares) / balance.tokens.to(exact)
        direction = probabilities * (shares - (probabilities * shares).sum(-1, keepdim=True))
        return gradients[0], (direction * (ctx.weight.to(exact) * factor).unsqueeze(1)).to(logits.dtype), None, None, None


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and probabilities over the last axis. Over a few experts this is five times as fast as torch's softmax."""
    shifted = logits - logits.amax(-1, keepdim=True)
    raised = shifted.exp()
    total = raised.sum(-1, keepdim=True)
    return shifted.sub_(total.log()), raised.div_(total)


def _spread(values: Tensor, place: Tensor, shape: tuple[int, int]) -> Tensor:
    """[K, ...] to [rows, width, ...], 0 elsewhere."""
    table = values.new_zeros(shape[0] * shape[1], *values.shape[1:])
    return table.index_copy_(0, place, values).reshape(*shape, *values.shape[1:])
