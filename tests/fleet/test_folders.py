"""The folders through which weights reach servers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Policy
from legato.rollouts.servers.folders import WeightFolders

TEXT = torch.tensor([[5, 6, 7, 8, 9, 10]])


def policy_of(kind: str = "tiny", *, lora: bool = False, tied: bool = True, dtype: str = "float32") -> Policy:
    loading = Loading(
        device="cpu",
        dtype=dtype,
        tiny=TinyShape(hidden=32, heads=2, experts=4, tied=tied),
        lora=Lora(rank=4) if lora else None,
    )
    policy = load_policy(kind, loading)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if not lora or ".lora_" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=source, dtype=torch.float32).to(weight.dtype))
    return policy


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        table: torch.Tensor = model(TEXT).logits
        return table.float()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("untied", [False, True])
def test_a_folder_is_the_model_with_its_head_tied_or_not(tmp_path: Path, kind: str, untied: bool) -> None:
    policy = policy_of(kind)
    folder = WeightFolders(policy, tmp_path, untied=untied).write(policy.model.named_parameters(), "a.3.1")
    model = loaded(folder)
    assert torch.allclose(logits(model), logits(policy.model), atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not untied
    names = [name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert ("lm_head.weight" in names) is untied and len(names) == len(set(names))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is not untied


def test_adapters_are_merged_into_a_folder_and_the_policy_stays_as_it_is(tmp_path: Path) -> None:
    policy = policy_of(lora=True)
    before = logits(policy.model)
    folders = WeightFolders(policy, tmp_path, untied=True)
    merged = loaded(folders.write(policy.model.named_parameters(), "a.1.1"))
    assert torch.allclose(logits(merged), before, atol=1e-5) and torch.equal(logits(policy.model), before)
    with policy.model.disable_adapter():
        bare = logits(policy.model)
    base = loaded(folders.write_base(policy.model.named_parameters()))
    assert torch.allclose(logits(base), bare, atol=1e-5) and not torch.allclose(bare, before)
    adapters = folders.write(policy.model.named_parameters(), "a.2.2", adapters=True)
    assert {path.name for path in adapters.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_float64_is_published_in_float32_and_old_folders_are_deleted(tmp_path: Path) -> None:
    policy = policy_of(dtype="float64")
    folders = WeightFolders(policy, tmp_path, untied=False)
    for version in range(4):
        folder = folders.write(policy.model.named_parameters(), f"a.{version}.{version}")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-a.2.2", "weights-a.3.3"]


def test_a_folder_that_a_server_reads_is_kept_until_it_has_read_it(tmp_path: Path) -> None:
    """Also if its version is published again: a run may go back to a checkpoint."""
    policy = policy_of()
    folders = WeightFolders(policy, tmp_path, untied=False)
    read = folders.write(policy.model.named_parameters(), "a.0.1")
    folders.hold(read)
    folders.hold(read)
    before = {path.name: path.stat().st_mtime_ns for path in read.iterdir()}
    for version, name in ((0, "a.0.2"), (1, "a.1.3"), (2, "a.2.4")):
        folders.write(policy.model.named_parameters(), name)
        assert {path.name: path.stat().st_mtime_ns for path in read.iterdir()} == before, version
        if version == 1:
            folders.release(read)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-a.0.1", "weights-a.1.3", "weights-a.2.4"]
    folders.release(read)
    folders.write(policy.model.named_parameters(), "a.3.5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-a.2.4", "weights-a.3.5"]
