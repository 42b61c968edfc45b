"""A reward asked of a model: an endpoint that speaks OpenAI's chat API reads question and response and gives a score.

    [reward]
    kind = "judge"
    url = "http://localhost:8000/v1"
    model = "judge"

Questions of a step are asked at once, `parallel` at a time; equal questions are asked once, and answers are kept in a file
if `cache` names one. `budget` limits the questions of a process: beyond it rollouts are unscored, which is counted and
named. A judge that cannot be reached, or answers without a score, leaves the rollout unscored too; it never scores 0.
"""

import asyncio
import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from legato.core.parts import Part, integer, number, part, pattern, text
from legato.core.rollout import Rollout, Unscorable
from legato.errors import InputError, describe_error
from legato.rewards.verifiers import Verdict

QUESTION = (
    "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\nIs the response right? Write one line:"
    " SCORE: and a number from 0 (wrong) to 1 (right)."
)
_LONGEST_ANSWER = 1_000_000


@part("reward", "judge")
class JudgeReward(Part):
    """The score that a model gives, from 0 to 1 (or as the question says). Only texts are sent: prompt, answer, response."""

    batch: ClassVar[bool] = True
    own_limit: ClassVar[bool] = True

    url: str = text(says="The endpoint, up to /v1: http://localhost:8000/v1. `legato serve` is one.")
    model: str = text(says="The name of the model there.")
    question: str = text(
        default=QUESTION, says="What is asked; {prompt}, {answer} and {response} stand for the texts of a rollout."
    )
    score: str = pattern(
        default=r"SCORE:\s*(-?\d+(?:\.\d+)?)", says="Finds the score in the answer: the first group, of the last match."
    )
    scale: float = number(default=1.0, says="What the score is divided by: 10 for scores from 0 to 10.", above=0.0)
    key_variable: str = text(default="OPENAI_API_KEY", says="The environment variable with the key of the endpoint.")
    max_tokens: int = integer(default=512, says="The longest answer of the judge.", minimum=1)
    parallel: int = integer(default=16, says="Questions in flight at once.", minimum=1, maximum=1024)
    seconds: float = number(default=60.0, says="How long an answer may take.", above=0.0)
    attempts: int = integer(default=3, says="How often a question is asked before the rollout is unscored.", minimum=1)
    budget: int | None = integer(
        default=None, says="The most questions of a run's process; absent: any number.", minimum=1, optional=True
    )
    cache: str | None = text(default=None, says="A file of JSON lines with answers, read and added to.", optional=True)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"reward 'judge'.url: expected http://... or https://..., got {self.url!r}")
        if "{response}" not in self.question:
            raise InputError("reward 'judge'.question: expected a text with {response}, got none; the judge must see it")
        if re.compile(self.score).groups < 1:
            raise InputError(f"reward 'judge'.score: expected a group in parentheses, got {self.score!r}")

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """The verdicts of a step."""
        questions = [self.ask_about(rollout) for rollout in rollouts]
        answers = await _desk_of(self).answers(list(dict.fromkeys(questions)))
        return [self.read(answers[question]) for question in questions]

    def ask_about(self, rollout: Rollout) -> str:
        """The question about a rollout."""
        prompt = rollout.problem.prompt
        question = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        said = rollout.text if rollout.dialogue is None else "\n".join(rollout.dialogue)
        texts = {"{prompt}": question, "{answer}": str(rollout.problem.answer), "{response}": said}
        # In one go: a response that spells out {answer} stays as it is.
        return re.sub(r"\{(?:prompt|answer|response)\}", lambda match: texts[match[0]], self.question)

    def read(self, answer: "str | Unscorable") -> Verdict:
        """The score in an answer."""
        if isinstance(answer, Unscorable):
            return answer
        scores = re.findall(self.score, answer)
        last = scores[-1] if scores else None
        word = last[0] if isinstance(last, tuple) else last
        try:
            value = float(word) / self.scale if word is not None else None
        except ValueError:
            value = None
        if value is None:
            return Unscorable(f"the judge gave no score: {' '.join(answer.split())[:80]!r}")
        return value


class _Desk:
    """The questions of one judge in this process: what was asked, what was answered, and how many questions are left."""

    def __init__(self, judge: JudgeReward) -> None:
        self.judge, self.asked = judge, 0
        self.known: dict[str, str] = {}
        self.file = None if judge.cache is None else Path(judge.cache)
        if self.file is not None and self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    self.known[str(record["key"])] = str(record["answer"])
                except (ValueError, KeyError, TypeError):
                    continue  # a line that was cut when a process died

    async def answers(self, questions: Sequence[str]) -> dict[str, "str | Unscorable"]:
        """The answer to each question."""
        gate = asyncio.Semaphore(self.judge.parallel)

        async def one(question: str) -> "str | Unscorable":
            async with gate:
                return await self._answer(question)

        return dict(zip(questions, await asyncio.gather(*map(one, questions)), strict=True))

    async def _answer(self, question: str) -> "str | Unscorable":
        judge = self.judge
        key = hashlib.sha256(f"{judge.url}\n{judge.model}\n{question}".encode()).hexdigest()
        if key in self.known:
            return self.known[key]
        reason = ""
        for attempt in range(judge.attempts):
            if judge.budget is not None and self.asked >= judge.budget:
                return Unscorable(f"the budget of the judge is spent ({judge.budget} questions)")
            self.asked += 1
            try:
                answer = await asyncio.to_thread(self._post, question)
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = describe_error(error)
                await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
                continue
            self._keep(key, answer)
            return answer
        return Unscorable(f"the judge did not answer: {reason[:200]}")

    def _keep(self, key: str, answer: str) -> None:
        self.known[key] = answer
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "answer": answer}) + "\n")

    def _post(self, question: str) -> str:
        judge = self.judge
        body = {
            "model": judge.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": judge.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(judge.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{judge.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=judge.seconds) as response:
                answer: Any = json.loads(response.read(_LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            raise ValueError(f"HTTP {error.code}: {error.read(300).decode(errors='replace')}") from None
        content = answer["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError(f"expected a text as content, got {content!r:.80}")
        return content


_DESKS: dict[JudgeReward, _Desk] = {}


def _desk_of(judge: JudgeReward) -> _Desk:
    """The desk of a judge; judges with equal options share it."""
    if judge not in _DESKS:
        _DESKS[judge] = _Desk(judge)
    return _DESKS[judge]
