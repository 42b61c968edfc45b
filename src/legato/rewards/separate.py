"""A reward of the user's in a process of its own, which can be killed whatever the reward does (`reward.separate_process`).

The process imports the reward by its path and keeps it between calls; the trainer never imports it. It sees a rollout as
JSON can carry it: the fields of a problem must be JSON, and routes of experts are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from legato.core.importing import IMPORT_SECONDS, OwnCode
from legato.core.rollout import Problem, Rollout, StopReason, Unscorable
from legato.errors import InputError
from legato.rewards.trl import NotScored, Schedule
from legato.rewards.verifiers import Verdict
from legato.workers.pool import DiedError, RefusedError, TimedOutError, Workers

WORKER = "legato.rewards.separate_worker:answer"
_TENSORS = ("prompt_tokens", "tokens", "sampler_logprobs", "version", "mask", "turn", "author", "kept_logmass")
_PLAIN = ("rollout_id", "text", "temperature", "turn_rewards", "turn_states", "dialogue")
FOR_EVER = 10.0**8
"""Seconds: three years."""


@dataclass(frozen=True, kw_only=True)
class SeparateReward:
    """Calls the reward at an import path in another process. One process, one question at a time, in order."""

    path: str
    options: Mapping[str, Any]
    seconds: float | None
    batch: bool
    """Whether the reward gets all rollouts in one call; an async reward does, to wait for all of them at once."""
    schedule: Schedule = field(default_factory=Schedule)
    """For a reward with TRL's signature, which may read the number of updates."""
    code: tuple[OwnCode, ...] = ()
    """The reward's file and the user's modules that it imports."""
    own_limit = True
    _workers: Workers = field(default_factory=lambda: Workers(WORKER, count=1, limited=False), repr=False)

    @classmethod
    def load(cls, path: str, options: Mapping[str, Any], seconds: float | None, schedule: Schedule) -> "SeparateReward":
        """Import a reward in its own process and ask what it is; InputError if it cannot be used."""
        unknown = cls(path=path, options=options, seconds=seconds, batch=False, schedule=schedule)
        try:
            # An import may take IMPORT_SECONDS, and so may the making of an object; the worker itself says so.
            facts = unknown._workers.ask(
                "describe", path, dict(options), [], asdict(schedule), seconds=2 * IMPORT_SECONDS + 10
            )
        except (TimedOutError, DiedError, RefusedError) as error:
            unknown._workers.close()
            raise InputError(f"reward {path!r}: it could not be imported in its own process: {error}") from None
        if "refused" in facts:
            unknown._workers.close()
            raise InputError(facts["refused"])
        return replace(unknown, batch=facts["batch"], code=tuple(OwnCode(**each) for each in facts["code"]))

    def __call__(self, rollout_or_batch: Rollout | Sequence[Rollout]) -> Verdict | list[Verdict]:
        rollouts = [rollout_or_batch] if isinstance(rollout_or_batch, Rollout) else rollout_or_batch
        records = [rollout_as_json(rollout) for rollout in rollouts]
        question = "judge", self.path, dict(self.options), records, asdict(self.schedule)
        seconds = FOR_EVER if self.seconds is None else self.seconds
        try:
            replies = self._workers.ask(*question, seconds=seconds)
        except TimedOutError:
            verdicts: list[Verdict] = [Unscorable(f"timed out after {seconds:g} s")] * len(rollouts)
        except (DiedError, RefusedError) as error:
            verdicts = [Unscorable(str(error))] * len(rollouts)
        else:
            verdicts = [_verdict(each) for each in replies]
        return verdicts if self.batch else verdicts[0]


def _verdict(reply: dict[str, float] | str | None) -> Verdict:
    if reply is None:
        return NotScored("returned None: it does not score this response")
    return Unscorable(reply) if isinstance(reply, str) else reply


def check_separate(paths: Sequence[str]) -> None:
    """InputError if none of the rewards comes from an import path, which another process could import."""
    if not paths:
        raise InputError(
            "expected a reward named as 'module:name' or 'file.py:name' for reward.separate_process = true, got none; put"
            " the reward into a file and name it in reward.kind, or drop the option"
        )


def rollout_as_json(rollout: Rollout) -> dict[str, Any]:
    """The rollout as JSON values, without its routes."""
    problem = rollout.problem
    record: dict[str, Any] = {name: getattr(rollout, name) for name in _PLAIN}
    for name in _TENSORS:
        tensor = getattr(rollout, name)
        record[name] = None if tensor is None else [str(tensor.dtype).removeprefix("torch."), tensor.tolist()]
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    return record | {
        "stop": rollout.stop.name,
        "problem": {"prompt": prompt, "answer": problem.answer, "fields": dict(problem.fields)},
    }


def rollout_from_json(record: Mapping[str, Any]) -> Rollout:
    """Inverse of `rollout_as_json`."""
    values = {name: _as_tuple(record[name]) for name in _PLAIN}
    for name in _TENSORS:
        stored = record[name]
        values[name] = None if stored is None else torch.tensor(stored[1], dtype=getattr(torch, stored[0]))
    return Rollout(problem=Problem(**record["problem"]), stop=StopReason[record["stop"]], **values)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
