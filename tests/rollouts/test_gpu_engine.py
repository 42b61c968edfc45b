"""The engine with slots on a GPU, its kernels compiled and its steps captured: `generate`, graphs on and off, memory.

In float32 everything is equal. In bfloat16 two right ways to the same logits may round differently: where greedy texts part,
the two tokens must have been as good as tied by the model's own forward.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.policy.model.selfcheck import tolerance
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.proof.waits import no_waiting
from tests.rollouts.families import END, FAMILIES, OTHERS, asked, plainly, policy, prompts, same, turn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LIMITS = Limits(max_response_tokens=40, end_tokens=(END, 5))
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUTED = {"qwen3-moe", "mixtral", "gpt-oss"}
"""In bfloat16 a router may choose another expert at a tie, and a log-prob then moves by as much as the experts differ."""
FAMILY = pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])


def engine_of(made: Policy, rows_at_once: int = 16, **options: Any) -> Any:
    # Only here: a machine without Triton collects this file too.
    from legato.rollouts.gpu.engine import GraphedEngine

    return GraphedEngine(made, rows_at_once, **{"graphs": capturable(made), **options})


def capturable(made: Policy) -> bool:
    """Experts in float32 are not: `select.local_engine` finds that out and decodes them without graphs."""
    routed = any("Experts" in type(module).__name__ for module in made.model.modules())
    return not routed or made.model.dtype != torch.float32


def tied(made: Policy, prompt: Tensor, left: list[int], right: list[int], allowed: float) -> None:
    """Equal, or parting at a token where the model's own forward sees the two choices within so much of each other."""
    place = next((n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), None)
    if place is None:
        assert left == right
        return
    text = torch.cat([prompt, torch.tensor(left[:place], dtype=torch.int64)]).to(made.device)
    with torch.no_grad():
        logits = made.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
    gap = float((logits[left[place]] - logits[right[place]]).abs())
    assert gap <= allowed, f"token {place}: {left[place]} and {right[place]} lie {gap:.3g} apart"


@FAMILY
@BOTH
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_is_what_generate_writes(name: str, dtype: torch.dtype, graphs: bool) -> None:
    made = policy(name, dtype, "cuda")
    if graphs and not capturable(made):
        pytest.skip("torch's grouped product copies from the host in float32, which no graph can hold")
    requests = asked(3, 9, 1, 17, 70, each=1)
    found = engine_of(made, 3, graphs=graphs).generate(requests, Sampling(temperature=0), LIMITS)
    for request, (response,) in zip(requests, found, strict=True):
        ids = request.prompt.cuda()[None]
        plain = made.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LIMITS.max_response_tokens,
            do_sample=False,
            eos_token_id=list(LIMITS.end_tokens),
            pad_token_id=0,
        )
        expected = plain[0, len(request.prompt) :].tolist()
        allowed = 0.0 if dtype == torch.float32 else 1.0 if name in ROUTED else tolerance(dtype)
        tied(made, request.prompt, response.tokens.tolist(), expected, allowed)


@FAMILY
@BOTH
def test_sampled_log_probs_are_those_of_a_plain_forward(name: str, dtype: torch.dtype) -> None:
    made, requests = policy(name, dtype, "cuda"), asked(3, 9, 1, 17, 70, each=4)
    found = engine_of(made, 7).generate(requests, Sampling(temperature=0.8), LIMITS)
    for request, row in zip(requests, found, strict=True):
        for response in row:
            gaps = (response.logprobs - plainly(made, request.prompt, response, 0.8)).abs()
            if dtype == torch.float32:
                assert float(gaps.max()) <= 1e-5
            else:
                assert float(gaps.median() if name in ROUTED else gaps.max()) <= tolerance(dtype)


@FAMILY
def test_in_float32_slots_write_what_the_plain_engine_does(name: str) -> None:
    made, requests = policy(name, device="cuda"), asked(3, 9, 1, 17, 70, each=4)
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.8, top_k=30)):
        for limits in (LIMITS, Limits(max_response_tokens=9, end_tokens=(), stop=("<7>", "<30><"))):
            plain = LocalEngine(made).generate(requests, sampling, limits)
            same(engine_of(made, 7).generate(requests, sampling, limits), plain)


@FAMILY
@BOTH
def test_graphs_on_and_off_write_the_same_in_the_same_buckets(name: str, dtype: torch.dtype) -> None:
    made, requests = policy(name, dtype, "cuda"), asked(3, 9, 1, 17, 70, each=4)
    if not capturable(made):
        pytest.skip("torch's grouped product copies from the host in float32, which no graph can hold")
    on, off = engine_of(made, 7), engine_of(made, 7, graphs=False)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(min_p=0.02)):
        left, right = (engine.generate(requests, sampling, LIMITS) for engine in (on, off))
        for one, other in zip(chain(*left), chain(*right), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert torch.allclose(one.logprobs, other.logprobs, atol=1e-6)
    assert 0 < on.captures <= 3 * len(on.buckets) and off.captures == 0


@pytest.mark.parametrize("name", sorted(ROUTED))
def test_a_captured_step_notes_the_experts_that_an_eager_one_does(name: str) -> None:
    made, requests = policy(name, torch.bfloat16, "cuda"), asked(30, 9, each=4)
    captured, eager = (
        engine_of(made, graphs=graphs, record_routes=True).generate(requests, Sampling(), LIMITS) for graphs in (True, False)
    )
    same(captured, eager)
    for one, other in zip(chain(*captured), chain(*eager), strict=True):
        assert one.routes is not None and other.routes is not None
        assert torch.equal(one.routes.experts, other.routes.experts)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_a_later_turn_equals_that_of_a_fresh_engine(name: str) -> None:
    made = policy(name, device="cuda")
    engine = engine_of(made)
    requests = asked(20, 31, 90, each=4)
    for _ in range(3):
        before = engine.reused_tokens
        requests = turn(engine, requests, LIMITS, more=5)
        found = engine.generate(requests, Sampling(), LIMITS)
        assert engine.reused_tokens - before >= sum(len(request.prompt) - 6 for request in requests)
        same(found, engine_of(made).generate(requests, Sampling(), LIMITS))


def test_nothing_is_taken_over_after_a_fused_optimizer_step() -> None:
    made = policy("qwen3", device="cuda")
    engine = engine_of(made)
    requests = turn(engine, asked(20, 31, each=2), LIMITS, more=5)
    weights = list(made.model.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.01, fused=True).step()
    found = engine.generate(requests, Sampling(), LIMITS)
    assert engine.reused_tokens == 0
    same(found, LocalEngine(made).generate(requests, Sampling(), LIMITS))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_twenty_calls_capture_nothing_new_and_take_no_more_memory(name: str) -> None:
    engine = engine_of(policy(name, torch.bfloat16, "cuda"), 32)
    held, captures = [], []
    for number in range(20):
        # As in a run: training and evaluation in turn, each with its own sampling, limits and end tokens.
        engine.generate(asked(30, 9, 17, each=16, seed=number), Sampling(), LIMITS)
        evaluated = Limits(max_response_tokens=30, end_tokens=(END, 7, 8))
        engine.generate(asked(*[25] * 12, each=1, seed=99), Sampling(temperature=0), evaluated)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        captures.append(engine.captures)
    # Which buckets a call goes through depends on when its rows end; the sizes are few, and each is captured once.
    assert captures[-1] <= 2 * len(engine.buckets)
    settled = held[captures.index(captures[-1]) :]
    assert max(settled) == settled[0], f"allocated since the last capture: {settled}"


def test_the_same_call_twenty_times_takes_no_more_memory_after_the_second() -> None:
    engine = engine_of(policy("qwen3", torch.bfloat16, "cuda"), 32)
    requests, held = asked(30, 9, 17, each=16), []
    for _ in range(20):
        engine.generate(requests, Sampling(), LIMITS)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[2:]) <= held[1], f"allocated after each call: {held}"


def test_memory_that_runs_out_means_fewer_slots_and_the_same_tokens() -> None:
    made, said = policy("llama", device="cuda"), []
    requests = [Request(prompt=prompt, seeds=tuple(range(64))) for prompt in prompts(9, 20, 3, 30)]
    limits = Limits(max_response_tokens=4096, end_tokens=tuple(range(32)))
    expected = LocalEngine(made).generate(requests, Sampling(), Limits(max_response_tokens=64, end_tokens=limits.end_tokens))
    assert max(len(response.tokens) for response in chain(*expected)) < 64, "a response was cut; take other seeds"
    torch.cuda.empty_cache()
    # 256 slots of 4096 tokens are 537 MB; 200 MB more than what is held now may be taken.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * 2**20) / total)
    try:
        engine = engine_of(made, 256, say=said.append)
        found = engine.generate(requests, Sampling(), limits)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same(found, expected)
    assert 1 <= engine.rows_at_once < 256
    assert said and all(text.startswith("out of memory with ") for text in said)


def test_the_host_waits_for_nothing_but_its_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.rollouts.gpu.scheduler import Scheduler

    made, requests = policy("qwen3", torch.bfloat16, "cuda"), asked(30, 9, 17, each=8)
    engine = engine_of(made, 32)
    expected = engine.generate(requests, Sampling(), LIMITS)

    def watched(method: Any) -> Any:
        def run(*args: Any) -> Any:
            with no_waiting():
                return method(*args)

        return run

    # The graphs are there; from now on neither steps nor the taking out of finished rows may synchronise.
    captures = engine.captures
    engine.prefixes.clear()  # so that the second call is the first one to the bit
    for name in ("_advance", "_collect"):
        monkeypatch.setattr(Scheduler, name, watched(getattr(Scheduler, name)))
    found = engine.generate(requests, Sampling(), LIMITS)
    assert engine.captures == captures, "a capture synchronises; the calls should have been equal"
    same(found, expected)


def test_the_reading_of_prompts_is_bounded() -> None:
    """512 prompts of 400 tokens at once: what a pass holds is of 16384 tokens, not of 204800."""
    made = policy("qwen3", torch.bfloat16, "cuda")
    few, many = (asked(*[400] * count, each=1) for count in (40, 512))
    limits, peaks = Limits(max_response_tokens=2, end_tokens=()), []
    for requests in (few, many):
        engine = engine_of(made, 512)
        engine.generate(requests, Sampling(), limits)
        torch.cuda.synchronize()
        engine.prefixes.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.generate(requests, Sampling(), limits)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2 * peaks[0]


def responses(found: list[list[Response]]) -> list[list[int]]:
    return [response.tokens.tolist() for response in chain(*found)]


def test_bf16_tokens_repeat_from_call_to_call_and_from_engine_to_engine() -> None:
    made, requests = policy("qwen3", torch.bfloat16, "cuda"), asked(30, 9, 17, each=8)
    first = responses(engine_of(made, 16).generate(requests, Sampling(), LIMITS))
    again = engine_of(made, 16)
    assert responses(again.generate(requests, Sampling(), LIMITS)) == first
    again.prefixes.clear()  # a prompt that is taken over is read another way, and may round differently
    assert responses(again.generate(requests, Sampling(), LIMITS)) == first
