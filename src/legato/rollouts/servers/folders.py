"""The folders through which weights reach servers: a model as transformers saves it, one folder a publish.

A tied output layer is written as a matrix of its own where a server needs that (`untied`): config.json then says so. Under
LoRA a folder holds the adapters, as peft saves them, or weights into which they are merged; the policy stays as it is.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from legato.policy.policy import Policy

KEPT = 2
"""Folders that are kept beside those that a server reads (`hold`)."""


class WeightFolders:
    """Writes the weights of each version under `root`."""

    def __init__(self, policy: Policy, root: Path, *, untied: bool) -> None:
        self.policy, self.root = policy, root
        self.lora = hasattr(policy.model, "disable_adapter")
        self._base: Any = policy.model.get_base_model() if self.lora else policy.model
        self.tied = bool(getattr(self._base.config, "tie_word_embeddings", False))
        self.untied = untied and self.tied
        self.dtype = _served_dtype(self._base.get_input_embeddings().weight.dtype)
        self._readers: Counter[Path] = Counter()
        """How many servers read a folder that may be an old one by now."""

    def hold(self, folder: Path) -> None:
        """Keep a folder until as many calls of `release`: a server may start from it for minutes, while steps go on."""
        self._readers[folder] += 1

    def release(self, folder: Path) -> None:
        """A server has read a folder. It is deleted with the next one that is written."""
        self._readers[folder] -= 1

    def path_of(self, name: str) -> Path:
        """Where the weights of a name are written."""
        return self.root / f"weights-{name}"

    def write(self, weights: Iterable[tuple[str, Tensor]], name: str, *, adapters: bool = False) -> Path:
        """Write the weights of the policy's model under a name that no others have. Older folders but the last are deleted.

        Versions repeat when a run goes back to a checkpoint: a folder of a version might still be read.
        """
        folder = self.path_of(name)
        partial = self.root / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if adapters:
            self.policy.model.save_pretrained(partial)
        else:
            self._write_model(self._merge_adapters(weights) if self.lora else weights, partial)
        partial.rename(folder)
        self._prune(folder)
        return folder

    def write_base(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """The folder of the model without adapters, on which a server starts that gets adapters later."""
        folder = self.root / "base"
        if not folder.exists():
            partial = self.root / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._write_model(((_plain_name(name), each) for name, each in weights if ".lora_" not in name), partial)
            partial.rename(folder)
        return folder

    def _write_model(self, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        # One after the other: where layers are divided among ranks, each is whole on the device for a moment only.
        held = {
            name: tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in weights
        }
        # Under peft the base model's own state_dict has the names of its wrappers: names and tensors are given.
        self._base.save_pretrained(folder, state_dict=dict(held))
        self.policy.tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.untied:
            embedding = self._base.get_input_embeddings().weight
            name = next(name for name, weight in self._base.named_parameters() if weight is embedding)
            _add_head(folder, held[_plain_name(name)])
            config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _merge_adapters(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base model with the adapters added, by the names without peft."""
        deltas = _deltas(self._base)
        with torch.no_grad():
            for name, weight in weights:
                if ".lora_" in name:
                    continue
                plain = _plain_name(name)
                yield plain, weight if plain not in deltas else (weight.float() + deltas[plain]().float()).to(weight.dtype)

    def _prune(self, newest: Path) -> None:
        folders = [path for path in self.root.glob("weights-*") if path.is_dir() and path != newest]
        folders = [path for path in folders if self._readers[path] <= 0]
        for path in sorted(folders, key=lambda path: path.stat().st_mtime)[: -(KEPT - 1) or None]:
            shutil.rmtree(path, ignore_errors=True)


def _served_dtype(dtype: torch.dtype) -> torch.dtype:
    """Servers do not compute in float64."""
    return torch.float32 if dtype is torch.float64 else dtype


def _plain_name(name: str) -> str:
    """The name of a weight without the wrappers of peft."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _deltas(base: Any) -> dict[str, Any]:
    """Functions that compute what the adapters add, by the plain name of the weight they add it to."""
    deltas: dict[str, Any] = {}
    for name, module in base.named_modules():
        if not hasattr(module, "lora_A") or not module.lora_A:
            continue
        parameter = getattr(module, "parameter_name", "weight")
        path = _plain_name(f"{name}.{parameter}")
        deltas[path] = lambda module=module: module.get_delta_weight(module.active_adapters[0])
    return deltas


def _add_head(folder: Path, head: Tensor) -> None:
    """Add the output layer to a saved model as a matrix of its own, with the index that names the file of each weight."""
    from safetensors import safe_open

    index_path, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        first = folder / "model-00001-of-00002.safetensors"
        whole.rename(first)
        with safe_open(first, framework="pt") as file:
            files = dict.fromkeys(file.keys(), first.name)
    else:
        files = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    last = folder / "model-head.safetensors"
    save_file({"lm_head.weight": head.clone()}, last, metadata={"format": "pt"})
    files["lm_head.weight"] = last.name
    total = sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    index_path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
