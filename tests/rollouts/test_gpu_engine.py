"""The slot engine on a GPU with compiled kernels and captured steps: tokens, graphs on and off, GPU memory.

In float32 all results are equal. In bfloat16 two correct computations of the same logits may round differently. Where greedy
texts diverge, the model's own forward must give the two tokens nearly equal logits.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.policy.model.selfcheck import tolerance
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import local_engine
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.sampling import Sampling
from tests.proof.waits import no_waiting
from tests.rollouts.families import (
    END,
    FAMILIES,
    OTHERS,
    assert_same_responses,
    forward_logprobs,
    make_policy,
    make_prompts,
    make_requests,
    next_turn,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LIMITS = Limits(max_response_tokens=40, end_tokens=(END, 5))
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUTED = {"qwen3-moe", "mixtral", "gpt-oss"}
"""In bfloat16 a router may break a tie differently, and a log-prob then moves by as much as the two experts differ."""
FAMILY = pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])


def graphed_engine(policy: Policy, rows_at_once: int = 16, **options: Any) -> Any:
    # Only here: a machine without Triton collects this file too.
    from legato.rollouts.gpu.engine import GraphedEngine

    return GraphedEngine(policy, rows_at_once, **{"graphs": capturable(policy), **options})


def capturable(policy: Policy) -> bool:
    """False for experts in float32: `select.local_engine` detects them and decodes them without graphs."""
    routed = any("Experts" in type(module).__name__ for module in policy.model.modules())
    return not routed or policy.model.dtype != torch.float32


def assert_equal_or_tied(policy: Policy, prompt: Tensor, left: list[int], right: list[int], allowed: float) -> None:
    """Assert equal tokens, or a first difference at which the model's own logits differ by at most `allowed`."""
    place = next((n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), None)
    if place is None:
        assert left == right
        return
    text = torch.cat([prompt, torch.tensor(left[:place], dtype=torch.int64)]).to(policy.device)
    with torch.no_grad():
        logits = policy.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
    gap = float((logits[left[place]] - logits[right[place]]).abs())
    assert gap <= allowed, f"token {place}: {left[place]} and {right[place]} have logits {gap:.3g} apart"


@FAMILY
@BOTH
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_match_model_generate(name: str, dtype: torch.dtype, graphs: bool) -> None:
    policy = make_policy(name, dtype, "cuda")
    if graphs and not capturable(policy):
        pytest.skip("torch's grouped product copies from the host in float32, which no graph can hold")
    requests = make_requests(3, 9, 1, 17, 70, each=1)
    responses = graphed_engine(policy, 3, graphs=graphs).generate(requests, Sampling(temperature=0), LIMITS)
    for request, (response,) in zip(requests, responses, strict=True):
        ids = request.prompt.cuda()[None]
        plain = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LIMITS.max_response_tokens,
            do_sample=False,
            eos_token_id=list(LIMITS.end_tokens),
            pad_token_id=0,
        )
        expected = plain[0, len(request.prompt) :].tolist()
        allowed = 0.0 if dtype == torch.float32 else 1.0 if name in ROUTED else tolerance(dtype)
        assert_equal_or_tied(policy, request.prompt, response.tokens.tolist(), expected, allowed)


@FAMILY
@BOTH
def test_sampled_log_probs_match_a_plain_forward(name: str, dtype: torch.dtype) -> None:
    policy, requests = make_policy(name, dtype, "cuda"), make_requests(3, 9, 1, 17, 70, each=4)
    responses = graphed_engine(policy, 7).generate(requests, Sampling(temperature=0.8), LIMITS)
    for request, row in zip(requests, responses, strict=True):
        for response in row:
            gaps = (response.logprobs - forward_logprobs(policy, request.prompt, response, 0.8)).abs()
            if dtype == torch.float32:
                assert float(gaps.max()) <= 1e-5
            else:
                assert float(gaps.median() if name in ROUTED else gaps.max()) <= tolerance(dtype)


@FAMILY
def test_in_float32_slots_give_the_tokens_of_the_plain_engine(name: str) -> None:
    policy, requests = make_policy(name, device="cuda"), make_requests(3, 9, 1, 17, 70, each=4)
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.8, top_k=30)):
        for limits in (LIMITS, Limits(max_response_tokens=9, end_tokens=(), stop=("<7>", "<30><"))):
            plain = LocalEngine(policy).generate(requests, sampling, limits)
            assert_same_responses(graphed_engine(policy, 7).generate(requests, sampling, limits), plain)


@FAMILY
@BOTH
def test_graphs_on_and_off_give_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    policy, requests = make_policy(name, dtype, "cuda"), make_requests(3, 9, 1, 17, 70, each=4)
    if not capturable(policy):
        pytest.skip("torch's grouped product copies from the host in float32, which no graph can hold")
    on, off = graphed_engine(policy, 7), graphed_engine(policy, 7, graphs=False)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(min_p=0.02)):
        left, right = (engine.generate(requests, sampling, LIMITS) for engine in (on, off))
        for one, other in zip(chain(*left), chain(*right), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert torch.allclose(one.logprobs, other.logprobs, atol=1e-6)
    assert 0 < on.captures <= 3 * len(on.buckets) and off.captures == 0


@pytest.mark.parametrize("name", sorted(ROUTED))
def test_a_captured_step_records_the_same_experts_as_an_eager_step(name: str) -> None:
    policy, requests = make_policy(name, torch.bfloat16, "cuda"), make_requests(30, 9, each=4)
    captured, eager = (
        graphed_engine(policy, graphs=graphs, record_routes=True).generate(requests, Sampling(), LIMITS)
        for graphs in (True, False)
    )
    assert_same_responses(captured, eager)
    for one, other in zip(chain(*captured), chain(*eager), strict=True):
        assert one.routes is not None and other.routes is not None
        assert torch.equal(one.routes.experts, other.routes.experts)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_a_later_turn_matches_a_fresh_engine(name: str) -> None:
    policy = make_policy(name, device="cuda")
    engine = graphed_engine(policy)
    requests = make_requests(20, 31, 90, each=4)
    for _ in range(3):
        before = engine.reused_tokens
        requests = next_turn(engine, requests, LIMITS, more=5)
        responses = engine.generate(requests, Sampling(), LIMITS)
        assert engine.reused_tokens - before >= sum(len(request.prompt) - 6 for request in requests)
        assert_same_responses(responses, graphed_engine(policy).generate(requests, Sampling(), LIMITS))


def test_no_prefix_is_reused_after_a_fused_optimizer_step() -> None:
    policy = make_policy("qwen3", device="cuda")
    engine = graphed_engine(policy)
    requests = next_turn(engine, make_requests(20, 31, each=2), LIMITS, more=5)
    weights = list(policy.model.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.01, fused=True).step()
    responses = engine.generate(requests, Sampling(), LIMITS)
    assert engine.reused_tokens == 0
    assert_same_responses(responses, LocalEngine(policy).generate(requests, Sampling(), LIMITS))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_twenty_calls_capture_each_graph_once_and_allocate_no_more_memory(name: str) -> None:
    engine = graphed_engine(make_policy(name, torch.bfloat16, "cuda"), 32)
    allocated, captures = [], []
    for number in range(20):
        # As in a run, training and evaluation alternate, each with its own sampling, limits and end tokens.
        engine.generate(make_requests(30, 9, 17, each=16, seed=number), Sampling(), LIMITS)
        evaluation_limits = Limits(max_response_tokens=30, end_tokens=(END, 7, 8))
        engine.generate(make_requests(*[25] * 12, each=1, seed=99), Sampling(temperature=0), evaluation_limits)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        captures.append(engine.captures)
    # The buckets a call uses depend on when its rows end. There are few bucket sizes, and each is captured once.
    assert captures[-1] <= 2 * len(engine.buckets)
    settled = allocated[captures.index(captures[-1]) :]
    assert max(settled) == settled[0], f"allocated since the last capture: {settled}"


def test_repeating_a_call_allocates_no_more_memory_after_the_second() -> None:
    engine = graphed_engine(make_policy("qwen3", torch.bfloat16, "cuda"), 32)
    requests, allocated = make_requests(30, 9, 17, each=16), []
    for _ in range(20):
        engine.generate(requests, Sampling(), LIMITS)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[2:]) <= allocated[1], f"allocated after each call: {allocated}"


def test_running_out_of_memory_means_fewer_slots_and_the_same_tokens() -> None:
    policy, messages = make_policy("llama", device="cuda"), []
    requests = [Request(prompt=prompt, seeds=tuple(range(64))) for prompt in make_prompts(9, 20, 3, 30)]
    limits = Limits(max_response_tokens=4096, end_tokens=tuple(range(32)))
    expected = LocalEngine(policy).generate(
        requests, Sampling(), Limits(max_response_tokens=64, end_tokens=limits.end_tokens)
    )
    assert max(len(response.tokens) for response in chain(*expected)) < 64, "a response was cut; take other seeds"
    torch.cuda.empty_cache()
    # 256 slots of 4096 tokens need 537 MB; only 200 MB more than now may be allocated.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * 2**20) / total)
    try:
        engine = graphed_engine(policy, 256, say=messages.append)
        responses = engine.generate(requests, Sampling(), limits)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_responses(responses, expected)
    assert 1 <= engine.rows_at_once < 256
    assert messages and all(text.startswith("out of memory with ") for text in messages)


def test_the_host_synchronises_only_to_read_slot_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.rollouts.gpu.scheduler import Scheduler

    policy, requests = make_policy("qwen3", torch.bfloat16, "cuda"), make_requests(30, 9, 17, each=8)
    engine = graphed_engine(policy, 32)
    expected = engine.generate(requests, Sampling(), LIMITS)

    def without_waiting(method: Any) -> Any:
        def run(*args: Any) -> Any:
            with no_waiting():
                return method(*args)

        return run

    # All graphs are captured. From now on neither steps nor collecting finished rows may synchronise.
    captures = engine.captures
    engine.prefixes.clear()  # so that the second call repeats the first bit for bit
    for name in ("_advance", "_collect"):
        monkeypatch.setattr(Scheduler, name, without_waiting(getattr(Scheduler, name)))
    responses = engine.generate(requests, Sampling(), LIMITS)
    assert engine.captures == captures, "a capture synchronises; the calls should have been equal"
    assert_same_responses(responses, expected)


def test_prefill_memory_is_bounded() -> None:
    """512 prompts of 400 tokens: one prefill forward holds activations of 16384 tokens, not of 204800."""
    policy = make_policy("qwen3", torch.bfloat16, "cuda")
    few, many = (make_requests(*[400] * count, each=1) for count in (40, 512))
    limits, peaks = Limits(max_response_tokens=2, end_tokens=()), []
    for requests in (few, many):
        engine = graphed_engine(policy, 512)
        engine.generate(requests, Sampling(), limits)
        torch.cuda.synchronize()
        engine.prefixes.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.generate(requests, Sampling(), limits)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2 * peaks[0]


def response_tokens(responses: list[list[Response]]) -> list[list[int]]:
    return [response.tokens.tolist() for response in chain(*responses)]


def test_bf16_tokens_repeat_from_call_to_call_and_from_engine_to_engine() -> None:
    policy, requests = make_policy("qwen3", torch.bfloat16, "cuda"), make_requests(30, 9, 17, each=8)
    first = response_tokens(graphed_engine(policy, 16).generate(requests, Sampling(), LIMITS))
    again = graphed_engine(policy, 16)
    assert response_tokens(again.generate(requests, Sampling(), LIMITS)) == first
    again.prefixes.clear()  # prefill of a reused prompt may round differently
    assert response_tokens(again.generate(requests, Sampling(), LIMITS)) == first


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_an_exact_engine_has_the_trainers_bits_whatever_the_batch(name: str) -> None:
    """`find_difference` compares 1, 2, 3, 9 and 40 rows; 40 rows of one length and refilled slots come after it."""
    policy = make_policy(name, torch.bfloat16, "cuda")
    engine = local_engine(policy, 40, exact="on")
    assert policy.exact and any("the engine is exact" in note for note in policy.notes)
    requests = make_requests(3, 70, 130, each=25)
    limits = Limits(max_response_tokens=90, end_tokens=(END, *range(5, 9)))
    responses = engine.generate(requests, Sampling(temperature=0.8), limits)
    for request, row in zip(requests, responses, strict=True):
        for response in row:
            texts = replace(
                prompt_texts([request.prompt]),
                tokens=response.tokens.unsqueeze(0),
                lengths=torch.tensor([len(response.tokens)]),
                mask=torch.ones(1, len(response.tokens), dtype=torch.bool),
                group=torch.tensor([0]),
                temperature=torch.tensor([0.8]),
            )
            assert torch.equal(policy.score(texts, torch.tensor([0])).logprobs.cpu()[0], response.logprobs)
