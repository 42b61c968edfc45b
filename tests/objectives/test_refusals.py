"""Inputs that `legato.loss` refuses instead of guessing."""

import pytest
import torch

import legato
from tests.proof.batches import keep_fields
from tests.proof.bridge import count, evaluate, signals
from tests.proof.members import build_member
from tests.reference.examples import batch_v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="half precision"):
        evaluate("gspo", keep_fields(batch_v()), dtype=dtype)


def test_gspo_refuses_advantages_that_vary_within_a_row() -> None:
    with pytest.raises(ValueError, match="gspo-token"):
        evaluate("gspo", keep_fields(batch_v("A_tok")), "token")


@pytest.mark.parametrize("name", ["gepo", "dapo", "cispo"])
def test_members_that_use_groups_refuse_a_call_without_them(name: str) -> None:
    keywords = signals(keep_fields(batch_v()))
    del keywords["group"]
    with pytest.raises(ValueError, match="needs group"):
        legato.loss(name, **keywords)


@pytest.mark.parametrize("name", ["rspo", "minirl", "dppo", "turn-gspo", "ppo"])
def test_members_refuse_a_call_without_the_channel_they_read(name: str) -> None:
    with pytest.raises(ValueError, match=r"needs .*read by"):
        evaluate(build_member(name), keep_fields(batch_v()))


@pytest.mark.parametrize(("name", "overrides"), [("dr-grpo", {}), ("fspo", {})])
def test_a_constant_without_a_default_must_be_given(name: str, overrides: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be given|response budget"):
        evaluate(legato.algorithm(name, overrides), keep_fields(batch_v()))


UPDATE_SCOPE = {
    "bapo": ("bapo", {}),
    "clip-cov": ("dapo", {"objective.trust.clip-cov.selection": "all"}),
    "kl-cov": ("dapo", {"objective.penalties.kl-cov.fraction": 0.2}),
}


@pytest.mark.parametrize("case", UPDATE_SCOPE)
def test_members_that_need_the_whole_update_refuse_the_counts_of_another(case: str) -> None:
    name, overrides = UPDATE_SCOPE[case]
    algorithm, batch = legato.algorithm(name, overrides), keep_fields(batch_v())
    own = count(algorithm, batch)
    evaluate(algorithm, batch, counts=own)
    with pytest.raises(ValueError, match="counts"):
        evaluate(algorithm, batch, counts=own + own)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown algorithm"):
        evaluate("gsop", keep_fields(batch_v()))


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        legato.algorithm("gspo", {"objective.trust.clip.hight": 0.1})
