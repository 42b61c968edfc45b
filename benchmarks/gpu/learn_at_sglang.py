"""A run that learns to write digits at a real SGLang, which it starts and publishes to, beside the same run locally.

    python -m benchmarks.gpu.learn_at_sglang --out RESULT.json         # about three minutes beside other work on the GPU
    python -m benchmarks.gpu.learn_at_sglang --engine legato           # `legato serve` in place of SGLang: to try it

The tiny model in bfloat16, 40 steps: what tests/vllm does at vLLM. SGLang's packages are found as in with_sglang.py. Results
of the accuracies at the end, and of every publish, go to RESULT.json, which docs/engines.md shows.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import legato
from benchmarks.gpu.with_sglang import PACKAGES, WITHOUT_GRAPHS, server_arguments, wrap_python
from legato.errors import describe_error
from legato.records.directory import RunDirectory

SHARE = "0.1"
"""Of the GPU's memory: the model is tiny."""
OPTIONS: dict[str, Any] = {
    "training.steps": 40,
    "training.prompts_per_step": 8,
    "training.updates_per_step": 2,
    "training.lr": 3e-3,
    "training.warm_up_updates": 0,
    "rollouts.samples_per_prompt": 8,
    "rollouts.max_response_tokens": 6,
    "policy.max_prompt_tokens": 24,
    "policy.tiny.hidden": 64,
    "policy.tiny.heads": 2,
    "policy.tiny.tied": False,
    "task.held_out": 64,
    "evaluation.every_steps": 0,
}


def count_digits(rollout: Any) -> float:
    """The share of digits among the first six characters."""
    return sum(letter.isdigit() for letter in rollout.text[:6]) / 6


def main() -> None:
    """Train both ways and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "legato"], default="sglang")
    parser.add_argument("--steps", type=int, default=OPTIONS["training.steps"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="learn-at-sglang-"))
    servers: dict[str, Any] = {
        "rollouts.engine": options.engine,
        "rollouts.servers.start": 1,
        "rollouts.servers.start_seconds": options.start_seconds,
        "rollouts.servers.pause_seconds": 30.0,
    }
    if options.engine == "sglang":
        packages = os.environ.get(PACKAGES)
        servers["rollouts.servers.python"] = (
            wrap_python(str(Path(packages).resolve()), folder) if packages else sys.executable
        )
        servers["rollouts.servers.arguments"] = [*server_arguments(SHARE), *WITHOUT_GRAPHS]
    table: dict[str, Any] = {"commit": os.environ.get("COMMIT", ""), "day": time.strftime("%Y-%m-%d"), "rows": []}

    def train(name: str, more: dict[str, Any]) -> Any:
        own = {"training.steps": options.steps, "training.seed": options.seed}
        where = {"output.directory": str(folder), "output.name": name}
        return legato.train(reward=count_digits, progress=False, **{**OPTIONS, **own, **where, **more})

    try:
        there = train("there", servers)
        local = train("local", {})
        records = [each for each in RunDirectory.open(there.directory).metrics() if each["kind"] == "step"]
        rows = {
            f"accuracy after {options.steps} steps at {options.engine} / locally, seed {options.seed}": [
                there.accuracy,
                local.accuracy,
            ],
            "publishes that the probe accepted": len(records),
            "median seconds of a publish": statistics.median(each["servers/publish_seconds"] for each in records),
            "largest gap of a probe": max(each["servers/probe_gap"] for each in records),
            "requests sent again; servers dropped": [
                sum(each["servers/retries"] for each in records),
                sum(each["servers/drops"] for each in records),
            ],
        }
        table["rows"] = [["learn", what, value] for what, value in rows.items()]
    except Exception as error:
        table["failed"] = describe_error(error)
        for log in sorted(folder.rglob("server-*.log")):
            table["log"] = log.read_text(encoding="utf-8", errors="replace")[-6000:]
        raise
    finally:
        print(json.dumps(table, indent=1), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
