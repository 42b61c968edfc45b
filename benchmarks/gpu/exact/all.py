"""Everything about the exact engine and decoding that is measured on a GPU: python -m benchmarks.gpu.exact.all --output DIR

    first    at the same time, since nothing is timed: unequal bits of the shapes that were not repeated after the last
             correction, and whole runs at a learning rate of 0 and above
    then     one after the other: experts of mixtures, decoding of the 0.6B shape, the whole step of B8

Each part has a time limit and is killed at it; what it has written by then counts. No part starts after --seconds. Writes
three files to DIR: exact.json (for `benchmarks.gpu.exact.engine --merge DIR/exact.json`), experts.json (for
benchmarks/results/experts-gpu.json) and log.txt (the ends of all outputs). `--tiny` runs what has a tiny form on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TAIL = 6000
"""Characters of a part's output that the log keeps."""


@dataclass(slots=True, kw_only=True)
class Part:
    """One command, its time limit, and the file that it writes."""

    name: str
    command: list[str]
    """Arguments of `python -m`; OUT is the file to write."""
    seconds: float
    shape: str | None = None
    """Set where the file holds the results of this shape alone (`engine --child`)."""
    process: Any = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    ended: str = field(default="not started: no time left", init=False)

    def start(self, folder: Path) -> None:
        command = [str(self.file(folder)) if word == "OUT" else word for word in self.command]
        self.started = time.monotonic()
        with self.log(folder).open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, most: float) -> None:
        """Wait until the part ends; kill it and what it started after `most` seconds."""
        try:
            code = self.process.wait(max(1.0, most))
            self.ended = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nothing else is in this group
            self.process.wait()
            self.ended = "killed at its time limit"
        self.ended += f" after {time.monotonic() - self.started:.0f} s"

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def log(self, folder: Path) -> Path:
        return folder / f"{self.name}.txt"

    def read(self, folder: Path) -> Any:
        """What the part wrote; None if it wrote nothing that can be read."""
        try:
            return json.loads(self.file(folder).read_text())
        except (OSError, ValueError):
            return None


def gpu_parts() -> tuple[list[Part], list[Part]]:
    """The parts that run at the same time, and those that run alone."""
    engine = ["benchmarks.gpu.exact.engine", "--output", "OUT", "--child"]
    again = ["--cases", "one row", "ragged, refilled"]
    every = ["one row", "3 rows", "64 rows", "256 rows", "512 rows", "ragged, refilled"]
    together = [
        Part(name="bits-1.7B", command=[*engine, "1.7B", *again], seconds=80, shape="1.7B"),
        Part(name="bits-Llama-1B", command=[*engine, "Llama-1B", *again], seconds=80, shape="Llama-1B"),
        Part(
            name="bits-Mistral",
            command=[*engine, "Mistral-7B, 4 layers", "--cases", *every],
            seconds=80,
            shape="Mistral-7B, 4 layers",
        ),
        Part(name="runs", command=["benchmarks.gpu.exact.run_at_zero", "--output", "OUT"], seconds=90),
    ]
    timed = ["--cases", "none", "--times", "8", "64", "256", "256, ragged"]
    alone = [
        Part(name="experts", command=["benchmarks.gpu.experts", "--output", "OUT", "--seconds", "45"], seconds=75),
        Part(name="times-0.6B", command=[*engine, "0.6B", *timed], seconds=90, shape="0.6B"),
        Part(
            name="step",
            command=["benchmarks.gpu", "--only", "B8", "--parts", "Legato", "--output", "OUT", "--seconds", "60"],
            seconds=80,
        ),
    ]
    return together, alone


def tiny_parts() -> tuple[list[Part], list[Part]]:
    step = ["benchmarks.gpu", "--tiny", "--device", "cpu", "--only", "B8", "--parts", "Legato", "--output", "OUT"]
    return (
        [Part(name="runs", command=["benchmarks.gpu.exact.run_at_zero", "--tiny", "--output", "OUT"], seconds=240)],
        [Part(name="step", command=step, seconds=240)],
    )


def run_parts(together: Sequence[Part], alone: Sequence[Part], folder: Path, deadline: float) -> None:
    for part in together:
        part.start(folder)
    for part in together:
        part.wait(min(part.started + part.seconds, deadline) - time.monotonic())
        print(part.name, part.ended, flush=True)
    for part in alone:
        if time.monotonic() < deadline:
            part.start(folder)
            part.wait(min(part.seconds, deadline - time.monotonic()))
        print(part.name, part.ended, flush=True)


def gather(parts: Sequence[Part], folder: Path, commit: str) -> dict[str, Any]:
    """What the parts wrote as one document for `benchmarks.gpu.exact.engine --merge`. Parts without results are left out."""
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit, "shapes": {}}
    for part in parts:
        content = part.read(folder)
        if content is None or part.name == "experts":
            continue
        if part.shape is not None:
            document["shapes"][part.shape] = content
        elif "runs" in content:
            document["runs"] = content["runs"]
        else:
            measured = content["sections"]["B8"]["parts"]
            if all("seconds" in measured.get(name, {}) for name in ("Legato", "Legato exact")):
                document["sections"] = content["sections"]
    document["parts"] = {part.name: part.ended for part in parts}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=240.0, help="everything is killed at this time")
    parser.add_argument("--commit", default="", help="stored with the results; the GPU's machine has no history")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.output.mkdir(parents=True, exist_ok=True)
    together, alone = tiny_parts() if options.tiny else gpu_parts()
    parts = [*together, *alone]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_parts(together, alone, folder, deadline)
        finally:
            (options.output / "exact.json").write_text(json.dumps(gather(parts, folder, options.commit), indent=1) + "\n")
            experts = folder / "experts.json"
            if experts.is_file():
                (options.output / "experts.json").write_bytes(experts.read_bytes())
            ends = [
                f"== {part.name}: {part.ended}\n{part.log(folder).read_text(errors='replace')[-_TAIL:]}"
                for part in parts
                if part.log(folder).is_file()
            ]
            (options.output / "log.txt").write_text("\n".join(ends) + "\n")
    for each in ends:
        print(each[-1500:], flush=True)


if __name__ == "__main__":
    main()
