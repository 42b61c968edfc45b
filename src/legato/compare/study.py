"""`legato study`: run a registered grid of arms, seeds, sweeps and beds, and compare them once every run has ended."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from legato.compare.analysis import analyse, describe_power, is_complete, share_variance
from legato.compare.compare import Comparison, GuardedSay, check_equal, plan_runs, preparing, run_jobs
from legato.compare.finished import describe_machine, export_runs, import_runs, slices
from legato.compare.jobs import Job
from legato.compare.outcomes import outcomes, say_of_room
from legato.compare.processes import Machine
from legato.compare.registration import Study, hold_registration, registering_commit
from legato.diagnostics.collapse import DEFINITION
from legato.diagnostics.statistics.paired import power
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.pages.study import mixed_precision, write_study_page

FORMAT = 1


def run_study(
    study: Study,
    *,
    folder: Path | None = None,
    machine: Machine | None = None,
    pilot: bool = False,
    only: Collection[str] | None = None,
    seeds: Collection[int] | None = None,
    seconds: float = math.inf,
    finished: Sequence[Path] = (),
    export: Path | None = None,
    retry_failed: bool = False,
    keep_checkpoints: bool = True,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Train all unfinished runs. When the last one has ended, compare; before that the results hold no comparison.

    With `pilot` the pilot seeds run instead, in a folder of their own. With `only`, the runs of those names alone; with
    `seeds`, the runs of those seeds. After `seconds` no further run begins. `finished` names files of runs that were made
    on other machines; the seeds that were run to their end here are written to the file `export`. Without
    `keep_checkpoints`, runs write none when they begin and end, and others are removed when a run ends.
    """
    machine = machine or Machine()
    definition = replace(study.definition, seeds=chosen_seeds(study, pilot))
    store, planned = plan_runs(definition, folder or study_folder(study, pilot), keep_checkpoints)
    say = GuardedSay(say, store.path)
    check_equal(definition, planned, "or allow it with unequal = true")
    chosen = planned if only is None else [job for job in planned if job.name in only]
    strangers = sorted({*(only or ())} - {job.name for job in planned})
    if strangers:
        raise InputError(f"expected the name of a run, got {strangers[0]!r} (--only); the first is {planned[0].name}")
    unknown = sorted({*(seeds or ())} - {*definition.seeds})
    if unknown:
        raise InputError(f"expected seeds out of {list(definition.seeds)}, got {unknown} (--seeds)")
    chosen = warm_ups_first([job for job in chosen if seeds is None or job.seed in seeds])
    registered = registering_commit(study.file.absolute(), study.sha256)  # git reads the whole history of the file
    if not pilot:
        warn_of_power(study, say)
        warn_of_spread(study, planned, say)
        warn_of_registration(study, registered, say)
    here = describe_machine()
    with preparing(store, definition, planned, retry_failed):
        runs_begun = any(store.state(job) != "absent" for job in planned)
        begun = None if pilot else hold_registration(study, store.path, runs_begun=runs_begun)
        import_runs(finished, study, planned, store, retry_failed=retry_failed)

        def report() -> dict[str, Any]:
            runs = outcomes(planned, store)
            results = describe(
                study, runs, machine, pilot=pilot, seeds=definition.seeds, registered=registered, begun=begun, here=here
            )
            store.write_results("study.json", results)
            write_study_page(store.path, results)
            if export is not None:
                export_runs(export, study, planned, store)  # now and then: a machine may go before the end
            return results

        code = run_jobs(
            chosen,
            store,
            machine,
            say,
            report,
            seconds=seconds,
            blind=not pilot,
            keep_checkpoints=keep_checkpoints,
            here=here,
        )
        results = report()
        say_of_room(results["runs"], say)
        if mixed := mixed_precision(results):
            say(
                f"expected all runs in one precision, got {mixed}."
                ' policy.dtype = "auto" takes that of the machine; register one, "float32" say'
            )
        if export is not None:
            whole = export_runs(export, study, planned, store)
            say(f"{export}: {count(len(whole), 'whole seed')}{''.join(f', {seed}' for seed in whole)}")
    return Comparison(folder=store.path, results=results, exit_code=code)


def chosen_seeds(study: Study, pilot: bool) -> tuple[int, ...]:
    """The reported seeds, or the pilot's."""
    if pilot and not study.pilot_seeds:
        raise InputError(f"expected pilot_seeds, got none ({study.file}); a pilot needs seeds that are not reported")
    return study.pilot_seeds if pilot else study.definition.seeds


def study_folder(study: Study, pilot: bool) -> Path:
    """Where a study goes without --out."""
    return Path("runs") / f"study-{study.file.stem}{'-pilot' if pilot else ''}"


def warn_of_power(study: Study, say: Callable[[str], None]) -> None:
    """Say which comparisons have too few seeds for the registered difference, or to find none."""
    seeds = len(study.definition.seeds)
    for each in describe_power(study, seeds):
        if each["power"] < each["wanted"]:
            say(
                f"power {each['power']:.0%} with {seeds} seeds for {each['name']!r}; {each['seeds_needed']} seeds would have"
                f" {each['wanted']:.0%}"
            )
        if each["equivalence"] is not None and each["equivalence"] < each["wanted"]:
            say(
                f"power {each['equivalence']:.0%} with {seeds} seeds to find no difference in {each['name']!r} equivalent,"
                " which the registered rule names"
            )


def warn_of_spread(study: Study, planned: Sequence[Job], say: Callable[[str], None]) -> None:
    """Say which comparisons register a smaller spread than the analysis will assume, whatever the seeds do: it takes at
    least the error of the held-out problems."""
    if study.endpoint.kind not in ("score", "area"):
        return
    problems = {(job.arm, job.bed): job.resolved.config.task.held_out for job in planned}
    seeds, number = len(study.definition.seeds), len(study.comparisons)
    for each in study.comparisons:
        floor = math.sqrt(
            math.fsum(term.weight**2 * share_variance(0.5, problems[term.arm, term.bed]) for term in each.terms)
        )
        if floor > each.spread:
            chance = power(each.detects, floor, seeds, number)
            say(
                f"{each.name!r} registers a spread of {each.spread:g}, and its held-out problems alone have an error of"
                f" {floor:.2g} where half of them are solved: with that its power is {chance:.0%}"
            )


def warn_of_registration(study: Study, registered: Mapping[str, str] | None, say: Callable[[str], None]) -> None:
    """Say that the study file, as it is, is in no commit."""
    if registered is None:
        say(f"{study.file} as it is now is in no commit; commit it before its reported seeds run, else it is not registered")


def describe(
    study: Study,
    runs: list[dict[str, Any]],
    machine: Machine,
    *,
    pilot: bool,
    seeds: tuple[int, ...],
    registered: dict[str, str] | None,
    begun: str | None = None,
    here: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of study.json. An unfinished study has no comparisons, and its runs no scores: nobody looks early.

    `registered` is the commit that registered the study (`registering_commit`), `begun` when its first run began
    (`hold_registration`), `here` what made the runs that do not say it themselves (`describe_machine`).
    """
    definition, complete = study.definition, is_complete(runs)
    analysis = {"comparisons": [], "verdict": "unfinished"}
    if complete and len(seeds) > 1:
        analysis = analyse(study, runs, seeds)
    elif complete:
        analysis["verdict"] = "undecided"  # a pilot of one seed: there is nothing to compare
    machines = slices(runs, here or {})
    precisions = dict(Counter(run["precision"] for run in runs if run.get("precision")))
    if not complete:
        runs = [{key: run[key] for key in ("name", "bed", "arm", "seed", "point", "status", "reason")} for run in runs]
    return {
        "format": FORMAT,
        "name": study.file.stem,
        "title": study.title,
        "pilot": pilot,
        "registration": {
            "file": study.file.name,
            "sha256": study.sha256,
            "registered": registered,
            "begun": begun,
        },
        "question": study.question,
        "confirmed": study.confirmed,
        "refuted": study.refuted,
        "endpoint": {"kind": study.endpoint.kind, "axis": study.endpoint.axis, "means": study.endpoint.means},
        "measure": study.measure,
        "settings": dict(study.settings),
        "collapse": DEFINITION if study.measure is None else None,
        "seeds": list(seeds),
        "arms": {arm: dict(options) for arm, options in definition.arms.items()},
        "beds": {name: [str(path) for path in bed.recipes] for name, bed in definition.all_beds.items()},
        "sweep": {path: list(values) for path, values in definition.sweep.items()},
        "machine": {"parallel": machine.parallel, "threads": machine.threads, "gpus": list(machine.gpus)},
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "made": machines,
        "precision": precisions,
        "complete": complete,
        "power": describe_power(study, len(seeds)) if len(seeds) > 1 else [],
        **analysis,
        "runs": runs,
    }


def warm_ups_first(planned: Sequence[Job]) -> list[Job]:
    """The same runs, in front one for each warm-up: runs at once would else all wait for the same one."""
    first: dict[tuple[str, int], Job] = {}
    for job in planned:
        first.setdefault((job.bed, job.seed), job)
    leading = list(first.values())
    names = {job.name for job in leading}
    return [*leading, *(job for job in planned if job.name not in names)]
