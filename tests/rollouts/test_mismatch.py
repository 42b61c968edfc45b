"""Mismatched samplers differ from the trainer as configured, follow its updates and return their own log-probs."""

import copy

import pytest
import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.policy.layout.attention import Heads
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.mismatch import KINDS, Mismatch, MismatchedEngine, round_to_int8
from legato.rollouts.sampling import Sampling
from tests.rollouts.families import END, VOCABULARY, assert_same_responses, forward_logprobs, make_policy, make_requests

LIMITS = Limits(max_response_tokens=8, end_tokens=(END,))


def mismatched_engine(policy: Policy, kind: str, seed: int = 0, **options: float) -> MismatchedEngine:
    return MismatchedEngine(policy, Mismatch(kind=kind, **options), seed=seed)  # type: ignore[arg-type]


def publish_and_generate(
    engine: LocalEngine | MismatchedEngine, requests: list[Request] | None = None
) -> list[list[Response]]:
    """Responses of the engine with the current weights of its policy."""
    engine.publish(engine.policy.model.named_parameters(), engine.version + 1)
    return engine.generate(make_requests(5, 9) if requests is None else requests, Sampling(), LIMITS)


def largest_gap(policy: Policy, requests: list[Request], responses: list[list[Response]]) -> float:
    """The largest difference between the sampler's log-probs and the policy's for the same tokens."""
    pairs = [(request, response) for request, row in zip(requests, responses, strict=True) for response in row]
    return max(
        float((forward_logprobs(policy, request.prompt, response) - response.logprobs).abs().max())
        for request, response in pairs
    )


def perturb_weights(policy: Policy, size: float = 0.02, seed: int = 0) -> None:
    """Change all weights at random, as an update would."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters().values():
            weight.add_(size * torch.randn(weight.shape, generator=source))


def copy_policy(policy: Policy) -> Policy:
    return Policy(model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer, name="copy")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_every_mismatch_kind_differs_a_little_and_follows_updates(kind: str, family: str) -> None:
    trained = make_policy(family)
    sampler, requests = mismatched_engine(trained, kind, size=1e-2), make_requests(5, 9)
    before = largest_gap(trained, requests, publish_and_generate(sampler, requests))
    perturb_weights(trained)
    after = largest_gap(trained, requests, publish_and_generate(sampler, requests))
    # An update moves log-probs by tenths, so a sampler that did not follow would fail here.
    assert 1e-6 < before < 0.2 and 1e-6 < after < 0.2


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_16_bit_sampler_matches_the_16_bit_model(kind: str, dtype: torch.dtype) -> None:
    trained = make_policy("qwen3")
    rounded = make_policy("qwen3", dtype)
    frequencies = trained.model.model.rotary_emb.inv_freq
    rounded.model.model.rotary_emb.inv_freq = frequencies.clone()
    sampler = mismatched_engine(trained, kind)
    assert_same_responses(publish_and_generate(sampler), publish_and_generate(LocalEngine(rounded)), within=0.0)
    assert sampler.engine.policy.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_int8_rounds_only_the_matrices_of_the_layers() -> None:
    trained = make_policy("qwen3")
    weights = mismatched_engine(trained, "int8").engine.policy.model.state_dict()
    for name, weight in trained.model.state_dict().items():
        if weight.dim() < 2 or "embed_tokens" in name or "lm_head" in name:
            assert torch.equal(weights[name], weight), name
            continue
        step = weight.abs().amax(-1, keepdim=True) / 127
        assert 0 < float(((weights[name] - weight).abs() / step).max()) <= 0.5 + 1e-4, name
        whole = weights[name] / step
        assert float((whole - whole.round()).abs().max()) < 1e-3, name


def test_int8_rounding_keeps_zeros_and_scales_by_row_maximum() -> None:
    assert torch.equal(round_to_int8(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert round_to_int8(torch.tensor([[127.0, 3.4, -0.6]])).tolist() == [[127.0, 3.0, -1.0]]


@pytest.mark.parametrize("kind", ["kv-bf16", "kv-int8"])
def test_keys_and_values_are_rounded_once_in_every_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference over whole texts: round each layer's keys and values before the attention of the model's own forward."""
    import legato.policy.layout.attention as attention

    trained, requests = make_policy("qwen3"), make_requests(5, 9)
    responses = publish_and_generate(mismatched_engine(trained, kind), requests)

    class Rounding:
        def attend(self, heads: Heads) -> Tensor:
            key, value = (
                x.bfloat16().float() if kind == "kv-bf16" else round_rows_to_int8(x) for x in (heads.key, heads.value)
            )
            return attention.attend(heads, heads.query, key, value, None).transpose(1, 2)

    with attention.attending(trained.body.config, Rounding()):
        assert largest_gap(trained, requests, responses) < 2e-5
    assert largest_gap(trained, requests, responses) > 1e-4


def round_rows_to_int8(values: Tensor) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    rounded = [[round(x / (max(map(abs, row)) / 127)) * (max(map(abs, row)) / 127) for x in row] for row in rows.tolist()]
    return torch.tensor(rounded).reshape(values.shape)


def test_perturbation_noise_is_relative_has_the_set_size_and_stays_fixed() -> None:
    trained = make_policy("qwen3")
    sampler = mismatched_engine(trained, "perturbed", size=0.01, seed=3)

    def relative() -> dict[str, Tensor]:
        weights = sampler.engine.policy.model.state_dict()
        return {name: weights[name] / weight - 1 for name, weight in trained.model.state_dict().items()}

    first = relative()
    every = torch.cat([noise.flatten() for noise in first.values()])
    assert float(every.std()) == pytest.approx(0.01, rel=0.02) and abs(float(every.mean())) < 1e-3
    perturb_weights(trained)
    publish_and_generate(sampler)
    assert all(torch.allclose(first[name], noise, atol=1e-4) for name, noise in relative().items())
    weights, other = (
        e.engine.policy.model.state_dict() for e in (sampler, mismatched_engine(trained, "perturbed", size=0.01, seed=4))
    )
    assert not any(torch.equal(weights[name], other[name]) for name in weights)


def test_a_stale_sampler_matches_the_policy_of_earlier_updates() -> None:
    trained = make_policy("qwen3")
    sampler = mismatched_engine(trained, "stale", updates=3)
    past = [copy_policy(trained)]
    for update in range(6):
        assert_same_responses(
            publish_and_generate(sampler), publish_and_generate(LocalEngine(past[max(0, update - 3)])), within=0.0
        )
        assert sampler.settled == (update >= 3)
        sampler.before_update()
        perturb_weights(trained, seed=update)
        past.append(copy_policy(trained))
    assert largest_gap(trained, make_requests(5, 9), publish_and_generate(sampler)) > 1e-2


def test_the_state_of_a_stale_sampler_restores_another() -> None:
    trained = make_policy("qwen3")
    sampler = mismatched_engine(trained, "stale", updates=2)
    for update in range(3):
        sampler.before_update()
        perturb_weights(trained, seed=update)
    other = mismatched_engine(trained, "stale", updates=2)
    other.load(sampler.state())
    for place in range(3):
        assert_same_responses(publish_and_generate(other), publish_and_generate(sampler), within=0.0)
        for one in (other, sampler):
            one.before_update()
        perturb_weights(trained, seed=10 + place)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
def test_other_mismatch_kinds_have_empty_state(kind: str) -> None:
    sampler = mismatched_engine(make_policy("qwen3"), kind)
    sampler.before_update()
    assert sampler.state() == {} and sampler.settled


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatched_engine_leaves_the_policy_unchanged(kind: str) -> None:
    trained = make_policy("qwen3")
    before = {name: weight.detach().clone() for name, weight in trained.parameters().items()}
    texts = _texts()
    scored = trained.score(texts, torch.arange(2)).logprobs
    publish_and_generate(mismatched_engine(trained, kind, size=0.1))
    assert all(weight.requires_grad and torch.equal(weight, before[name]) for name, weight in trained.parameters().items())
    assert torch.equal(trained.score(texts, torch.arange(2)).logprobs, scored)


def _texts() -> Texts:
    source = torch.Generator().manual_seed(0)
    return Texts(
        prompts=torch.randint(2, VOCABULARY, (1, 4), generator=source),
        prompt_lengths=torch.tensor([4]),
        tokens=torch.randint(2, VOCABULARY, (2, 5), generator=source),
        lengths=torch.tensor([5, 5]),
        mask=torch.ones(2, 5, dtype=torch.bool),
        group=torch.tensor([0, 0]),
        temperature=torch.ones(2),
    )


def test_rounding_the_kv_cache_is_refused_for_a_model_that_hides_its_keys() -> None:
    trained = make_policy("qwen3")
    trained.views = False
    with pytest.raises(
        ValueError, match=r"mismatch\.kind = 'kv-int8': expected .*got Qwen3ForCausalLM, which hides its keys"
    ):
        mismatched_engine(trained, "kv-int8")


def test_frozen_weights_are_altered_too() -> None:
    trained = make_policy("qwen3")
    for name, weight in trained.model.named_parameters():
        weight.requires_grad_("norm" in name)
    weights = dict(mismatched_engine(trained, "int8").engine.policy.model.named_parameters())
    assert any(
        not torch.equal(weights[name], weight) for name, weight in trained.model.named_parameters() if weight.dim() == 2
    )
    assert not any(weight.requires_grad for weight in weights.values())
