"""The experts an engine notes for every token it reads are those of one plain forward over the finished text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.core.batch import collate
from legato.core.rollout import Author, Group, Problem, Rollout, Score, Scored
from legato.policy.experts.routers import Routers
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.routes import chosen_by, record_router_logits, sets
from tests.rollouts import in_torch
from tests.rollouts.families import END, asked, policy, same, turn

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))
FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


def slotted(of: Policy, rows: int, **options: Any) -> GraphedEngine:
    return GraphedEngine(of, rows, graphs=False, **options)


def right(of: Policy, requests: Sequence[Request], found: Sequence[Sequence[Response]]) -> int:
    """How many tokens have routes, all of them those of a plain forward."""
    count = 0
    for request, row in zip(requests, found, strict=True):
        for response in row:
            assert response.routes is not None
            read = torch.cat([request.prompt, response.tokens])[:-1]
            assert response.routes.tokens.tolist() == read.tolist() and response.routes.count == 4
            assert response.routes.experts.dtype == torch.uint8
            with record_router_logits(of.model) as logits, torch.no_grad():
                of.model(input_ids=read[None], use_cache=False)
            assert sets(response.routes.experts) == sets(chosen_by(torch.stack(logits, 1)))
            count += len(read)
    return count


@pytest.mark.parametrize("kind", [LocalEngine, slotted])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("quick")
def test_routes_are_those_of_a_plain_forward_and_change_nothing_else(name: str, kind: Any) -> None:
    made, requests = policy(name), asked(3, 9, 1, 17, each=3)
    found = kind(made, 5, record_routes=True).generate(requests, Sampling(), LIMITS)
    assert right(made, requests, found) > 120
    plain = kind(made, 5).generate(requests, Sampling(), LIMITS)
    same(found, plain)
    assert all(response.routes is None for row in plain for response in row)


@pytest.mark.usefixtures("quick")
def test_a_later_turn_has_the_routes_of_what_the_store_still_held() -> None:
    made = policy("qwen3-moe")
    engine, requests = slotted(made, 4, record_routes=True), asked(30, 25, each=2)
    later = turn(engine, requests, LIMITS, more=3)
    found = engine.generate(later, Sampling(), LIMITS)
    assert engine.reused_tokens > 40
    assert right(made, later, found) > 100


def test_a_dense_model_and_one_without_a_memory_have_none() -> None:
    dense = policy("qwen3")
    ((response,),) = LocalEngine(dense, record_routes=True).generate(asked(4, each=1), Sampling(), LIMITS)
    assert response.routes is None
    made = policy("qwen3-moe")
    made.views = False
    ((response,),) = LocalEngine(made, record_routes=True).generate(asked(4, each=1), Sampling(), LIMITS)
    assert response.routes is None


def groups(of: Policy, requests: Sequence[Request]) -> list[Group]:
    found = LocalEngine(of, record_routes=True).generate(requests, Sampling(), LIMITS)
    made = []
    for number, (request, row) in enumerate(zip(requests, found, strict=True)):
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
        made.append(Group(problem=problem, members=tuple(members)))
    return made


def changed(group: Group, which: int, **changes: Any) -> Group:
    members = list(group.members)
    members[which] = replace(members[which], rollout=replace(members[which].rollout, **changes))
    return replace(group, members=tuple(members))


def test_a_batch_holds_the_routes_by_place_and_knows_where_there_are_none() -> None:
    made = policy("qwen3-moe")
    found = groups(made, asked(3, 6, each=2))
    found[1] = changed(found[1], 0, routes=None)
    batch = collate(found)
    assert batch.routes is not None and isinstance(made.routers, Routers)
    wide, deep, first = batch.texts.prompts.shape[1], batch.texts.tokens.shape[1], batch.texts.prompts.numel()
    for row in range(4):
        rollout = found[row // 2].members[row % 2].rollout
        head, tail = row // 2 * wide, first + row * deep
        length, own = len(rollout.prompt_tokens), len(rollout.tokens) - 1
        assert batch.routes.tokens[head : head + length].tolist() == rollout.prompt_tokens.tolist()
        if rollout.routes is None:
            assert bool((batch.routes.tokens[tail : tail + own] == -1).all())
            continue
        assert torch.equal(batch.routes.experts[head : head + length], rollout.routes.experts[:length])
        assert torch.equal(batch.routes.experts[tail : tail + own], rollout.routes.experts[length:])
        assert batch.routes.tokens[tail : tail + own].tolist() == rollout.tokens[:-1].tolist()


def test_a_record_of_another_tokenisation_is_refused() -> None:
    (group,) = groups(policy("qwen3-moe"), asked(3, each=2))
    routes = group.members[1].rollout.routes
    assert routes is not None
    other = replace(routes, tokens=routes.tokens + 1)
    with pytest.raises(ValueError, match=r"rollout 1 of .*speaks of other tokens.*tokenised again"):
        collate([changed(group, 1, routes=other)])
    short = replace(routes, tokens=routes.tokens[:-1], experts=routes.experts[:-1])
    with pytest.raises(ValueError, match="speaks of other tokens"):
        collate([changed(group, 1, routes=short)])
    thin = replace(routes, experts=routes.experts[:, :, :1])
    with pytest.raises(ValueError, match=r"differ in \(layers, active experts, experts\)"):
        collate([changed(group, 1, routes=thin)])
