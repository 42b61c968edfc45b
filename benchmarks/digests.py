"""Digests of whole runs. Two checkouts that compute the same have equal digests of every metric and every weight.

    python -m benchmarks.digests --source OLD/src --output before.json      runs the cases with that package
    python -m benchmarks.digests --compare before.json after.json           names what differs; exit code 1 if anything does

Runs use only the public commands (`legato train`, `resume`, `mismatch`), so that any version can be measured. Bits depend on
the machine and on the number of threads: compare digests of one machine only.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL = {
    "policy.tiny.hidden": 32,
    "policy.tiny.layers": 2,
    "policy.tiny.heads": 2,
    "policy.max_prompt_tokens": 16,
    "task.left_digits": 1,
    "task.held_out": 4,
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 6,
    "training.prompts_per_step": 4,
    "training.updates_per_step": 2,
    "training.lr": 3e-3,
    "training.steps": 4,
    "evaluation.every_steps": 2,
    "output.checkpoint_every_steps": 2,
    "output.rollouts_every_steps": 2,
    "health.action": "say",
}
ALGORITHMS = [
    "gspo",
    "gspo-auto",
    "gspo-token",
    "gmpo",
    "rspo",
    "luspo",
    "fspo",
    "gepo",
    "vespo",
    "seq-product",
    "grpo",
    "grpo-baseline",
    "dr-grpo",
    "dapo",
    "cispo",
    "sapo",
    "srpo",
    "ppo",
    "reinforce",
    "rloo",
    "reinforce++",
    "lite-ppo",
    "minirl",
    "dppo",
    "bapo",
]
_EXTRA_OPTIONS: dict[str, dict[str, Any]] = {
    "fspo": {"algorithm.objective.trust.log-clip.log_low": 0.05, "algorithm.objective.trust.log-clip.log_high": 0.06},
    "rspo": {"policy.model": "tiny-moe", "policy.tiny.experts": 4},
}
_MOE = {"policy.model": "tiny-moe", "policy.tiny.experts": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "two-passes": {"algorithm": "gspo", "training.update_passes": "two"},
    "one-pass": {"algorithm": "gspo", "training.update_passes": "one", "training.skip_silent_rows": False},
    "small-packs": {"algorithm": "grpo", "training.tokens_per_pack": 32},
    "epochs": {"algorithm": "gspo", "training.epochs_per_step": 2, "training.anchor": "recompute"},
    "kl": {"algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1, "policy.warm_up.steps": 3},
    "padded": {"algorithm": "gspo", "policy.packing": False},
    "checkpointed": {"algorithm": "gspo", "policy.gradient_checkpointing": True},
    "bfloat16": {"algorithm": "gspo", "policy.dtype": "bfloat16", "training.lr": 1e-2},
    "lora": {"algorithm": "gspo", "policy.lora.rank": 2},
    "lora-kl": {"algorithm": "grpo", "policy.lora.rank": 2, "algorithm.objective.penalties.kl.beta": 0.1},
    "moe": {"algorithm": "gspo", **_MOE},
    "moe-R2": {"algorithm": "gspo", **_MOE, "training.routing_replay": "R2"},
    "moe-R3": {"algorithm": "gspo", **_MOE, "training.routing_replay": "R3"},
    "moe-balance": {"algorithm": "grpo", **_MOE, "training.load_balance": 0.01},
    "upcycled": {"algorithm": "gspo", "policy.upcycle.experts": 4, "policy.upcycle.noise": 0.1, "policy.warm_up.steps": 3},
    "truncated": {"algorithm": "gspo", "rollouts.top_p": 0.9, "rollouts.temperature": 0.7},
    "stop-strings": {"algorithm": "gspo", "rollouts.stop": ["1"]},
    "sampler-anchor": {"algorithm": "gspo", "training.anchor": "sampler", "training.accept_unsafe_anchor": True},
    "stale": {"algorithm": "gspo", "rollouts.mismatch.kind": "stale", "rollouts.mismatch.updates": 3},
    "int8": {"algorithm": "gspo", "rollouts.mismatch.kind": "int8", "algorithm.objective.corrections.tis.cap": 2.0},
    "kv-int8": {"algorithm": "gspo", "rollouts.mismatch.kind": "kv-int8"},
    "dynamic": {"algorithm": "gspo", "task.resampling": "dynamic", "task.max_refills": 2},
    "recover": {
        "algorithm": "grpo",
        "health.action": "recover",
        "health.lr_factor": 0.5,
        "health.clip_factor": 0.5,
        "output.checkpoint_every_steps": 1,
        "training.lr": 0.5,
        "training.steps": 12,
    },
}
REWARD = '''"""A reward that an untrained model earns some of."""


def early(rollout):
    return float((rollout.tokens < 40).float().mean())
'''
_TIMES = ("time/", "tokens/per_second")
_ORIGIN = ("origin", "weights")
"""A hash of the first weights, formed otherwise since a frozen base is hashed once. Steps and checkpoints cover them."""


def run_cases(folder: Path) -> dict[str, Any]:
    """Run every case and return the digests by case name."""
    (folder / "early.py").write_text(REWARD)
    os.chdir(folder)
    cases = {name: {"algorithm": name, **_EXTRA_OPTIONS.get(name, {})} for name in ALGORITHMS} | VARIANTS
    digests = {}
    for name, options in cases.items():
        started = time.perf_counter()
        words = {**SMALL, "reward.kind": "early.py:early", **options, "output.directory": "runs", "output.name": name}
        run_legato("train", *option_words(words))
        digests[name] = _digest(Path("runs") / name)
        print(f"{name:16} {time.perf_counter() - started:5.1f} s", file=sys.stderr, flush=True)
    for name in ("gspo", "lora", "moe-R2", "stale"):
        options = {
            **SMALL,
            "reward.kind": "early.py:early",
            **cases[name],
            "output.name": f"{name}-cut",
            "training.steps": 2,
        }
        run_legato("train", *option_words({**options, "output.directory": "runs"}))
        run_legato("resume", f"runs/{name}-cut", "training.steps=4")
        digests[f"{name} resumed"] = _digest(Path("runs") / f"{name}-cut")
    run_legato("mismatch", "runs/gspo", "--kinds", "none,int8,stale:2", "--prompts", "4", "--output", "mismatch")
    figures = json.loads(Path("mismatch/mismatch.json").read_text())
    digests["mismatch verb"] = {"keys": {key: _hash(value) for key, value in _numbers(figures).items()}}
    return digests


def option_words(options: Mapping[str, Any]) -> list[str]:
    return [f"{path}={json.dumps(value) if not isinstance(value, str) else value}" for path, value in options.items()]


def run_legato(*words: str) -> None:
    from legato.cli.main import main

    sys.argv = ["legato", *words]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as end:
        if end.code not in (0, None, 3):
            raise RuntimeError(f"legato {' '.join(words)} ended with {end.code}:\n{printed.getvalue()[-2000:]}") from None


def _digest(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    series: dict[str, list[Any]] = {}
    for line in lines:
        if line["kind"] in ("step", "evaluation", "probe", "origin"):
            for key, value in line.items():
                if key not in ("kind", "words") and not key.startswith(_TIMES) and (line["kind"], key) != _ORIGIN:
                    value = {name: _filled_bins(each) for name, each in value.items()} if key == "histograms" else value
                    series.setdefault(f"{line['kind']} {key}", []).append(value)
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    weights: dict[str, str] = {}
    for file in [*sorted((last / "model").glob("*.safetensors")), last / "optimizer.safetensors"]:
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(file).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().reshape(-1).view(dtype=__import__("torch").uint8).numpy().tobytes())
        weights[file.name] = digest.hexdigest()[:16]
    return {"weights": weights, "keys": {key: _hash(values) for key, values in sorted(series.items())}}


def _filled_bins(histogram: Mapping[str, list[float]]) -> list[list[Any]]:
    """The filled bins of a histogram with their edges in six digits. Later versions store empty bins as one."""
    edges = [f"{edge:.6g}" for edge in histogram["edges"]]
    bins = zip(edges, edges[1:], histogram["counts"], strict=False)
    return [[lower, upper, int(count)] for lower, upper, count in bins if count]


def _numbers(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: value for name, inner in tree.items() for key, value in _numbers(inner, f"{prefix}{name}.").items()}
    return {prefix: tree} if isinstance(tree, int | float) else {}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each case that differs. Keys that only `after` has count as new, not as different."""
    lines = []
    for name, digest in before.items():
        other = after.get(name)
        if other is None:
            lines.append(f"{name}: missing")
            continue
        keys = [key for key, value in digest["keys"].items() if other["keys"].get(key) != value]
        files = [file for file, value in digest.get("weights", {}).items() if other.get("weights", {}).get(file) != value]
        if keys or files:
            lines.append(f"{name}: {len(keys)} of {len(digest['keys'])} metrics ({', '.join(keys[:4])}), files {files}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="the src folder of the checkout to run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text())["digests"] for path in options.compare)
        lines = compare(before, after)
        print("\n".join(lines) or f"{len(before)} cases are equal to the bit")
        sys.exit(bool(lines))
    source = options.source.resolve()
    output = options.output.resolve()
    sys.path.insert(0, str(source))
    import torch

    import legato

    assert Path(legato.__file__).is_relative_to(source), legato.__file__
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        digests = run_cases(Path(folder))
        os.chdir(source)
    record = {"torch": torch.__version__, "threads": 1, "cases": len(digests), "digests": digests}
    output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
