"""The Triton kernels against plain torch: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from legato.policy.kernels.decode import Workspace, attend_slots, rows_per_block, store  # noqa: E402
from legato.policy.kernels.layers import add_norm, heads, swiglu  # noqa: E402
from legato.policy.kernels.sample import sample  # noqa: E402
from legato.rollouts.gpu.slots import group_by_prompt  # noqa: E402
from legato.rollouts.randomness import uniform  # noqa: E402
from legato.rollouts.sampling import Sampling, choose  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def source() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal(*shape: int, source: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=source).to(DEVICE)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """One row, one new token at the end of its keys: [H, D] over [K, L, D]."""
    repeat = len(query) // len(keys)
    scores = torch.einsum("hd,hld->hl", query, keys.repeat_interleave(repeat, 0)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(keys.shape[1], device=query.device)
    if window:
        scores = scores.masked_fill(keys.shape[1] - 1 - places >= window, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], 1)
    weights = scores.softmax(1)[:, : keys.shape[1]]
    return torch.einsum("hl,hld->hd", weights, values.repeat_interleave(repeat, 0))


@pytest.mark.parametrize("splits", [(1, 1), (2, 3)])
@pytest.mark.parametrize(
    ("count", "key_heads", "width", "window", "softcap", "sink"),
    [(4, 2, 16, 0, 0.0, False), (9, 3, 24, 0, 0.0, False), (4, 4, 32, 7, 0.0, False), (8, 1, 16, 9, 3.0, True)],
)
def test_slot_attention_is_attention_over_prompt_and_response(
    count: int,
    key_heads: int,
    width: int,
    window: int,
    softcap: float,
    sink: bool,
    splits: tuple[int, int],
    source: torch.Generator,
) -> None:
    prompt_keys, prompt_values = (normal(3, key_heads, 40, width, source=source) for _ in range(2))
    keys, values = (normal(7, key_heads, 33, width, source=source) for _ in range(2))
    query = normal(5, count, width, source=source)
    slots, length = torch.tensor([3, 0, 6, 2, 1], device=DEVICE), torch.tensor([0, 5, 31, 2, 9, 1, 17], device=DEVICE)
    prompt_length, prompt = torch.tensor([40, 1, 17], device=DEVICE), [0, 0, 2, 1, 0]
    sinks = normal(count, source=source) if sink else None
    owners, rows = group_by_prompt(prompt, rows_per_block(count, key_heads), 5)
    output = attend_slots(
        query,
        prompt_keys,
        prompt_values,
        keys,
        values,
        slots=slots,
        slot_length=length,
        prompt_length=prompt_length,
        block_prompt=torch.tensor(owners, device=DEVICE),
        block_rows=torch.tensor(rows, device=DEVICE),
        workspace=Workspace(5, count, width, *splits, query.device),
        scale=width**-0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
        block=16,
    )
    for row, (slot, owner) in enumerate(zip(slots.tolist(), prompt, strict=True)):
        own, first = int(length[slot]) + 1, int(prompt_length[owner])
        whole_keys = torch.cat([prompt_keys[owner, :, :first], keys[slot, :, :own]], 1)
        whole_values = torch.cat([prompt_values[owner, :, :first], values[slot, :, :own]], 1)
        expected = attention(query[row], whole_keys, whole_values, width**-0.5, window, softcap, sinks)
        assert torch.allclose(output[row], expected, atol=2e-5)


def test_new_keys_go_to_the_next_column_of_their_slot(source: torch.Generator) -> None:
    key, value = (normal(2, 3, 8, source=source) for _ in range(2))
    keys, values = torch.zeros(4, 3, 5, 8, device=DEVICE), torch.zeros(4, 3, 5, 8, device=DEVICE)
    store(key, value, keys, values, torch.tensor([2, 0], device=DEVICE), torch.tensor([4, 0, 1, 0], device=DEVICE))
    assert torch.equal(keys[2, :, 1], key[0]) and torch.equal(values[0, :, 4], value[1])
    assert int((keys != 0).any(-1).sum()) == 6


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_sampling_kernel_chooses_the_tokens_of_the_plain_sampler(temperature: float, source: torch.Generator) -> None:
    logits = 3 * normal(12, 3000, source=source)
    logits[3, 7:] = -torch.inf
    slots = torch.arange(12, device=DEVICE).flip(0)
    seeds, places = torch.randint(0, 2**62, (12,), generator=source).to(DEVICE), torch.arange(12, device=DEVICE)
    tokens, logprobs = sample(logits, slots, seeds, places, temperature=temperature, add=1)
    expected = choose(logits, uniform(seeds[slots], places[slots] + 1), Sampling(temperature=temperature))
    assert torch.equal(tokens, expected.tokens)
    assert torch.allclose(logprobs, expected.logprobs, atol=2e-6)


def test_the_norm_adds_the_residual_first(source: torch.Generator) -> None:
    residual, update, weight = normal(3, 20, source=source), normal(3, 20, source=source), normal(20, source=source)
    total, out = add_norm(residual, update, weight, 1e-6)
    assert torch.equal(total, residual + update)
    assert torch.allclose(out, torch.nn.functional.rms_norm(total, (20,), weight, 1e-6), atol=1e-6)
    alone, out = add_norm(residual, None, weight, 1e-6)
    assert alone is residual
    assert torch.allclose(out, torch.nn.functional.rms_norm(residual, (20,), weight, 1e-6), atol=1e-6)


def test_swiglu_matches_torch(source: torch.Generator) -> None:
    gate, up = normal(3, 50, source=source), normal(3, 50, source=source)
    assert torch.allclose(swiglu(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_rotated_and_stored_in_the_cache(normed: bool, source: torch.Generator) -> None:
    rows, count, key_heads, width = 3, 4, 2, 12
    query, key, value = (normal(rows, n * width, source=source) for n in (count, key_heads, key_heads))
    angle = normal(rows, width // 2, source=source)
    cosine, sine = torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)
    weights = normal(width, source=source), normal(width, source=source)
    keys, values = (torch.zeros(5, key_heads, 4, width, device=DEVICE) for _ in range(2))
    slots, length = torch.tensor([4, 1, 2], device=DEVICE), torch.tensor([0, 3, 2, 0, 1], device=DEVICE)
    norms = (*weights, 1e-6) if normed else None
    queries = heads(query, key, value, cosine, sine, norms, keys, values, slots, length, width)

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        x = x.reshape(rows, -1, width)
        x = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6) if normed else x
        swapped = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cosine[:, None] + swapped * sine[:, None]

    assert torch.allclose(queries, expected(query, weights[0]), atol=1e-5)
    for row, slot in enumerate(slots.tolist()):
        column = int(length[slot])
        assert torch.allclose(keys[slot, :, column], expected(key, weights[1])[row], atol=1e-5)
        assert torch.equal(values[slot, :, column], value.reshape(rows, key_heads, width)[row])


def test_rows_of_a_prompt_are_grouped_into_blocks() -> None:
    owners, rows = group_by_prompt([5, 5, -1, 2, 5], 2, 5)
    assert owners == [5, 5, 2, -1, -1]
    assert rows[:3] == [[0, 1], [4, -1], [3, -1]]
