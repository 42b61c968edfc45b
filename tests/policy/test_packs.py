"""Log-probs, entropies and values in packs, in padded rows and one sequence at a time agree to 1e-12 in float64."""

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


def written_tokens(texts: Texts) -> Tensor:
    return texts.mask & (torch.arange(texts.tokens.shape[1]) < texts.lengths[:, None])


def score_alone(policy: Policy, texts: Texts) -> Channels:
    """The channels of every sequence alone by the model's plain forward; 0 at tokens the policy did not write."""
    with torch.no_grad():
        logprobs, entropy, values = plain_tables(policy, texts, range(len(texts.tokens)))
    return Channels(
        logprobs=logprobs.nan_to_num(0.0),
        entropy=entropy.nan_to_num(0.0),
        values=None if values is None else values.nan_to_num(0.0),
    )


def largest_difference(channels: Channels, expected: Channels, rows: Tensor) -> float:
    """The largest difference in any channel; outside the mask both must be exactly 0."""
    width = channels.logprobs.shape[1]
    worst = 0.0
    for table, expected_table in ((channels.logprobs, expected.logprobs), (channels.entropy, expected.entropy)):
        worst = max(worst, float((table - expected_table[rows, :width]).abs().max()) if table.numel() else 0.0)
        assert float(expected_table[rows, width:].abs().sum()) == 0.0
    assert (channels.values is None) == (expected.values is None)
    if channels.values is not None and expected.values is not None and channels.values.numel():
        worst = max(worst, float((channels.values - expected.values[rows, :width]).abs().max()))
    return worst


def with_value_head(policy: Policy) -> Policy:
    policy.value_head = ValueHead(24, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return policy


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_entropies_and_values_are_those_of_every_sequence_alone(name: str, packing: bool) -> None:
    policy = with_value_head(policy_of(family(name), packing=packing))
    for seed in (0, 1):
        texts = ragged(seed)
        rows = torch.arange(len(texts.tokens))
        assert largest_difference(policy.score(texts, rows), score_alone(policy, texts), rows) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [[0], [1], [3], [1, 3], [11, 2, 7, 0], [5, 4, 3, 2, 1, 0], [11]])
def test_any_choice_of_rows_in_any_order_gives_the_same_numbers(rows: list[int], packing: bool) -> None:
    policy, texts = with_value_head(policy_of(family("gemma2"), packing=packing)), ragged(2)
    chosen = torch.tensor(rows)
    assert largest_difference(policy.score(texts, chosen), score_alone(policy, texts), chosen) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
def test_empty_responses_have_no_log_probs(packing: bool) -> None:
    policy, texts = with_value_head(policy_of(family("qwen3"), packing=packing)), ragged()
    empty = replace(texts, lengths=torch.zeros_like(texts.lengths))
    channels = policy.score(empty, torch.arange(12))
    assert channels.logprobs.shape == (12, 0) and channels.entropy.shape == (12, 0)


@pytest.mark.parametrize("packing", [True, False])
def test_responses_of_one_token_are_scored_from_the_prompt_alone(packing: bool) -> None:
    policy, texts = policy_of(family("gpt-oss"), packing=packing), ragged()
    short = replace(texts, lengths=torch.ones_like(texts.lengths), mask=torch.ones_like(texts.mask))
    rows = torch.arange(12)
    channels = policy.score(short, rows)
    assert channels.logprobs.shape == (12, 1)
    assert largest_difference(channels, score_alone(policy, short), rows) < 1e-12


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_only_tool_tokens_have_no_log_probs(packing: bool) -> None:
    policy, texts = policy_of(family("qwen3"), packing=packing), ragged()
    silenced = replace(texts, mask=torch.zeros_like(texts.mask))
    assert float(policy.score(silenced, torch.arange(12)).logprobs.abs().sum()) == 0.0


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_beyond_a_length_are_never_read(packing: bool) -> None:
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


def test_a_tool_token_changes_the_log_probs_of_later_tokens_only() -> None:
    policy, texts = policy_of(family("qwen3")), ragged()
    texts = replace(texts, mask=torch.ones_like(texts.mask), lengths=torch.full_like(texts.lengths, 9))
    holed = replace(texts, mask=texts.mask.index_fill(1, torch.tensor([2]), False))
    changed = replace(holed, tokens=holed.tokens.index_fill(1, torch.tensor([2]), 3))
    rows = torch.arange(12)
    plain, after = policy.score(holed, rows).logprobs, policy.score(changed, rows).logprobs
    assert torch.equal(policy.score(texts, rows).logprobs[:, 3:], plain[:, 3:])
    assert torch.equal(plain[:, :2], after[:, :2]) and not torch.equal(plain[:, 3:], after[:, 3:])
    assert float(plain[:, 2].abs().sum()) == 0.0


def test_the_prompt_of_a_group_is_packed_once() -> None:
    texts = ragged()
    packed = pack(texts, torch.arange(12))
    responses = int((texts.lengths - 1).clamp(min=0).sum())
    assert len(packed.tokens) == int(texts.prompt_lengths.sum()) + responses
    assert len(packed.targets) == int(written_tokens(texts).sum())


def test_positions_of_every_response_continue_from_the_prompt() -> None:
    texts = ragged()
    packed = pack(texts, torch.tensor([0, 2, 9]))
    expected = []
    for group in (0, 3):
        expected += list(range(int(texts.prompt_lengths[group])))
    for row in (0, 2, 9):
        start = int(texts.prompt_lengths[texts.group[row]])
        expected += list(range(start, start + int(texts.lengths[row]) - 1))
    assert packed.positions.tolist() == expected


def test_the_number_of_logits_at_once_changes_nothing() -> None:
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
    channels = half.score(texts, rows)
    assert (
        half.dtype == torch.float32 and channels.logprobs.dtype == torch.float32 and channels.entropy.dtype == torch.float32
    )


def test_a_failed_pass_restores_the_attention_of_the_model() -> None:
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


def test_entropies_lie_between_0_and_the_log_of_the_vocabulary() -> None:
    texts, rows = ragged(), torch.arange(12)
    entropy = policy_of(family("qwen3")).score(texts, rows).entropy[written_tokens(texts)]
    assert float(entropy.min()) > 0.0 and float(entropy.max()) <= torch.tensor(float(VOCABULARY)).log()


def test_pieces_without_a_backward_leave_no_gradient() -> None:
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    texts, rows = ragged(), torch.arange(12)
    with policy.accumulate_gradient(texts, rows) as forward:
        pieces = [piece.channels.logprobs for piece in forward.pieces()]
    assert len(pieces) > 2 and torch.equal(torch.cat(pieces), policy.score(texts, rows).logprobs)
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_gradients_of_pieces_add_up() -> None:
    """The gradients of some pieces and of the other pieces, in two passes, add up to the gradient of all pieces."""
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    texts, rows = ragged(), torch.arange(12)

    def gradients(chosen: Callable[[int], bool], stop: int | None = None) -> dict[str, Tensor]:
        policy.model.zero_grad()
        with policy.accumulate_gradient(texts, rows) as forward:
            for number, piece in enumerate(forward.pieces()):
                if chosen(number):
                    piece.backward(ones(piece))
                if number == stop:
                    break
        return {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}

    whole, first, later = (
        gradients(lambda number: True),
        gradients(lambda number: number < 2, 1),
        gradients(lambda number: number >= 2),
    )
    assert all(torch.allclose(whole[name], first[name] + later[name], atol=1e-12) for name in whole)
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in first.values())


def test_a_piece_runs_backward_once_and_before_the_next() -> None:
    policy = policy_of(family("qwen3"), logits_at_once=VOCABULARY * 8)
    with policy.accumulate_gradient(ragged(), torch.arange(12)) as forward:
        before = None
        for piece in forward.pieces():
            if before is not None:
                with pytest.raises(AssertionError, match="goes backward once"):
                    before.backward(ones(before))
            before = piece
