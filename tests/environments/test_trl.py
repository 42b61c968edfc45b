"""Classes of TRL's `environment_factory`, as they are: reset, tools and reward, plain and async."""

from typing import Any

import pytest

from legato.core.rollout import Problem, StopReason
from legato.environments.adapt import adapt_environment
from legato.environments.tools import tools_of
from legato.environments.trl import TrlEnvironment
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import EpisodeSettings, Runner, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from tests.rollouts.chat_families import FAMILIES
from tests.rollouts.test_tools import Saying, calls, check_tokens

(QWEN,) = [each for each in FAMILIES if each.name == "qwen"]


class Counter:
    """As a user of TRL writes it: nothing of ours in it."""

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.value, self.row, self.asked = start, row, 0
        return f" from {start}"

    def double(self, a: int) -> str:
        """Add twice a number.

        Args:
            a: The number.
        """
        self.value += 2 * a
        return f"now {self.value}"

    def get_reward(self) -> float:
        self.asked += 1
        return float(self.value) if self.asked == 1 else -1.0

    def _secret(self) -> None:
        raise AssertionError("private")


class Waiting(Counter):
    async def double(self, a: int) -> str:  # type: ignore[override]
        """Add twice a number.

        Args:
            a: The number.
        """
        return Counter.double(self, a)

    async def get_reward(self) -> float:  # type: ignore[override]
        return Counter.get_reward(self)


def play(kind: type, turns: list[tuple[str, str]], **limits: Any) -> tuple[Any, Saying]:
    environment = adapt_environment(kind())
    assert isinstance(environment, TrlEnvironment)
    words = QWEN.tokenizer()
    rendering = Rendering(tokenizer=words, tools=tools_of(environment))
    problem = Problem(prompt=[{"role": "user", "content": "count"}], answer="6", fields={"start": 4})
    engine = Saying(words, turns, QWEN)
    runner = Runner(
        engine=engine, rendering=rendering, environment=environment, episodes=EpisodeSettings(**limits),
        limits=Limits(max_response_tokens=4000, end_tokens=(words.eos_token_id,)),
    )  # fmt: skip
    start = Start(problem=problem, prompt=rendering.prompt(problem), seeds=(1,), ids=(0,))
    ((rollout,),) = runner.play([start], Sampling())
    return rollout, engine


@pytest.mark.parametrize("kind", [Counter, Waiting])
def test_a_class_of_trls_runs_as_it_is(kind: type) -> None:
    rollout, engine = play(kind, calls(QWEN, 3))
    check_tokens(rollout, engine)
    assert rollout.fault is None and rollout.turn_rewards == (0.0, 0.0, 0.0, 10.0)
    assert rollout.dialogue[1::2] == ("now 4", "now 6", "now 10") and rollout.stop is StopReason.ENVIRONMENT
    text = engine.words.decode(engine.read[0])
    assert "count from 4" in text and '"double"' in text and "reset" not in text and "_secret" not in text


def test_a_limit_asks_for_the_reward_once() -> None:
    rollout, _ = play(Counter, calls(QWEN, 3), max_turns=2)
    assert rollout.stop is StopReason.TURNS and rollout.turn_rewards == (0.0, 6.0)


def test_prompts_may_differ_between_siblings() -> None:
    class Drifting(Counter):
        count = 0

        def reset(self, **row: Any) -> str:
            Drifting.count += 1
            super().reset(**row)
            return f" #{Drifting.count}"

    environment = adapt_environment(Drifting())
    words = QWEN.tokenizer()
    rendering = Rendering(tokenizer=words, tools=tools_of(environment))
    problem = Problem(prompt=[{"role": "user", "content": "count"}])

    class Each(Saying):
        def respond(self, requests: Any, sampling: Any, limits: Any) -> Any:
            return [super(Each, self).respond([request], sampling, limits)[0] for request in requests]

    engine = Each(words, [(QWEN.answer, QWEN.end)] * 2, QWEN)
    limits = Limits(max_response_tokens=400, end_tokens=(words.eos_token_id,))
    runner = Runner(engine=engine, rendering=rendering, environment=environment, limits=limits)
    start = Start(problem=problem, prompt=rendering.prompt(problem), seeds=(1, 2), ids=(0, 1))
    (pair,) = runner.play([start], Sampling())
    assert ["#1" in words.decode(r.prompt_tokens) for r in pair] == [True, False]
    assert [r.prompt_tokens.tolist() for r in pair] == engine.read


@pytest.mark.parametrize(
    ("method", "value", "reason"),
    [
        ("reset", 5, "expected an opening of text or None, got 5"),
        ("reset", "x" * 2_000_000, "expected an opening of at most 1000000 characters, got 2000000"),
        ("get_reward", float("nan"), "expected a finite number from get_reward, got nan"),
        ("get_reward", "1", "expected a finite number from get_reward, got '1'"),
    ],
)
def test_wrong_values_cost_the_rollout_and_are_named(method: str, value: Any, reason: str) -> None:
    kind = type("Wrong", (Counter,), {method: lambda self, **row: value})
    rollout, _ = play(kind, calls(QWEN, 0))
    assert reason in rollout.fault
