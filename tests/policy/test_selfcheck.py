"""Which log-probs the look at a loaded model takes for the same and which for wrong."""

import pytest
import torch

from legato.policy.model import selfcheck


class Noisy:
    """A stand-in for a policy: its padded rows are right, its packs off by what it is given."""

    name, vocabulary, views = "stand-in", 32, True

    def __init__(self, dtype: torch.dtype, padded: torch.Tensor, packed: torch.Tensor) -> None:
        self.packing, self.notes, self.body = True, list[str](), object()
        self.model = torch.nn.Embedding(32, 4, dtype=dtype)
        self.model.get_input_embeddings = lambda: self.model
        self.padded, self.packed = padded, packed

    def score(self, texts: object, rows: torch.Tensor) -> "Noisy":
        self.logprobs = self.packed if self.packing else self.padded
        return self


RIGHT = torch.full((4, 6), -10.0)


def checked(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, packed: torch.Tensor, padded: torch.Tensor = RIGHT
) -> Noisy:
    monkeypatch.setattr(selfcheck, "_plainly", lambda policy, texts: RIGHT)
    policy = Noisy(dtype, padded, packed)
    selfcheck.check(policy)
    return policy


def one_token(by: float) -> torch.Tensor:
    found = RIGHT.clone()
    found[1, 1] += by
    return found


def test_rounding_of_16_bits_is_no_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 in bfloat16 on a GPU: 0.37 apart at one of 18 tokens, and nearer to float32 than the model's own forward."""
    policy = checked(monkeypatch, torch.bfloat16, one_token(0.37))
    assert policy.packing and policy.views and not policy.notes


@pytest.mark.parametrize("dtype, by", [(torch.bfloat16, 0.4), (torch.float32, 0.002), (torch.float64, 1e-5)])
def test_packs_that_are_wrong_at_every_token_are_not_used(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, by: float
) -> None:
    policy = checked(monkeypatch, dtype, RIGHT + by)
    assert not policy.packing and not policy.views and "cannot be laid out in packs" in policy.notes[0]


def test_one_wrong_token_is_enough_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checked(monkeypatch, torch.float32, one_token(0.1)).views


def test_a_head_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not a linear layer"):
        checked(monkeypatch, torch.bfloat16, RIGHT, RIGHT + 0.5)


def test_log_probs_that_are_not_finite_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checked(monkeypatch, torch.bfloat16, RIGHT * torch.nan).views
