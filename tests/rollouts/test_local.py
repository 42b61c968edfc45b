"""The local engine against plain forwards and `model.generate`: log-probs, greedy text, neighbours, waves, ends."""

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


def tiny(experts: int = 0, ends: float = 0.0) -> Policy:
    """Random weights large enough to have opinions; `ends` makes the end token likelier, so that lengths are ragged."""
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


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 70, (length,), generator=generator) for length in lengths]


def ask(prompt: Tensor, *seeds: int) -> Request:
    return Request(prompt=prompt, seeds=seeds)


def flat(found: Sequence[Sequence[Response]]) -> list[Response]:
    return [response for row in found for response in row]


def plain_distribution(policy: Policy, prompt: Tensor, response: Response, temperature: float) -> Tensor:
    """[T, V] log-probs by one forward over the finished text."""
    with torch.no_grad():
        logits = policy.model(torch.cat([prompt, response.tokens])[None]).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def kept_mass(logprobs: Tensor, sampling: Sampling) -> tuple[Tensor, set[int]]:
    """The log of the mass that truncation keeps of one distribution, and what it keeps, in plain Python."""
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
def test_log_probs_are_those_of_a_plain_forward_before_truncation(name: str, experts: int) -> None:
    policy, sampling = tiny(experts), TRUNCATIONS[name]
    asked = [ask(prompt, *range(10 * i, 10 * i + 4)) for i, prompt in enumerate(prompts(1, 7, 3, 12))]
    found = LocalEngine(policy).generate(asked, sampling, LIMITS)
    for request, row in zip(asked, found, strict=True):
        for response in row:
            expected = plain_distribution(policy, request.prompt, response, sampling.temperature)
            chosen = expected[torch.arange(len(response.tokens)), response.tokens]
            assert response.logprobs.dtype == torch.float32
            assert float((response.logprobs - chosen).abs().max()) < 1e-5
            assert float(response.logprobs.max()) <= 0.0


@pytest.mark.parametrize("name", list(TRUNCATIONS)[1:])
def test_the_kept_mass_is_that_of_the_tokens_that_could_have_been_drawn(name: str) -> None:
    policy, sampling = tiny(), TRUNCATIONS[name]
    asked = [ask(prompt, 1, 2, 3) for prompt in prompts(2, 9)]
    for request, row in zip(asked, LocalEngine(policy).generate(asked, sampling, LIMITS), strict=True):
        for response in row:
            assert response.kept_logmass is not None
            each = plain_distribution(policy, request.prompt, response, sampling.temperature)
            for token, logmass, logprobs in zip(response.tokens, response.kept_logmass, each, strict=True):
                expected, kept = kept_mass(logprobs, sampling)
                assert abs(float(logmass) - float(expected)) < 1e-5 and int(token) in kept


def test_without_truncation_there_is_no_kept_mass() -> None:
    (response,) = flat(LocalEngine(tiny()).generate([ask(*prompts(3), 1)], Sampling(), LIMITS))
    assert response.kept_logmass is None


@pytest.mark.parametrize("experts", [0, 4])
def test_greedy_text_is_that_of_generate(experts: int) -> None:
    policy = tiny(experts)
    ragged = prompts(1, 2, 5, 11, 17)
    found = LocalEngine(policy).generate([ask(p, 0, 1) for p in ragged], Sampling(temperature=0.0), LIMITS)
    for prompt, row in zip(ragged, found, strict=True):
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
    asked = [ask(torch.tensor([5, 6, 7]), 1, 2), ask(torch.tensor([9]), 3), ask(torch.arange(2, 13), 4)]
    for request, row in zip(asked, LocalEngine(policy).generate(asked, Sampling(temperature=0.7), LIMITS), strict=True):
        for response in row:
            expected = plain_distribution(policy, request.prompt, response, 0.7)
            chosen = expected[torch.arange(len(response.tokens)), response.tokens]
            assert float((response.logprobs - chosen).abs().max()) < 1e-6


def same(left: Response, right: Response) -> bool:
    return (
        left.tokens.tolist() == right.tokens.tolist()
        and float((left.logprobs - right.logprobs).abs().max()) < 1e-5
        and (left.stop, left.text) == (right.stop, right.text)
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_neighbours_and_a_shared_prefill_change_no_token(experts: int) -> None:
    policy = tiny(experts, ends=2.0)
    asked = [ask(prompt, *range(8 * i, 8 * i + 8)) for i, prompt in enumerate(prompts(1, 4, 9, 15))]
    together = LocalEngine(policy).generate(asked, Sampling(), LIMITS)
    assert len({len(response.tokens) for response in flat(together)}) > 3
    for request, row in zip(asked, together, strict=True):
        for seed, response in zip(request.seeds, row, strict=True):
            ((alone,),) = LocalEngine(policy).generate([ask(request.prompt, seed)], Sampling(), LIMITS)
            assert same(alone, response)


@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 10**6])
def test_how_many_rows_are_written_at_once_does_not_matter(rows_at_once: int) -> None:
    policy = tiny(ends=2.0)
    asked = [ask(prompt, *range(5 * i, 5 * i + 5)) for i, prompt in enumerate(prompts(2, 11, 5))]
    expected = LocalEngine(policy, rows_at_once=4).generate(asked, Sampling(), LIMITS)
    found = LocalEngine(policy, rows_at_once=rows_at_once).generate(asked, Sampling(), LIMITS)
    assert [len(row) for row in found] == [5, 5, 5]
    assert all(same(a, b) for a, b in zip(flat(found), flat(expected), strict=True))


def test_the_order_of_requests_and_of_seeds_does_not_matter() -> None:
    policy, (first, second) = tiny(ends=2.0), prompts(3, 10)
    engine = LocalEngine(policy)
    forward = engine.generate([ask(first, 1, 2, 3), ask(second, 4, 5)], Sampling(), LIMITS)
    backward = engine.generate([ask(second, 5, 4), ask(first, 3, 2, 1)], Sampling(), LIMITS)
    assert all(same(a, b) for a, b in zip(forward[0], backward[1][::-1], strict=True))
    assert all(same(a, b) for a, b in zip(forward[1], backward[0][::-1], strict=True))


def test_equal_seeds_give_equal_responses_and_other_seeds_others() -> None:
    (row,) = LocalEngine(tiny()).generate([ask(*prompts(4), 9, 9, 10)], Sampling(), LIMITS)
    assert row[0].tokens.tolist() == row[1].tokens.tolist() != row[2].tokens.tolist()


def test_nothing_to_do_is_done() -> None:
    engine = LocalEngine(tiny())
    assert engine.generate([], Sampling(), LIMITS) == []
    assert engine.generate([ask(*prompts(4))], Sampling(), LIMITS) == [[]]
    found = engine.generate([ask(*prompts(4)), ask(*prompts(4), 1), ask(*prompts(5))], Sampling(), LIMITS)
    assert [len(row) for row in found] == [0, 1, 0]


def test_the_end_token_is_written_counted_and_left_out_of_the_text() -> None:
    policy = tiny(ends=2.0)
    (row,) = LocalEngine(policy).generate([ask(*prompts(4), *range(40))], Sampling(), LIMITS)
    ended = [response for response in row if response.stop is StopReason.END_TOKEN]
    assert ended and len(ended) < len(row)
    for response in row:
        written = response.tokens.tolist()
        assert END not in written[:-1] and len(written) == len(response.logprobs) <= 20
        assert (written[-1] == END) == (response.stop is StopReason.END_TOKEN)
        assert (len(written) == 20 and written[-1] != END) == (response.stop is StopReason.LENGTH)
        assert response.text == policy.tokenizer.decode(written, skip_special_tokens=True)


def test_any_of_several_end_tokens_ends_a_response() -> None:
    policy = tiny()
    several = Limits(max_response_tokens=20, end_tokens=(END, 10, 20, 30, 40, 50))
    (row,) = LocalEngine(policy).generate([ask(*prompts(4), *range(60))], Sampling(), several)
    seen = {int(response.tokens[-1]) for response in row if response.stop is StopReason.END_TOKEN}
    assert len(seen) > 2
    for response in row:
        assert not set(response.tokens[:-1].tolist()) & set(several.end_tokens)


def test_an_end_token_in_the_last_place_is_an_end_and_no_cut() -> None:
    policy = tiny()
    everything = Limits(max_response_tokens=1, end_tokens=tuple(range(3, 200)))
    (row,) = LocalEngine(policy).generate([ask(*prompts(4), 1, 2)], Sampling(), everything)
    assert [response.stop for response in row] == [StopReason.END_TOKEN] * 2
    assert [len(response.tokens) for response in row] == [1, 1] and [response.text for response in row] == ["", ""]


def test_without_end_tokens_every_response_is_cut() -> None:
    (row,) = LocalEngine(tiny(ends=2.0)).generate(
        [ask(*prompts(4), *range(8))], Sampling(), Limits(max_response_tokens=6, end_tokens=())
    )
    assert {response.stop for response in row} == {StopReason.LENGTH}
    assert {len(response.tokens) for response in row} == {6}


def test_a_stop_string_ends_the_response_and_leaves_the_text() -> None:
    policy, request = tiny(), ask(*prompts(4), *range(12))
    engine, endless = LocalEngine(policy), Limits(max_response_tokens=20, end_tokens=())
    (free,) = engine.generate([request], Sampling(), endless)
    # Two characters that the first response writes in its middle: the string spans tokens.
    stop = free[0].text[5:7]
    (row,) = engine.generate([request], Sampling(), replace(endless, stop=("~never~", stop)))
    assert len(stop) == 2 and row[0].stop is StopReason.STOP_STRING
    for before, after in zip(free, row, strict=True):
        written = before.tokens.tolist()
        said = [policy.tokenizer.decode(written[:end], skip_special_tokens=True) for end in range(1, 21)]
        cut = next((end for end, text in enumerate(said, 1) if stop in text), None)
        if cut is None:
            assert same(before, after)
        else:
            assert after.stop is StopReason.STOP_STRING and after.text == said[cut - 1].split(stop)[0]
            assert after.tokens.tolist() == written[:cut] and len(after.logprobs) == cut


def test_the_stop_string_that_comes_first_in_the_text_cuts_it() -> None:
    policy, request = tiny(), ask(*prompts(4), 0)
    endless = Limits(max_response_tokens=20, end_tokens=())
    ((free,),) = LocalEngine(policy).generate([request], Sampling(), endless)
    late, early = free.text[6], free.text[4:7]
    assert late not in free.text[:6]
    ((found,),) = LocalEngine(policy).generate([request], Sampling(), replace(endless, stop=(late, early)))
    assert found.text == free.text[:4] and found.stop is StopReason.STOP_STRING


def test_adapters_are_sampled_with_unmerged() -> None:
    policy = tiny()
    policy.model = with_lora(policy.model, Lora(rank=4)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    (prompt,) = prompts(6)
    ((response,),) = LocalEngine(policy).generate([ask(prompt, 3)], Sampling(), LIMITS)
    expected = plain_distribution(policy, prompt, response, 1.0)
    assert float((response.logprobs - expected[torch.arange(len(response.tokens)), response.tokens]).abs().max()) < 1e-5
    with policy.model.disable_adapter():
        without = plain_distribution(policy, prompt, response, 1.0)
    assert float((expected - without).abs().max()) > 0.1


def test_the_engine_reads_the_weights_as_they_are_now() -> None:
    policy = tiny()
    engine, request = LocalEngine(policy), ask(*prompts(6), 3)
    before = flat(engine.generate([request], Sampling(), LIMITS))[0]
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.7)
    after = flat(engine.generate([request], Sampling(), LIMITS))[0]
    expected: Any = plain_distribution(policy, request.prompt, after, 1.0)
    assert float((after.logprobs - expected[torch.arange(len(after.tokens)), after.tokens]).abs().max()) < 1e-5
    assert not torch.equal(before.logprobs[:1], after.logprobs[:1])


def test_a_policy_that_recomputes_its_layers_is_sampled_like_any_other() -> None:
    plain, asked = tiny(ends=2.0), [ask(prompt, 1, 2, 3) for prompt in prompts(3, 8)]
    expected = flat(LocalEngine(plain).generate(asked, Sampling(), LIMITS))
    loading = Loading(dtype="float32", device="cpu", gradient_checkpointing=True)
    policy = load_policy(plain.model, loading, tokenizer=plain.tokenizer)
    found = flat(LocalEngine(policy).generate(asked, Sampling(), LIMITS))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
