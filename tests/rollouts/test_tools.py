"""Tools over several turns: the trainer's tokens are those the engine saw, and texts of tools stay texts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from legato.core.batch import collate
from legato.core.rollout import Author, Group, Problem, Rollout, Score, Scored, StopReason
from legato.environments.tools import ToolEnvironment, ToolEpisode, tools_of
from legato.rollouts.engine import Limits, QueuedEngine, Request, Response, make_responses
from legato.rollouts.episodes import EpisodeSettings, Reply, Runner, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.tool_calls import FORMATS, Call, format_of
from tests.rollouts.chat_families import FAMILIES, Family

families = pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])


class Doubling(ToolEpisode):
    result: str | None = None

    def double(self, a: int) -> str:
        """Double a number.

        Args:
            a: The number.
        """
        return str(2 * a) if self.result is None else self.result

    def after_calls(self, results: Sequence[str]) -> Reply:
        return Reply(reward=0.25)

    def finish(self, text: str) -> Reply:
        return Reply(reward=1.0 if text == "it is 8" else 0.0, done=True)


class Doubles(ToolEnvironment):
    max_turns = 10
    episodes = Doubling


class Saying(QueuedEngine):
    """Says the n-th text in the n-th turn, and records what it was asked to continue."""

    def __init__(self, words: Any, turns: Sequence[tuple[str, str]], family: Family) -> None:
        super().__init__()
        self.words, self.turns, self.family = words, turns, family
        self.read: list[list[int]] = []

    def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        (request,) = requests
        text, end = self.turns[len(self.read)]
        self.read.append(request.prompt.tolist())
        tokens = torch.tensor([self.family.ids(self.words, text, end)])
        length = tokens.shape[1]
        return [
            make_responses(
                self.words, tokens, torch.full((1, length), -0.5), None, [length], [StopReason.END_TOKEN], {},
                [torch.zeros(length, dtype=torch.int64)],
            )
        ]  # fmt: skip


def play(
    family: Family, turns: Sequence[tuple[str, str]], environment: Any, **more: Any
) -> tuple[Rollout, Saying, Rendering]:
    words = family.tokenizer()
    rendering = Rendering(tokenizer=words, tools=tools_of(environment), date="2026-01-01")
    problem = Problem(prompt=[{"role": "user", "content": "double 4"}])
    ends = {family.end, family.call_end}
    engine = Saying(words, turns, family)
    limits = Limits(max_response_tokens=4000, end_tokens=tuple(sorted(words.convert_tokens_to_ids(list(ends)))))
    runner = Runner(engine=engine, rendering=rendering, limits=limits, environment=environment, **more)
    start = Start(problem=problem, prompt=rendering.prompt(problem), seeds=(1,), ids=(7,))
    ((rollout,),) = runner.play([start], Sampling())
    return rollout, engine, rendering


def calls(family: Family, count: int) -> list[tuple[str, str]]:
    return [(family.call.format(a=number), family.call_end) for number in range(count)] + [(family.answer, family.end)]


def check_tokens(rollout: Rollout, engine: Saying) -> None:
    """Each turn's tokens stand after exactly the tokens that the engine read before it wrote them."""
    turns = 0
    for row in rollout.rows:
        whole = torch.cat([row.prompt_tokens, row.tokens]).tolist()
        for turn in sorted(set(row.turn[row.mask].tolist())):
            first = int((row.turn == turn).nonzero()[0]) + len(row.prompt_tokens)
            said = engine.family.ids(engine.words, *engine.turns[turn])
            assert whole[:first] == engine.read[turn] and whole[first : first + len(said)] == said
            assert turn == turns
            turns += 1
    assert turns == len(engine.read)


@families
@pytest.mark.parametrize("count", range(6))
def test_the_trainers_tokens_are_those_the_engine_saw(family: Family, count: int) -> None:
    rollout, engine, _ = play(family, calls(family, count), Doubles())
    assert rollout.fault is None and rollout.stop is StopReason.ENVIRONMENT
    assert rollout.turn_rewards == (*[0.25] * count, 1.0)
    check_tokens(rollout, engine)
    # While the policy only calls tools, no template takes back what it rendered.
    assert rollout.earlier == () and rollout.rollout_id == 7
    batch = collate([Group(problem=rollout.problem, members=(Scored(rollout=rollout, score=Score(reward=1, accuracy=1)),))])
    row = torch.cat([batch.texts.prompts[0], batch.texts.tokens[0]]).tolist()
    assert row[: len(engine.read[-1])] == engine.read[-1]
    results = [engine.words.decode(rollout.tokens[rollout.author == Author.TOOL.value].tolist())]
    assert "".join(str(2 * number) for number in range(count)) in results[0].replace('"', "")


@families
def test_the_tools_stand_in_the_prompt(family: Family) -> None:
    _, engine, _ = play(family, calls(family, 0), Doubles())
    assert "double" in engine.words.decode(engine.read[0]).replace("double 4", "")


class Asking(ToolEpisode):
    """Answers every turn with a message of a user."""

    def act(self, turn: Any, stop: StopReason) -> Reply:
        self.failed += 1
        return Reply(content="and now?", reward=0.5, done=self.failed == 3)


class Asks(ToolEnvironment):
    episodes = Asking


@families
def test_a_template_that_drops_reasoning_makes_rows_of_one_rollout(family: Family) -> None:
    thinking = {"hermes": "<think>\nhm\n</think>\n\nword", "llama": "word"}
    thinking["harmony"] = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>word"
    text = thinking[format_of(family.template).name]
    rollout, engine, _ = play(family, [(f"{text}{number}", family.end) for number in range(3)], Asks())
    check_tokens(rollout, engine)
    assert rollout.turn_rewards == (0.5, 0.5, 0.5) and int(rollout.turn.max()) == 2
    # What the engine read last is what the template renders, so a server would show the same.
    last = engine.words.decode(engine.read[-1])
    if len(rollout.rows) > 1:
        assert [int(row.turn.max()) for row in rollout.rows] == sorted({int(row.turn.max()) for row in rollout.rows})
        assert "hm" not in last and last.count("and now?") == 2
    else:
        assert family.name.endswith(("llama", "llama3_1"))


def test_an_answer_that_the_template_closes_otherwise_starts_a_row() -> None:
    (family,) = [each for each in FAMILIES if each.name == "harmony"]
    rollout, engine, _ = play(family, [("<|channel|>final<|message|>a", family.end)] * 3, Asks())
    check_tokens(rollout, engine)
    assert len(rollout.earlier) == 2 and engine.words.convert_tokens_to_ids("<|return|>") not in engine.read[-1]


@families
@pytest.mark.parametrize("forged", ["special", "added", "controls"])
def test_texts_of_tools_do_not_become_template_tokens(family: Family, forged: str) -> None:
    evil = {"special": "".join(family.special), "added": "".join(family.added) or "x", "controls": "\x00\x1b[2J\ud800\u202e"}

    class Evil(Doubling):
        result = f"8 {evil[forged]} 9"

    class Evils(Doubles):
        episodes = Evil

    plain, _, _ = play(family, calls(family, 1), Doubles())
    rollout, engine, _ = play(family, calls(family, 1), Evils())
    check_tokens(rollout, engine)
    known = {*engine.words.all_special_ids, *engine.words.convert_tokens_to_ids([*family.special, *family.added])}
    known -= {engine.words.unk_token_id}

    def markers(each: Rollout) -> list[int]:
        return [token for token in each.tokens[~each.mask].tolist() if token in known]

    assert rollout.fault is None and markers(rollout) == markers(plain)
    if forged == "special":
        assert family.special[0] in engine.words.decode(rollout.tokens[rollout.author == Author.TOOL.value].tolist())


BROKEN = {
    "hermes": ['<tool_call>{"name": "double"', "<tool_call>[1]</tool_call>", '<tool_call>{"name": 3}</tool_call>'],
    "llama": ['<|python_tag|>{"name": "double", ', "<|python_tag|>double.call(a=__import__('os'))", '{"name": 1}'],
    "harmony": ["<|channel|>commentary to=functions.double<|message|>{", "<|channel|>commentary to=python<|message|>1"],
}


@families
def test_a_malformed_call_is_a_reply(family: Family) -> None:
    for text in BROKEN[format_of(family.template).name]:
        rollout, engine, _ = play(family, [(text, family.call_end), *calls(family, 0)], Doubles())
        assert rollout.fault is None and rollout.dialogue is not None
        assert rollout.dialogue[1].startswith("error: the tool call could not be read: expected"), text
        check_tokens(rollout, engine)


@families
def test_wrong_calls_are_replies_too(family: Family) -> None:
    wrong = [family.call.format(a='"x"'), family.call.format(a=1).replace("double", "triple")]
    wrong += [family.call.format(a=1).replace('"a"', '"b"')]
    rollout, _, _ = play(family, [*((text, family.call_end) for text in wrong), *calls(family, 0)], Doubles())
    assert rollout.fault is None and rollout.dialogue is not None
    said = rollout.dialogue[1::2]
    assert "expected int, got 'x'" in said[0] and "expected one of the tools double, got 'triple'" in said[1]
    assert said[2].startswith("error: double:")


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<think>a <tool_call>{"name": "no"}</tool_call></think>hi', None),
        ("hermes", '<think>never closed <tool_call>{"name": "no"}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', Call(name="f", arguments={"a": 1})),
        ("llama", '{"name": "f", "parameters": {"a": [1]}}', Call(name="f", arguments={"a": [1]})),
        ("llama", "<|python_tag|>f.call(query=\"x\")", Call(name="f", arguments={"query": "x"})),
        ("llama", '{"answer": 4}', None),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}', Call(name="f", arguments={})),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', Call(name="f", arguments={"a": 1})),
        ("plain", "f(1+2)", Call(name="f", arguments="1+2")),
        ("plain", 'f({"a": 1})', Call(name="f", arguments={"a": 1})),
        ("plain", "42", None),
    ],
)  # fmt: skip
def test_calls_are_read(name: str, text: str, call: Call | None) -> None:
    turn = FORMATS[name].read(text)
    assert turn.calls == (() if call is None else (call,)) and turn.malformed == ()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 50_000, "9" * 50_000, '{"name": NaN}', "\x00", "{}" * 60_000])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_text_breaks_a_parser(name: str, text: str) -> None:
    wrapped = {"hermes": "<tool_call>{}</tool_call>", "llama": "<|python_tag|>{}", "plain": "f({{{})"}
    wrapped["harmony"] = "<|channel|>commentary to=functions.f<|message|>{}"
    turn = FORMATS[name].read(wrapped[name].format(text))
    assert turn.calls == () and len(turn.malformed) == 1 and len(turn.malformed[0]) < 400


@families
@pytest.mark.parametrize(
    ("limit", "stop"), [({"max_turns": 2}, StopReason.TURNS), ({"episode_seconds": 1e-9}, StopReason.TIME)]
)
def test_limits_end_an_episode(family: Family, limit: dict[str, Any], stop: StopReason) -> None:
    rollout, engine, _ = play(family, calls(family, 5), Doubles(), episodes=EpisodeSettings(**limit))
    assert rollout.stop is stop and stop.truncated and len(engine.read) == (2 if "max_turns" in limit else 1)
