"""A reward asked of a model: an endpoint that speaks OpenAI's chat API reads question and response and gives a score.

    [reward]
    kind = "judge"
    url = "http://localhost:8000/v1"      absent: `model` is loaded into this process
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from legato.core.parts import Part, choice, integer, number, part, pattern, text
from legato.core.rollout import Rollout, TurnScores, Unscorable
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

    url: str | None = text(
        default=None,
        says="The endpoint, up to /v1: http://localhost:8000/v1. `legato serve` is one; absent: the model is loaded here.",
        optional=True,
    )
    model: str = text(says="The name of the model there; without a url, a folder or a hub name.")
    per: str = choice(
        "rollout",
        "turn",
        default="rollout",
        says="'turn': a question for each turn of the policy, with the dialogue up to it as {response}: process scores.",
    )
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
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise InputError(f"reward 'judge'.url: expected http://... or https://..., got {self.url!r}")
        if "{response}" not in self.question:
            raise InputError("reward 'judge'.question: expected a text with {response}, got none; the judge must see it")
        if re.compile(self.score).groups < 1:
            raise InputError(f"reward 'judge'.score: expected a group in parentheses, got {self.score!r}")

    async def __call__(self, rollouts: Sequence[Rollout]) -> "list[Verdict | TurnScores]":
        """The verdicts of a step."""
        questions = [self.ask_about(rollout) for rollout in rollouts]
        answers = await _desk_of(self).answers(list(dict.fromkeys(each for asked in questions for each in asked)))
        return [self._verdict([self.read(answers[each]) for each in asked]) for asked in questions]

    def ask_about(self, rollout: Rollout) -> list[str]:
        """The questions about a rollout: one, or one for each turn of the policy."""
        prompt = rollout.problem.prompt
        asked = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        said = (rollout.text,) if rollout.dialogue is None else rollout.dialogue
        ends = range(1, len(said) + 1, 2) if self.per == "turn" else (len(said),)
        questions = []
        for end in ends:
            response = "\n".join(said[:end])
            questions.append(self._write({"prompt": asked, "answer": str(rollout.problem.answer), "response": response}))
        return questions

    def _write(self, texts: Mapping[str, str]) -> str:
        # In one go: a response that spells out {answer} stays as it is.
        return re.sub(r"\{(prompt|answer|response)\}", lambda match: texts[match[1]], self.question)

    def _verdict(self, scores: "Sequence[float | Unscorable]") -> "Verdict | TurnScores":
        """One verdict from the scores of the questions about a rollout."""
        known = [each for each in scores if not isinstance(each, Unscorable)]
        if len(known) < len(scores):
            return next(each for each in scores if isinstance(each, Unscorable))
        return TurnScores(known) if self.per == "turn" else known[0]

    def read(self, answer: "str | Unscorable") -> "float | Unscorable":
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
        # The pool of asyncio itself has as many threads as the machine has cores and four more.
        with ThreadPoolExecutor(self.judge.parallel) as pool:
            answers = await asyncio.gather(*[self._answer(question, pool) for question in questions])
        return dict(zip(questions, answers, strict=True))

    async def _answer(self, question: str, pool: ThreadPoolExecutor) -> "str | Unscorable":
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
                answer = await asyncio.get_running_loop().run_in_executor(pool, self._post, question)
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
            **({} if judge.url is None else {"model": judge.model}),
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": judge.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        url, key = LOCAL[judge.model] if judge.url is None else (judge.url, os.environ.get(judge.key_variable))
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        # A proxy of the system would not find a server of this process.
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if judge.url is None else []))
        try:
            with opener.open(request, timeout=judge.seconds) as response:
                answer: Any = json.loads(response.read(_LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            raise ValueError(f"HTTP {error.code}: {error.read(300).decode(errors='replace')}") from None
        content = answer["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError(f"expected a text as content, got {content!r:.80}")
        return content


LOCAL: dict[str, tuple[str, str]] = {}
"""Address and key of the judges that were loaded into this process, by model. `run` loads them (`serve/in_thread.py`)."""
_DESKS: dict[JudgeReward, _Desk] = {}


def _desk_of(judge: JudgeReward) -> _Desk:
    """The desk of a judge; judges with equal options share it."""
    if judge not in _DESKS:
        _DESKS[judge] = _Desk(judge)
    return _DESKS[judge]
