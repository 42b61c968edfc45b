"""The probe after every publish: does the server sample from the trainer's weights, and report their log-probs?

Two comparisons on fixed texts. The server's log-probs of the texts, at temperature 1, against those of the trainer's forward
pass. And a response that the server samples, at another temperature, against the trainer's log-probs of the same tokens: a
server that reports log-probs of another temperature, or of other tokens than it sends, is found here.

A server that kept the old weights is found by the size of the difference, or, where one update moves log-probs by less than
rounding does, by log-probs that have not moved at all since the last publish while the trainer's have.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from legato.rollouts.servers.backoff import ask_until_taken
from legato.rollouts.servers.dialect import Ask
from legato.rollouts.servers.dialects.base import Dialect, Reading
from legato.rollouts.servers.http import HttpClient

TEXTS, TOKENS = 3, 24
TEMPERATURE = 0.7
SAMPLED = 12
"""Tokens of the response that is compared."""
SEED = 20_231
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
STILL = 0.25
"""A server whose log-probs moved by less than this share of the trainer's kept the old weights."""
SMALLEST_MOVE = 1e-5
"""Moves of the trainer's log-probs that say nothing: rounding of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """What a server answered."""

    scores: Tensor
    """Log-probs of all texts, one after the other."""
    response: Response | None
    """None: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a server is from the trainer."""

    gap: float
    """Mean |log-prob of the server - log-prob of the trainer| on the fixed texts."""
    largest: float
    problem: str | None
    """None: the server is right."""


class Probe:
    """The fixed texts and the trainer's log-probs of them at the version that was published last."""

    def __init__(self, policy: Policy, tolerance: float | None, dtype: torch.dtype) -> None:
        self.policy = policy
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        source = torch.Generator().manual_seed(SEED)
        highest = min(len(policy.tokenizer), policy.vocabulary)
        self.texts = [torch.randint(0, highest, (TOKENS,), generator=source) for _ in range(TEXTS)]
        self.texts[0][-1] = highest - 1  # a server with a smaller vocabulary refuses the text
        self.expected: Tensor | None = None
        self.before: Tensor | None = None
        """The trainer's log-probs at the publish before."""

    def score(self) -> None:
        """Score the texts with the policy as it is now: these are the log-probs that servers must have."""
        scores = torch.cat([each.logprobs for each in score_texts(self.policy, self.texts)])
        self.before, self.expected = self.expected, scores

    def ask(
        self, dialect: Dialect, client: HttpClient, reading: Reading, name: str, seconds: float, *, sample: bool = True
    ) -> ProbeReply:
        """Ask a server; from any thread. While it is busy it is asked again, for as long as one answer may take."""
        scores = [
            ask_until_taken(partial(dialect.score, client, text.tolist(), f"{name}-{place}", seconds), seconds)
            for place, text in enumerate(self.texts)
        ]
        asking = partial(dialect.sample, client, self._ask(name), reading, seconds)
        response = ask_until_taken(asking, seconds) if sample else None
        return ProbeReply(scores=torch.tensor([value for row in scores for value in row]), response=response)

    def _ask(self, name: str) -> Ask:
        return Ask(
            prompt=self.texts[0][:8].tolist(),
            seed=SEED,
            sampling=Sampling(temperature=TEMPERATURE),
            limits=Limits(max_response_tokens=SAMPLED, end_tokens=()),
            name=f"{name}-sample",
        )

    def judge(self, reply: ProbeReply, last: Tensor | None) -> Verdict:
        """Compare a server with the trainer. `last` are the log-probs that this server had at the publish before."""
        assert self.expected is not None
        differences = (reply.scores - self.expected).abs()
        gap, largest = float(differences.mean()), float(differences.max())
        if not gap <= self.tolerance:
            return Verdict(
                gap=gap, largest=largest, problem=_words("the server did not take the weights", gap, largest, self)
            )
        if last is not None and self.before is not None:
            moved = float((self.expected - self.before).abs().mean())
            followed = float((reply.scores - last).abs().mean())
            if moved > SMALLEST_MOVE and followed < STILL * moved:
                problem = (
                    f"the server did not take the weights: since the last publish the trainer's log-probs of the fixed texts"
                    f" moved by {moved:.2g} on average, the server's by {followed:.2g}"
                )
                return Verdict(gap=gap, largest=largest, problem=problem)
        return Verdict(gap=gap, largest=largest, problem=self._judge_response(reply.response))

    def _judge_response(self, response: Response | None) -> str | None:
        """What is wrong with the log-probs of a sampled response; None if nothing is. The policy is asked."""
        if response is None:
            return None
        prompt = self.texts[0][:8]
        (scores,) = score_texts(self.policy, [torch.cat([prompt, response.tokens])], [TEMPERATURE])
        differences = (response.logprobs - scores.logprobs[len(prompt) - 1 :]).abs()
        gap, largest = float(differences.mean()), float(differences.max())
        if gap <= 2 * self.tolerance:
            return None
        what = f"the server's log-probs are not those of its tokens at temperature {TEMPERATURE}"
        return _words(what, gap, largest, self, 2)


def _words(what: str, gap: float, largest: float, probe: Probe, times: float = 1.0) -> str:
    return (
        f"{what}: its log-probs differ from the trainer's by {gap:.2g} on average (at most {largest:.2g}), allowed are"
        f" {times * probe.tolerance:.2g}"
    )
