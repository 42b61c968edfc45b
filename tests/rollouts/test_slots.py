"""The engine with slots on a CPU: it writes what the plain engine writes, for every family and however rows are dealt."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu import scheduler
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.rollouts import in_torch
from tests.rollouts.families import END, FAMILIES, OTHERS, asked, plainly, policy, prompts, same

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))
MIXED = [(3, 9, 1, 17, 9), (2,), (30, 1, 1, 30, 2, 4, 5)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


# Norms of heads and fused parts; a window and a soft cap; sinks: what the kernels know.
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss"])
@pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy
def test_with_its_kernels_in_the_interpreter_the_engine_writes_what_the_plain_one_does(name: str) -> None:
    made, requests, limits = policy(name), asked(9, 2, each=2)[:2], Limits(max_response_tokens=4, end_tokens=(END,))
    found = GraphedEngine(made, rows_at_once=3, graphs=False).generate(requests, Sampling(), limits)
    same(found, LocalEngine(made).generate(requests, Sampling(), limits))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@pytest.mark.usefixtures("quick")
def test_slots_write_what_the_plain_engine_and_a_plain_forward_say(name: str) -> None:
    made, requests = policy(name), asked(3, 9, 1, 17, each=3)
    found = GraphedEngine(made, rows_at_once=5, graphs=False).generate(requests, Sampling(temperature=0.8), LIMITS)
    same(found, LocalEngine(made).generate(requests, Sampling(temperature=0.8), LIMITS))
    for request, row in zip(requests, found, strict=True):
        for response in row:
            assert torch.allclose(response.logprobs, plainly(made, request.prompt, response, 0.8), atol=1e-5)


@pytest.mark.parametrize("rows_at_once", [1, 2, 7, 64])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.8, top_k=20)])
@pytest.mark.usefixtures("quick")
def test_how_rows_are_dealt_to_slots_does_not_matter(rows_at_once: int, sampling: Sampling) -> None:
    made = policy("qwen3")
    engine = GraphedEngine(made, rows_at_once, graphs=False)
    for lengths in MIXED:
        requests = asked(*lengths, each=3, seed=len(lengths))
        same(engine.generate(requests, sampling, LIMITS), LocalEngine(made).generate(requests, sampling, LIMITS))


@pytest.mark.usefixtures("quick")
def test_requests_without_seeds_and_calls_without_requests_are_answered() -> None:
    engine = GraphedEngine(policy("llama"), 2, graphs=False)
    assert engine.generate([], Sampling(), LIMITS) == []
    nobody = Request(prompt=torch.tensor([3, 4]), seeds=())
    assert engine.generate([nobody], Sampling(), LIMITS) == [[]]
    mixed = [nobody, *asked(4, each=3), nobody]
    found = engine.generate(mixed, Sampling(), LIMITS)
    assert [len(row) for row in found] == [0, 3, 0]
    same(found[1:2], LocalEngine(engine.policy).generate(mixed[1:2], Sampling(), LIMITS))


@pytest.mark.parametrize("longest", [1, 2, 8, 9, 10, 17, 18, 40])
@pytest.mark.usefixtures("quick")
def test_looks_that_come_late_change_nothing_at_any_length(longest: int) -> None:
    made, requests = policy("qwen2"), asked(3, 5, 1, 2, each=3)
    limits = Limits(max_response_tokens=longest, end_tokens=(END, 5))
    same(
        GraphedEngine(made, 5, graphs=False).generate(requests, Sampling(), limits),
        LocalEngine(made).generate(requests, Sampling(), limits),
    )


@pytest.mark.usefixtures("quick")
def test_stop_strings_end_a_response_where_they_do_in_the_plain_engine() -> None:
    made, requests = policy("llama"), asked(3, 5, 1, 2, each=4)
    limits = Limits(max_response_tokens=20, end_tokens=(END, 5), stop=("<6>", "<17><", "<3"))
    found = GraphedEngine(made, 6, graphs=False).generate(requests, Sampling(), limits)
    same(found, LocalEngine(made).generate(requests, Sampling(), limits))
    assert len({response.stop for row in found for response in row}) >= 2


def counted(engine: GraphedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine does in order: 's' for each step, 'l' where it waits for a look."""
    done: list[str] = []
    advance, wait = engine.advance, scheduler.SlotCopy.wait

    def stepped(*args: Any) -> None:
        done.append("s")
        advance(*args)

    def looked(look: scheduler.SlotCopy) -> scheduler.SlotCopy:
        done.append("l")
        return wait(look)

    monkeypatch.setattr(engine, "advance", stepped)
    monkeypatch.setattr(scheduler.SlotCopy, "wait", looked)
    return done


@pytest.mark.usefixtures("quick")
def test_the_next_steps_are_enqueued_before_the_last_look_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(policy("qwen3"), 8, graphs=False)
    done = counted(engine, monkeypatch)
    engine.generate(asked(3, 4, each=2), Sampling(), Limits(max_response_tokens=25, end_tokens=()))
    # 24 steps after the first token: no step is taken that could move nobody.
    assert "".join(done) == "s" * 16 + "l" + "s" * 8 + "l" + "l"


@pytest.mark.usefixtures("quick")
def test_a_finished_row_costs_two_looks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(policy("qwen3"), 8, graphs=False)
    done = counted(engine, monkeypatch)
    everything = tuple(range(64))
    found = engine.generate(asked(3, 4, each=2), Sampling(), Limits(max_response_tokens=100, end_tokens=everything))
    assert all(len(response.tokens) == 1 for row in found for response in row)
    assert done.count("s") == 16


@pytest.mark.usefixtures("quick")
def test_a_finished_row_writes_nothing_more() -> None:
    engine = GraphedEngine(policy("qwen3"), 4, graphs=False)
    engine.generate(asked(5, each=4), Sampling(), LIMITS)
    store = engine.store
    assert store is not None
    before = {name: value.clone() for name, value in vars(store).items() if isinstance(value, torch.Tensor)}
    bucket = engine.bucket(4)
    bucket.place([0, 1, 2, 3], [0, 0, 0, 0])
    with torch.no_grad():
        for _ in range(3):
            engine.advance(bucket, Sampling(), engine.end_tokens(LIMITS.end_tokens))
    for name, value in before.items():
        assert torch.equal(value[:4], getattr(store, name)[:4]), name


@pytest.mark.usefixtures("quick")
def test_a_group_larger_than_the_slots_reads_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("qwen3")
    read: list[int] = []
    hidden = type(made).hidden

    def noted(self: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        read.append(tokens.numel())
        return hidden(self, tokens, positions)

    monkeypatch.setattr(type(made), "hidden", noted)
    engine = GraphedEngine(made, 4, graphs=False)
    engine.generate([Request(prompt=prompts(21)[0], seeds=tuple(range(11)))], Sampling(), LIMITS)
    assert read == [21]


@pytest.mark.usefixtures("quick")
def test_prompts_are_read_in_packs_of_a_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made, requests = policy("qwen3"), asked(3, 9, 1, 17, 9, 30, each=1)
    monkeypatch.setattr("legato.rollouts.gpu.prefill.TOKENS_AT_ONCE", 20)
    sizes: list[int] = []
    hidden: Callable[..., torch.Tensor] = type(made).hidden

    def noted(self: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sizes.append(tokens.numel())
        return hidden(self, tokens, positions)

    monkeypatch.setattr(type(made), "hidden", noted)
    found = GraphedEngine(made, 64, graphs=False).generate(requests, Sampling(), LIMITS)
    assert sizes == [4, 18, 17, 30]
    monkeypatch.undo()
    same(found, LocalEngine(made).generate(requests, Sampling(), LIMITS))
