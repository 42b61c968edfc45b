"""The plain engine keeps the KV cache of a turn for the next: same responses, never stale, bounded memory."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.core.rollout import Problem, StopReason
from legato.policy.layout.attention import as_bias
from legato.policy.model.tiny import character_tokenizer
from legato.policy.policy import Policy
from legato.rollouts.engine import Request, Response
from legato.rollouts.episodes import Reply, Runner, Start
from legato.rollouts.local import blocks
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.kept import Keeper
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from tests.policy.exact import VOCABULARY
from tests.rollouts.families import assert_same_responses
from tests.rollouts.test_blocks import COUNTS, KNOWN, LIMITS, make_policy, make_requests


def first_requests(counts: tuple[int, ...] = COUNTS) -> list[Request]:
    return [replace(request, keep=True) for request in make_requests(counts)]


def continue_with(requests: list[Request], responses: list[list[Response]], seed: int) -> list[Request]:
    """Each response, with one to four more tokens, as the prompt of a request of its own."""
    source = torch.Generator().manual_seed(seed)
    answered = [(request.prompt, one) for request, row in zip(requests, responses, strict=True) for one in row]
    return [
        Request(
            prompt=torch.cat([prompt, one.tokens, torch.randint(2, VOCABULARY, (1 + number % 4,), generator=source)]),
            seeds=(1000 * seed + number,),
            keep=True,
            kept=one.kept,
        )
        for number, (prompt, one) in enumerate(answered)
    ]


def play_anew(policy: Policy, requests: list[Request]) -> list[list[Response]]:
    """The responses of an engine that keeps nothing and is given nothing."""
    plain = [replace(request, keep=False, kept=None) for request in requests]
    return LocalEngine(policy, way="blocks").generate(plain, Sampling(), LIMITS)


@pytest.mark.parametrize(("name", "rows_at_once"), [*((name, 256) for name in KNOWN), ("llama", 5)])
def test_later_turns_match_an_engine_that_computes_them_anew(name: str, rows_at_once: int) -> None:
    policy = make_policy(name)
    engine, requests = LocalEngine(policy, rows_at_once, way="blocks"), first_requests()
    for turn in range(3):
        before = engine.keeper.reused_tokens
        responses = engine.generate(requests, Sampling(), LIMITS)
        assert_same_responses(responses, play_anew(policy, requests))
        if turn:
            # All but the last token of the earlier turn, which was never read, and the environment's one to four.
            assert engine.keeper.reused_tokens - before >= sum(len(request.prompt) - 5 for request in requests)
        requests = continue_with(requests, responses, turn)


def test_new_and_continued_prompts_decode_together() -> None:
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    mixed = [*first_requests((2, 1, 1, 3)), *later[::2]]
    assert_same_responses(engine.generate(mixed, Sampling(), LIMITS), play_anew(policy, mixed))
    assert engine.keeper.reused_tokens > 0


def test_masks_after_kept_texts_are_made_for_a_few_prompts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt beside many kept ones must not need a mask of its length for each of them."""
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    mixed = [*first_requests((1, 1, 1, 1)), *later]
    whole, sizes = engine.generate(mixed, Sampling(), LIMITS), []

    def counted(visible: Tensor, like: Tensor) -> Tensor:
        sizes.append(visible.numel())
        return as_bias(visible, like)

    monkeypatch.setattr(blocks, "as_bias", counted)
    monkeypatch.setattr(blocks, "_MASKED_AT_ONCE", 1000)
    assert_same_responses(engine.generate(mixed, Sampling(), LIMITS), whole)
    assert len(sizes) > 2 * len(policy.body.get_decoder().layers) and max(sizes) <= 1000


def test_only_the_common_prefix_is_reused() -> None:
    """A template may render an earlier turn differently: what follows the change is computed."""
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    changed = []
    for request in later:
        prompt = request.prompt.clone()
        prompt[len(prompt) // 2] = (prompt[len(prompt) // 2] - 1) % (VOCABULARY - 2) + 2
        changed.append(replace(request, prompt=prompt))
    assert_same_responses(engine.generate(changed, Sampling(), LIMITS), play_anew(policy, changed))
    assert 0 < engine.keeper.reused_tokens <= sum(len(request.prompt) // 2 for request in later)


def test_a_prompt_shorter_than_the_kept_text_computes_its_last_token() -> None:
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    short = [replace(request, prompt=request.prompt[:3]) for request in later if len(request.prompt) > 8]
    assert_same_responses(engine.generate(short, Sampling(), LIMITS), play_anew(policy, short))
    assert engine.keeper.reused_tokens == 2 * len(short)


@pytest.mark.parametrize("how", ["publish", "before_update"])
def test_nothing_is_reused_after_the_weights_have_changed(how: str) -> None:
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    if how == "before_update":
        engine.before_update()
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.05)
    if how == "publish":
        engine.publish((), 1)
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.keeper.reused_tokens == 0
    assert_same_responses(responses, play_anew(policy, later))


def test_the_cache_of_another_engine_is_not_used() -> None:
    policy = make_policy()
    engine, other = (LocalEngine(policy, way="blocks") for _ in range(2))
    requests = first_requests()
    later = continue_with(requests, engine.generate(requests, Sampling(), LIMITS), 1)
    other.generate(later, Sampling(), LIMITS)
    assert other.keeper.reused_tokens == 0


def test_memory_is_bounded_and_freed_with_the_responses() -> None:
    policy = make_policy()
    engine, requests = LocalEngine(policy, way="blocks"), first_requests()
    responses = engine.generate(requests, Sampling(), LIMITS)
    unbounded = engine.keeper.bytes
    assert unbounded > 0 and all(one.kept is not None for row in responses for one in row)
    engine.keeper = Keeper(most_bytes=unbounded // 2)
    responses = engine.generate(requests, Sampling(), LIMITS)
    kept = [one.kept is not None for row in responses for one in row]
    assert 0 < engine.keeper.bytes <= unbounded // 2 and any(kept) and not all(kept)
    later = continue_with(requests, responses, 1)
    assert_same_responses(engine.generate(later, Sampling(), LIMITS), play_anew(policy, later))
    assert engine.keeper.reused_tokens > 0
    del responses, later
    gc.collect()
    assert engine.keeper.bytes == 0


def test_a_request_that_is_not_continued_keeps_nothing() -> None:
    engine = LocalEngine(make_policy(), way="blocks")
    responses = engine.generate(make_requests(), Sampling(), LIMITS)
    assert engine.keeper.bytes == 0 and all(one.kept is None for row in responses for one in row)


def test_an_engine_that_records_routes_keeps_nothing() -> None:
    """Routes are recorded for every prompt token, so every prompt token must be computed."""
    engine = LocalEngine(make_policy("qwen3-moe"), way="blocks", record_routes=True)
    responses = engine.generate(first_requests((1, 1, 1, 1)), Sampling(), LIMITS)
    assert engine.keeper.bytes == 0 and all(one.kept is None and one.routes is not None for row in responses for one in row)


class Echo:
    """Four turns, each answered with three tokens; an episode may end before."""

    max_turns = 4
    deterministic = True

    def episode(self, problem: Problem) -> "Echo":
        return self

    def reply(self, text: str, stop: StopReason) -> Any:
        return Reply(content="345", reward=1.0, done=len(text) % 5 == 0)


def play_echo(policy: Policy, most_bytes: int | None) -> tuple[list[Any], LocalEngine]:
    engine = LocalEngine(policy, way="blocks")
    if most_bytes is not None:
        engine.keeper = Keeper(most_bytes)
    limits = replace(LIMITS, max_response_tokens=36)
    runner = Runner(engine=engine, rendering=Rendering(tokenizer=character_tokenizer()), limits=limits, environment=Echo())
    starts = [
        Start(
            problem=Problem(prompt=str(number)),
            prompt=request.prompt,
            seeds=request.seeds,
            ids=range(4 * number, 4 * number + 4),
        )
        for number, request in enumerate(make_requests((4, 4, 4, 4)))
    ]
    return [rollout for row in runner.play(starts, Sampling()) for rollout in row], engine


def test_episodes_reuse_their_turns() -> None:
    policy = make_policy()
    (kept, engine), (anew, plain) = play_echo(policy, None), play_echo(policy, 0)
    assert engine.keeper.reused_tokens > 0 and plain.keeper.reused_tokens == 0
    assert max(int(rollout.turn.max()) for rollout in kept) > 0
    for one, other in zip(kept, anew, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.turn.tolist() == other.turn.tolist()
        assert torch.allclose(one.sampler_logprobs[one.mask], other.sampler_logprobs[other.mask], atol=1e-5)


def test_kept_caches_are_freed_before_an_update() -> None:
    """At the end of the episodes, not when garbage is collected: the estimate of an update's memory counts none of them."""
    gc.disable()
    try:
        _, engine = play_echo(make_policy(), None)
        assert engine.keeper.reused_tokens > 0 and engine.keeper.bytes == 0
    finally:
        gc.enable()
