"""Sampling from a policy: prompts in, responses out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from legato.core.generators import seed_generators
from legato.core.rollout import Problem
from legato.core.settings import select
from legato.rollouts.engine import Request, Response
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import Sampling
from legato.run import wire
from legato.run.remote import policy_and_engine
from legato.run.sizes import check_samples
from legato.run.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResponses:
    """A prompt and the policy's responses."""

    prompt: str
    responses: tuple[Response, ...]


def sample(
    target: Target,
    prompts: Iterable[str],
    *,
    samples: int = 1,
    temperature: float | None = None,
    max_response_tokens: int | None = None,
    seed: int | None = None,
    server: str | None = None,
) -> Iterator[PromptResponses]:
    """Yield responses prompt by prompt. The policy is loaded once; temperature 0 is greedy. `server`: samples there."""
    config = target.resolved.config
    check_samples(samples, "samples")
    seed_generators(config.training.seed)
    with policy_and_engine(target, server) as (policy, engine):
        rendering, limits = wire.rendering_of(config, policy, target.date), wire.limits_of(config, policy)
        sampling = select(Sampling, [config.rollouts])
        if max_response_tokens is not None:
            limits = replace(limits, max_response_tokens=max_response_tokens)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        seed = config.training.seed if seed is None else seed
        for prompt in prompts:
            problem = Problem(prompt=prompt)
            seeds = tuple(seed_of("sample", seed, problem.key, k) for k in range(samples))
            responses = engine.generate([Request(prompt=rendering.prompt(problem), seeds=seeds)], sampling, limits)[0]
            yield PromptResponses(prompt=prompt, responses=tuple(responses))
