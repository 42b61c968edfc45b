"""Scores of texts are those of a forward of the model over each text alone."""

import pytest
import torch

from legato.rollouts import scoring
from legato.rollouts.scoring import score_texts
from tests.rollouts.families import make_policy, make_prompts


@pytest.mark.parametrize("packing", [True, False])
def test_scores_are_those_of_the_model(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("qwen3")
    policy.packing, policy.logits_at_once = packing, 5 * policy.vocabulary
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", 30)
    texts = make_prompts(9, 1, 25, 2, 14)
    temperatures = [1.0, 1.0, 0.7, 1.0, 1.3]
    for text, temperature, scores in zip(texts, temperatures, score_texts(policy, texts, temperatures, 3), strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=text[None], use_cache=False).logits[0, :-1] / temperature
        expected = logits.log_softmax(-1)
        own = expected.gather(1, text[1:, None])
        assert scores.logprobs.dtype == torch.float32 and torch.allclose(scores.logprobs, own[:, 0], atol=1e-5)
        if len(text) > 1:
            values, indices = expected.topk(3, 1)
            assert torch.equal(scores.top, indices) and torch.allclose(scores.top_logprobs, values, atol=1e-5)
            assert torch.equal(scores.ranks, (expected > own).sum(1) + 1)


def test_no_top_tokens_and_no_texts() -> None:
    policy = make_policy("qwen3")
    (scores,) = score_texts(policy, make_prompts(4))
    assert scores.logprobs.shape == (3,) and scores.top.shape == (3, 0)
    assert score_texts(policy, []) == []
