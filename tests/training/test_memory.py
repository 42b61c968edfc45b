"""The memory estimate against the bytes that autograd saves, on the smallest model of each kind."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from legato.core.texts import Texts
from legato.policy.layout.packs import Pack, pack
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.training.memory.fit import fit
from legato.training.memory.model import OFFLOADED_TOGETHER, Demand, gigabytes
from legato.training.memory.shape import Shape
from tests.policy.exact import accumulate, ones
from tests.training.held import peak_bytes

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3-moe": lambda **rest: Qwen3MoeConfig(**EXPERTS, decoder_sparse_step=1, mlp_only_layers=[], **rest),
    "qwen3-moe, one layer dense": lambda **rest: Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[1], **rest),
    "mixtral": lambda **rest: MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **rest),
}
SIZES = {torch.float32: 4, torch.bfloat16: 2}
both_dtypes = pytest.mark.parametrize("dtype", list(SIZES), ids=["float32", "bfloat16"])


class Words:
    """A tokenizer that has only a size."""

    def __len__(self) -> int:
        return VOCABULARY


def model_of(kind: str, dtype: torch.dtype, layers: int = 3) -> Any:
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(CONFIGS[kind](**COMMON, num_hidden_layers=layers), dtype=dtype)


def policy_of(kind: str, dtype: torch.dtype, lora: Lora | None = None, checkpointing: bool = False) -> Policy:
    loading = Loading(device="cpu", lora=lora, gradient_checkpointing=checkpointing)
    return load_policy(model_of(kind, dtype), loading, tokenizer=Words())


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves for the backward: every storage once, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in saved.values())


def make_texts(groups: int = 2, prompt: int = 30, each: int = 4, response: int = 20) -> Texts:
    rows = groups * each
    return Texts(
        prompts=torch.randint(0, VOCABULARY, (groups, prompt)),
        prompt_lengths=torch.full((groups,), prompt),
        tokens=torch.randint(0, VOCABULARY, (rows, response)),
        lengths=torch.full((rows,), response),
        mask=torch.ones(rows, response, dtype=torch.bool),
        group=torch.arange(groups).repeat_interleave(each),
        temperature=torch.ones(rows),
    )


def packed_demand(policy: Policy, packed: Pack, dtype: torch.dtype, **rest: Any) -> Demand:
    """The demand of a pack whose responses are equally long."""
    prompts = int(packed.prefix_lengths.sum())
    repeated = int((packed.prefix_lengths[packed.owner] + packed.suffix_lengths).sum())
    tokens = len(packed.tokens)
    return Demand(
        shape=Shape.from_config(policy.body.config),
        size=SIZES[dtype],
        tokens_per_pack=tokens,
        tables=True,
        sharing=(prompts + repeated) / tokens,
        longest=int(packed.prefix_lengths.max() + packed.suffix_lengths.max()),
        **rest,
    )


def forward_bytes(demand: Demand) -> float:
    """The estimated bytes of a forward of the whole body: the layers and the last norm."""
    return demand.memory(checkpointing=False).activations + demand.tokens_per_pack * demand.states()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@both_dtypes
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plain_forward_saves_the_estimated_bytes(kind: str, dtype: torch.dtype) -> None:
    model, tokens = model_of(kind, dtype), 200
    inputs = torch.randint(0, VOCABULARY, (1, tokens))
    measured = saved_bytes(model, lambda: model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state)
    demand = Demand(shape=Shape.from_config(model.config), size=SIZES[dtype], tokens_per_pack=tokens)
    assert forward_bytes(demand) == pytest.approx(measured, rel=0.15)


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_one_more_layer_costs_what_the_formula_says(kind: str, dtype: torch.dtype) -> None:
    inputs, sizes = torch.randint(0, VOCABULARY, (1, 200)), []
    for layers in (1, 2):
        model = model_of(kind, dtype, layers)
        decoder = model.get_decoder()
        sizes.append(
            saved_bytes(model, lambda decoder=decoder: decoder(input_ids=inputs, use_cache=False).last_hidden_state)
        )
    demand = Demand(shape=Shape.from_config(model.config), size=SIZES[dtype], tokens_per_pack=200)
    assert demand.layer(sparse=kind == "qwen3-moe") * 200 == pytest.approx(sizes[1] - sizes[0], rel=0.03)


@both_dtypes
@pytest.mark.parametrize("shape", [(2, 30, 4, 20), (3, 6, 5, 40), (1, 80, 8, 4)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_a_pack_saves_the_estimated_bytes(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    policy, rows = policy_of(kind, dtype), shape[0] * shape[2]
    packed = pack(make_texts(*shape), torch.arange(rows))
    with policy.attending(packed):
        measured = saved_bytes(policy.model, lambda: policy.hidden(packed.tokens[None], packed.positions[None]))
    assert forward_bytes(packed_demand(policy, packed, dtype)) == pytest.approx(measured, rel=0.15)


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_adapters_save_the_estimated_bytes(kind: str, dtype: torch.dtype) -> None:
    policy = policy_of(kind, dtype, Lora(rank=8))
    packed = pack(make_texts(), torch.arange(8))
    with policy.attending(packed):
        measured = saved_bytes(policy.model, lambda: policy.hidden(packed.tokens[None], packed.positions[None]))
    demand = packed_demand(policy, packed, dtype, adapter_rank=8)
    assert forward_bytes(demand) == pytest.approx(measured, rel=0.15)
    assert demand.shape.adapters(8) == sum(p.numel() for p in policy.parameters().values())


def live_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of tensors created during a forward that still exist after it, checkpointed inputs included."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    created: dict[int, tuple[Any, int]] = {}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = function(*args, **(kwargs or {}))
            inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                    storage = leaf.untyped_storage()
                    created[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return outputs

    with Watching():
        result = forward()
    # Tensors that only a reference cycle holds do not count.
    gc.collect()
    total = sum(size for reference, size in created.values() if not reference.expired())
    del result
    return total


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_with_checkpointing_a_layer_saves_only_its_input(kind: str, dtype: torch.dtype) -> None:
    sizes = []
    for layers in (2, 10):
        loading = Loading(device="cpu", gradient_checkpointing=True)
        policy = load_policy(model_of(kind, dtype, layers), loading, tokenizer=Words())
        packed = pack(make_texts(), torch.arange(8))
        with policy.attending(packed):
            sizes.append(live_bytes(lambda p=policy, k=packed: p.hidden(k.tokens[None], k.positions[None])))
    demand = packed_demand(policy, packed, dtype)
    estimated = [
        replace(demand, shape=replace(demand.shape, layers=layers)).memory(checkpointing=True).activations_checkpointed
        for layers in (2, 10)
    ]
    assert sizes[1] - sizes[0] == pytest.approx(8 * len(packed.tokens) * 48 * SIZES[dtype], rel=0.05)
    assert estimated[1] - estimated[0] == pytest.approx(sizes[1] - sizes[0], rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 8000], ids=["layers", "head"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_the_peak_of_an_update_is_the_estimate(kind: str, vocabulary: int, checkpointing: bool) -> None:
    rows, tokens, dtype = 32, 240, torch.float32
    automatic: Any = AutoModelForCausalLM
    config = CONFIGS[kind](**{**COMMON, "vocab_size": vocabulary}, num_hidden_layers=6)
    loading = Loading(device="cpu", gradient_checkpointing=checkpointing)
    policy = load_policy(automatic.from_config(config, dtype=dtype), loading, tokenizer=Words())
    policy.logits_at_once = tokens * vocabulary
    batch = make_texts(4, 60, 8, 60)
    packed = pack(batch, torch.arange(rows))
    memory = packed_demand(policy, packed, dtype, head_tokens=tokens).memory(checkpointing=checkpointing)
    activations = memory.activations_checkpointed if checkpointing else memory.activations
    estimated = activations + max(memory.head, memory.layer) + memory.gradients
    assert estimated == pytest.approx(peak_bytes(lambda: accumulate(policy, batch, torch.arange(rows), ones)), rel=0.15)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_counted_from_the_configuration(kind: str, tied: bool) -> None:
    config = CONFIGS[kind](**{**COMMON, "tie_word_embeddings": tied}, num_hidden_layers=3)
    automatic: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = automatic.from_config(config)
    assert Shape.from_config(config).parameters == sum(parameter.numel() for parameter in model.parameters())


QWEN3 = Shape.from_config(
    Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
)
"""Qwen3-0.6B."""
DEMAND = Demand(
    shape=QWEN3, size=2, tokens_per_pack=16384, head_tokens=3500, logit_bytes=6, cached_tokens=100_000, reference=True
)


def test_the_items_of_a_known_model_by_hand() -> None:
    weights = 596_049_920
    assert QWEN3.parameters == weights
    memory = DEMAND.memory(checkpointing=False)
    assert (memory.weights, memory.reference) == (2 * weights, 2 * weights)
    assert (memory.masters, memory.moments) == (4 * weights, 8 * weights)
    # A float32 sum of gradients, and one 16-bit gradient of the embedding on its way into it.
    assert memory.gradients == 4 * weights + 2 * 151936 * 1024
    assert memory.kv_cache == 100_000 * 112 * 1024
    norms = 2 * (4 * 1024 + 4 + 4 * 1024) + 6 * 3072 + 4 * 24
    attention = 2 * (2 * 2048 + 2 * 1024) + 4 * 16
    assert DEMAND.layer() == norms + attention + 8 * 3072
    assert memory.activations == 16384 * (28 * DEMAND.layer() + 64 + 512)
    assert memory.activations_checkpointed == 16384 * (28 * 2048 + 64 + 512)
    assert memory.head == 16384 * (8 * 1024 + 4 + 4096) + 3500 * 151936 * 6
    names = ("weights", "reference", "gradients", "masters", "moments", "activations", "kv_cache", "slack")
    assert memory.total == sum(getattr(memory, name) for name in names) + max(memory.head, memory.layer)
    assert memory.slack == int(0.06 * (memory.total - memory.slack))


def test_fused_layers_save_fewer_bytes() -> None:
    fused = replace(DEMAND, fused=True)
    assert fused.layer() == 2 * (2 * 1024 + 2 * 2048 + 2 * 1024 + 2 * 3072) + 4 * 16
    by_parts = replace(fused, adapter_rank=8)
    assert fused.layer() < by_parts.layer()
    assert 0.3 < fused.layer() / DEMAND.layer() < 0.5


def test_the_memory_of_the_optimizer_by_kind() -> None:
    count = QWEN3.parameters
    eight = replace(DEMAND, eight_bit=True).memory(checkpointing=False)
    assert eight.moments == pytest.approx(2 * count, rel=0.02) and eight.masters == 4 * count
    away = replace(DEMAND, offload=True).memory(checkpointing=False)
    # Gradients and 16-bit weights pass through the host, for a gigabyte of masters at a time.
    # torch rounds their 1.5 GiB up to a power of two.
    assert OFFLOADED_TOGETHER * 6 == 1.5 * 2**30 and count > OFFLOADED_TOGETHER
    assert (away.masters, away.moments, away.host) == (0, 0, 12 * count + 2**31)
    exact = replace(DEMAND, size=4).memory(checkpointing=False)
    assert (exact.masters, exact.moments, exact.gradients) == (0, 8 * count, 4 * count)
    half = replace(DEMAND, trained=count // 2).memory(checkpointing=False)
    assert half.masters == 4 * (count // 2) and half.weights == 2 * count
    frozen = replace(DEMAND, trained=0).memory(checkpointing=False)
    assert (frozen.gradients, frozen.masters, frozen.moments) == (0, 0, 0)


def test_adapters_train_little_and_need_no_reference() -> None:
    memory = replace(DEMAND, adapter_rank=16).memory(checkpointing=False)
    adapters = QWEN3.adapters(16)
    assert memory.weights == 2 * QWEN3.parameters + 4 * adapters
    assert (memory.reference, memory.masters) == (0, 0)
    assert (memory.gradients, memory.moments) == (4 * adapters, 8 * adapters)


def test_a_pack_fits_whole_or_checkpointed_or_smaller_or_not() -> None:
    plain, checkpointed = (DEMAND.memory(checkpointing=each).total for each in (False, True))
    assert checkpointed < plain
    assert fit(DEMAND, plain) == fit(DEMAND, plain + 10**12)
    whole = fit(DEMAND, plain)
    assert whole.fits and not whole.checkpointing and whole.tokens_per_pack == 16384
    less = fit(DEMAND, plain - 1)
    assert less.fits and less.checkpointing and less.tokens_per_pack == 16384 and less.memory.total == checkpointed
    smaller = fit(DEMAND, checkpointed - 1)
    assert smaller.fits and smaller.checkpointing and 1 <= smaller.tokens_per_pack < 16384
    assert smaller.memory.total <= checkpointed - 1
    nothing = fit(DEMAND, 10**9, smallest=512)
    assert not nothing.fits and nothing.tokens_per_pack == 512 and nothing.memory.total > 10**9


@pytest.mark.parametrize("available", [28_000_000_000, 30_000_000_000, 33_000_000_000])
def test_the_smaller_pack_is_the_largest_that_fits(available: int) -> None:
    demand = replace(DEMAND, tokens_per_pack=100_000)
    result = fit(demand, available, smallest=64)
    assert result.fits and result.tokens_per_pack < 100_000
    for tokens, fits in ((result.tokens_per_pack, True), (result.tokens_per_pack + 1, False)):
        resized = replace(demand, tokens_per_pack=tokens, head_tokens=min(3500, tokens))
        assert (resized.memory(checkpointing=True).total <= available) is fits


def test_the_lines_name_every_item_and_the_total() -> None:
    memory = replace(DEMAND, offload=True).memory(checkpointing=True)
    lines = memory.lines()
    assert lines[-1].split() == ["total", *gigabytes(memory.total).split()]
    text = "\n".join(lines)
    for item in ("weights", "reference", "gradients", "activations, checkpointed", "head", "KV cache", "slack"):
        assert item in text
    assert "masters" not in text and "host" in text
    assert all(len(line) == len(lines[0]) for line in lines)


def test_gigabytes_are_readable() -> None:
    assert [gigabytes(size) for size in (0, 3e6, 0.123e9, 1.26e9, 139e9)] == [
        "0 GB", "0.003 GB", "0.12 GB", "1.3 GB", "139.0 GB",
    ]  # fmt: skip


def test_a_configuration_without_the_usual_parts_is_refused() -> None:
    class Strange:
        hidden_size = 8

    with pytest.raises(ValueError, match="Strange has no num_hidden_layers"):
        Shape.from_config(Strange())
