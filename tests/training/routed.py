"""Tables of a step with a mixture of experts, as the trainer prepares them, and hand-made routes of an engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import legato
from legato.algorithms.algorithm import Algorithm
from legato.core.batch import Batch
from legato.core.rollout import Routes
from legato.policy.experts.routing import Directions
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.training.anchor import anchor
from legato.training.plan import Update
from legato.training.tables import Tables, needs, needs_router_shift
from legato.training.update import Report, count_update, update_gradient
from tests.policy.exact import Words, family
from tests.policy.routes import chosen_by, plain_logits, rows_with_tokens, whole
from tests.training.steps import gradients, move_weights

CPU = torch.device("cpu")
WIDE = {"objective.trust.clip.low": 2e-2, "objective.trust.clip.high": 3e-2}


def gspo() -> Algorithm:
    return legato.algorithm("gspo", WIDE)


def exact_policy(name: str = "qwen3-moe", **changes: Any) -> Policy:
    policy = load_policy(family(name), Loading(dtype="float64", device="cpu", **changes), tokenizer=Words())
    if changes.get("lora") is not None:
        for parameter in policy.parameters().values():
            parameter.data = parameter.data.double()
        move_weights(policy, 0.1, seed=11)
    return policy


def copy_policy(of: Policy, name: str, changes: dict[str, Any]) -> Policy:
    """A copy of the policy without gradient checkpointing, for the reference whose routes are set by hand."""
    copy = exact_policy(name, **{**changes, "gradient_checkpointing": False})
    with torch.no_grad():
        for left, right in zip(copy.model.parameters(), of.model.parameters(), strict=True):
            left.copy_(right)
    return copy


def tables_of(
    policy: Policy,
    value: Algorithm,
    batch: Batch,
    updates: Sequence[Update],
    *,
    replay: str = "off",
    choice: str = "recompute",
    skip_first: bool = False,
    move: float = 0.0,
) -> Tables:
    """Tables as a step of the trainer prepares them. Then the policy moves by `move`."""
    reference = Reference.from_policy(policy) if "ref_logprobs" in needs(value) else None
    tables = Tables.from_batch(batch, CPU).with_routes(policy.routers, replay)
    shift = needs_router_shift(value)
    options: dict[str, Any] = {"choice": choice, "skip_first": skip_first, "replay": replay, "shift": shift}
    tables = anchor(tables, policy, reference, updates, **options).with_advantages(value)
    if move:
        move_weights(policy, move)
    return tables


def run_update(
    policy: Policy, value: Algorithm, tables: Tables, update: Update, *, passes: int = 1, load_balance: float = 0.0
) -> tuple[dict[str, Tensor], Report]:
    counts, state = count_update(value, tables, update), value.initial()
    report = update_gradient(
        policy, value, tables, update, counts, state, passes=passes, silent=None, load_balance=load_balance
    )
    return gradients(policy), report


def routes_of(policy: Policy, batch: Batch) -> Routes:
    """The routes that an engine with the policy's own weights would record, each row alone."""
    texts = Tables.from_batch(batch, CPU).texts
    wide, deep, first = batch.texts.prompts.shape[1], batch.texts.tokens.shape[1], batch.texts.prompts.numel()
    tokens = torch.full((first + batch.texts.tokens.numel(),), -1)
    experts = torch.zeros(len(tokens), 2, 2, dtype=torch.uint8)
    for row in rows_with_tokens(texts):
        group = int(batch.texts.group[row])
        places = [group * wide + p for p in range(int(batch.texts.prompt_lengths[group]))]
        places += [first + row * deep + t for t in range(int(batch.texts.lengths[row]) - 1)]
        experts[places] = chosen_by(plain_logits(policy, texts, row)).to(torch.uint8)
        tokens[places] = whole(texts, row)[:-1]
    return Routes(tokens=tokens, experts=experts, count=4)


class Forcing:
    """Returns the experts of one row after the other, for a model that reads one whole row at a time."""

    def __init__(self, policy: Policy, batch: Batch, rows: Sequence[int]) -> None:
        texts = Tables.from_batch(batch, CPU).texts
        spare = torch.tensor([[[0, 1], [0, 1]]])
        self.tables = []
        for row in rows:
            experts = chosen_by(plain_logits(policy, texts, row)) if texts.lengths[row] else None
            # The model reads the last token too, the trainer does not. No log-prob depends on it.
            self.tables.append(None if experts is None else torch.cat([experts, spare]))
        self.calls = 0

    def __call__(self, layer: int) -> Tensor | None:
        table = self.tables[self.calls // 2]
        self.calls += 1
        return None if table is None else table[:, layer]


def directions_of(tables: Tables) -> Directions:
    return Directions(replay=tables.replay, old=tables.old_experts)
