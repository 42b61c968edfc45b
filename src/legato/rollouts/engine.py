"""The interface of a sampling engine: prompts with seeds in, sampled responses out."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import choice, flag_or, integer, number, texts
from legato.core.rollout import Routes, StopReason
from legato.core.settings import settings
from legato.rollouts.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and one seed for each response to sample."""

    prompt: Tensor
    """[P] token ids, at least one."""
    seeds: tuple[int, ...]
    keep: bool = False
    """Whether a later request will begin with this prompt and one of its responses. An engine may then keep KV caches."""
    kept: object = None
    """`Response.kept` of the response that this prompt continues; None: there is none."""


@settings()
class ResponseSettings:
    """The limits of a response that do not depend on the tokenizer."""

    max_response_tokens: int = integer(default=64, says="The longest response.", minimum=1)
    stop: tuple[str, ...] = texts(default=(), says="Strings that end a response.")


@settings()
class EngineSettings:
    """How much of the machine an engine may use, and whether it records routes."""

    rows_at_once: int = integer(
        default=256,
        says="Sequences decoded together: more is faster and needs more memory.",
        minimum=1,
        resume="free",
    )
    kv_memory_share: float = number(
        default=0.5,
        says="On a GPU, the share of the memory training leaves free that keys and values may take; rows_at_once is cut to"
        " fit.",
        above=0.0,
        maximum=1.0,
        resume="free",
    )
    record_routes: bool | str = flag_or(
        "auto",
        default="auto",
        says="Whether the engine records the experts of every token it reads, K bytes a layer and token; auto: if there are"
        " any.",
    )
    exact: str = choice(
        "auto",
        "on",
        "off",
        default="auto",
        says="Whether the engine's log-probs equal the trainer's to the bit, so that the old policy need not be scored."
        " Possible for dense Llama, Mistral, Qwen2 and Qwen3 in bfloat16 on a Hopper GPU, in one turn; auto: there, where"
        " 128 rows or more decode at once.",
    )


@dataclass(frozen=True, kw_only=True)
class Limits(ResponseSettings):
    """When a response ends."""

    end_tokens: tuple[int, ...]
    """Tokens that end a response. They are part of the response, because the policy sampled them."""

    def before_stop(self, text: str) -> str | None:
        """The text before its first stop string; None if it has no stop string."""
        cuts = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(cuts)] if cuts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One sampled response. Tensors are [T], with T at least 1."""

    tokens: Tensor
    logprobs: Tensor
    """float32, of softmax(z / temperature) before truncation."""
    kept_logmass: Tensor | None
    text: str
    """Without end tokens and without the stop string."""
    stop: StopReason
    version: Tensor
    """[T] int64: the policy version that sampled each token."""
    routes: Routes | None = None
    """Routes of the prompt and of all response tokens but the last; None if the engine does not record routes."""
    server: str | None = None
    """The name of the server that sampled it; None: the engine has none, or one only."""
    kept: object = None
    """The KV cache of its text, for the request that continues it; None: the engine kept none, or finds it by itself."""


def make_responses(
    tokenizer: Any,
    tokens: Tensor,
    logprobs: Tensor,
    kept_logmass: Tensor | None,
    lengths: Sequence[int],
    stops: Sequence[StopReason],
    cut: Mapping[int, str],
    versions: Sequence[Tensor],
) -> list[Response]:
    """Responses from tables [rows, T]. `cut` holds the texts that a stop string ended; other texts are decoded here.

    `versions` are [length] each.
    """
    tokens, logprobs, kept_logmass = tokens.cpu(), logprobs.cpu(), None if kept_logmass is None else kept_logmass.cpu()
    token_lists = [
        tokens[row, : length - (stops[row] is StopReason.END_TOKEN)].tolist() for row, length in enumerate(lengths)
    ]
    texts = tokenizer.batch_decode(token_lists, skip_special_tokens=True)
    return [
        Response(
            tokens=tokens[row, :length].clone(),
            logprobs=logprobs[row, :length].clone(),
            kept_logmass=None if kept_logmass is None else kept_logmass[row, :length].clone(),
            text=cut.get(row, texts[row]),
            stop=stops[row],
            version=versions[row],
        )
        for row, length in enumerate(lengths)
    ]


def token_versions(versions: Sequence[tuple[int, int]], length: int) -> Tensor:
    """[length]: the policy version of each token, from (first token, version) pairs."""
    table = torch.empty(length, dtype=torch.int64)
    for start, version in versions:
        table[start:] = version
    return table


@dataclass(frozen=True, slots=True)
class Handle:
    """Identifies one submitted request; unique within its engine."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request whose responses are all complete, in the order of its seeds."""

    handle: Handle
    responses: list[Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A complete response. Other responses of its request may still be decoding."""

    handle: Handle
    place: int
    """Index of its seed in the request."""
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """New tokens of a response that is still being decoded. Tensors are [n], with n at least 1."""

    handle: Handle
    place: int
    """Index of its seed in the request."""
    start: int
    """Index of the first of these tokens in the response. An engine that ran out of memory starts again from 0."""
    tokens: Tensor
    logprobs: Tensor
    version: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The result of decoding for a short while."""

    ended: tuple[Ended, ...] = ()
    partial: tuple[Partial, ...] = ()


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request inside an engine: how many of its seeds have started, and the responses so far."""

    handle: Handle
    request: Request
    sampling: Sampling
    limits: Limits
    taken: int = 0
    """How many responses have started. Seeds start in order."""
    responses: dict[int, Response] = field(default_factory=dict)
    """index of the seed -> its response"""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The seeds whose responses have not started."""
        return self.request.seeds[self.taken :]

    @property
    def complete(self) -> bool:
        return len(self.responses) == len(self.request.seeds)

    def finish(self) -> Finished:
        """The report of a complete job."""
        return Finished(handle=self.handle, responses=[self.responses[place] for place in range(len(self.request.seeds))])

    def restart(self) -> None:
        """Discard all responses and start over."""
        self.taken = 0
        self.responses.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. Settings that need more are refused before a run starts."""

    routes: bool = False
    """Responses carry the experts of every token read."""
    versions: bool = True
    """Responses carry the policy version of every token."""
    truncation: bool = True
    """top-p, top-k and min-p, with the kept probability mass reported."""
    logprobs_at_temperature: bool = True
    """Log-probs are of softmax(z / temperature), before truncation."""
    holds_weights: bool = False
    """The engine holds its own weights: `publish` must hand it every new version."""
    in_background: bool | None = None
    """Whether a thread may sample while the policy trains in another. None: if the engine holds its own weights."""
    concurrent: bool = False
    """`submit`, `cancel` and `publish` may be called while another thread polls. Otherwise they wait for the poll."""
    partial: bool = False
    """`decode_briefly` returns after a few tokens and reports responses that are still being decoded."""


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Where an engine may write, and how it speaks to the user."""

    folder: Path
    """A folder of the run's own. It may not exist yet."""
    say: Callable[[str], None] = _say_nothing
    """Shows a line on the terminal and stores it with the run."""
    weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    """Returns the policy's weights, whole also where they are divided among ranks; None: the model has them."""


class Engine:
    """A source of responses. Subclasses define `submit`, `poll` and `cancel`; the rest has defaults.

    Requests are submitted and polled, so that episodes and servers can add requests while others decode:

        handles = engine.submit(requests, sampling, limits)
        while handles outstanding: for finished in engine.poll(): ...

    `generate` is that loop, for callers with nothing to add.
    """

    name: str = "engine"
    capabilities: Capabilities = Capabilities()
    version: int = 0
    """Version of the policy being sampled. Every response reports it per token."""
    weights_are_published: bool = False
    """Whether weights change by `publish` alone, as in a server: the engine then need not look whether they have changed."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        """Queue requests and return one handle each. Nothing is computed yet."""
        raise NotImplementedError

    def poll(self) -> list[Finished]:
        """Decode until at least one submitted request has finished; [] only if none is outstanding."""
        raise NotImplementedError

    def cancel(self, handle: Handle) -> None:
        """Cancel a request: its responses will not be reported. The handle of a finished request is ignored."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        """For each request its responses, in the order of its seeds. No other request may be outstanding."""
        places = {handle: place for place, handle in enumerate(self.submit(requests, sampling, limits))}
        responses: list[list[Response]] = [[] for _ in requests]
        try:
            while places:
                reported = self.poll()
                if not reported:
                    raise RuntimeError(f"the engine {self.name!r} polled [] with {len(places)} requests outstanding")
                for finished in reported:
                    responses[places.pop(finished.handle)] = finished.responses
        except BaseException:
            # The caller will not poll for the remaining requests.
            for handle in places:
                self.cancel(handle)
            raise
        return responses

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new policy weights. An engine that samples from the policy's own tensors only records the version."""
        self.version = version

    def open(self, place: "EnginePlace") -> None:
        """Called once before a run samples: an engine that needs processes or files makes them here."""

    def close(self) -> None:
        """Called once when the run ends, whatever ended it."""

    def metrics(self) -> dict[str, float]:
        """What the engine measured since this was last called, by the keys of the run's metrics."""
        return {}

    @property
    def innermost(self) -> "Engine":
        """The engine that does the work, for one that passes its calls on."""
        return self

    # For a server. An engine with the capability `partial` overrides these.

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        """Decode for a short while: the responses that ended, and the new tokens of those `watched` requests that did not.

        Takes the place of `poll`; while requests are outstanding, use one of the two. Weights may change only by `publish`.
        Tokens of a watched request may be reported by a later call, also one that watches nothing. An
        engine without the capability `partial` decodes whole requests here.
        """
        return Progress(
            ended=tuple(
                Ended(handle=finished.handle, place=place, response=response)
                for finished in self.poll()
                for place, response in enumerate(finished.responses)
            )
        )

    def reserve(self, prompt_tokens: int, response_tokens: int) -> None:
        """Allocate memory for as many requests of this size as the engine decodes at once, before the first arrives."""

    # An engine that samples from older weights (a stale sampler, a lagging server) overrides these.

    @property
    def settled(self) -> bool:
        """True once the engine's weight history is full, so that measurements of the engine stay valid."""
        return True

    def before_update(self) -> None:
        """Called before the policy's weights change."""

    def state(self) -> dict[str, Tensor]:
        """The engine's part of a checkpoint, beside the policy's weights."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""


class JobEngine(Engine):
    """An engine that stores submitted requests as jobs. Subclasses define `poll`, which works on `self.jobs`."""

    def __init__(self) -> None:
        self._submitted = 0
        self.jobs: dict[Handle, Job] = {}
        """Outstanding jobs, in the order they were submitted."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        jobs = [Job(Handle(self._submitted + place), request, sampling, limits) for place, request in enumerate(requests)]
        self._submitted += len(jobs)
        self.jobs |= {job.handle: job for job in jobs}
        return [job.handle for job in jobs]

    def cancel(self, handle: Handle) -> None:
        self.jobs.pop(handle, None)

    def end_responses(self, responses: Iterable[tuple[Job, int, Response]]) -> tuple[Ended, ...]:
        """Report responses (job, place, response) one by one and remove the jobs that they complete."""
        ended = []
        for job, place, response in responses:
            job.responses[place] = response
            ended.append(Ended(handle=job.handle, place=place, response=response))
            if job.complete:
                del self.jobs[job.handle]
        return tuple(ended)

    def report_complete(self) -> list[Finished]:
        """Remove the complete jobs and return their reports."""
        complete = [job for job in self.jobs.values() if job.complete]
        for job in complete:
            del self.jobs[job.handle]
        return [job.finish() for job in complete]


class QueuedEngine(JobEngine):
    """An engine that answers all requests with equal sampling at once. Subclasses define `respond`, which blocks."""

    def poll(self) -> list[Finished]:
        if not self.jobs:
            return []
        first = next(iter(self.jobs.values()))
        alike = [job for job in self.jobs.values() if (job.sampling, job.limits) == (first.sampling, first.limits)]
        answers = self.respond([job.request for job in alike], first.sampling, first.limits)
        for job, responses in zip(alike, answers, strict=True):
            job.responses = dict(enumerate(responses))
        return self.report_complete()

    def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        """The responses of each request, in the order of its seeds."""
        raise NotImplementedError
