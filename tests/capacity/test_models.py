"""Shipped configurations have the published numbers of weights; folders and config.json files are read alike."""

import json
from pathlib import Path

import pytest

from legato.capacity.hardware import find_hardware, hardware_names
from legato.capacity.model import find_model, shipped_names, shipped_record
from legato.capacity.work import active_in_layers, head_weights
from legato.errors import InputError
from legato.policy.model.tiny import TinyShape
from tests.capacity.setups import model

WANTED = {
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
    *("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "gpt-oss-20b", "gpt-oss-120b"),
}


def matches(count: int, published: str) -> bool:
    """Whether a count is a published number such as 8.03B, rounded or cut to its digits."""
    digits = published.removesuffix("B")
    unit = 10 ** -len(digits.partition(".")[2])
    return abs(count / 1e9 - float(digits)) < unit


def test_all_named_families_are_shipped_small_to_large() -> None:
    names = shipped_names()
    assert set(names) == WANTED
    assert names[0] == "qwen3-0.6b" and names[-1] == "gpt-oss-120b"
    assert names.index("qwen3-4b") < names.index("qwen3-14b") < names.index("qwen3-235b-a22b") < names.index("llama-3.2-1b")


@pytest.mark.parametrize("name", sorted(WANTED))
def test_the_counted_weights_are_the_published_ones(name: str) -> None:
    record, counted = shipped_record(name), model(name)
    published, shape = record["published"], counted.shape
    assert record["source"].startswith("https://huggingface.co/" + record["name"])
    assert matches(counted.parameters, published["parameters"])
    # Biases and sinks of gpt-oss are all that the formula leaves out.
    assert shape.parameters == pytest.approx(counted.parameters, rel=4e-4 if "gpt" in name else 1e-12)
    if "without_embedding" in published:
        assert matches(counted.parameters - shape.parameters_outside, published["without_embedding"])
    if "active" in published:
        embedding = head_weights(shape) if published.get("active_counts_embedding") else 0
        assert matches(active_in_layers(shape) + head_weights(shape) + embedding, published["active"])


def test_which_models_train_fused() -> None:
    assert [model(name).fused for name in ("qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "gpt-oss-20b")] == [True] * 3 + [
        False
    ]
    assert model("gpt-oss-20b").scores and not model("qwen3-8b").scores
    assert model("qwen3-30b-a3b").is_mixture and not model("qwen3-8b").is_mixture


def test_a_model_is_found_by_its_hub_name_its_folder_and_its_config(tmp_path: Path) -> None:
    assert find_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    assert find_model("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"
    record = {**shipped_record("qwen3-0.6b")["config"], "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(record))
    for target in (tmp_path, tmp_path / "config.json"):
        found = find_model(str(target))
        assert found.weights == model("qwen3-0.6b").weights and found.shape == model("qwen3-0.6b").shape
    assert find_model("tiny", TinyShape()).parameters < 10**6


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[1]", "without a table"), ('{"model_type": "nothing"}', "a causal language model")],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        find_model(str(tmp_path))


def test_an_unknown_model_or_gpu_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"got 'qwen3-9b'.*did you mean 'qwen3-8b'"):
        find_model("qwen3-9b")
    with pytest.raises(InputError, match=r"got 'h300'.*did you mean 'h200'"):
        find_hardware("h300")
    with pytest.raises(InputError, match="--memory"):
        find_hardware("h200", 0)


def test_frozen_weights_are_not_trained() -> None:
    small = model("qwen3-0.6b")
    assert small.trained(["*embed_tokens*"]) == small.parameters - 151936 * 1024
    assert small.trained([]) == small.parameters


def test_only_the_h200_is_called_measured_and_the_others_follow_their_data_sheets() -> None:
    gpus = {name: find_hardware(name) for name in hardware_names()}
    assert {name for name, gpu in gpus.items() if gpu.figures == "measured"} == {"h200"}
    assert gpus["h200"].memory == 139 * 2**30 and find_hardware("h200", 80).memory == 80 * 2**30
    # The same chip as the H200 with slower memory.
    assert gpus["h100"].matmul == pytest.approx(gpus["h200"].matmul)
    assert gpus["h100"].bandwidth / gpus["h200"].bandwidth == pytest.approx(3.35 / 4.8)
    assert gpus["a100"].matmul / gpus["h200"].matmul == pytest.approx(312 / 989)
    assert all("data sheet" in gpu.links for gpu in gpus.values())


def test_between_machines_the_bus_is_what_all_network_cards_carry() -> None:
    gpu = find_hardware("h200")
    assert gpu.bus(8) == 450e9 and gpu.bus(16) == 8 * 50e9 == gpu.bus(512)
