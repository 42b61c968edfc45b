"""A hand-made batch of rollouts, and the gradient of an update computed in one graph over all its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import legato
from legato.algorithms.algorithm import Algorithm
from legato.core.batch import Batch
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.training.anchor import anchor
from legato.training.plan import Update, plan
from legato.training.tables import Tables, needs
from legato.training.update import Report, count_update, update_gradient
from tests.policy.exact import plain_tables, ragged

WHOLE = 10**6


def batch_by_hand(seed: int = 0, groups: int = 4, each: int = 3, longest: int = 9) -> Batch:
    """A ragged batch with empty responses, tool tokens (NaN log-probs), two turns and a flat group (advantage 0)."""
    texts = ragged(seed, groups, each, longest)
    generator = torch.Generator().manual_seed(seed + 100)
    rows = len(texts.tokens)
    inside = torch.arange(longest) < texts.lengths[:, None]
    mask = texts.mask & inside
    rewards = torch.rand(rows, generator=generator, dtype=torch.float64)
    rewards[each : 2 * each] = 0.25
    return Batch(
        texts=replace(texts, mask=mask),
        turn=torch.where(mask, (torch.arange(longest) >= 4).long().expand(rows, -1), -1),
        version=torch.zeros_like(texts.tokens),
        sampler_logprobs=torch.where(mask, -4 * torch.rand(mask.shape, generator=generator, dtype=torch.float64), torch.nan),
        kept_logmass=None,
        rewards=rewards,
        accuracy=(rewards > 0.4).double(),
        components={},
        truncated=torch.zeros(rows, dtype=torch.bool),
        rollout_id=torch.arange(rows) + 1000,
    )


def move_weights(policy: Policy, size: float, seed: int = 7) -> None:
    """Move every trained weight a little, as updates would have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def prepare_tables(
    policy: Policy,
    algorithm: Algorithm,
    batch: Batch,
    updates: Sequence[Update],
    *,
    skip_first: bool = False,
    move: float = 0.0,
    old_from: float = 0.0,
) -> Tables:
    """Tables with old log-probs and advantages. The policy moves by `old_from` before scoring and by `move` after it."""
    reference = None
    if "ref_logprobs" in needs(algorithm) | set(algorithm.advantage.needs()):
        reference = Reference.from_policy(policy)
    if old_from:
        move_weights(policy, old_from, seed=3)
    tables = Tables.from_batch(batch, torch.device("cpu"))
    tables = anchor(tables, policy, reference, updates, choice="recompute", skip_first=skip_first)
    tables = tables.with_advantages(algorithm)
    if "uniform" in needs(algorithm):
        tables = tables.with_uniform(5, 17)
    if move:
        move_weights(policy, move)
    return tables


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradient of every trained parameter, zeros if it has none. The parameters' gradients are cleared."""
    copies = {}
    for name, parameter in policy.parameters().items():
        copies[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        parameter.grad = None
    return copies


def trainer_gradient(
    policy: Policy, algorithm: Algorithm, tables: Tables, update: Update, *, passes: int, silent: Tensor | None = None
) -> tuple[dict[str, Tensor], Report]:
    """The gradient and the report of `update_gradient`."""
    counts = count_update(algorithm, tables, update)
    report = update_gradient(policy, algorithm, tables, update, counts, algorithm.initial(), passes=passes, silent=silent)
    return gradients(policy), report


def graph_gradient(policy: Policy, algorithm: Algorithm, tables: Tables, rows: Sequence[int]) -> dict[str, Tensor]:
    """The gradient of `legato.loss` over the whole update in one backward; the model reads each sequence alone."""
    logprobs, entropy, values = plain_tables(policy, tables.texts, rows)
    index = torch.tensor(list(rows))

    def part(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[index]

    assert tables.advantages is not None
    advantages = tables.advantages[index]
    signals: Mapping[str, Any] = {
        "old_logprobs": part(tables.old_logprobs),
        "ref_logprobs": part(tables.ref_logprobs),
        "sampler_logprobs": part(tables.batch.sampler_logprobs),
        "old_values": part(tables.old_values),
        "returns": part(tables.returns),
        "uniform": part(tables.extra.get("uniform")),
        "turn": part(tables.batch.turn),
        "values": values,
        "entropy": entropy,
        "keep": None if tables.keep is None else tables.keep[index, 0],
    }
    outcome = legato.loss(
        algorithm,
        logprobs=logprobs,
        advantages=advantages[:, 0] if advantages.shape[1] == 1 else advantages,
        mask=tables.texts.mask[index],
        group=tables.texts.group[index],
        state=algorithm.initial() or None,
        **signals,
    )
    outcome.loss.backward()
    return gradients(policy)


def max_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest difference of any entry."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def largest_entry(gradient: Mapping[str, Tensor]) -> float:
    """The largest absolute value in a gradient."""
    return max(float(value.abs().max()) for value in gradient.values())


def one_update(batch: Batch, tokens_per_pack: int = WHOLE, packing: bool = True) -> Update:
    (update,) = plan(batch.texts, updates=1, epochs=1, tokens_per_pack=tokens_per_pack, seed=0, packing=packing)
    return update


def drop_old_logprobs(tables: Tables) -> Tables:
    return replace(tables, old_logprobs=None, anchored=None)
