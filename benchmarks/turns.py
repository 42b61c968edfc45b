"""What the kept KV cache of earlier turns saves an episode on a CPU, for docs/performance.md.

    python -m benchmarks.turns --machine "two CPU cores that others used too"

Both sides play the same episodes on the plain engine: fixed replies of the environment, the same seeds, no end token. Time
is the CPU time of the process, so that other processes on the machine count little.
"""

import argparse
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling

RESULTS = Path(__file__).parent / "results" / "turns.json"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 64,
        "head_dim": 16,
    },
    "SmolLM2-135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "head_dim": 64,
    },
}
"""Weights are random: only shapes count here."""
CASES = (
    ("tiny", {"groups": 16, "samples": 8, "prompt": 16, "turns": 4, "response": 4, "reply": 6}),
    ("SmolLM2-135M", {"groups": 2, "samples": 4, "prompt": 96, "turns": 4, "response": 12, "reply": 12}),
)


class _NoText:
    """The engine decodes responses to text; here nobody reads it."""

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["" for _ in rows]


def build_policy(name: str) -> Policy:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], tie_word_embeddings=True, max_position_embeddings=2048)
    automatic: Any = transformers.AutoModelForCausalLM
    return Policy(model=automatic.from_config(config, dtype=torch.float32).eval(), tokenizer=_NoText(), name=name)


def play(engine: LocalEngine, vocabulary: int, case: dict[str, int], keep: bool) -> float:
    """CPU seconds of the episodes of a case."""
    source = torch.Generator().manual_seed(0)
    requests = [
        Request(
            prompt=torch.randint(0, vocabulary, (case["prompt"],), generator=source),
            seeds=tuple(range(number * 100, number * 100 + case["samples"])),
            keep=keep,
        )
        for number in range(case["groups"])
    ]
    limits = Limits(max_response_tokens=case["response"], end_tokens=())
    begin = time.process_time()
    for turn in range(case["turns"]):
        answers = engine.generate(requests, Sampling(), limits)
        requests = [
            Request(
                prompt=torch.cat(
                    [request.prompt, one.tokens, torch.randint(0, vocabulary, (case["reply"],), generator=source)]
                ),
                seeds=(1000 * turn + number,),
                keep=keep and turn + 2 < case["turns"],
                kept=one.kept,
            )
            for request, row in zip(requests, answers, strict=True)
            for number, one in enumerate(row)
        ]
        answers = []
    return time.process_time() - begin


def measure(machine: str, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = []
    for name, case in CASES:
        policy = build_policy(name)
        engine = LocalEngine(policy)
        vocabulary = SHAPES[name]["vocab_size"]
        times: dict[bool, list[float]] = {False: [], True: []}
        play(engine, vocabulary, {**case, "turns": 2}, keep=True)  # warm-up
        for _ in range(repeats):
            for keep in (False, True):
                times[keep].append(play(engine, vocabulary, case, keep))
        anew, kept = (sorted(times[keep])[repeats // 2] for keep in (False, True))
        rows.append({"model": name, **case, "anew_seconds": anew, "kept_seconds": kept, "ratio": anew / kept})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    when = {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}
    return {"rows": rows, "repeats": repeats, "on": machine, **when}


def turns_section(results: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    lines = [
        "## Later turns on a CPU",
        "",
        "Generated from `benchmarks/results/turns.json` (`python -m benchmarks.turns`).",
        "",
        f"Episodes on the plain engine, one thread, float32, random weights; {results['on']}, {results['date']}, commit"
        f" {results['commit']}.",
        "*Anew*: every turn computes its whole conversation. *Kept*: the KV cache of the last turn is kept for the next"
        " (`rollouts/local/kept.py`).",
        f"CPU seconds of sampling alone, median of {results['repeats']}; both sides sample from the same weights and take"
        " turns.",
        "",
        "| model | prompts x episodes | turns | tokens of prompt, turn, reply | anew, s | kept, s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        tokens = f"{row['prompt']}, {row['response']}, {row['reply']}"
        lines.append(
            f"| {row['model']} shape | {row['groups']} x {row['samples']} | {row['turns']} | {tokens} |"
            f" {row['anew_seconds']:.2f} | {row['kept_seconds']:.2f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help='On what it ran: "two CPU cores".')
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.machine, options.repeats)
    options.output.write_text(json.dumps(results) + "\n")
    for row in results["rows"]:
        print(row)


if __name__ == "__main__":
    main()
