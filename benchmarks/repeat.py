"""Make two stored runs of a study again, chosen at random by a fixed seed, and compare them with what is stored.

Where some runs of the study survived and others collapsed, one of each kind is chosen: a run that fell to 0 at once agrees
with anything that falls to 0. This rule was added after the plain draw for the frontier study had given two such runs
(mixture-sequence-narrow-lr0.00096-seed204 and mixture-token-wide+R2-lr0.00096-seed202). Other studies are as before.

    python -m benchmarks.repeat exponent                     # on a CPU with one thread
    python -m benchmarks.repeat dose --gpus 0                # on a GPU

On a CPU of the kind that made the stored runs, with the same torch, they are made again to the bit. On another kind, and on
a GPU, sums have another order. A measured number then differs by no more than `MEASURED`. A run that trains has the same
problems and ends in the same way within `SIGMAS` standard errors, which tells little: the page says how many pairs of
different runs would pass. So a run of a CPU study is also made with the code of its commit, here, and those bits must be
those of today's code.

The result goes to studies/repeats/NAME.json (on a machine that keeps nothing: --output FILE), and `make docs` shows it on
the page of the study. The exit code is 1 if a run does not agree.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from legato.compare.analysis import share_variance
from legato.compare.finished import describe_machine
from legato.compare.jobs import jobs
from legato.compare.outcomes import outcome
from legato.compare.processes import Machine
from legato.compare.registration import Study, read_study
from legato.compare.store import Store
from legato.compare.study import run_study
from legato.lab.measured import measure_seed

ROOT = Path(__file__).parents[1]
STORED, REPEATS = ROOT / "studies" / "results", ROOT / "studies" / "repeats"
CHOICE_SEED = 12
SIGMAS = 3.0
"""Where sums have another order, the first two evaluations and the last may differ by so many standard errors of the
difference of two accuracies over the held-out problems; the run must end in the same way."""
MEASURED = 1e-5
"""Where sums have another order, a measured number may differ by so much, and by as much of itself."""


def chosen_runs(name: str) -> list[dict[str, Any]]:
    """Two stored runs of a study: one that survived and one that did not, where there are both; else any two."""
    runs: list[dict[str, Any]] = json.loads((STORED / f"{name}.json").read_text())["runs"]
    generator = random.Random(CHOICE_SEED)
    survivors = [run for run in runs if run["status"] == "done"]
    others = [run for run in runs if run["status"] != "done"]
    return [generator.choice(survivors), generator.choice(others)] if survivors and others else generator.sample(runs, 2)


def made_on_gpu(results: Mapping[str, Any]) -> bool:
    places = results.get("made") or [{"device": results["machine"].get("device", "")}]
    return any("NVIDIA" in str(place["device"]) for place in places)


def same_bits_expected(results: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether all stored runs come from a CPU of this kind and this version of torch. Files that only say "x86_64" do not
    tell the kind."""
    places = results.get("made") or [{"device": "", "torch": ""}]
    return not torch.cuda.is_available() and all(
        (place["device"], place["torch"]) == (here["device"], here["torch"]) for place in places
    )


def run_again(study: Study, names: Collection[str], folder: Path, machine: Machine) -> dict[str, dict[str, Any]]:
    """The outcomes of the runs of those names, made now, by name."""
    result = run_study(study, folder=folder, machine=machine, only=names, keep_checkpoints=False, say=print)
    if result.exit_code:
        raise SystemExit(f"expected exit code 0, got {result.exit_code} ({', '.join(names)})")
    return {job.name: outcome(job, Store(folder)) for job in jobs(study.definition, folder) if job.name in names}


def disagreements(stored: Mapping[str, Any], again: Mapping[str, Any], *, exact: bool) -> list[str]:
    """What differs between a stored run and the same run made again, in words."""
    if "evaluations" not in stored:
        return _different_numbers(stored, again, exact=exact)
    before, now = stored["evaluations"], again["evaluations"]
    if exact:
        return [] if before == now else [f"evaluations {now} in place of {before}"]
    differing = []
    for name, one, other in _plain_facts(stored, again):
        if one != other:
            differing.append(f"{name} {other!r} in place of {one!r}")
    if [each["step"] for each in before] != [each["step"] for each in now]:
        return [*differing, "it was evaluated at other steps"]
    return [*differing, *_far_accuracies(stored, again)]


def _plain_facts(stored: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, stored and new value of what does not depend on the order of sums."""
    yield "status", stored["status"], again["status"]
    yield "number of held-out problems", stored["problems"], again["problems"]
    yield "hash of the problems", stored["origin"]["problems"], again["origin"]["problems"]
    if stored["status"] == again["status"] == "done":
        yield "steps", stored["steps"], again["steps"]
        yield "updates", stored["updates"], again["updates"]


def _far_accuracies(stored: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """The first two evaluations and the last, where they differ by more than `SIGMAS` standard errors."""
    before, now = stored["evaluations"], again["evaluations"]
    differing = []
    for place in sorted({0, min(1, len(before) - 1), len(before) - 1}):
        one, other = before[place]["sampled"], now[place]["sampled"]
        allowed = SIGMAS * math.sqrt(sum(share_variance(each, stored["problems"]) for each in (one, other)))
        if abs(one - other) > allowed:
            differing.append(f"step {before[place]['step']}: {other:.3f} in place of {one:.3f}, {allowed:.3f} allowed")
    return differing


def share_of_strangers(runs: Sequence[Mapping[str, Any]]) -> float:
    """Of all pairs of different runs that ended alike, the share whose accuracies `_far_accuracies` does not tell apart."""
    pairs = [
        (one, other)
        for one, other in combinations(runs, 2)
        if one["status"] == other["status"] and len(one["evaluations"]) == len(other["evaluations"])
    ]
    return sum(not _far_accuracies(one, other) for one, other in pairs) / len(pairs)


def _different_numbers(stored: Mapping[str, Any], again: Mapping[str, Any], *, exact: bool) -> list[str]:
    tolerance = 0.0 if exact else MEASURED
    return [
        f"{key}: {again.get(key)} in place of {value}"
        for key, value in stored.items()
        if isinstance(value, float)
        and not math.isclose(value, again.get(key, math.nan), rel_tol=tolerance, abs_tol=tolerance)
    ]


def run_at(commit: str, study: Study, names: Collection[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The outcomes of runs of a CPU study that the code of a commit makes on this machine, by name."""
    code = folder / "code"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(code), commit], cwd=ROOT, check=True)
    try:
        for name in names:
            words = [
                sys.executable,
                "-m",
                "legato",
                "study",
                f"studies/{study.file.name}",
                "--only",
                name,
                "--out",
                folder / "runs",
            ]
            environment = {**os.environ, "PYTHONPATH": str(code / "src"), "OMP_NUM_THREADS": "1"}
            subprocess.run(words, cwd=code, env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(code)], cwd=ROOT, check=True)
    planned = jobs(study.definition, folder / "runs")
    return {job.name: outcome(job, Store(folder / "runs")) for job in planned if job.name in names}


def repeat(name: str, machine: Machine) -> dict[str, Any]:
    """Make both runs again; the content of the result file."""
    study = read_study(ROOT / "studies" / f"{name}.toml")
    here = describe_machine()
    stored_results = json.loads((STORED / f"{name}.json").read_text())
    exact = same_bits_expected(stored_results, here)
    chosen = chosen_runs(name)
    names = {run["name"] for run in chosen}
    if study.measure:
        again = {run["name"]: run for seed in {stored["seed"] for stored in chosen} for run in measure_seed(study, seed)}
    else:
        with tempfile.TemporaryDirectory() as folder:
            again = run_again(study, names, Path(folder), machine)
    own_code = None
    commits = {place["commit"] for place in stored_results.get("made", ())}
    # A study that went on with other code does not say which of its runs each commit made.
    if len(commits) == 1 and not (study.measure or exact or made_on_gpu(stored_results)):
        (commit,) = commits
        with tempfile.TemporaryDirectory() as folder:
            then = run_at(commit, study, names, Path(folder))
        own_code = {
            "commit": commit,
            "disagreements": {name: disagreements(then[name], again[name], exact=True) for name in sorted(names)},
        }
    runs = [
        {
            "name": stored["name"],
            "stored": _numbers(stored),
            "again": _numbers(again[stored["name"]]),
            "disagreements": disagreements(stored, again[stored["name"]], exact=exact),
        }
        for stored in chosen
    ]
    return {"study": name, "exact": exact, **here, "runs": runs, **({"own_code": own_code} if own_code else {})}


def _numbers(run: Mapping[str, Any]) -> list[float]:
    """The accuracy of each evaluation of a run that trained; else what was measured."""
    return [each["sampled"] for each in run["evaluations"]] if "evaluations" in run else [run["value"]]


def sentences(name: str) -> list[str]:
    """What the page of a study says of its runs that were made again."""
    path = REPEATS / f"{name}.json"
    if not path.is_file():
        return []
    content = json.loads(path.read_text())
    measured = not any("evaluations" in run for run in chosen_runs(name))
    elsewhere = f"within {MEASURED:g}" if measured else f"within {SIGMAS:g} standard errors and with the same ending"
    rule = "to the bit" if content["exact"] else elsewhere
    lines = []
    for run in content["runs"]:
        again, before = (_listed(run[key], measured) for key in ("again", "stored"))
        agrees = "agrees to the last digit stored" if run["again"] == run["stored"] else f"agrees {rule}"
        verdict = agrees if not run["disagreements"] else f"does not agree: {'; '.join(run['disagreements'])}"
        lines.append(f"`{run['name']}` {verdict}: {again}; stored {before}.")
    if any(run["again"] != run["stored"] for run in content["runs"]) and not (content["exact"] or measured):
        strangers = share_of_strangers(json.loads((STORED / f"{name}.json").read_text())["runs"])
        lines.append(
            f"Agreeing within {SIGMAS:g} standard errors tells little: of all pairs of different runs of this study that"
            f" ended alike, {strangers:.0%} do so too."
        )
    if own_code := content.get("own_code"):
        unequal = [run for run, faults in own_code["disagreements"].items() if faults]
        bits = f"not to the bit in {' and '.join(unequal)}" if unequal else "all evaluations equal to the bit"
        lines.append(f"On the same machine the code of the study ({own_code['commit'][:12]}) made both runs too: {bits}.")
    commit = (content["commit"] or "unknown")[:12]
    return [
        f"Two runs, chosen by a fixed seed{_kinds(content['study'])}, were made again on"
        f" {content['date']} ({content['device']}, commit {commit}).",
        *lines,
    ]


def _listed(values: Sequence[float], measured: bool) -> str:
    if measured:
        return ", ".join(f"{value:.8g}" for value in values)
    return ", ".join(f"{100 * value:.1f}" for value in values) + " %"


def _kinds(name: str) -> str:
    """How the choice of runs was divided, for the page; empty where all runs of the study ended alike."""
    endings = {run["status"] == "done" for run in chosen_runs(name)}
    rule = " (one that survived and one that did not; the rule was added after a first draw of two that fell to 0)"
    return rule if len(endings) == 2 else ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="A stored study, as in dose.")
    parser.add_argument("--gpus", default="", help="The GPU, as in 0.")
    parser.add_argument("--output", type=Path, help="The result file; else studies/repeats/NAME.json.")
    options = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"  # as the stored runs had: the number of threads changes the order of sums
    os.chdir(ROOT)
    gpus = tuple(filter(None, options.gpus.split(",")))
    content = repeat(options.name, Machine(parallel=2 if gpus else 1, gpus=gpus))
    output = options.output or REPEATS / f"{options.name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")
    for run in content["runs"]:
        print(run["name"], "agrees" if not run["disagreements"] else run["disagreements"])
    own_code = content.get("own_code", {"disagreements": {}})
    for name, faults in own_code["disagreements"].items():
        print(name, "by the code of its commit:", faults or "equal bits")
    return int(any(run["disagreements"] for run in content["runs"]) or any(own_code["disagreements"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
