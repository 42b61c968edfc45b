"""The decided defaults of every member, frozen: a change here changes what a name means."""

import pytest

import legato
from legato.algorithms.catalogue import algorithm_names, entry

# name: (trust, aggregate, advantage, updates per step, verified)
DEFAULTS = {
    "gspo": ([("clip", {"low": 3e-4, "high": 4e-4})], "sequence-mean", "group-z", 4, True),
    "gspo-auto": (
        [("auto-clip", {"low": 3e-4, "high": 4e-4, "target": 0.15, "rate": 0.1, "noise_multiple": 3.0, "ceiling": 0.05})],
        *("sequence-mean", "group-z", 4, True),
    ),
    "gspo-token": ([("clip", {"low": 3e-4, "high": 4e-4})], "sequence-mean", "group-z", 4, True),
    "turn-gspo": ([("clip", {"low": 3e-4, "high": 4e-4, "scale": "none"})], "sequence-mean", "group-z", 4, True),
    "grpo": ([("clip", {"low": 0.2, "high": 0.2})], "sequence-mean", "group-z", 4, True),
    "grpo-baseline": ([("clip", {"low": 0.2, "high": 0.27})], "sequence-mean", "group-z", 4, True),
    "dr-grpo": ([("clip", {"low": 0.2, "high": 0.2})], "sequence-sum-over-constant", "group-centre", 4, True),
    "dapo": ([("clip", {"low": 0.2, "high": 0.28})], "group-token-mean", "group-z", 16, True),
    "cispo": ([("weight-clip", {"cap": 5.0, "floor": 0.0})], "group-token-mean", "group-z", 16, True),
    "sapo": ([("soft-gate", {"tau_positive": 1.0, "tau_negative": 1.05})], "sequence-mean", "group-z", 4, True),
    "gmpo": ([("token-log-clip", {"log_low": 0.4, "log_high": 0.4})], "sequence-mean", "group-z", 4, True),
    "rspo": ([("token-log-clip", {"log_low": 0.4, "log_high": 0.4})], "sequence-mean", "group-z", 4, False),
    "srpo": ([("clip", {"low": 0.2, "high": 0.2})], "token-mean", "group-z", 4, False),
    "ppo": ([("clip", {"low": 0.2, "high": 0.2})], "token-mean", "gae", 4, True),
    "reinforce": ([], "sequence-sum", "group-centre", 1, True),
    "rloo": ([], "sequence-sum", "leave-one-out", 1, True),
    "reinforce++": ([("clip", {"low": 0.2, "high": 0.2})], "token-mean", "group-centre-batch-z", 4, True),
    "lite-ppo": ([("clip", {"low": 0.2, "high": 0.2})], "token-mean", "group-centre-batch-std", 4, False),
    "luspo": ([("clip", {"low": 2e-3, "high": 2.5e-3})], "sequence-sum", "group-z", 4, True),
    "fspo": ([("log-clip", {"scale": "sqrt-length", "log_low": None})], "sequence-mean", "group-z", 4, False),
    "gepo": ([("clip", {"low": 0.2, "high": 0.2})], "sequence-mean", "group-z", 4, True),
    "vespo": (
        [("kernel", {"power_positive": 2, "rate_positive": 3, "power_negative": 3, "rate_negative": 2})],
        *("token-mean", "group-z", 4, True),
    ),
    "minirl": ([("mask", {"low": 0.2, "high": 0.27})], "sequence-sum", "group-centre", 4, False),
    "dppo": (
        [("weight-clip", {"cap": 20.0}), ("divergence-mask", {"threshold": 0.15, "divergence": "total-variation"})],
        *("token-mean", "group-centre", 4, True),
    ),
    "bapo": ([("balanced-clip", {"floor": 0.2, "target": 0.5})], "token-mean", "group-z", 4, False),
    "seq-product": ([("clip", {"low": 0.2, "high": 0.2})], "sequence-mean", "group-z", 4, True),
}


def test_the_table_holds_every_name() -> None:
    assert sorted(DEFAULTS) == sorted(algorithm_names())


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_the_decided_ones(name: str) -> None:
    trust, aggregate, advantage, updates, verified = DEFAULTS[name]
    value = legato.algorithm(name)
    assert [part.name for part in value.objective.trust] == [part for part, _ in trust]
    for part, (_, fields) in zip(value.objective.trust, trust, strict=True):
        assert {field: getattr(part, field) for field in fields} == fields
    assert (value.aggregate.name, value.advantage.name) == (aggregate, advantage)
    assert value.aggregate.denominator == "all"
    assert value.settings["training.updates_per_step"] == updates
    assert entry(name).verified is verified


def test_the_other_defaults_are_the_decided_ones() -> None:
    group_z, gae = legato.algorithm("gspo").advantage, legato.algorithm("ppo").advantage
    assert (group_z.ddof, group_z.epsilon) == (0, 1e-6)
    assert (gae.gamma, gae.lam, gae.whiten, gae.reward_kl) == (1.0, 0.95, True, 0.0)
    (value,) = legato.algorithm("ppo").objective.penalties
    assert (value.clip, value.coefficient) == (0.5, 0.5)
    assert legato.algorithm("reinforce++").advantage.unit == "sequence"
    assert legato.algorithm("lite-ppo").advantage.ddof == 0
    assert legato.algorithm("minirl").objective.corrections[0].cap == 5.0
    assert legato.algorithm("dppo").objective.ratio.anchor == "sampler"
    assert legato.algorithm("rspo").objective.corrections[0].floor == 0.8
    assert legato.algorithm("rspo").objective.corrections[0].placement == "before-clip"
    assert [part.name for part in legato.algorithm("dapo").filters] == ["zero-variance"]
    assert legato.algorithm("dapo").settings["reward.overlong.cache_share"] == 0.2
    assert legato.algorithm("srpo").settings["task.stages"] == 2
    assert legato.algorithm("gspo").objective.ratio.limit is None
    assert legato.algorithm("grpo").objective.ratio.limit == 20.0
    assert not any(legato.algorithm(name).objective.penalties for name in algorithm_names() if name != "ppo")
