"""Run the commands of docs/first-run.md as they stand and store what they print, with date, commit and machine.

    python -m benchmarks.first_run        # a minute or two on one CPU core; writes benchmarks/results/first-run.json

The page quotes lines of it; `tests/repository/test_documents.py` compares them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-run.md"
RESULTS = Path(__file__).parent / "results" / "first-run.json"
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEPT = re.compile(
    r"gradient checkpointing is off|numerics are fine|step 40/40|held-out accuracy|^(sampled|greedy) |avg@|pass@"
)
"""The lines that the page quotes."""


def run_page(folder: Path) -> list[dict[str, Any]]:
    """Write the files of the page and run its commands in their order; each with its seconds and the lines that are kept."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"}
    commands: list[dict[str, Any]] = []
    for block in BLOCK.findall(PAGE.read_text()):
        file = re.match(r"# (\w+\.(?:py|toml))\n", block)
        if file:
            (folder / file[1]).write_text(block)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            if words[:1] not in (["python"], ["legato"]):
                continue
            called = words[1:] if words[0] == "python" else ["-m", *words]
            began = time.monotonic()
            ended = subprocess.run([sys.executable, *called], cwd=folder, env=environment, capture_output=True, text=True)
            if ended.returncode:
                raise SystemExit(f"expected exit code 0, got {ended.returncode} ({line})\n{ended.stderr}")
            printed = (ended.stdout + ended.stderr).splitlines()
            seconds = time.monotonic() - began
            commands.append({"command": line, "seconds": seconds, "lines": [each for each in printed if KEPT.search(each)]})
    return commands


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = run_page(Path(folder))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{os.uname().machine}, one thread",
        "torch": torch.__version__,
        "commands": commands,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
