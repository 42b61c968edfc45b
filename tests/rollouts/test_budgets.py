"""Requests with different budgets of tokens share a wave of the local engine."""

import pytest
import torch

from legato.core.rollout import StopReason
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts.test_local import END, make_prompts, tiny_policy

BUDGETS = (3, 20, 1, 9)


@pytest.mark.parametrize("end_tokens", [(), (END,)])
def test_requests_with_different_budgets_decode_in_one_wave(
    end_tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(ends=1.5)
    requests = [Request(prompt=prompt, seeds=tuple(range(6))) for prompt in make_prompts(4, 7, 2, 5)]
    limits = [Limits(max_response_tokens=budget, end_tokens=end_tokens) for budget in BUDGETS]
    alone = [
        LocalEngine(policy).generate([request], Sampling(), limit)[0]
        for request, limit in zip(requests, limits, strict=True)
    ]
    engine, waves = LocalEngine(policy), []
    decode_wave = engine._decode_wave
    monkeypatch.setattr(engine, "_decode_wave", lambda: waves.append(None) or decode_wave())  # type: ignore[func-returns-value]
    handles = [engine.submit([request], Sampling(), limit)[0] for request, limit in zip(requests, limits, strict=True)]
    reports = {}
    while batch := engine.poll():
        reports |= {finished.handle: finished.responses for finished in batch}
    assert len(waves) == 1
    for handle, expected, budget in zip(handles, alone, BUDGETS, strict=True):
        for response, single in zip(reports[handle], expected, strict=True):
            assert torch.equal(response.tokens, single.tokens) and response.stop is single.stop
            assert len(response.tokens) <= budget
            assert (response.stop is StopReason.LENGTH) <= (len(response.tokens) == budget)
            torch.testing.assert_close(response.logprobs, single.logprobs, rtol=0, atol=1e-5)
