"""A model known by its configuration: a shipped name, a folder or a config.json. Weights are counted on the meta device."""

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from legato.errors import InputError, nearest
from legato.policy.layers.fused import why_not
from legato.policy.model.tiny import TinyShape, tiny_sizes
from legato.training.memory.shape import Shape

_FOLDER = files("legato.capacity") / "models"
_SUFFIXES = ("-instruct", "-base")
"""Endings of hub names that share the configuration of a shipped one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts about a model that decide memory and time."""

    name: str
    source: str
    """Where the configuration comes from."""
    shape: Shape
    weights: Mapping[str, int]
    """Number of weights by the name of their tensor; a tied head is not counted again."""
    fused: bool
    """Whether training uses our fused layer parts on a GPU in 16 bits."""
    scores: bool
    """Whether attention scores are materialised (soft caps, sinks)."""

    @property
    def parameters(self) -> int:
        return sum(self.weights.values())

    @property
    def is_mixture(self) -> bool:
        return self.shape.sparse_layers > 0

    def trained(self, frozen: Sequence[str]) -> int:
        """Number of weights whose names match none of the patterns."""
        return sum(count for name, count in self.weights.items() if not any(fnmatch.fnmatch(name, each) for each in frozen))


def shipped_names() -> list[str]:
    """The names of the shipped configurations: families together, small to large."""
    names = [path.name.removesuffix(".json") for path in _FOLDER.iterdir() if path.name.endswith(".json")]
    return sorted(names, key=lambda name: (_family(name), _billions(name)))


def _family(name: str) -> int:
    return next(place for place, start in enumerate(("qwen3", "llama", "")) if name.startswith(start))


def _billions(name: str) -> float:
    """The size in a shipped name, as 235 in qwen3-235b-a22b."""
    sizes = [part.removesuffix("b") for part in name.split("-") if part.endswith("b")]
    return float(sizes[0])


def shipped_record(name: str) -> dict[str, Any]:
    """The stored facts of a shipped configuration: name, source, published counts, config."""
    record: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return record


@cache
def shipped_model(name: str) -> Model:
    """The model of a shipped configuration."""
    record = shipped_record(name)
    return build_model(name, record["source"], record["config"])


def find_model(target: str, tiny: TinyShape | None = None) -> Model:
    """The model of a shipped name, a hub name of one, a folder or a config.json; InputError if there is none.

    `tiny` is the size of the models "tiny" and "tiny-moe".
    """
    if target in ("tiny", "tiny-moe") and tiny is not None:
        mixture = target == "tiny-moe"
        sizes = {"model_type": "qwen3_moe" if mixture else "qwen3", **tiny_sizes(tiny, mixture)}
        return build_model(target, "built in code (policy.tiny)", sizes)
    name = _shipped_name(target)
    if name is not None:
        return shipped_model(name)
    path = Path(target).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"expected a shipped configuration, a model folder or a config.json, got {target!r};"
            f" {nearest(target, shipped_names())}"
        )
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"expected a config.json of transformers, got {str(file)!r}, which cannot be read: {error}"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"expected a config.json of transformers, got {str(file)!r} without a table")
    return build_model(target, str(file), config)


def _shipped_name(target: str) -> str | None:
    lowered = target.lower()
    for name in shipped_names():
        hub = str(shipped_record(name)["name"]).lower()
        if lowered in (name, hub) or lowered in [hub + suffix for suffix in _SUFFIXES]:
            return name
    return None


def build_model(name: str, source: str, config: Mapping[str, Any]) -> Model:
    """The model of a transformers configuration, built on the meta device: no weight is allocated."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    automatic: Any = AutoModelForCausalLM
    try:
        described: Any = AutoConfig.for_model(config.get("model_type", ""), **values)
        with torch.device("meta"):
            module = automatic.from_config(described, dtype=torch.bfloat16)
    except Exception as error:  # libraries raise anything over a broken configuration
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"expected the configuration of a causal language model, got {source}: {reason}") from None
    text: Any = module.config.get_text_config()
    shape = Shape.from_config(text)
    fused = why_not(module.get_decoder()) is None and shape.width % 8 == 0 and shape.width <= 256
    return Model(
        name=name,
        source=source,
        shape=shape,
        weights={key: weight.numel() for key, weight in module.named_parameters()},
        fused=fused,
        scores=bool(getattr(text, "attn_logit_softcapping", None)) or "gpt_oss" in text.model_type,
    )
