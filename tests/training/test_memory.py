"""The memory model beside what autograd really keeps, counted on the smallest models of each kind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from legato.policy.adapters import Lora
from legato.policy.load import Loading, load_policy
from legato.policy.packs import Pack, Texts, pack
from legato.policy.policy import Policy
from legato.training.memory import Demand, Memory, Shape, fit, gigabytes

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
    """A tokenizer of which nothing is asked but its size."""

    def __len__(self) -> int:
        return VOCABULARY


def model_of(kind: str, dtype: torch.dtype, layers: int = 3) -> Any:
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(CONFIGS[kind](**COMMON, num_hidden_layers=layers), dtype=dtype)


def policy_of(kind: str, dtype: torch.dtype, lora: Lora | None = None, checkpointing: bool = False) -> Policy:
    loading = Loading(device="cpu", lora=lora, gradient_checkpointing=checkpointing)
    return load_policy(model_of(kind, dtype), loading, tokenizer=Words())


def kept(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of every storage that autograd keeps for the backward, each once, weights apart."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in seen.values())


def texts(groups: int = 2, prompt: int = 30, each: int = 4, response: int = 20) -> Texts:
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
        shape=Shape.of(policy.body.config),
        size=SIZES[dtype],
        tokens_per_pack=tokens,
        tables=True,
        sharing=(prompts + repeated) / tokens,
        longest=int(packed.prefix_lengths.max() + packed.suffix_lengths.max()),
        **rest,
    )


@both_dtypes
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plain_forward_keeps_what_the_model_says(kind: str, dtype: torch.dtype) -> None:
    model, tokens = model_of(kind, dtype), 200
    inputs = torch.randint(0, VOCABULARY, (1, tokens))
    measured = kept(model, lambda: model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state)
    demand = Demand(shape=Shape.of(model.config), size=SIZES[dtype], tokens_per_pack=tokens)
    assert demand.memory(checkpointing=False).activations == pytest.approx(measured, rel=0.15)


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_one_more_layer_costs_what_the_formula_says(kind: str, dtype: torch.dtype) -> None:
    inputs, found = torch.randint(0, VOCABULARY, (1, 200)), []
    for layers in (1, 2):
        model = model_of(kind, dtype, layers)
        decoder = model.get_decoder()
        found.append(kept(model, lambda decoder=decoder: decoder(input_ids=inputs, use_cache=False).last_hidden_state))
    demand = Demand(shape=Shape.of(model.config), size=SIZES[dtype], tokens_per_pack=200)
    assert demand.layer(sparse=kind == "qwen3-moe") * 200 == pytest.approx(found[1] - found[0], rel=0.03)


@both_dtypes
@pytest.mark.parametrize("shape", [(2, 30, 4, 20), (3, 6, 5, 40), (1, 80, 8, 4)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_a_pack_keeps_what_the_model_says(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    policy, rows = policy_of(kind, dtype), shape[0] * shape[2]
    packed = pack(texts(*shape), torch.arange(rows))
    with policy.attending(packed):
        measured = kept(policy.model, lambda: policy.hidden(packed.tokens[None], packed.positions[None]))
    estimated = packed_demand(policy, packed, dtype).memory(checkpointing=False).activations
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # peft's own, over fused experts
@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_adapters_keep_what_the_model_says(kind: str, dtype: torch.dtype) -> None:
    policy = policy_of(kind, dtype, Lora(rank=8))
    packed = pack(texts(), torch.arange(8))
    with policy.attending(packed):
        measured = kept(policy.model, lambda: policy.hidden(packed.tokens[None], packed.positions[None]))
    demand = packed_demand(policy, packed, dtype, adapter_rank=8)
    assert demand.memory(checkpointing=False).activations == pytest.approx(measured, rel=0.15)
    assert demand.shape.adapters(8) == sum(p.numel() for p in policy.parameters().values())


def alive(forward: Callable[[], Tensor]) -> int:
    """Bytes that were made during a forward and are still there after it: also what a checkpoint holds by itself."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[int, tuple[Any, int]] = {}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                    storage = leaf.untyped_storage()
                    made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return found

    with Watching():
        result = forward()
    total = sum(size for reference, size in made.values() if not reference.expired())
    del result
    return total


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_with_checkpointing_a_layer_keeps_its_input(kind: str, dtype: torch.dtype) -> None:
    found = []
    for layers in (2, 10):
        loading = Loading(device="cpu", gradient_checkpointing=True)
        policy = load_policy(model_of(kind, dtype, layers), loading, tokenizer=Words())
        packed = pack(texts(), torch.arange(8))
        with policy.attending(packed):
            found.append(alive(lambda p=policy, k=packed: p.hidden(k.tokens[None], k.positions[None])))
    demand = packed_demand(policy, packed, dtype)
    estimated = [
        replace(demand, shape=replace(demand.shape, layers=layers)).memory(checkpointing=True).activations_checkpointed
        for layers in (2, 10)
    ]
    assert found[1] - found[0] == pytest.approx(8 * len(packed.tokens) * 48 * SIZES[dtype], rel=0.05)
    assert estimated[1] - estimated[0] == pytest.approx(found[1] - found[0], rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_counted_from_the_configuration(kind: str, tied: bool) -> None:
    config = CONFIGS[kind](**{**COMMON, "tie_word_embeddings": tied}, num_hidden_layers=3)
    automatic: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = automatic.from_config(config)
    assert Shape.of(config).parameters == sum(parameter.numel() for parameter in model.parameters())
