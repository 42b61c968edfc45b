"""Routing in an update: what is measured, what replay forces, what RSPO weighs with, and the load-balance loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import legato
from legato.algorithms.algorithm import Algorithm
from legato.core.batch import Batch
from legato.core.rollout import Routes
from legato.diagnostics.routing import router_shift
from legato.policy.adapters import Lora
from legato.policy.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.policy.reference import Reference
from legato.training.anchor import anchor, needs_router_shift
from legato.training.passes import Report, count_update, update_gradient
from legato.training.plan import Update, plan
from legato.training.tables import Tables, needs
from policy.exact import Words, family, plain_tables
from policy.routes import FAMILIES, as_published, chosen_by, forced, overheard, plain_logits, present, sets, whole
from training.steps import batch_by_hand, furthest, gradients, in_one_graph, moved, one_update, size_of

CPU = torch.device("cpu")
WIDE = {"objective.trust.clip.low": 2e-2, "objective.trust.clip.high": 3e-2}
LORA_WARNING = "ignore:The following (rank|alpha)_pattern keys"  # peft's own, over fused experts


def gspo() -> Algorithm:
    return legato.algorithm("gspo", WIDE)


def exact_policy(name: str = "qwen3-moe", **changes: Any) -> Policy:
    policy = load_policy(family(name), Loading(dtype="float64", device="cpu", **changes), tokenizer=Words())
    if changes.get("lora") is not None:
        for parameter in policy.parameters().values():
            parameter.data = parameter.data.double()
        moved(policy, 0.1, seed=11)
    return policy


def twin(of: Policy, name: str, changes: dict[str, Any]) -> Policy:
    """The same policy with every layer computed once, for the model that is told by hand."""
    made = exact_policy(name, **{**changes, "gradient_checkpointing": False})
    with torch.no_grad():
        for left, right in zip(made.model.parameters(), of.model.parameters(), strict=True):
            left.copy_(right)
    return made


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
    """As a step of the trainer prepares them; then the policy moves."""
    reference = Reference.of(policy) if "ref_logprobs" in needs(value) else None
    tables = Tables.of(batch, CPU).with_routes(policy.routers, replay)
    shift = needs_router_shift(value)
    given: dict[str, Any] = {"choice": choice, "skip_first": skip_first, "replay": replay, "shift": shift}
    tables = anchor(tables, policy, reference, updates, **given).with_advantages(value)
    if move:
        moved(policy, move)
    return tables


def updated(
    policy: Policy, value: Algorithm, tables: Tables, update: Update, *, passes: int = 1, load_balance: float = 0.0
) -> tuple[dict[str, Tensor], Report]:
    counts, state = count_update(value, tables, update), value.initial()
    report = update_gradient(
        policy, value, tables, update, counts, state, passes=passes, silent=None, load_balance=load_balance
    )
    return gradients(policy), report


def routes_of(policy: Policy, batch: Batch) -> Routes:
    """What an engine that is the policy itself would have recorded, every row alone."""
    texts = Tables.of(batch, CPU).texts
    wide, deep, first = batch.prompts.shape[1], batch.tokens.shape[1], batch.prompts.numel()
    tokens = torch.full((first + batch.tokens.numel(),), -1)
    experts = torch.zeros(len(tokens), 2, 2, dtype=torch.uint8)
    for row in present(texts):
        group = int(batch.group[row])
        places = [group * wide + p for p in range(int(batch.prompt_lengths[group]))]
        places += [first + row * deep + t for t in range(int(batch.lengths[row]) - 1)]
        experts[places] = chosen_by(plain_logits(policy, texts, row)).to(torch.uint8)
        tokens[places] = whole(texts, row)[:-1]
    return Routes(tokens=tokens, experts=experts, count=4)


class Forcing:
    """The choices of each row in turn, for a model that is given one whole row at a time."""

    def __init__(self, policy: Policy, batch: Batch, rows: Sequence[int]) -> None:
        texts = Tables.of(batch, CPU).texts
        spare = torch.tensor([[[0, 1], [0, 1]]])
        self.tables = []
        for row in rows:
            found = chosen_by(plain_logits(policy, texts, row)) if texts.lengths[row] else None
            # The last token is read here and not by the trainer; nothing that is wanted comes after it.
            self.tables.append(None if found is None else torch.cat([found, spare]))
        self.calls = 0

    def __call__(self, layer: int) -> Tensor | None:
        table = self.tables[self.calls // 2]
        self.calls += 1
        return None if table is None else table[:, layer]


def test_nothing_flips_and_gamma_is_1_at_equal_weights() -> None:
    value, batch = gspo(), batch_by_hand()
    for packing in (True, False):
        policy = exact_policy(packing=packing)
        step = plan(batch, updates=2, epochs=1, tokens_per_pack=20, seed=2, packing=packing)
        for skip_first in (False, True):
            tables = tables_of(policy, value, batch, step, skip_first=skip_first)
            for update in step:
                for passes in (1, 2):
                    report = updated(policy, value, tables, update, passes=passes)[1].sums.report()
                    assert report["router/flip_mean"] == report["router/any_flip"] == report["router/jaccard"] == 0.0
                    assert report["router/shift_mean"] == 1.0 and report["router/floored"] == 0.0
                    assert report["router/flip_layer0"] == report["router/flip_layer1"] == 0.0
                    assert 0.0 < report["router/entropy"] < 1.387 and 1.0 <= report["router/load_max"] <= 2.0
                    assert "router/replay_missing" not in report and "router/mismatch_flip_mean" not in report


def by_loops(policy: Policy, tables: Tables, before: dict[int, Tensor]) -> dict[str, float]:
    """The measures of routing in plain loops, from the router logits of every row alone before and now."""
    batch, texts = tables.batch, tables.texts
    flips, any_flips, distances, gammas, entropies, per_token, moved_by = [], [], [], [], [], [], []
    new = plain_tables(policy, texts, range(len(batch)))[0].detach()
    assert tables.old_logprobs is not None
    chosen = [[0] * 4, [0] * 4]
    for row in present(texts):
        start = int(batch.prompt_lengths[batch.group[row]]) - 1
        now = plain_logits(policy, texts, row)
        for t in range(int(batch.lengths[row])):
            if not batch.mask[row, t]:
                continue
            old_sets, new_sets = (set_of(logits[start + t]) for logits in (before[row], now))
            here, gap = [], 0.0
            for layer in range(2):
                both = len(old_sets[layer] & new_sets[layer])
                here.append(1 - both / 2)
                any_flips.append(float(both < 2))
                distances.append(1 - both / (4 - both))
                old_lp, new_lp = (x[start + t, layer].log_softmax(-1) for x in (before[row], now))
                gap += sum(abs(float(new_lp[e] - old_lp[e])) for e in old_sets[layer]) / 4
                entropies.append(-float((new_lp.exp() * new_lp).sum()))
                for expert in new_sets[layer]:
                    chosen[layer][expert] += 1
            flips.append(here)
            gammas.append(float(torch.tensor(-gap, dtype=torch.float64).exp()))
            per_token.append(sum(here) / 2)
            moved_by.append(abs(float(new[row, t] - tables.old_logprobs[row, t])))
    table = torch.tensor(flips, dtype=torch.float64)
    return {
        "router/flip_mean": float(table.mean()),
        "router/flip_layer0": float(table[:, 0].mean()),
        "router/flip_layer1": float(table[:, 1].mean()),
        "router/any_flip": sum(any_flips) / len(any_flips),
        "router/jaccard": sum(distances) / len(distances),
        "router/shift_mean": sum(gammas) / len(gammas),
        "router/floored": sum(g < 0.8 for g in gammas) / len(gammas),
        "router/entropy": sum(entropies) / len(entropies),
        "router/load_max": sum(4 * max(layer) / sum(layer) for layer in chosen) / 2,
        "router/load_unused": sum(count == 0 for layer in chosen for count in layer) / 8,
        "router/flip_token_correlation": float(torch.corrcoef(torch.tensor([per_token, moved_by]).double())[0, 1]),
    }


def set_of(logits: Tensor) -> list[set[int]]:
    return [set(layer) for layer in chosen_by(logits).tolist()]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("packing", "name"), [(True, "qwen3-moe"), (False, "qwen3-moe"), (True, "gpt-oss"), (True, "olmoe")]
)
def test_what_is_measured_is_what_loops_over_single_rows_find(name: str, packing: bool, passes: int) -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy(name, packing=packing)
    update = one_update(batch, 25, packing)
    tables = tables_of(policy, value, batch, [update])
    before = {row: plain_logits(policy, tables.texts, row) for row in present(tables.texts)}
    moved(policy, 0.08)
    expected = by_loops(policy, tables, before)
    found = updated(policy, value, tables, update, passes=passes)[1].sums.report()
    assert expected["router/flip_mean"] > 0.05 and expected["router/shift_mean"] < 0.99
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert -1 <= found["router/flip_sequence_correlation"] <= 1


def test_the_first_update_under_r2_changes_no_bit() -> None:
    value, batch = legato.algorithm("grpo"), batch_by_hand()
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.float(), temperature=batch.temperature.float())
    for dtype in (torch.float32, torch.bfloat16):
        for name in FAMILIES:
            policy = load_policy(as_published(name, dtype), Loading(dtype="float32", device="cpu"), tokenizer=Words())
            update = one_update(batch, 30)
            plain = updated(policy, value, tables_of(policy, value, batch, [update]), update)
            for passes in (1, 2):
                tables = tables_of(policy, value, batch, [update], replay="R2")
                found, report = updated(policy, value, tables, update, passes=passes)
                if passes == 1:
                    assert size_of(found) > 0 and all(torch.equal(found[key], plain[0][key]) for key in found), name
                numbers = report.sums.report()
                assert numbers["router/replay_missing"] == numbers["router/flip_mean"] == 0.0
                assert numbers["ratio/sequence_min"] == numbers["ratio/sequence_max"] == 1.0


@pytest.mark.filterwarnings(LORA_WARNING)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("qwen3-moe", {"packing": False}),
        ("qwen3-moe", {"gradient_checkpointing": True}),
        ("gpt-oss", {"gradient_checkpointing": True, "packing": False}),
        ("qwen3-moe", {"lora": Lora(rank=3, alpha=5.0)}),
        ("mixtral", {"lora": Lora(rank=3, alpha=5.0), "gradient_checkpointing": True}),
    ],
)
def test_gradients_under_r2_are_those_of_a_model_with_the_old_routes_built_in(
    name: str, changes: dict[str, Any], passes: int
) -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy(name, **changes)
    update = one_update(batch, 25, policy.packing)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    rows, plain = update.rows.tolist(), twin(policy, name, changes)
    old_routes = Forcing(plain, batch, rows)
    moved(policy, 0.05)
    moved(plain, 0.05)
    free = in_one_graph(plain, value, tables, rows)
    with forced(plain, name, old_routes):
        expected = in_one_graph(plain, value, tables, rows)
    assert old_routes.calls == 2 * len(rows)
    found, report = updated(policy, value, tables, update, passes=passes)
    numbers = report.sums.report()
    assert furthest(found, expected) < 1e-10 < 1e-5 < furthest(expected, free)
    assert numbers["router/flip_mean"] > 0.02 and numbers["router/replay_missing"] == 0.0
    router = next(key for key in found if "gate." in key or "router." in key)
    assert float(found[router].abs().max()) > 1e-6


def test_after_a_move_r2_uses_the_old_experts_with_gates_of_the_live_logits() -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy()
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    old = Forcing(policy, batch, present(tables.texts))
    moved(policy, 0.1)
    assert tables.replay is not None and policy.routers is not None
    used: list[Any] = []
    with overheard(policy.model) as logits:
        handles = [
            layer.mlp.experts.register_forward_pre_hook(lambda _, given: used.append(given[1:]))
            for layer in policy.body.model.layers
        ]
        packed = policy.pack(tables.texts, update.rows)
        policy.scored(tables.texts, update.rows, replace(directions_of(tables), record=False))
        for handle in handles:
            handle.remove()
    recorded = tables.replay.experts[packed.source]
    live = 0
    for layer, (experts, gates) in enumerate(used):
        assert torch.equal(experts, recorded[:, layer].long())
        own = chosen_by(logits[layer])
        live += sum(a != b for a, b in zip(sets(own), sets(experts), strict=True))
        chosen = logits[layer].softmax(-1).gather(-1, experts)
        assert torch.allclose(gates, chosen / chosen.sum(-1, keepdim=True), atol=1e-14)
    assert live > 5
    assert sets(torch.cat([t[:-1] for t in old.tables if t is not None]).flatten(0, 1)) != []


def directions_of(tables: Tables) -> Any:
    from legato.policy.routing import Directions

    return Directions(replay=tables.replay, old=tables.old_experts)


def test_r3_with_an_engine_that_is_the_trainer_changes_nothing() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    batch = replace(batch, routes=routes_of(policy, batch))
    update = one_update(batch, 25)
    plain = tables_of(policy, value, batch, [update])
    replayed = tables_of(policy, value, batch, [update], replay="R3")
    assert plain.old_logprobs is not None and replayed.old_logprobs is not None
    assert torch.equal(plain.old_logprobs, replayed.old_logprobs)
    without, _ = updated(policy, value, plain, update)
    found, report = updated(policy, value, replayed, update)
    numbers = report.sums.report()
    assert size_of(found) > 0 and all(torch.equal(found[key], without[key]) for key in found)
    assert numbers["router/replay_missing"] == numbers["router/mismatch_flip_mean"] == 0.0
    assert numbers["router/mismatch_any_flip"] == numbers["router/mismatch_flip_layer1"] == 0.0


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("packing", [True, False])
def test_r3_forces_the_routes_of_the_engine_on_old_and_new_and_not_on_the_reference(packing: bool, skip_first: bool) -> None:
    value = legato.algorithm("grpo", {"objective.penalties.kl.beta": 0.3})
    policy, batch = exact_policy(packing=packing), batch_by_hand()
    rows = list(range(len(batch)))
    unforced = plain_tables(policy, Tables.of(batch, CPU).texts, rows)[0].detach()
    engine = exact_policy(packing=packing)
    moved(engine, 0.1, seed=21)
    batch = replace(batch, routes=routes_of(engine, batch))
    update = one_update(batch, 25, packing)
    tables = tables_of(policy, value, batch, [update], replay="R3", skip_first=skip_first)
    with forced(policy, "qwen3-moe", Forcing(engine, batch, rows)):
        old = plain_tables(policy, tables.texts, rows)[0].detach()
    assert tables.old_logprobs is not None and tables.ref_logprobs is not None
    inside = batch.mask
    if not skip_first:
        assert torch.allclose(tables.old_logprobs[inside], old[inside], atol=1e-12)
    assert torch.allclose(tables.ref_logprobs[inside], unforced[inside], atol=1e-12)
    assert not torch.allclose(old[inside], unforced[inside], atol=1e-4)
    if not skip_first:
        moved(policy, 0.02)
    anchored = replace(tables, old_logprobs=old) if skip_first else tables
    with forced(policy, "qwen3-moe", Forcing(engine, batch, rows)):
        expected = in_one_graph(policy, value, anchored, rows)
    for passes in (1, 2):
        found, report = updated(policy, value, tables, update, passes=passes)
        assert furthest(found, expected) < 1e-10
        assert report.sums.report()["router/mismatch_flip_mean"] > 0.02


def test_records_that_are_missing_fall_through_and_are_counted() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    routes = routes_of(policy, batch)
    routes.tokens[batch.prompts.numel() :] = -1
    batch = replace(batch, routes=routes)
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], replay="R3")
    numbers = updated(policy, value, tables, update)[1].sums.report()
    prompts, responses = int(batch.prompt_lengths.sum()), int((batch.lengths - 1).clamp(min=0).sum())
    assert numbers["router/replay_missing"] == pytest.approx(responses / (prompts + responses))


def test_an_engine_of_another_model_is_refused() -> None:
    policy, batch = exact_policy(), batch_by_hand()
    routes = routes_of(policy, batch)
    tables = Tables.of(replace(batch, routes=replace(routes, count=8)), CPU)
    with pytest.raises(ValueError, match="2 of 8 experts in 2 layers, the trainer's model has 2 of 4 in 2"):
        tables.with_routes(policy.routers, "R3")
    three = replace(routes, experts=routes.experts[:, :, :1])
    with pytest.raises(ValueError, match="1 of 4 experts in 2 layers"):
        Tables.of(replace(batch, routes=three), CPU).with_routes(policy.routers, "off")
    with pytest.raises(ValueError, match="'R3' replays the routes of the engine, but it recorded none"):
        Tables.of(batch, CPU).with_routes(policy.routers, "R3")


def test_the_engine_as_anchor_is_the_old_policy_of_the_flips() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    batch = replace(batch, routes=routes_of(policy, batch), sampler_logprobs=batch.sampler_logprobs.nan_to_num(-1.0))
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], choice="sampler")
    numbers = updated(policy, value, tables, update)[1].sums.report()
    assert numbers["router/flip_mean"] == numbers["router/mismatch_flip_mean"] == 0.0
    assert "router/shift_mean" not in numbers
    moved(policy, 0.1)
    later = replace(update, index=1)
    numbers = updated(policy, value, tables, later)[1].sums.report()
    assert numbers["router/flip_mean"] > 0.02 and "router/mismatch_flip_mean" not in numbers


ROUTER_SHIFT: dict[str, tuple[str, dict[str, Any]]] = {
    "rspo": ("rspo", {}),
    "grpo with router-shift": ("grpo", {"objective.corrections.router-shift.floor": 0.7}),
    "gspo with router-shift": ("gspo", {**WIDE, "objective.corrections.router-shift.floor": 0.9}),
    "gspo with router-shift after the clip": (
        "gspo",
        {**WIDE, "objective.corrections.router-shift.placement": "after-clip"},
    ),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("choice", ["recompute", "sampler"])
@pytest.mark.parametrize("name", ROUTER_SHIFT)
def test_router_shift_weighs_with_the_routers_of_old_and_new_at_the_predicting_position(
    name: str, choice: str, passes: int
) -> None:
    base, own = ROUTER_SHIFT[name]
    value, policy, batch = legato.algorithm(base, own), exact_policy(), batch_by_hand()
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.nan_to_num(-1.0) / 100 - 3.5)
    update = one_update(batch, 25)
    tables = tables_of(policy, value, batch, [update], choice=choice)
    assert (tables.old_logprobs is tables.sampler_logprobs) is (choice == "sampler")
    before = {row: plain_logits(policy, tables.texts, row).log_softmax(-1) for row in present(tables.texts)}
    moved(policy, 0.03)
    gamma = torch.ones(batch.mask.shape, dtype=torch.float64)
    for row, old in before.items():
        start = int(batch.prompt_lengths[batch.group[row]]) - 1
        new, experts = plain_logits(policy, tables.texts, row).log_softmax(-1), chosen_by(old)
        shift = router_shift(old.gather(-1, experts), new.gather(-1, experts))
        gamma[row, : batch.lengths[row]] = shift[start:]
    assert 0.0 < float((gamma[batch.mask] < 0.8).double().mean()) < 1.0
    expected = shifted(policy, value, tables, update, gamma)
    found, report = updated(policy, value, tables, update, passes=passes)
    assert furthest(found, expected) < 1e-10 < size_of(expected)
    assert furthest(expected, shifted(policy, value, tables, update, torch.ones_like(gamma))) > 1e-6
    numbers = report.sums.report()
    assert numbers["router/shift_mean"] == pytest.approx(float(gamma[batch.mask].mean()), abs=1e-9)
    assert numbers["router/floored"] == pytest.approx(float((gamma[batch.mask] < 0.8).double().mean()))


def shifted(policy: Policy, value: Algorithm, tables: Tables, update: Update, gamma: Tensor) -> dict[str, Tensor]:
    """The gradient in one graph, gamma given."""
    rows = update.rows
    logprobs, _, _ = plain_tables(policy, tables.texts, rows.tolist())
    assert tables.advantages is not None and tables.old_logprobs is not None
    outcome = legato.loss(
        value,
        logprobs=logprobs,
        old_logprobs=tables.old_logprobs[rows],
        advantages=tables.advantages[rows, 0],
        mask=tables.batch.mask[rows],
        group=tables.batch.group[rows],
        router_shift=gamma[rows],
    )
    outcome.loss.backward()
    return gradients(policy)


def test_rspo_is_gmpo_before_anything_has_moved() -> None:
    policy, batch = exact_policy(), batch_by_hand()
    update = one_update(batch)
    found = []
    for name in ("rspo", "gmpo"):
        value = legato.algorithm(name)
        found.append(updated(policy, value, tables_of(policy, value, batch, [update]), update)[0])
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0]) and size_of(found[0]) > 1e-4


def balance_in_one_graph(policy: Policy, name: str, tables: Tables, rows: Sequence[int], scale: float) -> dict[str, Tensor]:
    """The gradient of the load-balance loss alone: all router logits of the update in one float64 graph."""
    texts, every = tables.texts, []
    for row in rows:
        if not texts.lengths[row]:
            continue
        with overheard(policy.model) as found:
            policy.model(input_ids=whole(texts, row)[:-1][None], use_cache=False)
        start = int(texts.prompt_lengths[texts.group[row]]) - 1
        every.append(torch.stack(found, 1)[start:][tables.batch.mask[row, : texts.lengths[row]]])
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


@pytest.mark.filterwarnings(LORA_WARNING)
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
    plain = twin(policy, name, changes)
    objective = in_one_graph(plain, value, tables, rows)
    balance = balance_in_one_graph(plain, name, tables, rows, 0.05)
    found, report = updated(policy, value, tables, update, load_balance=0.05)
    assert report.passes == 2 and size_of(balance) > 1e-5
    assert furthest(found, {key: objective[key] + balance[key] for key in found}) < 1e-10
    assert report.sums.report()["router/balance"] > 1.0


def test_the_shares_of_the_balance_are_of_the_experts_that_were_used() -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy()
    update = one_update(batch, 25)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    assert tables.old_experts is not None
    counts = torch.stack(
        [torch.bincount(tables.old_experts[batch.mask][:, m].flatten().long(), minlength=4) for m in (0, 1)]
    )
    moved(policy, 0.1)
    _, traffic = policy.scored(tables.texts, update.rows, directions_of(tables))
    assert traffic is not None and torch.equal(traffic.choices, counts.double())
    _, live = policy.scored(tables.texts, update.rows, replace(directions_of(tables), replay=None))
    assert live is not None and not torch.equal(live.choices, counts.double())
