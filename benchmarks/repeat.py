"""Make two stored runs of a study again, chosen at random by a fixed seed, and compare them with what is stored.

    python -m benchmarks.repeat exponent                     # on a CPU with one thread: to the bit
    python -m benchmarks.repeat dose --gpus 0                # on a GPU: within `SIGMAS` standard errors

The result goes to studies/repeats/NAME.json (on a machine that keeps nothing: --output FILE), and `make docs` shows it on
the page of the study. The exit code is 1 if a run does not agree.
"""

import argparse
import json
import math
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.compare.analysis import share_variance
from legato.compare.finished import describe_machine
from legato.compare.jobs import jobs
from legato.compare.outcomes import outcome
from legato.compare.processes import Machine
from legato.compare.registration import Study, read_study
from legato.compare.store import Store
from legato.compare.study import run_study

ROOT = Path(__file__).parents[1]
STORED, REPEATS = ROOT / "studies" / "results", ROOT / "studies" / "repeats"
CHOICE_SEED = 12
SIGMAS = 3.0
"""On a GPU sums have no fixed order. The first two evaluations and the last may differ by so many standard errors of the
difference of two accuracies over the held-out problems; the run must end in the same way."""


def chosen_runs(name: str) -> list[dict[str, Any]]:
    """Two stored runs of a study."""
    runs: list[dict[str, Any]] = json.loads((STORED / f"{name}.json").read_text())["runs"]
    return random.Random(CHOICE_SEED).sample(runs, 2)


def made_on_gpu(results: Mapping[str, Any]) -> bool:
    places = results.get("made") or [{"device": results["machine"].get("device", "")}]
    return any("NVIDIA" in str(place["device"]) for place in places)


def run_again(study: Study, stored: Mapping[str, Any], folder: Path, machine: Machine) -> dict[str, Any]:
    """The outcome of the run of that name, made now."""
    result = run_study(study, folder=folder, machine=machine, only=stored["name"], keep_checkpoints=False, say=print)
    if result.exit_code:
        raise SystemExit(f"{stored['name']} ended with exit code {result.exit_code}")
    (job,) = [job for job in jobs(study.definition, folder) if job.name == stored["name"]]
    return outcome(job, Store(folder))


def disagreements(stored: Mapping[str, Any], again: Mapping[str, Any], *, exact: bool) -> list[str]:
    """What differs between a stored run and the same run made again, in words."""
    before, now = stored["evaluations"], again["evaluations"]
    if exact:
        return [] if before == now else [f"evaluations {now} in place of {before}"]
    differing = []
    if stored["status"] != again["status"]:
        differing.append(f"it ended as {again['status']!r} in place of {stored['status']!r}")
    if [each["step"] for each in before] != [each["step"] for each in now]:
        return [*differing, "it was evaluated at other steps"]
    for place in sorted({0, min(1, len(before) - 1), len(before) - 1}):
        one, other = before[place]["sampled"], now[place]["sampled"]
        allowed = SIGMAS * math.sqrt(sum(share_variance(each, stored["problems"]) for each in (one, other)))
        if abs(one - other) > allowed:
            differing.append(f"step {before[place]['step']}: {other:.3f} in place of {one:.3f}, {allowed:.3f} allowed")
    return differing


def repeat(name: str, machine: Machine) -> dict[str, Any]:
    """Make both runs again; the content of the result file."""
    study = read_study(ROOT / "studies" / f"{name}.toml")
    exact = not made_on_gpu(json.loads((STORED / f"{name}.json").read_text()))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for stored in chosen_runs(name):
            again = run_again(study, stored, Path(folder), machine)
            runs.append(
                {
                    "name": stored["name"],
                    "stored": [each["sampled"] for each in stored["evaluations"]],
                    "again": [each["sampled"] for each in again["evaluations"]],
                    "disagreements": disagreements(stored, again, exact=exact),
                }
            )
    return {"study": name, "exact": exact, **describe_machine(study), "runs": runs}


def sentences(name: str) -> list[str]:
    """What the page of a study says of its runs that were made again."""
    path = REPEATS / f"{name}.json"
    if not path.is_file():
        return []
    content = json.loads(path.read_text())
    rule = "to the bit" if content["exact"] else f"within {SIGMAS:g} standard errors and with the same ending"
    lines = []
    for run in content["runs"]:
        before, again = (", ".join(f"{100 * value:.1f}" for value in run[key]) for key in ("stored", "again"))
        verdict = f"agrees {rule}" if not run["disagreements"] else f"does not agree: {'; '.join(run['disagreements'])}"
        lines.append(f"`{run['name']}` {verdict}: {again} %; stored {before} %.")
    commit = (content["commit"] or "unknown")[:12]
    return [
        f"Two runs, chosen by a fixed seed, were made again on {content['date']} ({content['device']}, commit {commit}).",
        *lines,
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="A stored study that trains, as in dose.")
    parser.add_argument("--gpus", default="", help="The GPU, as in 0.")
    parser.add_argument("--output", type=Path, help="The result file; else studies/repeats/NAME.json.")
    options = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"  # as the stored runs had: the number of threads changes the order of sums
    os.chdir(ROOT)
    content = repeat(options.name, Machine(gpus=tuple(filter(None, options.gpus.split(",")))))
    output = options.output or REPEATS / f"{options.name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")
    for run in content["runs"]:
        print(run["name"], "agrees" if not run["disagreements"] else run["disagreements"])
    return int(any(run["disagreements"] for run in content["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
