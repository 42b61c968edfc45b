"""A made-up run directory, as the trainer would leave it."""

import math
import random
from pathlib import Path
from typing import Any

from legato.records.directory import RunDirectory

CONFIG = """[algorithm]
name = "gspo"

[task]
kind = "arithmetic"
held_out = 512

[policy]
model = "tiny"

[rollouts]
engine = "local"
samples_per_prompt = 8
temperature = 1.0
max_response_tokens = 16

[training]
seed = 0
steps = 200
prompts_per_step = 32
lr = 1e-3
"""


def synthetic_run(parent: Path, steps: int = 200, name: str = "arithmetic-tiny-gspo") -> RunDirectory:
    """Start, probe, warm-up, steps with four updates, evaluations, rollouts, end."""
    directory = RunDirectory.create(parent, name)
    directory.write_config(CONFIG)
    directory.write_environment({"seeds": {"training": 0}})
    directory.append_metrics(
        {
            "kind": "start",
            "name": name,
            "model": "tiny Qwen3, 0.2 M parameters, character tokenizer",
            "algorithm": "gspo",
            "deviations": ["training.lr: 1e-06 -> 0.001", "rollouts.max_response_tokens: 40960 -> 16"],
            "notes": ["anchor: recomputed", "engine local: samples from the module being trained"],
        }
    )
    chance = random.Random(0)
    for step in range(120):
        directory.append_metrics(
            {"kind": "warm-up", "step": step, "loss": 2.4 * math.exp(-step / 40) + 0.3 + chance.gauss(0, 0.03)}
        )
    probe = {"probe/packs_median": 3.1e-8, "probe/packs_max": 2.2e-7, "probe/engine_median": 8e-8, "probe/engine_max": 4e-7}
    directory.append_metrics({"kind": "probe", "step": 0, "responses": 64, **probe})
    _evaluate(directory, 0, steps, chance)
    _rollouts(directory, 1, chance, right=0.2)
    for step in range(1, steps + 1):
        directory.append_metrics(_step(step, steps, chance))
        if step % 20 == 0:
            _evaluate(directory, step, steps, chance)
    if steps > 1:
        _rollouts(directory, steps, chance, right=0.95)
    directory.append_metrics({"kind": "checkpoint", "step": steps})
    directory.append_metrics({"kind": "end", "reason": "target reached", "seconds": 198.4})
    return directory


def _accuracy(step: int, steps: int) -> float:
    return 0.18 + 0.72 / (1 + math.exp(-9 * (step / steps - 0.4)))


def _step(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    share, accuracy = step / steps, min(1.0, max(0.0, _accuracy(step, steps) + chance.gauss(0, 0.04)))
    record: dict[str, Any] = {
        "kind": "step",
        "step": step,
        "updates": 4,
        "reward/mean": accuracy - 0.05 * chance.random(),
        "reward/deviation": math.sqrt(accuracy * (1 - accuracy)),
        "accuracy/mean": accuracy,
        "reward/number": accuracy,
        "reward/format": min(1.0, 0.6 + 0.5 * share),
        "length/mean": 6 - 2.5 * share + chance.gauss(0, 0.1),
        "length/maximum": float(chance.choice([12, 14, 16])),
        "length/truncated": max(0.0, 0.08 * (1 - share) + chance.gauss(0, 0.01)),
        "groups/zero_variance": 0.1 + 0.4 * share**3,
        "groups/all_right": 0.02 + 0.4 * share**3,
        "groups/all_wrong": 0.08 * (1 - share),
        "groups/rounds": 1.0,
        "rollouts/unscorable": 0.0,
        "entropy/mean": 0.9 * math.exp(-2 * share) + 0.05 + chance.gauss(0, 0.01),
        "gradient/norm": math.nan if step == 7 else math.exp(chance.gauss(-0.5, 0.3)),
        "optimizer/lr": 1e-3 * min(1.0, step / 10),
        "clip/sequences": 0.15,
        "clip/band_low": 3e-4,
        "clip/band_high": 4e-4,
        "ratio/sequence_mean": 1.0001,
        "update/skipped_rows": 0.3,
        "time/step_seconds": 0.9 + chance.random() * 0.1,
        "time/rollouts_seconds": 0.4 + chance.random() * 0.05,
        "time/anchor_seconds": 0.1,
        "time/update_seconds": 0.32 + chance.random() * 0.03,
        "tokens/response": 1200.0,
        "tokens/per_second": 1300 + chance.gauss(0, 60),
    }
    for update in range(4):
        record[f"clip/sequences@{update}"] = max(
            0.0, 0.11 * update * (0.6 + 0.5 * share) + (update > 0) * chance.gauss(0, 0.02)
        )
    if step % 10 == 1:
        edges = [(-40 + index) * 5e-5 for index in range(81)]
        width = 2e-4 + 4e-4 * share
        counts = [round(300 * math.exp(-(((edges[index] + 2.5e-5) / width) ** 2) / 2)) for index in range(80)]
        record["histograms"] = {"ratio/sequence_log": {"edges": edges, "counts": counts}}
    return record


def _evaluate(directory: RunDirectory, step: int, steps: int, chance: random.Random) -> None:
    sampled = _accuracy(step, steps)
    greedy = min(0.99, sampled + 0.12 + chance.gauss(0, 0.01))
    accuracies = {"eval/accuracy_sampled": sampled, "eval/accuracy_greedy": greedy, "eval/problems": 512}
    bounds = {"eval/accuracy_sampled_low": sampled - 0.03, "eval/accuracy_sampled_high": min(1.0, sampled + 0.03)}
    directory.append_metrics({"kind": "evaluation", "step": step, **accuracies, **bounds})


def _rollouts(directory: RunDirectory, step: int, chance: random.Random, right: float) -> None:
    records = []
    for index in range(8):
        first, second = 17 + 7 * index, 3 + index
        good = chance.random() < right
        answer = str(first + second)
        text = answer if good else str(first + second + chance.choice([-10, -1, 1, 10]))
        records.append(
            {
                "prompt": f"{first}+{second}=",
                "text": text,
                "answer": answer,
                "reward": float(good),
                "accuracy": float(good),
                "components": {"number": float(good), "format": 1.0},
                "stop": "end",
                "tokens": len(text) + 1,
                "key": f"{step}-{index}",
            }
        )
    directory.write_rollouts(step, records)
