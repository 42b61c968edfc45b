"""Whole steps beside TRL's `GRPOTrainer` in sequence mode: time and peak memory on two CPU cores. Part of `make bench`.

    python -m benchmarks.step            # about an hour with SmolLM2; --models tiny: ten minutes
    python -m benchmarks.step --quick    # one short round, to see that it works; nothing is stored

Each side runs in a process of its own (TRL in the environment that `make peers` builds), in turn, on the same weights,
prompts, rewards and number of tokens: a step is 4 prompts x 8 responses of 24 tokens and 4 updates. Before timing, loss and
gradient of one fixed batch are compared; after it, that both sides saw the same prompts, rewards, tokens and updates.
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
    """Where the children work and which interpreter each side has."""

    folder: Path
    peers: Path

    def child(self, side: str, verb: str, given: dict[str, Any]) -> dict[str, Any]:
        """Run one process to its end and read what it found."""
        asked, found = self.folder / "work.json", self.folder / "found.json"
        found.unlink(missing_ok=True)
        work.write(str(asked), given)
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
        command = [str(python), "-m", module, verb, str(asked), str(found)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not found.is_file():
            raise SystemExit(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return work.read(str(found))

    def given(self, model: str, chat: bool, steps: int, *, silent: bool) -> dict[str, Any]:
        """One step of warm-up and so many measured ones."""
        return {
            "model": model,
            "chat": chat,
            "questions": work.questions((1 + steps) * work.PROMPTS),
            "rewards": work.rewards(1, silent=False) + work.rewards(steps, silent=silent),
        }

    def check(self, model: str, chat: bool) -> dict[str, float]:
        """Loss and gradient of one fixed batch on both sides; the run ends where they differ."""
        given = {**self.given(model, chat, 1, silent=False), "batch": str(self.folder / "batch.safetensors")}
        ours, theirs = (self.child(side, "check", given) for side in ("legato", "trl"))
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        norm = sum(found[0] ** 2 for found in theirs["gradients"].values()) ** 0.5
        gap = max(
            abs(mine - other)
            for name, pair in ours["gradients"].items()
            for mine, other in zip(pair, theirs["gradients"][name], strict=True)
        )
        found = {
            "loss": ours["loss"],
            "loss_difference": abs(ours["loss"] - theirs["loss"]),
            "gradient_norm": norm,
            "gradient_difference": gap / norm,
        }
        assert found["loss_difference"] <= LOSS_TOLERANCE, found
        assert found["gradient_difference"] <= GRADIENT_TOLERANCE, found
        return found

    def measure(
        self, model: str, chat: bool, sides: Sequence[str], steps: int, repeats: int, *, silent: bool
    ) -> dict[str, Any]:
        """All sides in turn, as often as asked."""
        given = self.given(model, chat, steps, silent=silent)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for repeat in range(repeats):
            for side in sides:
                found = self.child(side, "measure", {**given, "options": SIDES[side]})
                if SIDES[side]:
                    # These sides promise to skip nothing; a setting that changed its meaning must not pass unseen.
                    assert not any(step["skipped"] for step in found["steps"]), side
                runs[side].append(found)
                seconds = ", ".join(f"{step['seconds']:.2f}" for step in found["steps"][1:])
                print(f"  {repeat + 1}/{repeats} {side:22s} {seconds} s   {found['peak_mb']:.0f} MB", flush=True)
        same_work([found for side in sides for found in runs[side]], given["rewards"])
        return {
            "silent_share": work.silent_share(given["rewards"][work.PROMPTS :]),
            "prompt_tokens": runs["trl"][0]["steps"][1]["prompt_tokens"],
            "response_tokens": runs["trl"][0]["steps"][1]["response_tokens"],
            "sides": {side: summary(runs[side]) for side in sides},
        }


def same_work(runs: Sequence[dict[str, Any]], rewards: Sequence[Sequence[float]]) -> None:
    """Every process had the same prompts, rewards, tokens and updates in every step."""
    whole = work.PROMPTS * work.SAMPLES * work.TOKENS
    for number, steps in enumerate(zip(*(run["steps"] for run in runs), strict=True)):
        rows = rewards[number * work.PROMPTS : (number + 1) * work.PROMPTS]
        mean = statistics.fmean(value for row in rows for value in row)
        for step in steps:
            assert step["response_tokens"] == whole, step
            assert step["updates"] == work.UPDATES, step
            assert step["silent"] == work.silent_share(rows), step
            found = step["reward_mean"] if "reward_mean" in step else statistics.fmean(step["rewards"])
            assert abs(found - mean) < 1e-6, step
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


def two_cores() -> None:
    """This process and its children on two cores, where the system can say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.THREADS])


def run(models: Sequence[str], peers: Path, *, quick: bool) -> dict[str, Any]:
    """All measurements."""
    if not peers.exists():
        raise SystemExit(f"{peers} is not there: `make {PEERS.parents[1].name}/.ready` builds the environment of the peers")
    two_cores()
    load = os.getloadavg()
    rows, checks, skipped = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder=Path(folder), peers=peers)
        ready = bench.child("legato", "prepare", {"folder": folder})
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
                found = bench.measure(ready[model], chat, sides, steps, repeats, silent=bool(silent))
                rows.append({"model": model, "work": name, "steps": steps, "repeats": repeats, **found})
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
    asked = parser.parse_args()
    found = run(asked.models, asked.peers, quick=asked.quick)
    print("\n".join(table(found)))
    output = asked.output or (None if asked.quick else RESULTS)
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
