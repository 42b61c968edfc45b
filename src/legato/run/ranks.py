"""What a run does because it has several ranks: it compares what they start with, and finds the run after a restart."""

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from legato.config.resolved import Resolved
from legato.config.schema import Config
from legato.core.rollout import Problem
from legato.core.world import World, on_first_rank
from legato.errors import OtherRankError
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.run.interrupt import Interrupt
from legato.tasks.source import Source
from legato.training.evaluate import ProblemSet
from legato.training.ranks.join import read_launch
from legato.training.ranks.process_group import ProcessGroup
from legato.training.ranks.same import code_digest, require_same
from legato.training.ranks.watch import Watch


def environment() -> dict[str, Any]:
    """What environment.json holds of the launch; nothing for a run on one process."""
    launch = read_launch()
    return {} if launch is None else {"ranks": launch.size, "launch": launch.key}


def find_restarted(world: World, parent: Path) -> Path | None:
    """The run that torchrun started before and starts again; None if this is its first start, or nothing was saved."""
    launch = read_launch()
    if launch is None or not launch.restarts:
        return None

    def find() -> str | None:
        runs = [RunDirectory(path) for path in sorted(parent.iterdir()) if path.is_dir()] if parent.is_dir() else []
        same = [run for run in runs if (run.readable_environment() or {}).get("launch") == launch.key]
        saved = [run for run in same if run.checkpoint_steps()]
        return str(saved[-1].path) if saved else None

    path = on_first_rank(world, find)
    return None if path is None else Path(path)


def compare_configurations(world: World, resolved: Resolved) -> None:
    """InputError that names what differs, unless all ranks have the same code, packages and options."""
    if world.size == 1:
        return
    facts: dict[str, Any] = {
        "the code of Legato": code_digest(),
        "the version of torch": torch.__version__,
        "the version of transformers": transformers.__version__,
        "the version of Python": platform.python_version(),
    }
    facts |= {f"the option {path}": repr(value) for path, value in resolved.values.items()}
    facts |= {f"the file {code.reference}": code.sha256 for code in resolved.code}
    require_same(world, facts)


def compare_inputs(world: World, policy: Policy, source: Source) -> None:
    """InputError that names what differs, unless all ranks have the same problems and weights."""
    if world.size > 1:
        facts = {"the problems": wire.fingerprint(source), "the weights of the model": wire.weights_fingerprint(policy)}
        require_same(world, facts)


def compare_evaluations(world: World, held_out: Sequence[Problem], sets: Sequence[ProblemSet]) -> None:
    """InputError that names what differs, unless all ranks evaluate on the same problems."""
    if world.size > 1:
        facts = {f"the problems of evaluation.sets.{each.name}": wire.fingerprint_of(each.problems) for each in sets}
        require_same(world, {"the held-out problems": wire.fingerprint_of(held_out), **facts})


def describe(world: World, config: Config) -> list[str]:
    """A note on the ranks of a run; empty for one process that nobody asked to divide anything."""
    if world.size == 1 and config.training.shard == "layers":
        return ["one process divides nothing: training.shard = 'layers' takes --processes, or torchrun"]
    if world.size == 1:
        return []
    divided = {"optimizer": "masters and moments", "layers": "layers, masters and moments"}[config.training.shard]
    return [f"{world.size} processes, which divide {divided} among them (training.shard = {config.training.shard!r})"]


def observe(world: World, config: Config, directory: RunDirectory) -> None:
    """Tell the watch over the ranks the deadline of the run, and where to write."""
    watch = world.observer if isinstance(world, ProcessGroup) else None
    if isinstance(watch, Watch):
        watch.deadline = config.training.rank_deadline_seconds
        # Of every rank: where rank 0 hangs, another one writes the stacks.
        watch.folder = directory.path


def explain_losses(world: World) -> AbstractContextManager[None]:
    """Inside, ranks that are gone are named also where FSDP2 waits for them."""
    return world.passing() if isinstance(world, ProcessGroup) else nullcontext()


def is_interrupted(world: World, interrupt: Interrupt, error: BaseException) -> bool:
    """Whether an error before the first step is a signal, here or on another rank; tells the others of one here."""
    if isinstance(error, OtherRankError):
        interrupt.take_over(error.signal)
    elif interrupt.received is not None:
        world.fail(error)
    return interrupt.received is not None
