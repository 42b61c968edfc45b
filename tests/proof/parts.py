"""Every registered part beside an independent reference: in an algorithm of `members.py`, or on a host here.

`tests/objectives/test_registry.py` walks the registry, so that a part without a case is noticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from legato.algorithms.override import parts_of
from legato.core.parts import registry_of
from tests.proof.hosts import HOSTS
from tests.proof.members import MEMBERS, build_member, expected
from tests.reference import advantages, corrections, objectives, penalties, selections
from tests.reference.batch import Batch, Result, Rows


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A part in an algorithm, and what the reference says of it. `further`: keywords of `legato.loss` besides."""

    name: str
    reference: Callable[[Batch], Result]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    unit: str = "sequence"
    wild: bool = True
    further: Mapping[str, Any] = field(default_factory=dict)

    def algorithm(self) -> Any:
        return build_member(self.name, dict(self.overrides))


def add_to_host(host: str, part: str, fields: Mapping[str, Any], reference: Callable[[Batch], Result], **more: Any) -> Proof:
    """A part of a slot of several, added to a host: `part` is "trust.opsm", "corrections.tis" ..."""
    return Proof(
        name=host,
        reference=reference,
        overrides={f"objective.{part}.{name}": value for name, value in fields.items()},
        **more,
    )


def with_weight(host: str, weight: Callable[[Batch], Rows]) -> Callable[[Batch], Result]:
    """The policy term of a host under a weight per token."""
    return lambda batch: HOSTS[host].under(batch, weight(batch))


def without_rejected(host: str, survivors: Callable[[Batch], set[int]]) -> Callable[[Batch], Result]:
    """The policy term of a host without the rows that a part rejects."""
    return with_weight(host, lambda batch: corrections.keep_rows(batch, survivors(batch)))


def with_penalty(host: str, penalty: Callable[[Batch, Rows], Result]) -> Callable[[Batch], Result]:
    """The policy term of a host and a penalty under the same aggregation."""
    return lambda batch: HOSTS[host].under(batch) + penalty(batch, HOSTS[host].aggregate(batch))


def with_dual_clip(batch: Batch) -> Result:
    weight, log_ratio = HOSTS["grpo"].aggregate(batch), HOSTS["grpo"].log_ratio(batch)
    return objectives.clipped_tokens(batch, weight, log_ratio, 0.2, 0.2, dual_cap=1.5)


def without_candidates(batch: Batch) -> Rows:
    return selections.drop_tokens(batch, selections.covariance_candidates(batch, 0.2, 0.2, 0.1, 2.0))


def uncertain_half(batch: Batch) -> Rows:
    """The tokens at or above the median of the entropies, by linear interpolation between order statistics."""
    entropies = sorted(batch.entropy[row][position] for row, position in batch.tokens())
    place = 0.5 * (len(entropies) - 1)
    below, share = int(place), place - int(place)
    median = entropies[below] + share * (entropies[min(below + 1, len(entropies) - 1)] - entropies[below])
    chosen = [(row, position) for row, position in batch.tokens() if batch.entropy[row][position] >= median]
    return selections.keep_tokens(batch, chosen)


def with_kl_cov(batch: Batch) -> Result:
    weight, log_ratio = HOSTS["srpo"].aggregate(batch), HOSTS["srpo"].log_ratio(batch)
    selected = selections.top_covariance_tokens(batch, int(0.31 * batch.token_count()))
    return objectives.unclipped_tokens(batch, weight, log_ratio) + penalties.kl_cov(batch, weight, selected, 0.7)


def with_entropy(batch: Batch) -> Result:
    policy = HOSTS["gspo"].under(batch)
    return Result(policy.loss + penalties.entropy_bonus(batch, 0.05)[0], policy.gradient)


PROOFS: dict[tuple[str, str], Proof] = {
    ("ratio", "length-power"): Proof(
        name="gspo",
        overrides={"objective.ratio": "length-power", "objective.ratio.exponent": 0.5},
        reference=lambda batch: objectives.length_powers(batch, HOSTS["gspo"].aggregate(batch), 0.5, 3e-4, 4e-4),
    ),
    ("trust", "dual-clip"): add_to_host("grpo", "trust.dual-clip", {"cap": 1.5}, with_dual_clip),
    ("trust", "opsm"): add_to_host(
        "grpo",
        "trust.opsm",
        {"threshold": 0.1},
        without_rejected("grpo", lambda batch: selections.off_policy_survivors(batch, 0.1)),
        needs=("roll",),
    ),
    ("trust", "trm"): add_to_host(
        "grpo",
        "trust.trm",
        {"max_threshold": 0.3, "mean_threshold": 0.08},
        without_rejected("grpo", lambda batch: selections.trust_region_survivors(batch, 0.3, 0.08)),
        needs=("roll",),
    ),
    ("trust", "clip-cov"): add_to_host(
        "srpo",
        "trust.clip-cov",
        {"low": 0.1, "high": 2.0, "selection": "all"},
        with_weight("srpo", without_candidates),
        unit="token",
        wild=False,
    ),
    ("trust", "high-entropy"): add_to_host(
        "dapo", "trust.high-entropy", {"fraction": 0.5}, with_weight("dapo", uncertain_half), needs=("entropy",)
    ),
    **{
        ("correction", name): add_to_host(
            "gspo", f"corrections.{name}", {"level": "token"}, with_weight("gspo", weight), needs=("roll",)
        )
        for name, weight in {
            "tis": lambda batch: corrections.truncated(batch, "token"),
            "mis": lambda batch: corrections.masked_above(batch, "token"),
            "icepop": lambda batch: corrections.masked_outside(batch, "token"),
            "decoupled": lambda batch: corrections.uncapped(batch, "token"),
        }.items()
    },
    **{
        ("correction", name): add_to_host(
            "gspo", f"corrections.{name}", fields, without_rejected("gspo", survivors), needs=("roll",)
        )
        for name, fields, survivors in (
            (
                "geo-rejection",
                {"floor": 0.7, "cap": 1.3},
                lambda batch: corrections.geometric_survivors(batch, 0.7, 1.3),
            ),
            ("k3-rejection", {"threshold": 0.1}, lambda batch: corrections.k3_survivors(batch, 0.1)),
            ("veto", {"floor": 0.5}, lambda batch: corrections.veto_survivors(batch, 0.5)),
        )
    },
    ("penalty", "kl"): add_to_host(
        "gspo", "penalties.kl", {"beta": 0.3}, with_penalty("gspo", lambda b, w: penalties.kl(b, w, 0.3)), needs=("ref",)
    ),
    ("penalty", "kl-straight-through"): add_to_host(
        "gspo",
        "penalties.kl-straight-through",
        {"beta": 0.3},
        with_penalty("gspo", lambda b, w: penalties.kl_straight_through(b, w, 0.3)),
        needs=("ref",),
    ),
    ("penalty", "kl-ratio-weighted"): add_to_host(
        "grpo",
        "penalties.kl-ratio-weighted",
        {"beta": 0.3},
        with_penalty("grpo", lambda b, w: penalties.kl_ratio_weighted(b, w, 0.3)),
        needs=("ref",),
        wild=False,
    ),
    ("penalty", "kl-cov"): Proof(
        name="srpo",
        overrides={
            "objective.trust": [],
            "objective.penalties.kl-cov.fraction": 0.31,
            "objective.penalties.kl-cov.beta": 0.7,
        },
        reference=with_kl_cov,
        unit="token",
        wild=False,
    ),
    ("penalty", "entropy"): add_to_host(
        "gspo", "penalties.entropy", {"coefficient": 0.05}, with_entropy, needs=("entropy",)
    ),
    ("penalty", "adaptive-entropy"): add_to_host(
        "gspo",
        "penalties.adaptive-entropy",
        {"target": 0.2},
        with_entropy,
        needs=("entropy",),
        further={"state": {"adaptive-entropy": {"coefficient": 0.05, "active": 1.0}}},
    ),
}
"""Parts that no algorithm of `members.py` holds."""


def proof_of(kind: str, name: str) -> Proof | None:
    """The case of a part: its own, or the first member that holds it."""
    if (kind, name) in PROOFS:
        return PROOFS[kind, name]
    for member, about in MEMBERS.items():
        if any(part.kind == kind and part.name == name for _, part in parts_of(build_member(member))):
            return Proof(name=member, reference=partial(expected, member), needs=about.needs)
    return None


def own_part_names(kind: str) -> list[str]:
    """The parts of a kind that Legato itself registers; a test may have registered others."""
    return [name for name, cls in registry_of(kind).items() if cls.__module__.startswith("legato.")]


# Estimators

REWARDS = [1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 1.0, 0.0]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]
LENGTHS = [4, 3, 2, 5, 2, 2, 3, 3]
TURN = [[0, 0, -1, 1, 2], [0, -1, 1, 2, 2], [0, 1, 1, -1, -1]]
TURN_REWARDS = [[0.2, 0.0, 1.0], [0.0, 0.2, 0.0], [0.2, 0.2, 0.0]]
STATES = [[0, 1, 2], [0, 1, 3], [0, 4, 0]]
VALUES = [[0.2, 0.3, 0.9, 0.4, 0.6], [0.1, 0.5, 0.2, 0.2, 0.3], [0.7, 0.1, 0.4, 0.0, 0.0]]
REACHED = [[0.2, 0.0, 1.0], [0.0, 0.2, 0.0], [0.2, 0.2]]
COMPONENTS = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.5]]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Rewards and what else an estimator reads, its fields, and the advantage of each row or token (0 outside)."""

    expected: list[float] | Rows
    fields: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10


def by_turn(turns: Rows) -> Rows:
    """The number of each turn, for every token of the turn."""
    return [[turns[row][turn] if turn >= 0 else 0.0 for turn in tokens] for row, tokens in enumerate(TURN)]


def gae_by_turn(rewards: list[float]) -> Rows:
    """GAE of each row of TURN with VALUES, not whitened."""
    rows = []
    for row, tokens in enumerate(TURN):
        mask = [turn >= 0 for turn in tokens]
        rows.append(advantages.gae(advantages.token_rewards(rewards[row], mask), VALUES[row], mask))
    return rows


def correct_of_eight(right: float, wrong: float) -> list[float]:
    return [right] * 3 + [wrong] * 5


EIGHT = {"rewards": [1.0] * 3 + [0.0] * 5, "group": [0] * 8}
EPISODES = {"rewards": [1.2, 0.2, 0.4], "group": [0, 0, 0], "turn": TURN, "turn_rewards": TURN_REWARDS}
CREDITS: dict[str, Credit] = {
    "group-z": Credit(expected=advantages.group_z(REWARDS, GROUP)),
    "group-centre": Credit(expected=advantages.group_centre(REWARDS, GROUP)),
    "leave-one-out": Credit(expected=advantages.leave_one_out(REWARDS, GROUP)),
    "group-centre-batch-std": Credit(expected=advantages.group_centre_batch_std(REWARDS, GROUP)),
    "batch-z": Credit(expected=advantages.batch_z(REWARDS, LENGTHS), fields={"unit": "sequence"}, tolerance=1e-6),
    "group-centre-batch-z": Credit(
        expected=advantages.batch_z(advantages.group_centre(REWARDS, GROUP), LENGTHS),
        fields={"unit": "sequence"},
        tolerance=1e-6,
    ),
    "length-weighted": Credit(expected=advantages.length_weighted(REWARDS, GROUP, LENGTHS)),
    "pass-at-k": Credit(expected=correct_of_eight(*advantages.pass_at_k(8, 3, 2)[1:]), fields={"k": 2}, inputs=EIGHT),
    "pass-at-k-reward": Credit(
        expected=correct_of_eight(*advantages.pass_at_k_reward(8, 3, 2)), fields={"k": 2}, inputs=EIGHT
    ),
    "gdpo": Credit(
        expected=advantages.gdpo([list(column) for column in zip(*COMPONENTS, strict=True)], [0] * 4, [1.0, 1.0], 1),
        inputs={"rewards": [1.0, 0.0, 2.0, 0.5], "group": [0] * 4, "components": COMPONENTS},
    ),
    "turn-return": Credit(
        expected=by_turn(advantages.turn_returns(REACHED, [0, 0, 0])), fields={"normalise": "centre"}, inputs=EPISODES
    ),
    "gigpo": Credit(
        expected=by_turn(
            advantages.gigpo([1.2, 0.2, 0.4], REACHED, [row[: len(REACHED[n])] for n, row in enumerate(STATES)], [0, 0, 0])
        ),
        fields={"omega": 1.0, "gamma": 0.95, "normalise": "none"},
        inputs={**EPISODES, "turn_states": STATES},
    ),
    "gae": Credit(
        expected=gae_by_turn([1.2, 0.2, 0.4]),
        fields={"whiten": False},
        inputs={"rewards": [1.2, 0.2, 0.4], "group": [0, 0, 0], "turn": TURN, "values": VALUES},
    ),
}
