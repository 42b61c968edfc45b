"""Packed, padded and one by one: three ways to the same log-probs, entropies and values, to 1e-12 in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.policy.layout.packs import pack
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Channels, Policy, ValueHead
from tests.policy.exact import FAMILIES, VOCABULARY, Words, accumulate, family, ones, plain_tables, policy_of, ragged


def inside(texts: Texts) -> Tensor:
    return texts.mask & (torch.arange(texts.tokens.shape[1]) < texts.lengths[:, None])


def alone(policy: Policy, texts: Texts) -> Channels:
    """By the plain forward, 0 where nothing was written."""
    with torch.no_grad():
        logprobs, entropy, values = plain_tables(policy, texts, range(len(texts.tokens)))
    return Channels(
        logprobs=logprobs.nan_to_num(0.0),
        entropy=entropy.nan_to_num(0.0),
        values=None if values is None else values.nan_to_num(0.0),
    )


def apart(found: Channels, expected: Channels, rows: Tensor) -> float:
    """The largest difference in any channel; outside the mask both must be exactly 0."""
    width = found.logprobs.shape[1]
    worst = 0.0
    for mine, other in ((found.logprobs, expected.logprobs), (found.entropy, expected.entropy)):
        worst = max(worst, float((mine - other[rows, :width]).abs().max()) if mine.numel() else 0.0)
        assert float(other[rows, width:].abs().sum()) == 0.0
    assert (found.values is None) == (expected.values is None)
    if found.values is not None and expected.values is not None and found.values.numel():
        worst = max(worst, float((found.values - expected.values[rows, :width]).abs().max()))
    return worst


def with_values(policy: Policy) -> Policy:
    policy.value_head = ValueHead(24, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return policy


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_entropies_and_values_are_those_of_every_sequence_alone(name: str, packing: bool) -> None:
    policy = with_values(policy_of(family(name), packing=packing))
    for seed in (0, 1):
        texts = ragged(seed)
        rows = torch.arange(len(texts.tokens))
        assert apart(policy.score(texts, rows), alone(policy, texts), rows) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [[0], [1], [3], [1, 3], [11, 2, 7, 0], [5, 4, 3, 2, 1, 0], [11]])
def test_any_choice_of_rows_in_any_order_gives_the_same_numbers(rows: list[int], packing: bool) -> None:
    policy, texts = with_values(policy_of(family("gemma2"), packing=packing)), ragged(2)
    chosen = torch.tensor(rows)
    assert apart(policy.score(texts, chosen), alone(policy, texts), chosen) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
def test_responses_that_are_all_empty_have_no_log_probs_and_cost_no_error(packing: bool) -> None:
    policy, texts = with_values(policy_of(family("qwen3"), packing=packing)), ragged()
    empty = replace(texts, lengths=torch.zeros_like(texts.lengths))
    found = policy.score(empty, torch.arange(12))
    assert found.logprobs.shape == (12, 0) and found.entropy.shape == (12, 0)


@pytest.mark.parametrize("packing", [True, False])
def test_responses_of_one_token_are_read_from_the_prompt_alone(packing: bool) -> None:
    policy, texts = policy_of(family("gpt-oss"), packing=packing), ragged()
    short = replace(texts, lengths=torch.ones_like(texts.lengths), mask=torch.ones_like(texts.mask))
    rows = torch.arange(12)
    found = policy.score(short, rows)
    assert found.logprobs.shape == (12, 1)
    assert apart(found, alone(policy, short), rows) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_tool_tokens_alone_have_no_log_probs_at_all(packing: bool) -> None:
    policy, texts = policy_of(family("qwen3"), packing=packing), ragged()
    silenced = replace(texts, mask=torch.zeros_like(texts.mask))
    assert float(policy.score(silenced, torch.arange(12)).logprobs.abs().sum()) == 0.0


@pytest.mark.parametrize("packing", [True, False])
def test_what_stands_beyond_a_length_is_never_read(packing: bool) -> None:
    policy, texts = policy_of(family("qwen3"), packing=packing), ragged()
    rows = torch.arange(12)
    beyond = torch.arange(9) >= texts.lengths[:, None]
    after = torch.arange(8) >= texts.prompt_lengths[:, None]
    other = replace(
        texts,
        tokens=torch.where(beyond, 10**9, texts.tokens),
        prompts=torch.where(after, -5, texts.prompts),
        mask=texts.mask | beyond,
    )
    assert torch.equal(policy.score(texts, rows).logprobs, policy.score(other, rows).logprobs)


def test_a_tool_token_is_read_by_what_follows_it() -> None:
    policy, texts = policy_of(family("qwen3")), ragged()
    texts = replace(texts, mask=torch.ones_like(texts.mask), lengths=torch.full_like(texts.lengths, 9))
    holed = replace(texts, mask=texts.mask.index_fill(1, torch.tensor([2]), False))
    changed = replace(holed, tokens=holed.tokens.index_fill(1, torch.tensor([2]), 3))
    rows = torch.arange(12)
    plain, after = policy.score(holed, rows).logprobs, policy.score(changed, rows).logprobs
    assert torch.equal(policy.score(texts, rows).logprobs[:, 3:], plain[:, 3:])
    assert torch.equal(plain[:, :2], after[:, :2]) and not torch.equal(plain[:, 3:], after[:, 3:])
    assert float(plain[:, 2].abs().sum()) == 0.0


def test_the_prompt_of_a_group_is_laid_down_once() -> None:
    texts = ragged()
    found = pack(texts, torch.arange(12))
    responses = int((texts.lengths - 1).clamp(min=0).sum())
    assert len(found.tokens) == int(texts.prompt_lengths.sum()) + responses
    assert len(found.targets) == int(inside(texts).sum())


def test_positions_go_on_from_the_prompt_for_every_response() -> None:
    texts = ragged()
    found = pack(texts, torch.tensor([0, 2, 9]))
    expected = []
    for group in (0, 3):
        expected += list(range(int(texts.prompt_lengths[group])))
    for row in (0, 2, 9):
        start = int(texts.prompt_lengths[texts.group[row]])
        expected += list(range(start, start + int(texts.lengths[row]) - 1))
    assert found.positions.tolist() == expected


def test_how_many_logits_are_held_at_once_changes_nothing() -> None:
    texts, rows = ragged(), torch.arange(12)
    model = family("qwen3")
    whole = policy_of(model).score(texts, rows)
    for size in (1, 7):
        parts = policy_of(model, logits_at_once=size * VOCABULARY).score(texts, rows)
        assert float((whole.logprobs - parts.logprobs).abs().max()) < 1e-13
        assert float((whole.entropy - parts.entropy).abs().max()) < 1e-13


def test_log_probs_are_float32_for_16_bit_models_and_float64_for_64_bit_ones() -> None:
    texts, rows = ragged(), torch.arange(12)
    texts = replace(texts, temperature=texts.temperature.float())
    model = family("llama")
    assert policy_of(model).score(texts, rows).logprobs.dtype == torch.float64
    half = policy_of(model.bfloat16())
    found = half.score(texts, rows)
    assert half.dtype == torch.float32 and found.logprobs.dtype == torch.float32 and found.entropy.dtype == torch.float32


def test_a_pass_leaves_the_model_as_its_users_know_it() -> None:
    model = family("qwen3")
    policy = policy_of(model)
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), policy.accumulate_gradient(ragged(), torch.arange(3)):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before


def test_dropout_and_router_jitter_are_off_in_every_pass() -> None:
    model = family("qwen3-moe", attention_dropout=0.5)
    for module in model.modules():
        module.attention_dropout = 0.5 if hasattr(module, "attention_dropout") else None
    policy = load_policy(model, Loading(dtype="float64", device="cpu", gradient_checkpointing=True), tokenizer=Words())
    texts, rows = ragged(), torch.arange(12)
    for packing in (True, False):
        policy.packing = packing
        first = policy.score(texts, rows).logprobs
        again, _ = accumulate(policy, texts, rows, ones)
        assert torch.equal(first, again.logprobs)


def test_entropies_lie_between_0_and_that_of_equal_chances() -> None:
    texts, rows = ragged(), torch.arange(12)
    entropy = policy_of(family("qwen3")).score(texts, rows).entropy[inside(texts)]
    assert float(entropy.min()) > 0.0 and float(entropy.max()) <= torch.tensor(float(VOCABULARY)).log()


def test_pieces_that_never_go_backward_leave_no_gradient() -> None:
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    texts, rows = ragged(), torch.arange(12)
    with policy.accumulate_gradient(texts, rows) as forward:
        pieces = [piece.channels.logprobs for piece in forward.pieces()]
    assert len(pieces) > 2 and torch.equal(torch.cat(pieces), policy.score(texts, rows).logprobs)
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_pieces_add_up_whichever_of_them_go_backward() -> None:
    """The gradient of some pieces and that of the others, one pass each, are that of all of them in one."""
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    texts, rows = ragged(), torch.arange(12)

    def slopes(chosen: Callable[[int], bool], stop: int | None = None) -> dict[str, Tensor]:
        policy.model.zero_grad()
        with policy.accumulate_gradient(texts, rows) as forward:
            for number, piece in enumerate(forward.pieces()):
                if chosen(number):
                    piece.backward(ones(piece))
                if number == stop:
                    break
        return {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}

    whole, first, later = (
        slopes(lambda number: True),
        slopes(lambda number: number < 2, 1),
        slopes(lambda number: number >= 2),
    )
    assert all(torch.allclose(whole[name], first[name] + later[name], atol=1e-12) for name in whole)
    assert any(float(slope.abs().max()) > 1e-3 for slope in first.values())


def test_a_piece_goes_backward_once_and_before_the_next() -> None:
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    with policy.accumulate_gradient(ragged(), torch.arange(12)) as forward:
        before = None
        for piece in forward.pieces():
            if before is not None:
                with pytest.raises(AssertionError, match="goes backward once"):
                    before.backward(ones(before))
            before = piece
