"""How the GPU benchmarks measure: interleaved calls, peak memory, the ceilings of the machine, and the results file.

A section (B1, B2 ...) consists of parts. Each part is written to the file as soon as it is measured, so that a command that
runs out of time loses only the part it was measuring.
"""

import contextlib
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
Part = Callable[["Bench"], dict[str, Any]]


FEWEST = 3
"""Samples of each call, even if the time is up."""
LEAD_CYCLES = 4_000_000
"""Device cycles of sleep before a timed call, about 2 ms."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """One command: its device, its size and its deadline."""

    device: torch.device
    tiny: bool
    deadline: float
    without: tuple[str, ...] = ()
    """Peers that are not called. A peer that breaks the device would make the rest of the command fail."""
    ceilings: dict[str, float] = field(default_factory=dict)
    run: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M", time.gmtime()))
    """When the command began. Parts of one section may come from several commands."""

    def check_allowed(self, peer: str) -> bool:
        """True, or ValueError if `--without` names this peer."""
        if peer in self.without:
            raise ValueError("left out by --without")
        return True

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    def seconds_left(self) -> float:
        """Seconds until the deadline of this command."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free unused memory, so that the next side starts with the same amount."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        """Bytes allocated on the device, including the private pools of CUDA graphs."""
        return torch.cuda.memory_allocated(self.device) + graph_pool_bytes() if self.cuda else 0

    @contextlib.contextmanager
    def peak(self, into: dict[str, Any], before: int | None = None) -> Iterator[None]:
        """Store the peak memory above `before` in `into["peak_gib"]`, in GiB; 0 without CUDA.

        `before` is in bytes; by default it is the memory held on entry.
        """
        self.wait()
        start = self.held_bytes() if before is None else before
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        self.wait()
        most = torch.cuda.max_memory_allocated(self.device) + graph_pool_bytes() if self.cuda else 0
        into["peak_gib"] = (most - start) / GIB

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, by the device's clock if it has one."""
        if not self.cuda:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device sleeps first, so that the host runs ahead of it, as within a training step.
        torch.cuda._sleep(LEAD_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def wall_seconds(self, call: Callable[[], Any]) -> float:
        """Wall-clock seconds of one call, host work included."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def time_interleaved(
        self, calls: Mapping[str, Callable[[], Any]], *, warm: int, samples: int, seconds: float
    ) -> dict[str, dict[str, Any]]:
        """Time all calls in rounds. A call that fails is stored with its error and left out of later rounds.

        Every round has its own order: a GPU is slower right after heavy products, so a call that always followed the same
        neighbour would pay for it.

        The rounds end early once `seconds` have passed; the result holds the number of samples. The first call, which
        compiles and tunes, is reported separately, and so is the peak memory.
        """
        started, order = time.monotonic(), random.Random(0)
        results: dict[str, dict[str, Any]] = {name: {"samples": []} for name in calls}
        alive = dict(calls)
        for turn in range(warm + samples):
            if turn >= warm + FEWEST and time.monotonic() - started > min(seconds, max(self.seconds_left(), 0.0)):
                break
            for name, call in order.sample(list(alive.items()), len(alive)):
                try:
                    first = time.perf_counter()
                    elapsed = self.seconds(call)
                    if turn == 0:
                        results[name]["first_seconds"] = time.perf_counter() - first
                        with self.peak(results[name]):
                            call()
                    if turn >= warm:
                        results[name]["samples"].append(elapsed)
                except Exception as error:  # a peer's failure is a result
                    results[name] = {"error": describe_error(error)}
                    del alive[name]
                    self.free()
                if turn == 0:
                    self.free()
        return {name: {**row, **spread(row["samples"])} if row.get("samples") else row for name, row in results.items()}

    def measure_ceilings(self) -> None:
        """Measure the fastest product (8192^3 in bfloat16) and copy (one GiB) of this machine into `ceilings`."""
        size, count, length = (8192, 30, GIB) if not self.tiny else (64, 3, 2**16)
        first, second = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        out, source = torch.empty_like(first), torch.empty(length, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        calls = {"product": lambda: torch.mm(first, second, out=out), "copy": lambda: target.copy_(source)}
        results = self.time_interleaved(calls, warm=10 if not self.tiny else 1, samples=count, seconds=20)
        self.ceilings = {
            "tflops": 2 * size**3 / results["product"]["seconds"] / 1e12,
            "terabytes_per_second": 2 * length / results["copy"]["seconds"] / 1e12,
        }

    def machine(self) -> dict[str, str]:
        import transformers

        return {
            "device": torch.cuda.get_device_name(self.device) if self.cuda else f"{platform.machine()} CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }


def graph_pool_bytes() -> int:
    """Bytes in the private pools of CUDA graphs. Replaying a graph counts no allocation, so they are added separately."""
    own = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def describe_error(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def spread(samples: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile in seconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "seconds": statistics.median(ordered),
        "p20": ordered[round(0.2 * last)],
        "p80": ordered[round(0.8 * last)],
        "count": len(ordered),
    }


class Document:
    """The results file: one machine and a section per benchmark, each with its parts.

    A section's `earlier` has the last replaced result of parts that were measured again without the others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"machine": {}, "sections": {}}

    def begin_section(self, section: str, machine: Mapping[str, str], *, whole: bool) -> None:
        """Prepare a section. `whole` drops its stored parts; otherwise parts are replaced one by one."""
        self.content["machine"] = dict(machine)
        sections = self.content["sections"]
        if whole or section not in sections:
            sections[section] = {"parts": {}}

    def has_result(self, section: str, part: str) -> bool:
        result = self.content["sections"][section]["parts"].get(part)
        return result is not None and "error" not in result

    def store(self, section: str, part: str, result: Mapping[str, Any]) -> None:
        """Store the result of a part. One that it replaces is kept: other parts may have been measured beside it only."""
        own = self.content["sections"][section]
        if self.has_result(section, part):
            own.setdefault("earlier", {})[part] = own["parts"][part]
        own["parts"][part] = dict(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written to a second file and moved, so that a command killed here leaves the old file intact.
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self.path)


def run_parts(bench: Bench, document: Document, section: str, parts: Mapping[str, Part], only: tuple[str, ...]) -> None:
    """Measure the parts whose names begin with one of `only` (all parts if it is empty), and store each at once."""
    document.begin_section(section, bench.machine(), whole=not only)
    for name, part in parts.items():
        if only and not name.startswith(only):
            continue
        if bench.seconds_left() <= 0:
            # The result of an earlier command stays; the page names its run.
            if document.has_result(section, name):
                continue
            result: dict[str, Any] = {"error": "the time of the command was up"}
        else:
            started = time.monotonic()
            try:
                result = part(bench)
            except Exception as error:  # the other parts are still worth having
                result = {"error": describe_error(error)}
            result["took_seconds"] = time.monotonic() - started
        bench.free()
        document.store(section, name, {**result, "ceilings": bench.ceilings, "tiny": bench.tiny, "run": bench.run})
        print(f"{section} {name}: {result.get('error') or 'done'} ({result.get('took_seconds', 0.0):.1f} s)", flush=True)
