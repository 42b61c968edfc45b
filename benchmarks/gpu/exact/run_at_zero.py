"""Whole runs with the exact engine: python -m benchmarks.gpu.exact.run_at_zero --output FILE

The trainer itself on the 0.6B shape with random weights: 3 steps of 4 updates, 32 prompts with 8 responses each. The old
log-probs are the engine's. Two runs: with a learning rate of 0 every ratio of every update must be exactly 1 and nothing
may be clipped. With a learning rate above 0 that holds for the first update of every step; the later updates show that the
count can be other than 0.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import step as gpu_step
from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work
from benchmarks.gpu.measure import Bench
from legato.rollouts.engine import Limits
from legato.rollouts.local.select import local_engine
from legato.training.step import Trainer
from legato.training.update import Look

NEW_TOKENS = 256
STEPS = 3


class Counter:
    """Counts in every update the tokens whose ratio is not exactly 1: new log-prob against the engine's, bit by bit."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.updates: list[dict[str, float]] = []
        trainer.look = self.count

    def count(self, look: Look) -> None:
        signals = look.signals
        mask = signals.mask.tokens
        sampler, old = signals.tensor("sampler_logprobs"), signals.tensor("old_logprobs")
        self.updates.append(
            {
                "step": self.trainer.steps_done,
                "update": look.update.index,
                "tokens": int(mask.sum()),
                "unequal": int(((signals.logprobs.detach() != sampler) & mask).sum()),
                "anchor unequal": int(((old != sampler) & mask).sum()),
                "largest": float(signals.log_ratio("sampler").detach().abs().max()),
            }
        )


def run(bench: Bench, lr: float, *, exact: str, steps: int = STEPS, new: int = NEW_TOKENS) -> dict[str, Any]:
    """The counts of every update of a run with this learning rate."""
    policy = work.make_policy(bench, "0.6B")
    workload = gpu_step.step_work(bench)
    trainer = gpu_update.fixed_trainer(policy, workload, [], lr=lr or work.LEARNING_RATE)
    # The settings refuse a learning rate of 0. Its scale may be 0: the optimizer runs, and no weight moves.
    trainer.optimizer.scale = 1.0 if lr else 0.0
    # As in a run with `rollouts.exact`: where the probe finds them equal, the engine's log-probs are the old ones.
    trainer.settings = gpu_update.replace(trainer.settings, anchor="auto")
    trainer.anchor_choice = None
    rows = len(workload.prompts) * len(workload.rewards[0])
    trainer.source.runner.engine = local_engine(policy, rows, exact=exact)  # type: ignore[attr-defined]
    trainer.source.runner.limits = Limits(  # type: ignore[attr-defined]
        max_response_tokens=new, end_tokens=(policy.vocabulary,)
    )
    before = {name: weight.detach().clone() for name, weight in policy.parameters().items()} if lr == 0 else {}
    counter, clipped, floor = Counter(trainer), list[float](), None
    for _ in range(steps):
        report = trainer.step()
        floor = report.floor or floor
        clipped += [report.metrics[f"clip/sequences@{index}"] for index in range(trainer.settings.updates_per_step)]
    for each, share in zip(counter.updates, clipped, strict=True):
        each["clipped"] = share
    moved = [name for name, weight in policy.parameters().items() if before and not torch.equal(weight, before[name])]
    assert not moved, f"expected the same weights after a run with learning rate 0, got others in {moved[:3]}"
    return {
        "lr": lr,
        "steps": steps,
        "updates": counter.updates,
        "anchor": trainer.anchor_choice,
        "exact": policy.exact,
        "notes": list(policy.notes),
        "noise": None if floor is None else floor.metrics(),
    }


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """The counts that the page shows: first and later updates, summed over the steps."""
    parts = {
        "first": [each for each in result["updates"] if each["update"] == 0],
        "later": [each for each in result["updates"] if each["update"] > 0],
    }
    return {
        name: {
            "updates": len(some),
            "tokens": sum(each["tokens"] for each in some),
            "unequal": sum(each["unequal"] for each in some),
            "clipped": max((each["clipped"] for each in some), default=0.0),
        }
        for name, some in parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", default="", help="stored with the results; the GPU's machine has no history")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on the CPU, where the engine is not exact")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    bench = Bench(device=torch.device("cpu" if options.tiny else "cuda"), tiny=options.tiny, deadline=time.monotonic() + 600)
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": options.commit, "runs": {}}
    for name, lr in (("learning rate 0", 0.0), (f"learning rate {work.LEARNING_RATE:g}", work.LEARNING_RATE)):
        started = time.monotonic()
        result = run(bench, lr, exact="off" if options.tiny else "on", new=5 if options.tiny else NEW_TOKENS)
        document["runs"][name] = {**result, "summary": summarise(result), "seconds": time.monotonic() - started}
        document["machine"] = bench.machine()
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        print(name, json.dumps({**document["runs"][name]["summary"], "anchor": result["anchor"]}), flush=True)
        bench.free()


if __name__ == "__main__":
    main()
