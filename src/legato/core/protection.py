"""Protects a run from the user's code: copies of rollouts and problems, and settings of the process put back afterwards."""

import copy
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from legato.core.rollout import Problem, Rollout, Row

_TENSORS = ("prompt_tokens", "tokens", "sampler_logprobs", "version", "mask", "turn", "author", "kept_logmass")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def copy_rollout(rollout: Rollout) -> Rollout:
    """A rollout that shares no tensor and no field of its problem with the original, which is trained on."""
    earlier = tuple([replace(row, **_copy_tensors(row)) for row in rollout.earlier])
    return replace(rollout, problem=copy_problem(rollout.problem), earlier=earlier, **_copy_tensors(rollout))


def _copy_tensors(row: Row | Rollout) -> dict[str, Any]:
    tensors: dict[str, Any] = {name: _clone(getattr(row, name)) for name in _TENSORS}
    routes = row.routes
    if routes is not None:
        routes = replace(routes, tokens=routes.tokens.clone(), experts=routes.experts.clone())
    return tensors | {"routes": routes}


def copy_problem(problem: Problem) -> Problem:
    """A problem that shares no list and no field with the original."""
    return replace(problem, prompt=copy_value(problem.prompt), fields=_copy_fields(problem.fields))


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _copy_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy_value(value) for name, value in fields.items()}


def copy_value(value: Any) -> Any:
    """A deep copy of a value; the value itself if it cannot be copied."""
    if isinstance(value, str | int | float | bool | None):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        # An open file, a lock: whoever put it into a problem shares it on purpose.
        return value


class _Outputs:
    """Standard output and error while user code runs, maybe in several threads at once: streams that it cannot close."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._own: tuple[Any, Any] = (None, None)
        self._kept: tuple[Any, Any] = (None, None)

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._own = (sys.stdout, sys.stderr)
                stdout, stderr = (None if output is None else _KeptOpen(output) for output in self._own)
                self._kept = (stdout, stderr)
                sys.stdout, sys.stderr = self._kept
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            sys.stdout, sys.stderr = self._own if self._inside == 0 else self._kept


_OUTPUTS = _Outputs()


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put back the settings of the process that training depends on: autograd, dtype, threads, output, signal handlers."""
    gradients, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    folder = _folder()
    # Handlers can be set in the main thread only.
    watched = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in watched}
    opened = [number for number in (0, 1, 2) if _is_open(number)]
    _OUTPUTS.enter()
    try:
        yield
    finally:
        _OUTPUTS.leave()
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if (
            torch.are_deterministic_algorithms_enabled() != deterministic
            or torch.is_deterministic_algorithms_warn_only_enabled() != warn_only
        ):
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for number in opened:
            if not _is_open(number):
                # Else the next file that is opened would get this number, and with it everything that is printed.
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if folder is not None and _folder() != folder:
            os.chdir(folder)
        for signal_number, handler in handlers.items():
            if signal.getsignal(signal_number) != handler and handler is not None:
                signal.signal(signal_number, handler)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        # Deleted since the run started there.
        return None


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


class _KeptOpen:
    """An output stream that `close` does not close."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def close(self) -> None:
        pass

    def detach(self) -> Any:
        raise OSError("the output of the run cannot be detached")
