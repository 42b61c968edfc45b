"""`--processes N`: the same command under torchrun, once per process of this machine."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from legato.errors import InputError

_OWN = ("--processes", "--restarts")
_SHUTDOWN_SECONDS = 3600
"""How long ranks may take to finish a step and save it. Those that hang end by `training.rank_deadline_seconds`."""
_PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun hands to the ranks; SIGUSR1 would end it otherwise."""


def start_processes(processes: int, restarts: int) -> None:
    """Run the command that was typed, without these two options, under torchrun; exits with the code of the run."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InputError(
            f"expected --processes {processes} outside torchrun, got a process that torchrun has started; leave --processes"
            " out, or start without torchrun"
        )
    # Else torchrun gives each process one thread, and prints five lines about it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # After a signal torchrun kills processes that have not ended in 30 s; a step and its checkpoint may take longer.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", _PASSED_ON)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks say what happens to them; torchrun would say it again.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments: Any = torchrun.parse_args(torchrun_words(processes, restarts, sys.argv[1:]))  # type: ignore[no-untyped-call]
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # The ranks have said what went wrong; torchrun would print its own table of exit codes.
        sys.exit(exit_code([failure.exitcode for failure in error.failures.values()]))
    except SignalException as ending:
        sys.exit(128 + int(ending.sigval))
    sys.exit(0)


def exit_code(codes: Sequence[int]) -> int:
    """The exit code of a run from those of its ranks: what a rank decided comes before what a kill did to another."""
    decided = [code for code in codes if code > 0]
    if decided:
        return min(decided)
    return 128 - min(codes)  # a negative code is the signal that killed the process


def torchrun_words(processes: int, restarts: int, words: Sequence[str]) -> list[str]:
    """The arguments of torchrun that start these words of legato on several processes of this machine."""
    own = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}", "-m", "legato"]
    return [*own, *_without_own(words)]


def _without_own(words: Sequence[str]) -> list[str]:
    """The words without --processes and --restarts and their values."""
    kept, skip = list[str](), False
    for word in words:
        if skip or word.split("=")[0] in _OWN:
            skip = not skip and word in _OWN
            continue
        kept.append(word)
    return kept
