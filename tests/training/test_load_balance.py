"""The load-balance loss is that of one graph over the whole update, whatever the split."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.policy.model.adapters import Lora
from legato.policy.policy import Policy
from legato.training.tables import Tables
from tests.policy.routes import chosen_by, record_router_logits, whole
from tests.training.routed import (
    copy_policy,
    directions_of,
    exact_policy,
    gspo,
    run_update,
    tables_of,
)
from tests.training.steps import (
    batch_by_hand,
    gradients,
    graph_gradient,
    largest_entry,
    max_difference,
    move_weights,
    one_update,
)


def balance_in_one_graph(policy: Policy, name: str, tables: Tables, rows: Sequence[int], scale: float) -> dict[str, Tensor]:
    """The gradient of the load-balance loss alone: all router logits of the update in one float64 graph."""
    texts, every = tables.texts, []
    for row in rows:
        if not texts.lengths[row]:
            continue
        with record_router_logits(policy.model) as by_layer:
            policy.model(input_ids=whole(texts, row)[:-1][None], use_cache=False)
        start = int(texts.prompt_lengths[texts.group[row]]) - 1
        every.append(torch.stack(by_layer, 1)[start:][tables.texts.mask[row, : texts.lengths[row]]])
    logits = torch.cat(every)
    shares = torch.zeros(2, 4, dtype=torch.float64)
    for token in chosen_by(logits).tolist():
        for layer, experts in enumerate(token):
            for expert in experts:
                shares[layer, expert] += 1 / (2 * len(logits))
    loss = scale * 4 * (shares * logits.softmax(-1).mean(0)).sum(-1).mean()
    loss.backward()
    assert float(loss.detach()) > scale
    return gradients(policy)


@pytest.mark.parametrize(
    ("name", "changes", "tokens_per_pack"),
    [
        ("qwen3-moe", {}, 10**6),
        ("qwen3-moe", {}, 1),
        ("qwen3-moe", {}, 25),
        ("qwen3-moe", {"packing": False}, 25),
        ("qwen3-moe", {"gradient_checkpointing": True}, 25),
        ("qwen3-moe", {"lora": Lora(rank=3, alpha=5.0)}, 25),
        ("gpt-oss", {}, 25),
        ("mixtral", {"gradient_checkpointing": True}, 25),
        ("olmoe", {}, 25),
        ("qwen2-moe", {}, 25),
    ],
)
def test_the_load_balance_loss_is_that_of_one_graph_over_the_whole_update(
    name: str, changes: dict[str, Any], tokens_per_pack: int
) -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy(name, **changes)
    update = one_update(batch, tokens_per_pack, policy.packing)
    tables = tables_of(policy, value, batch, [update], move=3e-3)
    rows = update.rows.tolist()
    plain = copy_policy(policy, name, changes)
    objective = graph_gradient(plain, value, tables, rows)
    balance = balance_in_one_graph(plain, name, tables, rows, 0.05)
    gradient, report = run_update(policy, value, tables, update, load_balance=0.05)
    assert report.passes == 2 and largest_entry(balance) > 1e-5
    assert max_difference(gradient, {key: objective[key] + balance[key] for key in gradient}) < 1e-10
    assert report.sums.report()["router/balance"] > 1.0


def test_the_shares_of_the_balance_are_of_the_experts_that_were_used() -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy()
    update = one_update(batch, 25)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    assert tables.old_experts is not None
    counts = torch.stack(
        [torch.bincount(tables.old_experts.values[batch.texts.mask][:, m].flatten().long(), minlength=4) for m in (0, 1)]
    )
    move_weights(policy, 0.1)
    traffic = policy.score(tables.texts, update.rows, replace(directions_of(tables), count=True)).traffic
    assert traffic is not None and traffic.choices is not None
    assert torch.equal(traffic.choices, counts.double())
    live = policy.score(tables.texts, update.rows, replace(directions_of(tables), replay=None, count=True)).traffic
    assert live is not None and live.choices is not None
    assert not torch.equal(live.choices, counts.double())
