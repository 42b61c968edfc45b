"""GPUs and their links. The H200 was measured; of the others there are data sheets only.

A figure of a data sheet is multiplied by the share of its own data sheet that the H200 reached.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from legato.errors import InputError, nearest

GIB = 2**30
_MEASURED = "h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of GPU in machines of several."""

    key: str
    name: str
    memory: int
    """Bytes a run may use."""
    matmul: float
    """FLOP/s of large matrix products in bfloat16."""
    bandwidth: float
    """Bytes per second of the GPU's memory."""
    nvlink: float
    """Bytes per second and direction between the GPUs of a machine."""
    network: float
    """Bytes per second and direction of each GPU's network card."""
    pcie: float
    """Bytes per second and direction between a GPU and its host."""
    host: float
    """Bytes per second of host memory, for each GPU."""
    gpus_per_node: int
    figures: str
    """"measured" or "data sheet": where memory, products and bandwidth come from."""
    source: str
    links: str
    """Where the link speeds come from."""

    def bus(self, ranks: int) -> float:
        """Bytes per second at which each rank receives, if all ranks gather or reduce one buffer together.

        Inside a machine that is NVLink. Between machines a buffer passes through all network cards of a machine at once, so
        that the slower of both decides.
        """
        if ranks <= self.gpus_per_node:
            return self.nvlink
        return min(self.nvlink, self.gpus_per_node * self.network)


def hardware_names() -> list[str]:
    return list(_table())


def find_hardware(key: str, memory_gib: float | None = None) -> Hardware:
    """The GPU of this name, with another size of memory if `memory_gib` is given; InputError if it is not known."""
    table = _table()
    if key.lower() not in table:
        raise InputError(f"expected a known GPU, got {key!r} (--hardware); {nearest(key, table)}")
    if memory_gib is not None and memory_gib <= 0:
        raise InputError(f"expected more than 0 GiB, got {memory_gib:g} (--memory)")
    row, base = table[key.lower()], table[_MEASURED]

    def measured_or_scaled(name: str, measured: str) -> float:
        """The measured figure, or that of the data sheet times the share that the H200 reached."""
        share = base[measured] / base["sheet"][name]
        return float(row.get(measured) or row["sheet"][name] * share)

    return Hardware(
        key=key.lower(),
        name=row["name"],
        memory=int((memory_gib or measured_or_scaled("memory_gb", "memory_gib")) * GIB),
        matmul=measured_or_scaled("matmul_tflops", "matmul_tflops") * 1e12,
        bandwidth=measured_or_scaled("bandwidth_tbs", "bandwidth_tbs") * 1e12,
        nvlink=row["nvlink_gbs"] * 1e9,
        network=row["network_gbs"] * 1e9,
        pcie=row["pcie_gbs"] * 1e9,
        host=row["host_gbs"] * 1e9,
        gpus_per_node=row["gpus_per_node"],
        figures=row["figures"],
        source=row["source"],
        links=row["links"],
    )


def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("legato.capacity") / "hardware.json").read_text())
    return table
