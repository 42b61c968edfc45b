"""Checks on a few tokens that an engine reports the same log-probs as the policy, before the engine is used."""

import torch

from legato.policy.model.selfcheck import distance, own_forward, tolerance
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine, Limits, Request
from legato.rollouts.prompts import response_texts
from legato.rollouts.sampling import Sampling

_TOKENS = 4
_FAILURES = (AttributeError, TypeError, KeyError, IndexError, AssertionError, RuntimeError)


def describe_failure(error: Exception) -> str:
    """What went wrong when an engine was tried; an error that is a fault of ours is raised again.

    A model may not be what it looks like, memory may run out, and Triton raises errors of its own, which are no
    RuntimeErrors: a kernel does not compile, or needs more shared memory than the GPU has.
    """
    if not isinstance(error, _FAILURES) and not type(error).__module__.startswith("triton."):
        raise error
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else 'no message'}"


def disagreement(engine: Engine, policy: Policy) -> str | None:
    """None if the log-probs agree; otherwise the error, or how far the log-probs are apart."""
    prompts = [torch.tensor([1, 2, 3, 4]) % policy.vocabulary, torch.tensor([5, 6]) % policy.vocabulary]
    requests = [Request(prompt=prompt, seeds=(0,)) for prompt in prompts]
    try:
        responses = engine.generate(requests, Sampling(), Limits(max_response_tokens=_TOKENS, end_tokens=()))
        tokens = torch.stack([row[0].tokens for row in responses])
        texts = response_texts(prompts, tokens)
        expected = policy.score(texts, torch.arange(len(tokens))).logprobs.cpu()
    except Exception as error:
        return describe_failure(error)
    dtype = policy.model.get_input_embeddings().weight.dtype
    gap = distance(dtype, torch.stack([row[0].logprobs for row in responses]), expected)
    if gap <= tolerance(dtype):
        return None
    own = own_forward(policy, texts)
    if dtype in (torch.float32, torch.float64):
        allowed = tolerance(dtype) * max(1.0, own.spread)
    else:
        # Rounding grows with depth and with the size of logits: two computations by the policy itself show by how much.
        # Log-probs of other texts would differ by more than the spread.
        allowed = min(4 * distance(dtype, own.logprobs, expected), own.spread)
    return None if gap <= allowed else f"its log-probs are off by {gap:.2g}"
