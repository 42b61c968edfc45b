"""Router taps: what they record is what every row alone would show, and forced routes get the gates of their family."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legato.core.outcome import Coefficients
from legato.core.texts import Texts
from legato.policy.experts.routers import Routers, find_routers
from legato.policy.experts.routing import Directions, Record
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Channels, Policy
from tests.policy.exact import Words, accumulate, family, ones, policy_of, ragged
from tests.policy.routes import FAMILIES, as_published, chosen_by, family_gates, overheard, plain_logits, present, sets

CPU = torch.device("cpu")


def exact_policy(name: str, **changes: Any) -> Policy:
    return load_policy(family(name), Loading(dtype="float64", device="cpu", **changes), tokenizer=Words())


def table_of(policy: Policy, texts: Texts) -> Record:
    assert policy.routers is not None
    return Record.empty(texts, policy.routers, CPU)


def zeros(_: range, channels: Channels) -> Coefficients:
    return Coefficients(logprobs=torch.zeros_like(channels.logprobs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_routers_of_every_family_are_found_and_their_gates_made_again_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model = as_published(name, dtype)
    found = find_routers(model)
    assert isinstance(found, Routers)
    assert (found.shape, found.experts, found.index) == ((2, 2), 4, torch.uint8)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    for router in found.modules:
        logits, scores, experts = router(hidden)
        assert torch.equal(found.gates(logits, experts), scores)


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_experts_get_the_gates_of_their_family(name: str) -> None:
    found = find_routers(family(name))
    assert isinstance(found, Routers)
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(30, 4, generator=source, dtype=torch.float64)
    experts = torch.rand(30, 4, generator=source).argsort(-1)[:, :2]
    assert torch.allclose(found.gates(logits, experts), family_gates(name, logits, experts), atol=1e-15)


def test_the_worked_example_of_replayed_gates() -> None:
    logits = torch.tensor([[0.5, 0.6, -0.3, 0.4]], dtype=torch.float64)
    for name in ("qwen3-moe", "gpt-oss"):
        found = find_routers(family(name))
        assert isinstance(found, Routers)
        own = found.gates(logits, torch.tensor([[1, 0]]))[0].tolist()
        replayed = found.gates(logits, torch.tensor([[1, 3]]))[0].tolist()
        assert own == pytest.approx([0.524979187479, 0.475020812521], abs=1e-12)
        assert replayed == pytest.approx([0.549833997312, 0.450166002688], abs=1e-12)


def test_many_experts_need_wider_numbers() -> None:
    model = as_published("qwen3-moe", num_experts=300, num_experts_per_tok=3)
    found = find_routers(model)
    assert isinstance(found, Routers)
    assert (found.experts, found.active, found.index) == (300, 3, torch.int16)


def test_layers_without_experts_have_no_router() -> None:
    found = find_routers(as_published("qwen3-moe", num_hidden_layers=3, mlp_only_layers=[1]))
    assert isinstance(found, Routers) and len(found.modules) == 2


class Unheard(nn.Module):
    """A router of another kind: it says which experts, and nothing of logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores, experts = (hidden @ self.weight.T).sigmoid().topk(self.top_k)
        return scores, experts


class Gate(Unheard):
    pass


@pytest.mark.parametrize(
    ("kind", "said"), [("UnheardRouter", "UnheardRouter does not give"), ("Gate", "Gate.*Qwen3MoeExperts")]
)
def test_a_mixture_whose_router_is_not_known_says_which_modules_it_has(kind: str, said: str) -> None:
    model = as_published("qwen3-moe")
    for layer in model.model.layers:
        layer.mlp.gate = type(kind, (Unheard,), {})(layer.mlp.gate)
    policy = policy_of(model)
    Policy(model=model, tokenizer=policy.tokenizer, name="its sampler", notes=policy.notes)
    assert policy.routers is None and sum("routing is not measured" in note for note in policy.notes) == 1
    with pytest.raises(ValueError, match=rf"(?s)training.routing_replay.*needs.*Qwen3MoeForCausalLM.*{said}"):
        policy.require_routers("training.routing_replay = 'R2'")


def test_a_dense_model_has_none_and_says_so() -> None:
    policy = policy_of(family("qwen3"))
    assert policy.routers is None and not policy.notes
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM\): it has no experts"):
        policy.require_routers("training.routing_replay = 'R2'")
    assert policy.score(ragged(), torch.arange(12), Directions()).routed is None


def expected(policy: Policy, texts: Texts, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, their log-probs and the entropy at the positions that predict the tokens of a row, the row alone."""
    logprobs = plain_logits(policy, texts, row)[int(texts.prompt_lengths[texts.group[row]]) - 1 :].log_softmax(-1)
    experts = chosen_by(logprobs)
    return experts, logprobs.gather(-1, experts), -(logprobs.exp() * logprobs).sum(-1).mean(1)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_recorded_is_what_every_row_alone_would_show(name: str, packing: bool) -> None:
    policy, texts = exact_policy(name, packing=packing), ragged()
    seen = 0
    for rows in (torch.arange(12), torch.tensor([1, 5, 7, 11])):
        routed = policy.score(texts, rows, Directions()).routed
        assert routed is not None and routed.experts.dtype == torch.uint8
        for place, row in enumerate(rows.tolist()):
            if texts.lengths[row] == 0:
                continue
            written = texts.mask[row, : texts.lengths[row]].nonzero().squeeze(1)
            experts, logprobs, entropy = (table[written] for table in expected(policy, texts, row))
            assert torch.equal(routed.experts[place, written].long(), experts)
            assert torch.allclose(routed.logprobs[place, written], logprobs, atol=1e-10)
            assert torch.allclose(routed.entropy[place, written], entropy, atol=1e-10)
            seen += len(written)
    assert seen > 60


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_a_record_holds_every_token_that_was_read_by_its_place_in_the_texts(packing: bool, shared: bool) -> None:
    policy, texts = exact_policy("qwen3-moe", packing=packing), ragged()
    policy.shared_prompts = shared
    record = table_of(policy, texts)
    for rows in (torch.arange(0, 12, 2), torch.arange(1, 12, 2)):
        traffic = policy.score(texts, rows, Directions()).traffic
        assert traffic is not None
        record.note(traffic)
    wide, deep = texts.prompts.shape[1], texts.tokens.shape[1]
    for row in present(texts):
        logits, group = plain_logits(policy, texts, row), int(texts.group[row])
        length, own = int(texts.prompt_lengths[group]), int(texts.lengths[row]) - 1
        first = texts.prompts.numel() + row * deep
        places = [*range(group * wide, group * wide + length), *range(first, first + own)]
        assert torch.equal(record.experts[places].long(), chosen_by(logits))
        assert record.tokens[places].tolist() == [
            *texts.prompts[group, :length].tolist(),
            *texts.tokens[row, :own].tolist(),
        ]
    read = sum(texts.prompt_lengths.tolist()) + sum(max(0, n - 1) for n in texts.lengths.tolist())
    assert int((record.tokens >= 0).sum()) == read


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern")
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_layers_computed_again_in_the_backward_are_recorded_once(packing: bool, lora: bool) -> None:
    changes: dict[str, Any] = {"packing": packing, "lora": Lora(rank=2) if lora else None}
    policy = exact_policy("qwen3-moe", **changes)
    again = exact_policy("qwen3-moe", gradient_checkpointing=True, **changes)
    texts, rows, found = ragged(), torch.arange(12), []
    for one in (policy, again):
        with overheard(one.model) as passed:
            channels, traffic = accumulate(one, texts, rows, ones, Directions())
        assert traffic is not None and len(passed) == (4 if one is again else 2)
        found.append((channels.routed, traffic))
    (left, going), (right, gone) = found
    assert left is not None and right is not None
    assert torch.equal(left.experts, right.experts) and torch.equal(going.experts, gone.experts)
    assert torch.allclose(left.logprobs, right.logprobs, atol=1e-12)


def test_nothing_is_looked_at_where_nobody_asks() -> None:
    policy = exact_policy("qwen3-moe")
    assert policy.routers is not None
    policy.score(ragged(), torch.arange(12))
    with policy._tap(policy.pack(ragged(), torch.arange(12)), Directions()) as tap:
        assert tap is not None and all(len(router._forward_hooks) == 1 for router in policy.routers.modules)
    assert all(len(router._forward_hooks) == 0 for router in policy.routers.modules)


def test_a_record_of_other_tokens_is_not_used_and_counted() -> None:
    policy, texts = exact_policy("qwen3-moe"), ragged()
    record = table_of(policy, texts)
    traffic = policy.score(texts, torch.arange(12), Directions()).traffic
    assert traffic is not None
    record.note(traffic)
    record.experts.copy_((record.experts + 1) % 4)
    used = policy.score(texts, torch.arange(12), Directions(replay=record)).traffic
    assert used is not None and float(used.missing) == 0
    # Five of the tokens that are read get the record of another token; none of them is forced.
    record.tokens[traffic.source[:5]] += 1
    moved = policy.score(texts, torch.arange(12), Directions(replay=record))
    assert moved.traffic is not None and float(moved.traffic.missing) == 5
    record.tokens.fill_(-1)
    free = policy.score(texts, torch.arange(12), Directions(replay=record))
    assert free.traffic is not None and float(free.traffic.missing) == len(traffic.tokens)
    plain = policy.score(texts, torch.arange(12)).logprobs
    assert torch.equal(free.logprobs, plain) and not torch.equal(moved.logprobs, plain)


def test_jitter_of_mixtral_is_set_to_0_also_where_layers_are_in_training_mode() -> None:
    model = as_published("mixtral", router_jitter_noise=0.3)
    policy = policy_of(model)
    assert all(layer.mlp.jitter_noise == 0.0 for layer in model.model.layers)
    assert any("jitter" in note for note in policy.notes)


def test_experts_are_sets_of_distinct_numbers() -> None:
    routed = exact_policy("qwen3-moe").score(ragged(), torch.arange(12), Directions()).routed
    assert routed is not None
    inside = ragged().mask & (torch.arange(9) < ragged().lengths[:, None])
    assert all(left != right for token in sets(routed.experts[inside]) for left, right in token)
