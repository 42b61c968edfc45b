"""Whole steps beside TRL's `GRPOTrainer` in sequence mode: time and peak memory on two CPU cores. Part of `make bench`.

    python -m benchmarks.step            # about an hour with SmolLM2; --models tiny: ten minutes
    python -m benchmarks.step --quick    # one short round, to check that it works; nothing is stored

Each side runs in its own process (TRL in the environment that `make peers` builds), in turn, on the same weights, prompts,
rewards and number of tokens: a step is 4 prompts x 8 responses of 24 tokens and 4 updates. Before timing, loss and gradient
of one fixed batch are compared. After timing, the benchmark asserts that both sides saw the same prompts, rewards, tokens
and updates.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.step import work as work
from benchmarks.step.page import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "step.json"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3
STEPS = len(work.SILENT)
REPEATS = {"tiny": 2, "smollm2": 1}

SIDES: dict[str, dict[str, Any]] = {
    "trl": {},
    "legato": {},
    "legato, no skipping": {"training.update_passes": "one", "training.skip_silent_rows": False},
    "legato, nothing saved": {
        "training.update_passes": "one",
        "training.skip_silent_rows": False,
        "training.anchor": "recompute",
    },
}
WORKS: dict[str, tuple[str, ...]] = {
    "every response counts": ("trl", "legato", "legato, nothing saved"),
    "40 % without advantage": ("trl", "legato, no skipping", "legato"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The folder of the child processes and the interpreter of the peers."""

    folder: Path
    peers: Path

    def run_child(self, side: str, verb: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Run one side in a process and return its result."""
        request_path, result_path = self.folder / "work.json", self.folder / "result.json"
        result_path.unlink(missing_ok=True)
        work.write_json(str(request_path), settings)
        python, module = (
            (self.peers, "benchmarks.step.trl_side") if side == "trl" else (sys.executable, "benchmarks.step.legato_side")
        )
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(work.THREADS),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.folder / "datasets"),
        }
        command = [str(python), "-m", module, verb, str(request_path), str(result_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result_path.is_file():
            raise SystemExit(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return work.read_json(str(result_path))

    def make_settings(self, model: str, chat: bool, steps: int, *, silent: bool) -> dict[str, Any]:
        """The settings of a child process: one warm-up step and `steps` measured ones."""
        return {
            "model": model,
            "chat": chat,
            "questions": work.questions((1 + steps) * work.PROMPTS),
            "rewards": work.rewards(1, silent=False) + work.rewards(steps, silent=silent),
        }

    def check(self, model: str, chat: bool) -> dict[str, float]:
        """Compare loss and gradient of one fixed batch on both sides. Raises AssertionError if they differ."""
        settings = {**self.make_settings(model, chat, 1, silent=False), "batch": str(self.folder / "batch.safetensors")}
        ours, theirs = (self.run_child(side, "check", settings) for side in ("legato", "trl"))
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        norm = sum(differences[0] ** 2 for differences in theirs["gradients"].values()) ** 0.5
        gap = max(
            abs(mine - other)
            for name, pair in ours["gradients"].items()
            for mine, other in zip(pair, theirs["gradients"][name], strict=True)
        )
        differences = {
            "loss": ours["loss"],
            "loss_difference": abs(ours["loss"] - theirs["loss"]),
            "gradient_norm": norm,
            "gradient_difference": gap / norm,
        }
        assert differences["loss_difference"] <= LOSS_TOLERANCE, differences
        assert differences["gradient_difference"] <= GRADIENT_TOLERANCE, differences
        return differences

    def measure(
        self, model: str, chat: bool, sides: Sequence[str], steps: int, repeats: int, *, silent: bool
    ) -> dict[str, Any]:
        """Measure all sides in turn, `repeats` times."""
        settings = self.make_settings(model, chat, steps, silent=silent)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for repeat in range(repeats):
            for side in sides:
                result = self.run_child(side, "measure", {**settings, "options": SIDES[side]})
                if SIDES[side]:
                    # These sides must skip no row; this catches a setting that changed its meaning.
                    assert not any(step["skipped"] for step in result["steps"]), side
                runs[side].append(result)
                seconds = ", ".join(f"{step['seconds']:.2f}" for step in result["steps"][1:])
                print(f"  {repeat + 1}/{repeats} {side:22s} {seconds} s   {result['peak_mb']:.0f} MB", flush=True)
        assert_same_work([result for side in sides for result in runs[side]], settings["rewards"])
        return {
            "silent_share": work.silent_share(settings["rewards"][work.PROMPTS :]),
            "prompt_tokens": runs["trl"][0]["steps"][1]["prompt_tokens"],
            "response_tokens": runs["trl"][0]["steps"][1]["response_tokens"],
            "sides": {side: summary(runs[side]) for side in sides},
        }


def assert_same_work(runs: Sequence[dict[str, Any]], rewards: Sequence[Sequence[float]]) -> None:
    """Assert that every process had the same prompts, rewards, tokens and updates in every step."""
    whole = work.PROMPTS * work.SAMPLES * work.TOKENS
    for number, steps in enumerate(zip(*(run["steps"] for run in runs), strict=True)):
        rows = rewards[number * work.PROMPTS : (number + 1) * work.PROMPTS]
        mean = statistics.fmean(value for row in rows for value in row)
        for step in steps:
            assert step["response_tokens"] == whole, step
            assert step["updates"] == work.UPDATES, step
            assert step["silent"] == work.silent_share(rows), step
            reward = step["reward_mean"] if "reward_mean" in step else statistics.fmean(step["rewards"])
            assert abs(reward - mean) < 1e-6, step
            for key in ("prompt_tokens", "prompts"):
                assert step[key] == steps[0][key], (key, number)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the measured steps of all repeats; memory is the median over processes."""
    steps = [step for run in runs for step in run["steps"][1:]]
    seconds = [step["seconds"] for step in steps]
    clipped = [step["clipped"] for step in steps if step["clipped"] is not None]
    return {
        "step_seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(step["cpu_seconds"] for step in steps),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "phases": {
            name: statistics.median(step["phases"][name] for step in steps) for name in ("rollouts", "anchor", "update")
        },
        "first_step_seconds": statistics.median(run["steps"][0]["seconds"] for run in runs),
        "peak_mb": statistics.median(run["peak_mb"] for run in runs),
        "later_peak_mb": statistics.median(run["later_peak_mb"] for run in runs),
        "loaded_mb": statistics.median(run["loaded_mb"] for run in runs),
        "clipped": statistics.fmean(clipped) if clipped else None,
        "skipped": statistics.fmean(step.get("skipped", 0.0) for step in steps),
        "anchor": runs[0].get("anchor", "recompute"),
        "samples": seconds,
        "versions": runs[0]["versions"],
    }


def pin_to_two_cores() -> None:
    """Pin this process and its children to two cores, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.THREADS])


def run(models: Sequence[str], peers: Path, *, quick: bool) -> dict[str, Any]:
    """Measure all models and return the results."""
    if not peers.exists():
        raise SystemExit(
            f"{peers} does not exist: run `make {PEERS.parents[1].name}/.ready` to build the peers' environment"
        )
    pin_to_two_cores()
    load = os.getloadavg()
    rows, checks, skipped = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder=Path(folder), peers=peers)
        ready = bench.run_child("legato", "prepare", {"folder": folder})
        for model in models:
            if ready[model] is None:
                skipped[model] = ready[f"{model}_missing"]
                print(f"{model}: left out: {skipped[model]}")
                continue
            chat = model != "tiny"
            checks[model] = bench.check(ready[model], chat)
            print(f"{model}: loss differs by {checks[model]['loss_difference']:.1e}, gradient by"
                  f" {checks[model]['gradient_difference']:.1e}")  # fmt: skip
            for silent, (name, sides) in enumerate(WORKS.items()):
                print(f"{model}, {name}")
                steps, repeats = (1, 1) if quick else (STEPS, REPEATS[model])
                measured = bench.measure(ready[model], chat, sides, steps, repeats, silent=bool(silent))
                rows.append({"model": model, "work": name, "steps": steps, "repeats": repeats, **measured})
    return {
        "prompts": work.PROMPTS,
        "samples": work.SAMPLES,
        "tokens": work.TOKENS,
        "updates": work.UPDATES,
        "dtype": "float32",
        "threads": work.THREADS,
        "machine": f"{platform.machine()}, {platform.system()}, CPU",
        "load": {"before": load[0], "after": os.getloadavg()[0]},
        "python": platform.python_version(),
        "transformers": importlib.metadata.version("transformers"),
        "torch": ready["torch"],
        "tiny_parameters": ready["tiny_parameters"],
        "checks": checks,
        "skipped": skipped,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one measured step a side, nothing stored")
    parser.add_argument("--models", nargs="+", choices=tuple(REPEATS), default=tuple(REPEATS))
    parser.add_argument("--peers", type=Path, default=PEERS, help="the interpreter that has TRL 1.16.0")
    parser.add_argument("--output", type=Path, help="where to store the JSON; with --quick nowhere unless given")
    options = parser.parse_args()
    results = run(options.models, options.peers, quick=options.quick)
    print("\n".join(table(results)))
    output = options.output or (None if options.quick else RESULTS)
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
