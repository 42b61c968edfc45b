"""Router taps: recorded routes are those of every row alone, and forced routes get the gates of their family."""

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
from tests.policy.routes import (
    FAMILIES,
    as_published,
    chosen_by,
    family_gates,
    plain_logits,
    record_router_logits,
    rows_with_tokens,
    sets,
)

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
def test_the_routers_of_every_family_are_found_and_their_gates_reproduced_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model = as_published(name, dtype)
    routers = find_routers(model)
    assert isinstance(routers, Routers)
    assert (routers.shape, routers.experts, routers.index) == ((2, 2), 4, torch.uint8)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    for router in routers.modules:
        logits, scores, experts = router(hidden)
        assert torch.equal(routers.gates(logits, experts), scores)


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_experts_get_the_gates_of_their_family(name: str) -> None:
    routers = find_routers(family(name))
    assert isinstance(routers, Routers)
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(30, 4, generator=source, dtype=torch.float64)
    experts = torch.rand(30, 4, generator=source).argsort(-1)[:, :2]
    assert torch.allclose(routers.gates(logits, experts), family_gates(name, logits, experts), atol=1e-15)


def test_the_worked_example_of_replayed_gates() -> None:
    logits = torch.tensor([[0.5, 0.6, -0.3, 0.4]], dtype=torch.float64)
    for name in ("qwen3-moe", "gpt-oss"):
        routers = find_routers(family(name))
        assert isinstance(routers, Routers)
        own = routers.gates(logits, torch.tensor([[1, 0]]))[0].tolist()
        replayed = routers.gates(logits, torch.tensor([[1, 3]]))[0].tolist()
        assert own == pytest.approx([0.524979187479, 0.475020812521], abs=1e-12)
        assert replayed == pytest.approx([0.549833997312, 0.450166002688], abs=1e-12)


def test_more_than_256_experts_are_stored_as_int16() -> None:
    model = as_published("qwen3-moe", num_experts=300, num_experts_per_tok=3)
    routers = find_routers(model)
    assert isinstance(routers, Routers)
    assert (routers.experts, routers.active, routers.index) == (300, 3, torch.int16)


def test_layers_without_experts_have_no_router() -> None:
    routers = find_routers(as_published("qwen3-moe", num_hidden_layers=3, mlp_only_layers=[1]))
    assert isinstance(routers, Routers) and len(routers.modules) == 2


class UnknownRouter(nn.Module):
    """A router of an unsupported kind: it returns scores and experts, but no logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores, experts = (hidden @ self.weight.T).sigmoid().topk(self.top_k)
        return scores, experts


class Gate(UnknownRouter):
    pass


@pytest.mark.parametrize(("kind", "message"), [("OddRouter", "OddRouter does not give"), ("Gate", "Gate.*Qwen3MoeExperts")])
def test_a_mixture_with_unsupported_routers_names_its_modules(kind: str, message: str) -> None:
    model = as_published("qwen3-moe")
    for layer in model.model.layers:
        layer.mlp.gate = type(kind, (UnknownRouter,), {})(layer.mlp.gate)
    policy = policy_of(model)
    Policy(model=model, tokenizer=policy.tokenizer, name="its sampler", notes=policy.notes)
    assert policy.routers is None and sum("routing is not measured" in note for note in policy.notes) == 1
    with pytest.raises(ValueError, match=rf"(?s)training.routing_replay.*needs.*Qwen3MoeForCausalLM.*{message}"):
        policy.require_routers("training.routing_replay = 'R2'")


def test_a_dense_model_has_no_routers_and_says_so() -> None:
    policy = policy_of(family("qwen3"))
    assert policy.routers is None and not policy.notes
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM\): it has no experts"):
        policy.require_routers("training.routing_replay = 'R2'")
    assert policy.score(ragged(), torch.arange(12), Directions()).routed is None


def expected_routes(policy: Policy, texts: Texts, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, their log-probs and the entropy at the positions that predict the tokens of a row, the row alone."""
    logprobs = plain_logits(policy, texts, row)[int(texts.prompt_lengths[texts.group[row]]) - 1 :].log_softmax(-1)
    experts = chosen_by(logprobs)
    return experts, logprobs.gather(-1, experts), -(logprobs.exp() * logprobs).sum(-1).mean(1)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_routes_are_those_of_every_row_alone(name: str, packing: bool) -> None:
    policy, texts = exact_policy(name, packing=packing), ragged()
    compared = 0
    for rows in (torch.arange(12), torch.tensor([1, 5, 7, 11])):
        routed = policy.score(texts, rows, Directions()).routed
        assert routed is not None and routed.experts.dtype == torch.uint8
        for place, row in enumerate(rows.tolist()):
            if texts.lengths[row] == 0:
                continue
            written = texts.mask[row, : texts.lengths[row]].nonzero().squeeze(1)
            experts, logprobs, entropy = (table[written] for table in expected_routes(policy, texts, row))
            assert torch.equal(routed.experts[place, written].long(), experts)
            assert torch.allclose(routed.logprobs[place, written], logprobs, atol=1e-10)
            assert torch.allclose(routed.entropy[place, written], entropy, atol=1e-10)
            compared += len(written)
    assert compared > 60


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_a_record_holds_every_read_token_at_its_index_in_the_texts(packing: bool, shared: bool) -> None:
    policy, texts = exact_policy("qwen3-moe", packing=packing), ragged()
    policy.shared_prompts = shared
    record = table_of(policy, texts)
    for rows in (torch.arange(0, 12, 2), torch.arange(1, 12, 2)):
        traffic = policy.score(texts, rows, Directions()).traffic
        assert traffic is not None
        record.note(traffic)
    wide, deep = texts.prompts.shape[1], texts.tokens.shape[1]
    for row in rows_with_tokens(texts):
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


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_layers_recomputed_in_the_backward_are_recorded_once(packing: bool, lora: bool) -> None:
    changes: dict[str, Any] = {"packing": packing, "lora": Lora(rank=2) if lora else None}
    policy = exact_policy("qwen3-moe", **changes)
    checkpointed = exact_policy("qwen3-moe", gradient_checkpointing=True, **changes)
    texts, rows, results = ragged(), torch.arange(12), []
    for one in (policy, checkpointed):
        with record_router_logits(one.model) as logits:
            channels, traffic = accumulate(one, texts, rows, ones, Directions())
        assert traffic is not None and len(logits) == (4 if one is checkpointed else 2)
        results.append((channels.routed, traffic))
    (left, left_traffic), (right, right_traffic) = results
    assert left is not None and right is not None
    assert torch.equal(left.experts, right.experts) and torch.equal(left_traffic.experts, right_traffic.experts)
    assert torch.allclose(left.logprobs, right.logprobs, atol=1e-12)


def test_routers_have_hooks_only_during_a_pass_with_directions() -> None:
    policy = exact_policy("qwen3-moe")
    assert policy.routers is not None
    policy.score(ragged(), torch.arange(12))
    with policy._tap(policy.pack(ragged(), torch.arange(12)), Directions()) as tap:
        assert tap is not None and all(len(router._forward_hooks) == 1 for router in policy.routers.modules)
    assert all(len(router._forward_hooks) == 0 for router in policy.routers.modules)


def test_a_record_of_other_tokens_is_not_replayed_but_counted_as_missing() -> None:
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


def test_router_jitter_of_mixtral_is_set_to_0() -> None:
    model = as_published("mixtral", router_jitter_noise=0.3)
    policy = policy_of(model)
    assert all(layer.mlp.jitter_noise == 0.0 for layer in model.model.layers)
    assert any("jitter" in note for note in policy.notes)


def test_the_experts_of_a_token_are_distinct() -> None:
    routed = exact_policy("qwen3-moe").score(ragged(), torch.arange(12), Directions()).routed
    assert routed is not None
    inside = ragged().mask & (torch.arange(9) < ragged().lengths[:, None])
    assert all(left != right for token in sets(routed.experts[inside]) for left, right in token)
