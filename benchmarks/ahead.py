"""Steps a second of a run that samples ahead, against the synchronous run: `python -m benchmarks.ahead`.

The engine answers after a fixed time for each token, as a server does, and training takes a fixed time. Neither needs this
machine's cores, so the ratio shows what the schedule of `rollouts.ahead` gains. Lengths are ragged: most responses are short
and one group in eight is four times as long. All settings are measured in one process, in rounds, each in its own order.
"""

import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from legato.core.rollout import Problem, Rollout, Score, StopReason, Unscorable
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Capabilities, Finished, Handle, JobEngine, Limits, Request, Response
from legato.rollouts.episodes import Runner
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.training.ahead import Ahead
from legato.training.collect import Collector, CollectorSettings

RESULTS = Path(__file__).parent / "results" / "ahead.json"
TOKEN_SECONDS = 0.001
TRAINING_SECONDS = 0.1
PROMPTS, STEPS, ROUNDS = 8, 20, 3
WORDS = character_tokenizer()


class FixedRate(JobEngine):
    """Answers a request after TOKEN_SECONDS for each token of its response; any number of requests at once."""

    name = "fixed rate"
    capabilities = Capabilities(truncation=False, holds_weights=True, concurrent=True)

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()
        self._ends: dict[Handle, float] = {}

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        with self._news:
            handles = super().submit(requests, sampling, limits)
            for handle, request in zip(handles, requests, strict=True):
                self._ends[handle] = time.monotonic() + TOKEN_SECONDS * _length(request)
            self._news.notify_all()
        return handles

    def poll(self) -> list[Finished]:
        with self._news:
            while self.jobs:
                now = time.monotonic()
                for handle, job in self.jobs.items():
                    if self._ends[handle] <= now:
                        job.responses = {place: self._answer(job.request) for place in range(len(job.request.seeds))}
                if finished := self.report_complete():
                    return finished
                self._news.wait(max(1e-4, min(self._ends[handle] for handle in self.jobs) - now))
        return []

    def cancel(self, handle: Handle) -> None:
        with self._news:
            super().cancel(handle)
            self._news.notify_all()

    def _answer(self, request: Request) -> Response:
        length = _length(request)
        return Response(
            tokens=torch.full((length,), 20),
            logprobs=torch.full((length,), -0.1),
            kept_logmass=None,
            text="",
            stop=StopReason.LENGTH,
            version=torch.full((length,), self.version),
        )


def _length(request: Request) -> int:
    chance = random.Random(request.seeds[0])
    return chance.randint(20, 60) * (4 if chance.random() < 1 / 8 else 1)


class Numbered:
    """Problems without end."""

    size = None

    def training(self, number: int) -> Problem:
        return Problem(prompt=f"p{number}")

    def held_out(self, count: int) -> list[Problem]:
        return []


def _judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    return [Score(reward=float(place % 2), accuracy=float(place % 2)) for place in range(len(rollouts))]


def measure(ahead: int) -> dict[str, float]:
    """Steps a second, seconds that a step waits for rollouts, and the mean age of tokens."""
    parts: dict[str, Any] = {
        "source": Numbered(),
        "runner": Runner(
            engine=FixedRate(),
            rendering=Rendering(tokenizer=WORDS),
            limits=Limits(max_response_tokens=400, end_tokens=()),
        ),
        "judge": _judge,
        "sampling": Sampling(),
        "settings": CollectorSettings(samples_per_prompt=4, max_prompt_tokens=20),
        "seed": 0,
    }
    source = Ahead(**parts, steps_ahead=ahead) if ahead else Collector(**parts)
    waited, lags, begun = 0.0, [], time.perf_counter()
    for step in range(STEPS + 2):
        if step == 2:  # the pipeline is full
            waited, lags, begun = 0.0, [], time.perf_counter()
        before = time.perf_counter()
        groups, _ = source.next(PROMPTS)
        waited += time.perf_counter() - before
        lags += [float((step - m.rollout.version).double().mean()) for group in groups for m in group.members]
        time.sleep(TRAINING_SECONDS)
        source.on_publish(step + 1)
    seconds = time.perf_counter() - begun
    source.close()
    return {"steps_per_second": STEPS / seconds, "waited_seconds": waited / STEPS, "lag": statistics.mean(lags)}


def main() -> None:
    settings = (0, 1, 2, 4)
    measured: dict[int, list[dict[str, float]]] = {ahead: [] for ahead in settings}
    for number in range(ROUNDS):
        for ahead in random.Random(number).sample(settings, len(settings)):
            measured[ahead].append(measure(ahead))
    rows = []
    for ahead in settings:
        middle = {key: statistics.median(each[key] for each in measured[ahead]) for key in measured[ahead][0]}
        rows.append({"ahead": ahead, **middle})
    for row in rows:
        row["ratio"] = row["steps_per_second"] / rows[0]["steps_per_second"]
        print(" ".join(f"{key} {value:.3g}" for key, value in row.items()))
    made = {"token_seconds": TOKEN_SECONDS, "training_seconds": TRAINING_SECONDS, "prompts": PROMPTS, "steps": STEPS}
    RESULTS.write_text(json.dumps({"made_with": made, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
