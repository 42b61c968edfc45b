"""What an engine is: prompts with seeds in, sampled tokens out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from legato.core.fields import flag_or, integer, number, texts
from legato.core.rollout import Routes, StopReason
from legato.core.settings import settings
from legato.rollouts.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and the seeds of the responses wanted: as many responses as seeds."""

    prompt: Tensor
    """[P] token ids, at least one."""
    seeds: tuple[int, ...]


@settings()
class ResponseSettings:
    """When a response ends, whatever the tokenizer is."""

    max_response_tokens: int = integer(default=64, says="The longest response.", minimum=1)
    stop: tuple[str, ...] = texts(default=(), says="Strings that end a response.")


@settings()
class EngineSettings:
    """What an engine may take of the machine, and what it notes."""

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
        says="Whether the engine notes the experts of every token it reads, K bytes a layer and token; auto: if there are"
        " any.",
    )


@dataclass(frozen=True, kw_only=True)
class Limits(ResponseSettings):
    """When a response ends."""

    end_tokens: tuple[int, ...]
    """Written and counted: the policy chose to stop."""

    def before_stop(self, text: str) -> str | None:
        """The text before the first stop string in it; None where there is none."""
        cuts = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(cuts)] if cuts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """[T] each; T is at least 1."""

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
    """Of prompt and response without the last token, where the engine records them."""


def make_responses(
    tokenizer: Any,
    tokens: Tensor,
    logprobs: Tensor,
    kept: Tensor | None,
    lengths: Sequence[int],
    stops: Sequence[StopReason],
    cut: Mapping[int, str],
    versions: Sequence[Tensor],
) -> list[Response]:
    """Responses from tables [rows, T]. `cut` holds the texts that a stop string ended; other texts are decoded here.

    `versions` are [length] each.
    """
    tokens, logprobs, kept = tokens.cpu(), logprobs.cpu(), None if kept is None else kept.cpu()
    said = [tokens[row, : length - (stops[row] is StopReason.END_TOKEN)].tolist() for row, length in enumerate(lengths)]
    texts = tokenizer.batch_decode(said, skip_special_tokens=True)
    return [
        Response(
            tokens=tokens[row, :length].clone(),
            logprobs=logprobs[row, :length].clone(),
            kept_logmass=None if kept is None else kept[row, :length].clone(),
            text=cut.get(row, texts[row]),
            stop=stops[row],
            version=versions[row],
        )
        for row, length in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class Handle:
    """The ticket of one submitted request; unique in its engine."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request whose responses are all there, in the order of its seeds."""

    handle: Handle
    responses: list[Response]


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request inside an engine: how many of its seeds have been taken up, and the responses there are."""

    handle: Handle
    request: Request
    sampling: Sampling
    limits: Limits
    taken: int = 0
    """Seeds whose responses have begun; they are taken up in order."""
    responses: dict[int, Response] = field(default_factory=dict)
    """By the place of their seed."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The seeds whose responses have not begun."""
        return self.request.seeds[self.taken :]

    @property
    def complete(self) -> bool:
        return len(self.responses) == len(self.request.seeds)

    def finish(self) -> Finished:
        """What is reported once it is complete."""
        return Finished(handle=self.handle, responses=[self.responses[place] for place in range(len(self.request.seeds))])

    def restart(self) -> None:
        """Forget the responses there are."""
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
    """It has weights of its own: `publish` must hand it every new version."""


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
    """Of the policy that is being sampled; every response reports it token by token."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        """Take requests; one handle each. Nothing is computed yet."""
        raise NotImplementedError

    def poll(self) -> list[Finished]:
        """Work until at least one submitted request has finished; [] only where none is left."""
        raise NotImplementedError

    def cancel(self, handle: Handle) -> None:
        """Give a request up. Its responses will not be reported; a handle that has finished already is ignored."""
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
            # Nobody will ask for these any more.
            for handle in places:
                self.cancel(handle)
            raise
        return responses

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """New weights of the policy. An engine that samples from the policy's own tensors only notes the version."""
        self.version = version

    # An engine that samples from more than the weights of now (a stale sampler, a server that lags) overrides these.

    @property
    def settled(self) -> bool:
        """Whether its weight history is full, so that what is measured of it now will stay true."""
        return True

    def before_update(self) -> None:
        """The policy's weights are about to change."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it beside the policy's weights."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""


class JobEngine(Engine):
    """An engine that keeps what is submitted as jobs: subclasses define `poll`, which takes them from `self.jobs`."""

    def __init__(self) -> None:
        self._submitted = 0
        self.jobs: dict[Handle, Job] = {}
        """What is outstanding, in the order it was submitted."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        jobs = [Job(Handle(self._submitted + place), request, sampling, limits) for place, request in enumerate(requests)]
        self._submitted += len(jobs)
        self.jobs |= {job.handle: job for job in jobs}
        return [job.handle for job in jobs]

    def cancel(self, handle: Handle) -> None:
        self.jobs.pop(handle, None)

    def report_complete(self) -> list[Finished]:
        """Take the complete jobs out and report them."""
        complete = [job for job in self.jobs.values() if job.complete]
        for job in complete:
            del self.jobs[job.handle]
        return [job.finish() for job in complete]


class QueuedEngine(JobEngine):
    """An engine that answers all requests that are sampled alike at once: subclasses define `respond`, which blocks."""

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
