"""Samplers that differ from the trainer differ by what they say, follow its updates and return their own log-probs."""

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
from tests.rollouts.families import END, VOCABULARY, asked, plainly, policy, same

LIMITS = Limits(max_response_tokens=8, end_tokens=(END,))


def engine(of: Policy, kind: str, seed: int = 0, **options: float) -> MismatchedEngine:
    return MismatchedEngine(of, Mismatch(kind=kind, **options), seed=seed)  # type: ignore[arg-type]


def said(of: LocalEngine | MismatchedEngine, requests: list[Request] | None = None) -> list[list[Response]]:
    """What an engine writes with the weights of its policy as they are now."""
    of.publish(of.policy.model.named_parameters(), of.version + 1)
    return of.generate(asked(5, 9) if requests is None else requests, Sampling(), LIMITS)


def gap(of: Policy, requests: list[Request], found: list[list[Response]]) -> float:
    """The largest difference between what a sampler reported and what a policy says of the same tokens."""
    pairs = [(request, response) for request, row in zip(requests, found, strict=True) for response in row]
    return max(float((plainly(of, request.prompt, response) - response.logprobs).abs().max()) for request, response in pairs)


def moved(of: Policy, size: float = 0.02, seed: int = 0) -> None:
    """An update, as far as a sampler can tell."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in of.parameters().values():
            weight.add_(size * torch.randn(weight.shape, generator=source))


def copied(of: Policy) -> Policy:
    return Policy(model=copy.deepcopy(of.model), tokenizer=of.tokenizer, name="copy")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_every_kind_differs_a_little_and_goes_along_with_updates(kind: str, family: str) -> None:
    trained = policy(family)
    sampler, requests = engine(trained, kind, size=1e-2), asked(5, 9)
    before = gap(trained, requests, said(sampler, requests))
    moved(trained)
    after = gap(trained, requests, said(sampler, requests))
    # An update moves log-probs by tenths: a sampler that did not follow would show it.
    assert 1e-6 < before < 0.2 and 1e-6 < after < 0.2


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_sampler_in_16_bits_is_the_model_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    trained = policy("qwen3")
    rounded = policy("qwen3", dtype)
    frequencies = trained.model.model.rotary_emb.inv_freq
    rounded.model.model.rotary_emb.inv_freq = frequencies.clone()
    sampler = engine(trained, kind)
    same(said(sampler), said(LocalEngine(rounded)), within=0.0)
    assert sampler.engine.policy.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_int8_rounds_the_matrices_of_the_layers_and_nothing_else() -> None:
    trained = policy("qwen3")
    held = engine(trained, "int8").engine.policy.model.state_dict()
    for name, weight in trained.model.state_dict().items():
        if weight.dim() < 2 or "embed_tokens" in name or "lm_head" in name:
            assert torch.equal(held[name], weight), name
            continue
        step = weight.abs().amax(-1, keepdim=True) / 127
        assert 0 < float(((held[name] - weight).abs() / step).max()) <= 0.5 + 1e-4, name
        whole = held[name] / step
        assert float((whole - whole.round()).abs().max()) < 1e-3, name


def test_steps_of_nothing_are_nothing() -> None:
    assert torch.equal(round_to_int8(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert round_to_int8(torch.tensor([[127.0, 3.4, -0.6]])).tolist() == [[127.0, 3.0, -1.0]]


@pytest.mark.parametrize("kind", ["kv-bf16", "kv-int8"])
def test_what_is_attended_to_is_rounded_once_and_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out over whole texts: each layer's keys and values rounded before the attention of the model's own forward."""
    import legato.policy.layout.attention as attention

    trained, requests = policy("qwen3"), asked(5, 9)
    found = said(engine(trained, kind), requests)

    class Rounding:
        def attend(self, heads: Heads) -> Tensor:
            key, value = (x.bfloat16().float() if kind == "kv-bf16" else steps_by_hand(x) for x in (heads.key, heads.value))
            return attention.attend(heads, heads.query, key, value, None).transpose(1, 2)

    with attention.attending(trained.body.config, Rounding()):
        assert gap(trained, requests, found) < 2e-5
    assert gap(trained, requests, found) > 1e-4


def steps_by_hand(values: Tensor) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    rounded = [[round(x / (max(map(abs, row)) / 127)) * (max(map(abs, row)) / 127) for x in row] for row in rows.tolist()]
    return torch.tensor(rounded).reshape(values.shape)


def test_noise_is_relative_of_the_size_asked_for_and_stays_the_same() -> None:
    trained = policy("qwen3")
    sampler = engine(trained, "perturbed", size=0.01, seed=3)

    def relative() -> dict[str, Tensor]:
        held = sampler.engine.policy.model.state_dict()
        return {name: held[name] / weight - 1 for name, weight in trained.model.state_dict().items()}

    first = relative()
    every = torch.cat([noise.flatten() for noise in first.values()])
    assert float(every.std()) == pytest.approx(0.01, rel=0.02) and abs(float(every.mean())) < 1e-3
    moved(trained)
    said(sampler)
    assert all(torch.allclose(first[name], noise, atol=1e-4) for name, noise in relative().items())
    held, other = (e.engine.policy.model.state_dict() for e in (sampler, engine(trained, "perturbed", size=0.01, seed=4)))
    assert not any(torch.equal(held[name], other[name]) for name in held)


def test_a_stale_sampler_is_the_policy_of_so_many_updates_ago() -> None:
    trained = policy("qwen3")
    sampler = engine(trained, "stale", updates=3)
    past = [copied(trained)]
    for update in range(6):
        same(said(sampler), said(LocalEngine(past[max(0, update - 3)])), within=0.0)
        assert sampler.settled == (update >= 3)
        sampler.before_update()
        moved(trained, seed=update)
        past.append(copied(trained))
    assert gap(trained, asked(5, 9), said(sampler)) > 1e-2


def test_what_a_stale_sampler_remembers_makes_another_the_same() -> None:
    trained = policy("qwen3")
    sampler = engine(trained, "stale", updates=2)
    for update in range(3):
        sampler.before_update()
        moved(trained, seed=update)
    other = engine(trained, "stale", updates=2)
    other.load(sampler.state())
    for place in range(3):
        same(said(other), said(sampler), within=0.0)
        for one in (other, sampler):
            one.before_update()
        moved(trained, seed=10 + place)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
def test_no_other_kind_has_anything_to_remember(kind: str) -> None:
    sampler = engine(policy("qwen3"), kind)
    sampler.before_update()
    assert sampler.state() == {} and sampler.settled


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_itself_is_left_as_it_was(kind: str) -> None:
    trained = policy("qwen3")
    before = {name: weight.detach().clone() for name, weight in trained.parameters().items()}
    texts = _texts()
    scored = trained.score(texts, torch.arange(2)).logprobs
    said(engine(trained, kind, size=0.1))
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


def test_a_model_that_hides_its_keys_cannot_have_them_rounded() -> None:
    trained = policy("qwen3")
    trained.views = False
    with pytest.raises(ValueError, match=r"rollouts\.mismatch\.kind = 'kv-int8': Qwen3ForCausalLM keeps its keys"):
        engine(trained, "kv-int8")


def test_weights_that_are_not_trained_are_altered_too() -> None:
    trained = policy("qwen3")
    for name, weight in trained.model.named_parameters():
        weight.requires_grad_("norm" in name)
    held = dict(engine(trained, "int8").engine.policy.model.named_parameters())
    assert any(not torch.equal(held[name], weight) for name, weight in trained.model.named_parameters() if weight.dim() == 2)
    assert not any(weight.requires_grad for weight in held.values())
