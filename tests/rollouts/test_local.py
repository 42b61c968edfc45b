"""The local engine against plain forwards and `model.generate`: log-probs, greedy tokens, batching, waves, stops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.policy.model.adapters import Lora, with_lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import family, policy_of

END = 1
LIMITS = Limits(max_response_tokens=20, end_tokens=(END,))
TRUNCATIONS = {
    "none": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=1.3, top_k=5),
    "top-p": Sampling(temperature=0.7, top_p=0.6),
    "min-p": Sampling(temperature=1.0, min_p=0.2),
    "all three": Sampling(temperature=1.5, top_k=12, top_p=0.8, min_p=0.05),
}


def tiny_policy(experts: int = 0, ends: float = 0.0) -> Policy:
    """A random policy with clearly unequal token probabilities. `ends` makes the end token likelier, so lengths vary."""
    words = character_tokenizer()
    model = tiny_model(
        TinyShape(hidden=32, heads=2, experts=experts or 8), vocabulary=len(words), seed=0, mixture=experts > 0
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=generator))
        embedding = model.get_input_embeddings().weight
        embedding[END] = (1 + ends) * embedding[END] + ends * embedding.mean(0)
    return Policy(model=model, tokenizer=words, name="tiny")


def make_prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 70, (length,), generator=generator) for length in lengths]


def make_request(prompt: Tensor, *seeds: int) -> Request:
    return Request(prompt=prompt, seeds=seeds)


def flatten(responses: Sequence[Sequence[Response]]) -> list[Response]:
    return [response for row in responses for response in row]


def plain_distribution(policy: Policy, prompt: Tensor, response: Response, temperature: float) -> Tensor:
    """[T, V] log-probs by one forward over the finished text."""
    with torch.no_grad():
        logits = policy.model(torch.cat([prompt, response.tokens])[None]).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def kept_mass(logprobs: Tensor, sampling: Sampling) -> tuple[Tensor, set[int]]:
    """The log-mass that truncation keeps of one distribution and the kept tokens, in plain Python."""
    order = logprobs.argsort(descending=True).tolist()
    kept = order[: sampling.top_k] if sampling.top_k else order
    if sampling.min_p:
        kept = [token for token in kept if logprobs[token].exp() >= sampling.min_p * logprobs[order[0]].exp()]
    if sampling.top_p < 1.0:
        total, nucleus, mass = sum(float(logprobs[token].exp()) for token in kept), [], 0.0
        for token in kept:
            nucleus.append(token)
            mass += float(logprobs[token].exp())
            if mass >= sampling.top_p * total:
                break
        kept = nucleus
    return logprobs[torch.tensor(kept)].logsumexp(0), set(kept)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("name", TRUNCATIONS)
def test_log_probs_match_a_plain_forward_before_truncation(name: str, experts: int) -> None:
    policy, sampling = tiny_policy(experts), TRUNCATIONS[name]
    requests = [make_request(prompt, *range(10 * i, 10 * i + 4)) for i, prompt in enumerate(make_prompts(1, 7, 3, 12))]
    responses = LocalEngine(policy).generate(requests, sampling, LIMITS)
    for request, row in zip(requests, responses, strict=True):
        for response in row:
            expected = plain_distribution(policy, request.prompt, response, sampling.temperature)
            chosen = expected[torch.arange(len(response.tokens)), response.tokens]
            assert response.logprobs.dtype == torch.float32
            assert float((response.logprobs - chosen).abs().max()) < 1e-5
            assert float(response.logprobs.max()) <= 0.0


@pytest.mark.parametrize("name", list(TRUNCATIONS)[1:])
def test_the_kept_mass_sums_the_tokens_that_could_have_been_drawn(name: str) -> None:
    policy, sampling = tiny_policy(), TRUNCATIONS[name]
    requests = [make_request(prompt, 1, 2, 3) for prompt in make_prompts(2, 9)]
    for request, row in zip(requests, LocalEngine(policy).generate(requests, sampling, LIMITS), strict=True):
        for response in row:
            assert response.kept_logmass is not None
            each = plain_distribution(policy, request.prompt, response, sampling.temperature)
            for token, logmass, logprobs in zip(response.tokens, response.kept_logmass, each, strict=True):
                expected, kept = kept_mass(logprobs, sampling)
                assert abs(float(logmass) - float(expected)) < 1e-5 and int(token) in kept


def test_without_truncation_there_is_no_kept_mass() -> None:
    (response,) = flatten(LocalEngine(tiny_policy()).generate([make_request(*make_prompts(3), 1)], Sampling(), LIMITS))
    assert response.kept_logmass is None


@pytest.mark.parametrize("experts", [0, 4])
def test_greedy_tokens_match_generate(experts: int) -> None:
    policy = tiny_policy(experts)
    ragged = make_prompts(1, 2, 5, 11, 17)
    responses = LocalEngine(policy).generate([make_request(p, 0, 1) for p in ragged], Sampling(temperature=0.0), LIMITS)
    for prompt, row in zip(ragged, responses, strict=True):
        expected = policy.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert [response.tokens.tolist() for response in row] == [expected, expected]


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mistral", "granite", "cohere", "llama"])
def test_windows_soft_caps_sinks_and_scaled_logits_are_decoded_exactly(name: str) -> None:
    policy = policy_of(family(name))
    requests = [
        make_request(torch.tensor([5, 6, 7]), 1, 2),
        make_request(torch.tensor([9]), 3),
        make_request(torch.arange(2, 13), 4),
    ]
    for request, row in zip(
        requests, LocalEngine(policy).generate(requests, Sampling(temperature=0.7), LIMITS), strict=True
    ):
        for response in row:
            expected = plain_distribution(policy, request.prompt, response, 0.7)
            chosen = expected[torch.arange(len(response.tokens)), response.tokens]
            assert float((response.logprobs - chosen).abs().max()) < 1e-6


def same_response(left: Response, right: Response) -> bool:
    return (
        left.tokens.tolist() == right.tokens.tolist()
        and float((left.logprobs - right.logprobs).abs().max()) < 1e-5
        and (left.stop, left.text) == (right.stop, right.text)
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_neighbours_and_a_shared_prefill_change_no_token(experts: int) -> None:
    policy = tiny_policy(experts, ends=2.0)
    requests = [make_request(prompt, *range(8 * i, 8 * i + 8)) for i, prompt in enumerate(make_prompts(1, 4, 9, 15))]
    together = LocalEngine(policy).generate(requests, Sampling(), LIMITS)
    assert len({len(response.tokens) for response in flatten(together)}) > 3
    for request, row in zip(requests, together, strict=True):
        for seed, response in zip(request.seeds, row, strict=True):
            ((alone,),) = LocalEngine(policy).generate([make_request(request.prompt, seed)], Sampling(), LIMITS)
            assert same_response(alone, response)


@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 10**6])
def test_the_number_of_rows_at_once_changes_no_response(rows_at_once: int) -> None:
    policy = tiny_policy(ends=2.0)
    requests = [make_request(prompt, *range(5 * i, 5 * i + 5)) for i, prompt in enumerate(make_prompts(2, 11, 5))]
    expected = LocalEngine(policy, rows_at_once=4).generate(requests, Sampling(), LIMITS)
    responses = LocalEngine(policy, rows_at_once=rows_at_once).generate(requests, Sampling(), LIMITS)
    assert [len(row) for row in responses] == [5, 5, 5]
    assert all(same_response(a, b) for a, b in zip(flatten(responses), flatten(expected), strict=True))


def test_the_order_of_requests_and_seeds_changes_no_response() -> None:
    policy, (first, second) = tiny_policy(ends=2.0), make_prompts(3, 10)
    engine = LocalEngine(policy)
    forward = engine.generate([make_request(first, 1, 2, 3), make_request(second, 4, 5)], Sampling(), LIMITS)
    backward = engine.generate([make_request(second, 5, 4), make_request(first, 3, 2, 1)], Sampling(), LIMITS)
    assert all(same_response(a, b) for a, b in zip(forward[0], backward[1][::-1], strict=True))
    assert all(same_response(a, b) for a, b in zip(forward[1], backward[0][::-1], strict=True))


def test_equal_seeds_give_equal_responses_and_other_seeds_differ() -> None:
    (row,) = LocalEngine(tiny_policy()).generate([make_request(*make_prompts(4), 9, 9, 10)], Sampling(), LIMITS)
    assert row[0].tokens.tolist() == row[1].tokens.tolist() != row[2].tokens.tolist()


def test_no_requests_or_no_seeds_give_no_responses() -> None:
    engine = LocalEngine(tiny_policy())
    assert engine.generate([], Sampling(), LIMITS) == []
    assert engine.generate([make_request(*make_prompts(4))], Sampling(), LIMITS) == [[]]
    responses = engine.generate(
        [make_request(*make_prompts(4)), make_request(*make_prompts(4), 1), make_request(*make_prompts(5))],
        Sampling(),
        LIMITS,
    )
    assert [len(row) for row in responses] == [0, 1, 0]


def test_the_end_token_is_in_the_tokens_but_not_in_the_text() -> None:
    policy = tiny_policy(ends=2.0)
    (row,) = LocalEngine(policy).generate([make_request(*make_prompts(4), *range(40))], Sampling(), LIMITS)
    ended = [response for response in row if response.stop is StopReason.END_TOKEN]
    assert ended and len(ended) < len(row)
    for response in row:
        written = response.tokens.tolist()
        assert END not in written[:-1] and len(written) == len(response.logprobs) <= 20
        assert (written[-1] == END) == (response.stop is StopReason.END_TOKEN)
        assert (len(written) == 20 and written[-1] != END) == (response.stop is StopReason.LENGTH)
        assert response.text == policy.tokenizer.decode(written, skip_special_tokens=True)


def test_any_of_several_end_tokens_ends_a_response() -> None:
    policy = tiny_policy()
    several = Limits(max_response_tokens=20, end_tokens=(END, 10, 20, 30, 40, 50))
    (row,) = LocalEngine(policy).generate([make_request(*make_prompts(4), *range(60))], Sampling(), several)
    last_tokens = {int(response.tokens[-1]) for response in row if response.stop is StopReason.END_TOKEN}
    assert len(last_tokens) > 2
    for response in row:
        assert not set(response.tokens[:-1].tolist()) & set(several.end_tokens)


def test_an_end_token_at_the_length_limit_stops_as_end_token() -> None:
    policy = tiny_policy()
    everything = Limits(max_response_tokens=1, end_tokens=tuple(range(3, 200)))
    (row,) = LocalEngine(policy).generate([make_request(*make_prompts(4), 1, 2)], Sampling(), everything)
    assert [response.stop for response in row] == [StopReason.END_TOKEN] * 2
    assert [len(response.tokens) for response in row] == [1, 1] and [response.text for response in row] == ["", ""]


def test_without_end_tokens_every_response_stops_at_the_length_limit() -> None:
    (row,) = LocalEngine(tiny_policy(ends=2.0)).generate(
        [make_request(*make_prompts(4), *range(8))], Sampling(), Limits(max_response_tokens=6, end_tokens=())
    )
    assert {response.stop for response in row} == {StopReason.LENGTH}
    assert {len(response.tokens) for response in row} == {6}


def test_a_stop_string_ends_the_response_and_is_cut_from_the_text() -> None:
    policy, request = tiny_policy(), make_request(*make_prompts(4), *range(12))
    engine, endless = LocalEngine(policy), Limits(max_response_tokens=20, end_tokens=())
    (free,) = engine.generate([request], Sampling(), endless)
    # Two characters from the middle of the first response, so that the stop string spans tokens.
    stop = free[0].text[5:7]
    (row,) = engine.generate([request], Sampling(), replace(endless, stop=("~never~", stop)))
    assert len(stop) == 2 and row[0].stop is StopReason.STOP_STRING
    for before, after in zip(free, row, strict=True):
        written = before.tokens.tolist()
        prefixes = [policy.tokenizer.decode(written[:end], skip_special_tokens=True) for end in range(1, 21)]
        cut = next((end for end, text in enumerate(prefixes, 1) if stop in text), None)
        if cut is None:
            assert same_response(before, after)
        else:
            assert after.stop is StopReason.STOP_STRING and after.text == prefixes[cut - 1].split(stop)[0]
            assert after.tokens.tolist() == written[:cut] and len(after.logprobs) == cut


def test_the_stop_string_that_comes_first_in_the_text_cuts_it() -> None:
    policy, request = tiny_policy(), make_request(*make_prompts(4), 0)
    endless = Limits(max_response_tokens=20, end_tokens=())
    ((free,),) = LocalEngine(policy).generate([request], Sampling(), endless)
    late, early = free.text[6], free.text[4:7]
    assert late not in free.text[:6]
    ((response,),) = LocalEngine(policy).generate([request], Sampling(), replace(endless, stop=(late, early)))
    assert response.text == free.text[:4] and response.stop is StopReason.STOP_STRING


def test_unmerged_adapters_are_used_in_sampling() -> None:
    policy = tiny_policy()
    policy.model = with_lora(policy.model, Lora(rank=4)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    (prompt,) = make_prompts(6)
    ((response,),) = LocalEngine(policy).generate([make_request(prompt, 3)], Sampling(), LIMITS)
    expected = plain_distribution(policy, prompt, response, 1.0)
    assert float((response.logprobs - expected[torch.arange(len(response.tokens)), response.tokens]).abs().max()) < 1e-5
    with policy.model.disable_adapter():
        without = plain_distribution(policy, prompt, response, 1.0)
    assert float((expected - without).abs().max()) > 0.1


def test_the_engine_samples_with_the_current_weights() -> None:
    policy = tiny_policy()
    engine, request = LocalEngine(policy), make_request(*make_prompts(6), 3)
    before = flatten(engine.generate([request], Sampling(), LIMITS))[0]
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.7)
    after = flatten(engine.generate([request], Sampling(), LIMITS))[0]
    expected: Any = plain_distribution(policy, request.prompt, after, 1.0)
    assert float((after.logprobs - expected[torch.arange(len(after.tokens)), after.tokens]).abs().max()) < 1e-5
    assert not torch.equal(before.logprobs[:1], after.logprobs[:1])


def test_a_policy_that_recomputes_its_layers_is_sampled_like_any_other() -> None:
    plain, requests = tiny_policy(ends=2.0), [make_request(prompt, 1, 2, 3) for prompt in make_prompts(3, 8)]
    expected = flatten(LocalEngine(plain).generate(requests, Sampling(), LIMITS))
    loading = Loading(dtype="float32", device="cpu", gradient_checkpointing=True)
    policy = load_policy(plain.model, loading, tokenizer=plain.tokenizer)
    responses = flatten(LocalEngine(policy).generate(requests, Sampling(), LIMITS))
    assert all(same_response(a, b) for a, b in zip(responses, expected, strict=True))
