"""Equivalence and variance on text of three kinds from SmolLM2, for docs/experiments/lab.md: dialogue, code and prose.

    python -m benchmarks.domains --work WORK --output benchmarks/results/lab-domains.json   # a GPU, `make smollm2`

Neither experiment needs a reward that means anything: advantages come from a coin that the text decides. `legato lab
variance` and `legato lab equivalence` run as they are, each in its own process.
"""

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.provenance import stored_by
from legato.compare.finished import describe_machine

if TYPE_CHECKING:
    from legato import Rollout

RESULTS = Path(__file__).parent / "results" / "lab-domains.json"
STEPS = {"variance": 12, "equivalence": 4}
MOST_TOKENS = 768
"""Of a response: about half of the prose and of the dialogue comes to its end before."""
PROMPTS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "dialogue": (
        "Write a conversation between {0} about {1}.",
        ("two friends", "a teacher and a pupil", "a doctor and a patient", "a clerk and a customer", "a mother and her son"),
        (
            "the weather",
            "a lost key",
            "a long journey",
            "money",
            "a new job",
            "a broken bicycle",
            "dinner",
            "an old photograph",
        ),
    ),
    "code": (
        "Write a Python function that {0} {1}.",
        ("sorts", "reverses", "counts", "prints", "filters"),
        (
            *("a list of numbers", "the words of a text", "the keys of a dictionary", "the lines of a file"),
            *("a list of names", "the digits of a number", "a matrix", "a binary tree"),
        ),
    ),
    "prose": (
        "Write a short story about {0} in {1}.",
        ("a fisherman", "a dog", "an old queen", "a thief", "two sisters"),
        ("a storm", "a forest", "the year 2200", "a small town", "the desert", "a library", "winter", "a lighthouse"),
    ),
}


def coin(rollout: "Rollout") -> float:
    """1 or 0, decided by the text alone."""
    return float(hashlib.blake2b(rollout.text.encode(), digest_size=1).digest()[0] % 2)


def write_recipe(folder: Path, domain: str, model: str) -> Path:
    """A recipe and its prompts; the path of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern, first, second = PROMPTS[domain]
    rows = [json.dumps({"prompt": pattern.format(*words)}) for words in itertools.product(first, second)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"""[algorithm]
name = "gspo"
[task]
kind = "jsonl"
path = "{folder.absolute() / "prompts.jsonl"}"
answer = false
held_out_share = 0.1
held_out = 1
[reward]
kind = "{Path(__file__).absolute()}:coin"
[policy]
model = "{model}"
max_prompt_tokens = 96
[rollouts]
max_response_tokens = {MOST_TOKENS}
[training]
prompts_per_step = 16
updates_per_step = 4
lr = 1e-5
"""
    )
    return recipe


def measure(work: Path, model: str, options: Sequence[str]) -> dict[str, Any]:
    """The sentences of both experiments for each kind of text."""
    results: dict[str, Any] = {"made": describe_machine(), "domains": {}}
    for domain in PROMPTS:
        recipe = write_recipe(work / domain, domain, model)
        found = results["domains"][domain] = {}
        for name, steps in STEPS.items():
            words = [
                "lab",
                name,
                str(recipe),
                *options,
                "--steps",
                str(steps),
                "--no-png",
                "--out",
                str(work / domain / name),
            ]
            words += ["--responses", "100"] if name == "variance" else []
            subprocess.run([sys.executable, "-m", "legato", *words], check=True)
            content = json.loads((work / domain / name / f"{name}.json").read_text())
            # The synthetic study is that of the page above.
            found[name] = [each for each in content["sentences"] if not each.startswith(("Synthetic", "A slope near"))]
    return results


def section() -> list[str]:
    """The lines of docs/experiments/lab.md on these kinds of text; before they were measured, that they were not."""
    heading = ["", "## Dialogue, code and prose from SmolLM2", ""]
    if not RESULTS.is_file():
        return [*heading, "Not measured yet: `python -m benchmarks.domains` does it. All above is of counting."]
    results = json.loads(RESULTS.read_text())
    made, prompts = results["made"], {len(first) * len(second) for _, first, second in PROMPTS.values()}
    lines = [
        *heading,
        f"`python -m benchmarks.domains`, on {made['date']} at commit {made['commit'][:12]} ({made['device']})."
        f" SmolLM2-135M-Instruct answers {' or '.join(map(str, sorted(prompts)))} prompts of each kind with at most"
        f" {MOST_TOKENS} tokens, 128 answers a step; advantages are random, the learning rate is 1e-5."
        f" {STEPS['variance']} steps for the variance, {STEPS['equivalence']} of four updates for the identity."
        f" {stored_by('lab-domains')}",
    ]
    for domain, experiments in results["domains"].items():
        lines += ["", f"**{domain.capitalize()}.**", ""]
        lines += [f"- {name}: {sentence}" for name, sentences in experiments.items() for sentence in sentences]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="A folder for recipes and pages.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("options", nargs="*", help="PATH=VALUE for both experiments.")
    words = parser.parse_args()
    words.output.write_text(json.dumps(measure(words.work, words.model, words.options), indent=1) + "\n")


if __name__ == "__main__":
    main()
