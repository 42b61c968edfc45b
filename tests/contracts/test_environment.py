"""The contract of an environment: replies of the right form, an end, finite rewards, and no episode that sees another."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from legato.core.importing import make_imported
from legato.core.rollout import Problem, StopReason
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Environment, Reply, Runner, SingleTurn, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from tests.contracts.conftest import choose_names
from tests.contracts.texts import HOSTILE

ROOT = Path(__file__).parents[2]
OURS = [f"{ROOT}/examples/second_guess.py:SecondGuess", f"{ROOT}/tests/proof/turns.py:Early", "single turn"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", choose_names(metafunc.config, "--environment", OURS), scope="module")


@pytest.fixture(scope="module")
def environment(name: str) -> Any:
    return SingleTurn() if name == "single turn" else make_imported("--environment", name)


def talk(environment: Any, problem: Problem, texts: Sequence[str], stop: StopReason = StopReason.END_TOKEN) -> list[Any]:
    """The replies of one episode to these texts, up to its end."""
    episode, replies = environment.episode(problem), []
    for text in texts:
        replies.append(episode.reply(text, stop))
        if replies[-1] is None or replies[-1].done:
            break
    return replies


def comparable(replies: Sequence[Any]) -> list[Any]:
    """The contents of replies that must be equal; states are compared by their repr."""
    return [None if r is None else (r.content, r.reward, repr(r.state), r.done) for r in replies]


def test_it_is_an_environment(environment: Any) -> None:
    assert isinstance(environment, Environment)
    assert type(environment.max_turns) is int and environment.max_turns >= 1 and type(environment.deterministic) is bool


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("stop", [StopReason.END_TOKEN, StopReason.STOP_STRING, StopReason.LENGTH])
def test_every_text_gets_a_reply_of_the_right_form(
    environment: Any, problems: list[Problem], kind: str, stop: StopReason
) -> None:
    for problem in problems:
        for reply in talk(environment, problem, [HOSTILE[kind]] * environment.max_turns, stop):
            if reply is None:
                continue
            assert isinstance(reply, Reply) and type(reply.done) is bool
            assert reply.reward is None or (type(reply.reward) in (int, float) and math.isfinite(reply.reward))
            hash(reply.state)
            if not isinstance(reply.content, str):
                for message in reply.content:
                    assert isinstance(message, Mapping) and {"role", "content"} <= set(message)
                    assert all(isinstance(value, str) for value in message.values())


def test_an_episode_ends_within_its_most_turns(environment: Any, problems: list[Problem]) -> None:
    for problem in problems:
        for text in HOSTILE.values():
            last = talk(environment, problem, [text] * environment.max_turns)[-1]
            assert last is None or last.done, f"it goes on after max_turns = {environment.max_turns} turns"


def test_equal_texts_get_equal_replies(environment: Any, problems: list[Problem]) -> None:
    if not environment.deterministic:
        pytest.skip("it does not claim to be deterministic")
    for problem in problems:
        for text in HOSTILE.values():
            texts = [text, *HOSTILE.values()][: environment.max_turns]
            assert comparable(talk(environment, problem, texts)) == comparable(talk(environment, problem, texts))


def test_no_episode_sees_another(environment: Any, problems: list[Problem]) -> None:
    """Two episodes turn by turn beside each other say what each says alone."""
    if not environment.deterministic:
        pytest.skip("it does not claim to be deterministic")
    texts = [[kind] * environment.max_turns for kind in ("5", "cba", "")]
    for one, other in zip(problems, [*problems[1:], problems[0]], strict=True):
        for mine, theirs in zip(texts, texts[1:] + texts[:1], strict=True):
            alone = comparable(talk(environment, one, mine))
            first, second, beside = environment.episode(one), environment.episode(other), []
            going_on = True
            for text, disturbing in zip(mine, theirs, strict=True):
                beside.append(first.reply(text, StopReason.END_TOKEN))
                if going_on:
                    reply = second.reply(disturbing, StopReason.END_TOKEN)
                    going_on = reply is not None and not reply.done
                if beside[-1] is None or beside[-1].done:
                    break
            assert comparable(beside) == alone


def test_episodes_are_played_without_a_fault(environment: Any, problems: list[Problem]) -> None:
    """Through the runner, as training plays them."""
    words = character_tokenizer()
    words.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    engine = ScriptedEngine(lambda prompt, sample: ([3 + sample, 1], [-1.0, -1.0]), words.decode)
    rendering = Rendering(tokenizer=words)
    limits = Limits(max_response_tokens=2_000, end_tokens=(1,))
    runner = Runner(engine=engine, rendering=rendering, limits=limits, environment=environment)
    starts = [
        Start(problem=problem, prompt=rendering.prompt(problem), seeds=(1, 2, 3), ids=range(3 * place, 3 * place + 3))
        for place, problem in enumerate(problems)
    ]
    for row in runner.play(starts, Sampling()):
        for rollout in row:
            assert rollout.fault is None and int(rollout.turn.max()) < environment.max_turns
            assert bool(rollout.mask[0]) and bool(rollout.mask[-1])
