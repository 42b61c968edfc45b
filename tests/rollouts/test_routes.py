"""The experts an engine records for each token match one plain forward over the finished text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.core.batch import collate
from legato.core.rollout import Author, Group, Problem, Rollout, Score, Scored
from legato.policy.experts.grouped import find_grouped
from legato.policy.experts.routers import Routers
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu import engine as graphed
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.routes import chosen_by, record_router_logits, sets
from tests.rollouts import in_torch
from tests.rollouts.families import END, assert_same_responses, make_policy, make_requests, next_turn

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))
FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss")


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


def slot_engine(policy: Policy, rows: int, **options: Any) -> GraphedEngine:
    return GraphedEngine(policy, rows, graphs=False, **options)


def count_correct_routes(policy: Policy, requests: Sequence[Request], responses: Sequence[Sequence[Response]]) -> int:
    """Assert that all routes match a plain forward, and return the number of tokens with routes."""
    count = 0
    for request, row in zip(requests, responses, strict=True):
        for response in row:
            assert response.routes is not None
            read = torch.cat([request.prompt, response.tokens])[:-1]
            assert response.routes.tokens.tolist() == read.tolist() and response.routes.count == 4
            assert response.routes.experts.dtype == torch.uint8
            with record_router_logits(policy.model) as logits, torch.no_grad():
                policy.model(input_ids=read[None], use_cache=False)
            assert sets(response.routes.experts) == sets(chosen_by(torch.stack(logits, 1)))
            count += len(read)
    return count


@pytest.mark.parametrize("kind", [LocalEngine, slot_engine])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("torch_kernels")
def test_routes_match_a_plain_forward_and_change_no_token(name: str, kind: Any) -> None:
    policy, requests = make_policy(name), make_requests(3, 9, 1, 17, each=3)
    responses = kind(policy, 5, record_routes=True).generate(requests, Sampling(), LIMITS)
    assert count_correct_routes(policy, requests, responses) > 120
    plain = kind(policy, 5).generate(requests, Sampling(), LIMITS)
    assert_same_responses(responses, plain)
    assert all(response.routes is None for row in plain for response in row)


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss"])
@pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy
@pytest.mark.usefixtures("torch_kernels")
def test_grouped_experts_decode_the_same_tokens_and_record_the_same_routes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, requests = slot_engine(make_policy(name), 4, record_routes=True), make_requests(3, 9, each=2)
    assert plain.grouped is None
    limits = Limits(max_response_tokens=4, end_tokens=(END,))
    expected = plain.generate(requests, Sampling(), limits)
    monkeypatch.setattr(graphed, "find_grouped", find_grouped)
    engine = slot_engine(plain.policy, 4, record_routes=True)
    assert engine.grouped is not None and len(engine.grouped.experts) == len(engine.grouped.routers) == 2
    responses = engine.generate(requests, Sampling(), limits)
    assert_same_responses(responses, expected)
    assert count_correct_routes(plain.policy, requests, responses) > 30


@pytest.mark.usefixtures("torch_kernels")
def test_a_later_turn_has_the_routes_of_its_reused_prefix() -> None:
    policy = make_policy("qwen3-moe")
    engine, requests = slot_engine(policy, 4, record_routes=True), make_requests(30, 25, each=2)
    later = next_turn(engine, requests, LIMITS, more=3)
    responses = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens > 40
    assert count_correct_routes(policy, later, responses) > 100


def test_a_dense_model_and_one_without_a_kv_cache_have_no_routes() -> None:
    dense = make_policy("qwen3")
    ((response,),) = LocalEngine(dense, record_routes=True).generate(make_requests(4, each=1), Sampling(), LIMITS)
    assert response.routes is None
    policy = make_policy("qwen3-moe")
    policy.views = False
    ((response,),) = LocalEngine(policy, record_routes=True).generate(make_requests(4, each=1), Sampling(), LIMITS)
    assert response.routes is None


def make_groups(policy: Policy, requests: Sequence[Request]) -> list[Group]:
    responses = LocalEngine(policy, record_routes=True).generate(requests, Sampling(), LIMITS)
    groups = []
    for number, (request, row) in enumerate(zip(requests, responses, strict=True)):
        problem = Problem(prompt=str(number))
        members = []
        for response in row:
            length = len(response.tokens)
            rollout = Rollout(
                problem=problem,
                rollout_id=10 * number + len(members),
                prompt_tokens=request.prompt,
                tokens=response.tokens,
                sampler_logprobs=response.logprobs,
                version=torch.zeros(length, dtype=torch.int64),
                text=response.text,
                stop=response.stop,
                temperature=1.0,
                mask=torch.ones(length, dtype=torch.bool),
                turn=torch.zeros(length, dtype=torch.int64),
                author=torch.full((length,), Author.POLICY.value),
                routes=response.routes,
            )
            members.append(Scored(rollout=rollout, score=Score(reward=0.0, accuracy=0.0)))
        groups.append(Group(problem=problem, members=tuple(members)))
    return groups


def replace_rollout(group: Group, which: int, **changes: Any) -> Group:
    members = list(group.members)
    members[which] = replace(members[which], rollout=replace(members[which].rollout, **changes))
    return replace(group, members=tuple(members))


def test_a_batch_holds_routes_by_position_and_marks_missing_ones() -> None:
    policy = make_policy("qwen3-moe")
    groups = make_groups(policy, make_requests(3, 6, each=2))
    groups[1] = replace_rollout(groups[1], 0, routes=None)
    batch = collate(groups)
    assert batch.routes is not None and isinstance(policy.routers, Routers)
    wide, deep, first = batch.texts.prompts.shape[1], batch.texts.tokens.shape[1], batch.texts.prompts.numel()
    for row in range(4):
        rollout = groups[row // 2].members[row % 2].rollout
        head, tail = row // 2 * wide, first + row * deep
        length, own = len(rollout.prompt_tokens), len(rollout.tokens) - 1
        assert batch.routes.tokens[head : head + length].tolist() == rollout.prompt_tokens.tolist()
        if rollout.routes is None:
            assert bool((batch.routes.tokens[tail : tail + own] == -1).all())
            continue
        assert torch.equal(batch.routes.experts[head : head + length], rollout.routes.experts[:length])
        assert torch.equal(batch.routes.experts[tail : tail + own], rollout.routes.experts[length:])
        assert batch.routes.tokens[tail : tail + own].tolist() == rollout.tokens[:-1].tolist()


def test_routes_of_other_tokens_are_refused() -> None:
    (group,) = make_groups(make_policy("qwen3-moe"), make_requests(3, each=2))
    routes = group.members[1].rollout.routes
    assert routes is not None
    other = replace(routes, tokens=routes.tokens + 1)
    with pytest.raises(ValueError, match=r"rollout 1 of .*speaks of other tokens.*tokenised again"):
        collate([replace_rollout(group, 1, routes=other)])
    short = replace(routes, tokens=routes.tokens[:-1], experts=routes.experts[:-1])
    with pytest.raises(ValueError, match="speaks of other tokens"):
        collate([replace_rollout(group, 1, routes=short)])
    thin = replace(routes, experts=routes.experts[:, :, :1])
    with pytest.raises(ValueError, match=r"differ in \(layers, active experts, experts\)"):
        collate([replace_rollout(group, 1, routes=thin)])
