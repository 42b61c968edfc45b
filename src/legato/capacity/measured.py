"""What was measured on a GPU: factors that turn the roofline into times, and results of shipped shapes.

`benchmarks/gpu/factors.py` derives both from `benchmarks/results`; every entry names its file, date and machine.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from legato.capacity.setup import Setup
from legato.capacity.work import active_in_layers, head_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A measured number and where it comes from."""

    value: float
    source: str
    date: str
    machine: str
    weights: int = 0
    """Matrix weights that a token meets in the measured model, where the factor depends on its size."""
    cores: int = 0
    """Cores of the host for each GPU of the measured machine, where the factor depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A stored measurement of a shipped shape."""

    model: str
    what: str
    value: float
    unit: str
    load: str
    source: str
    date: str
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All factors and results."""

    training_efficiency: tuple[Factor, ...]
    """Share of the speed of large products that forward and backward reach, by size of the model."""
    scoring_efficiency: tuple[Factor, ...]
    """The same of a forward without a gradient."""
    mixture_efficiency: Factor
    """The same of the layers of a mixture, forward and backward. Its head is a dense product."""
    adapters: Factor
    """Speed of layers with adapters, as a share of fused layers."""
    own_layers: Factor
    """Speed of the model's own layers, as a share of fused layers."""
    host_seconds_per_layer: Factor
    """The least time of a layer's forward over a pack: what the host needs to launch it."""
    decode_efficiency: tuple[Factor, ...]
    """Share of the roofline that decoding reaches beside the time per layer, by size of the model."""
    decode_seconds_per_layer: Factor
    decode_seconds_per_sparse_layer: Factor
    decode_seconds_per_adapted_layer: Factor
    """In addition, where layers have adapters."""
    host_bytes_per_second: Factor
    """Bytes of host memory that an offloaded optimizer reads and writes, with the cores of the measured machine."""
    results: tuple[Result, ...]

    def training_share(self, setup: Setup) -> float:
        """The share of the speed of large products that an update reaches."""
        return self._share(self.training_efficiency, setup)

    def scoring_share(self, setup: Setup) -> float:
        """The share of the speed of large products that a scoring pass reaches."""
        return self._share(self.scoring_efficiency, setup)

    def _share(self, by_size: Sequence[Factor], setup: Setup) -> float:
        mixture = setup.model.is_mixture
        share = self._mixture_share(by_size, setup) if mixture else at_size(by_size, matrix_weights(setup))
        if not setup.fused:
            return share * self.own_layers.value
        # Layers of mixtures run part by part with and without adapters.
        return share * self.adapters.value if setup.by_parts and not mixture else share

    def _mixture_share(self, by_size: Sequence[Factor], setup: Setup) -> float:
        """The share of layers and head together: their times add up."""
        dense = max(by_size, key=lambda factor: factor.weights).value
        head = head_weights(setup.model.shape) / matrix_weights(setup)
        return 1 / (head / dense + (1 - head) / self.mixture_efficiency.value)

    def decoding_share(self, setup: Setup) -> float:
        """The share of the roofline that decoding reaches."""
        return at_size(self.decode_efficiency, matrix_weights(setup))

    def decoding_seconds_per_step(self, setup: Setup) -> float:
        """Seconds of a decode step beside its roofline."""
        shape = setup.model.shape
        sparse = shape.sparse_layers * self.decode_seconds_per_sparse_layer.value
        adapted = shape.layers * self.decode_seconds_per_adapted_layer.value if setup.lora_rank else 0.0
        return sparse + (shape.layers - shape.sparse_layers) * self.decode_seconds_per_layer.value + adapted


def matrix_weights(setup: Setup) -> int:
    """Matrix weights that a token meets."""
    return active_in_layers(setup.model.shape) + head_weights(setup.model.shape)


def at_size(factors: Sequence[Factor], weights: int) -> float:
    """The factor for a model of this size: between two measured sizes in proportion to the logarithm, else the nearest."""
    ordered = sorted(factors, key=lambda factor: factor.weights)
    if weights <= ordered[0].weights:
        return ordered[0].value
    for low, high in itertools.pairwise(ordered):
        if weights <= high.weights:
            share = math.log(weights / low.weights) / math.log(high.weights / low.weights)
            return low.value + share * (high.value - low.value)
    return ordered[-1].value


@lru_cache
def measured() -> Measured:
    """The measurements that the package holds."""
    stored: dict[str, Any] = json.loads((files("legato.capacity") / "measured.json").read_text())
    factors: dict[str, Any] = {
        name: tuple(Factor(**each) for each in value) if isinstance(value, list) else Factor(**value)
        for name, value in stored["factors"].items()
    }
    return Measured(**factors, results=tuple(Result(**each) for each in stored["results"]))
