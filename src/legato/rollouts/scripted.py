"""An engine that returns scripted responses: for tests, and for replaying responses from elsewhere."""

from collections.abc import Callable, Sequence

import torch

from legato.core.rollout import StopReason
from legato.errors import InputError
from legato.rollouts.engine import Capabilities, Limits, QueuedEngine, Request, Response
from legato.rollouts.sampling import Sampling


class ScriptedEngine(QueuedEngine):
    """`script(prompt, sample)` returns the tokens and log-probs of a response. Limits apply as for a model."""

    name = "scripted"
    capabilities = Capabilities(truncation=False, logprobs_at_temperature=False)

    def __init__(
        self,
        script: Callable[[list[int], int], tuple[Sequence[int], Sequence[float]]],
        decode: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens)),
    ) -> None:
        super().__init__()
        self.script = script
        self.decode = decode

    def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        return [[self._response(request, sample, limits) for sample in range(len(request.seeds))] for request in requests]

    def _response(self, request: Request, sample: int, limits: Limits) -> Response:
        tokens, logprobs = self.script(request.prompt.tolist(), sample)
        if len(tokens) != len(logprobs) or not tokens:
            raise InputError(
                f"expected as many log-probs as tokens, at least 1, got {len(tokens)} tokens and {len(logprobs)} log-probs"
            )
        ends = [place for place, token in enumerate(tokens) if token in limits.end_tokens]
        length = min(ends[0] + 1 if ends else len(tokens), limits.max_response_tokens)
        ended = bool(ends) and ends[0] < length
        stop = StopReason.END_TOKEN if ended else StopReason.LENGTH
        text = self.decode(list(tokens[: length - ended]))
        for count in range(1, length + 1 - ended):
            before = limits.before_stop(self.decode(list(tokens[:count])))
            if before is not None:
                length, text, stop = count, before, StopReason.STOP_STRING
                break
        return Response(
            tokens=torch.tensor(list(tokens[:length])),
            logprobs=torch.tensor(list(logprobs[:length]), dtype=torch.float32),
            kept_logmass=None,
            text=text,
            stop=stop,
            version=torch.full((length,), self.version),
        )
