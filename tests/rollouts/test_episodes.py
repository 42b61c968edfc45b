"""The episode runner: the author of each token, when requests are submitted, where a rollout ends, and faults."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.core.rollout import START_STATE, Author, Problem, Rollout, Routes, StopReason
from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Engine, Finished, Handle, Limits, QueuedEngine, Request, Response
from legato.rollouts.episodes import Environment, Episode, Reply, Runner, SingleTurn, Start, _ask, divide_into_steps
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine

WORDS = character_tokenizer()
END = 1
Answer = Callable[[int, str, StopReason], Any]


def ids(text: str) -> list[int]:
    return list(WORDS(text)["input_ids"])


class Replying:
    """An environment that replies with `answer(turn, text, stop)` and records the calls of each episode."""

    deterministic = True

    def __init__(self, answer: Answer, max_turns: int = 5) -> None:
        self.answer, self.max_turns = answer, max_turns
        self.calls: list[list[tuple[str, StopReason]]] = []

    def episode(self, problem: Problem) -> "Replying.One":
        self.calls.append([])
        return Replying.One(self.answer, self.calls[-1])

    class One:
        def __init__(self, answer: Answer, calls: list[tuple[str, StopReason]]) -> None:
            self.answer, self.calls = answer, calls

        def reply(self, text: str, stop: StopReason) -> Any:
            self.calls.append((text, stop))
            return self.answer(len(self.calls) - 1, text, stop)


class Speaking(ScriptedEngine):
    """Responds with the n-th text if the prompt contains the marker n times; records submitted requests."""

    def __init__(self, *texts: str, marker: str = ":") -> None:
        self.submitted: list[tuple[Request, Limits]] = []

        def script(prompt: list[int], sample: int) -> tuple[list[int], list[float]]:
            tokens = [*ids(texts[prompt.count(ids(marker)[0])]), END]
            return tokens, [-0.5] * len(tokens)

        super().__init__(script, WORDS.decode)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        self.submitted += [(request, limits) for request in requests]
        return super().submit(requests, sampling, limits)


def make_runner(engine: Engine, environment: Environment, most: int = 30, **more: Any) -> Runner:
    limits = Limits(max_response_tokens=most, end_tokens=(END,))
    return Runner(engine=engine, rendering=Rendering(tokenizer=WORDS), limits=limits, environment=environment, **more)


def make_start(prompt: str = "2+3=", seeds: tuple[int, ...] = (11,), first: int = 0) -> Start:
    tokens = torch.tensor(ids(prompt))
    return Start(problem=Problem(prompt=prompt), prompt=tokens, seeds=seeds, ids=range(first, first + len(seeds)))


def play(runner: Runner, *starts: Start) -> list[Rollout]:
    return [rollout for row in runner.play(starts or [make_start()], Sampling()) for rollout in row]


def reply_twice(turn: int, text: str, stop: StopReason) -> Reply:
    return Reply(content="no:", reward=float(turn), state=text, done=turn == 1)


def test_a_single_turn_is_the_response_itself() -> None:
    engine = Speaking("5")
    engine.version = 0
    runner = make_runner(engine, SingleTurn(), version=7)
    (rollout,) = play(runner)
    assert rollout.tokens.tolist() == [*ids("5"), END] and rollout.text == "5" and rollout.stop is StopReason.END_TOKEN
    assert rollout.turn.tolist() == [0, 0] and rollout.author.tolist() == [0, 0] and rollout.mask.all()
    assert rollout.version.tolist() == [7, 7] and rollout.temperature == 1.0
    assert (rollout.turn_rewards, rollout.turn_states, rollout.dialogue, rollout.fault) == (None, None, None, None)


def test_every_token_has_its_author_turn_and_version() -> None:
    (rollout,) = play(make_runner(Speaking("5", "66"), Replying(reply_twice), version=3))
    policy, environment = Author.POLICY.value, Author.TOOL.value
    assert rollout.tokens.tolist() == [*ids("5"), END, *ids("no:"), *ids("66"), END]
    assert rollout.mask.tolist() == [True, True, False, False, False, True, True, True]
    assert rollout.turn.tolist() == [0, 0, -1, -1, -1, 1, 1, 1]
    assert rollout.author.tolist() == [policy] * 2 + [environment] * 3 + [policy] * 3
    assert rollout.version.tolist() == [3, 3, -1, -1, -1, 3, 3, 3]
    assert rollout.sampler_logprobs[rollout.mask].tolist() == [-0.5] * 5
    assert rollout.text == "66" and rollout.dialogue == ("5", "no:", "66") and rollout.stop is StopReason.ENVIRONMENT
    assert rollout.turn_rewards == (0.0, 1.0) and rollout.turn_states == (START_STATE, seed_of(repr("5")))


def test_the_next_prompt_is_the_whole_text_so_far_and_its_seed_follows_from_the_first() -> None:
    engine = Speaking("5", "66")
    play(make_runner(engine, Replying(reply_twice)), make_start(seeds=(11, 12)))
    prompts = [request.prompt.tolist() for request, _ in engine.submitted]
    assert prompts == [ids("2+3="), *[[*ids("2+3="), *ids("5"), END, *ids("no:")]] * 2]
    assert [request.seeds for request, _ in engine.submitted] == [
        (11, 12),
        (seed_of("turn", 11, 1),),
        (seed_of("turn", 12, 1),),
    ]


def test_sampled_tokens_are_never_tokenised_again() -> None:
    """The script writes a token without text, which decoding and encoding again would lose."""
    unknown = WORDS.unk_token_id

    class Odd(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(lambda prompt, sample: ([unknown, unknown, END], [-1.0] * 3), lambda tokens: "")

    (rollout,) = play(make_runner(Odd(), Replying(reply_twice)))
    assert rollout.tokens.tolist() == [unknown, unknown, END, *ids("no:"), unknown, unknown, END]


def test_the_token_limit_covers_the_whole_rollout() -> None:
    engine = Speaking("5", "6666")
    (rollout,) = play(make_runner(engine, Replying(reply_twice), most=7))
    assert [limits.max_response_tokens for _, limits in engine.submitted] == [7, 7 - 2 - 3]
    assert len(rollout.tokens) == 7 and rollout.stop is StopReason.LENGTH and rollout.text == "66"
    assert rollout.turn_rewards == (0.0, 1.0)


def test_a_reply_that_leaves_no_room_for_another_turn_is_dropped() -> None:
    (rollout,) = play(make_runner(Speaking("5", "6"), Replying(reply_twice), most=5))
    assert rollout.tokens.tolist() == [*ids("5"), END] and rollout.stop is StopReason.LENGTH
    assert rollout.turn_rewards == (0.0,) and rollout.turn.tolist() == [0, 0]


def test_a_turn_that_ran_out_of_tokens_is_the_last_and_still_rewarded() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", reward=0.25))
    (rollout,) = play(make_runner(Speaking("5555"), environment, most=3))
    assert environment.calls == [[("555", StopReason.LENGTH)]]
    assert rollout.turn_rewards == (0.25,) and rollout.stop is StopReason.LENGTH


def test_an_episode_ends_after_max_turns() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:"), max_turns=2)
    (rollout,) = play(make_runner(Speaking("5", "6", "7"), environment))
    assert int(rollout.turn.max()) == 1 and rollout.stop is StopReason.ENVIRONMENT and rollout.turn_rewards is None


def test_a_reply_of_none_ends_an_episode_without_reward() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", reward=0.5) if turn == 0 else None)
    (rollout,) = play(make_runner(Speaking("5", "6"), environment))
    assert rollout.turn_rewards == (0.5, 0.0) and rollout.stop is StopReason.END_TOKEN


def test_replies_without_a_state_get_a_state_of_their_own() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", done=turn == 1))
    rollouts = play(make_runner(Speaking("5", "6"), environment), make_start(seeds=(1, 2)))
    states = [rollout.turn_states for rollout in rollouts]
    assert [each[0] for each in states if each] == [START_STATE] * 2 and len({each[1] for each in states if each}) == 2


def unchecked_reply(content: Any) -> Reply:
    """A reply with unchecked content, since tests check types and runs do not."""
    reply = Reply()
    object.__setattr__(reply, "content", content)
    return reply


def raise_error(turn: int, text: str, stop: StopReason) -> Reply:
    raise RuntimeError("the tool is down")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raise_error, "environment: RuntimeError: the tool is down"),
        (lambda turn, text, stop: "no:", "environment: expected a Reply or None, got 'no:'"),
        (lambda turn, text, stop: Reply(reward=float("nan")), "environment: expected a finite reward or None, got nan"),
        (lambda turn, text, stop: unchecked_reply(5), "environment: expected text or chat messages, got 5"),
        (lambda turn, text, stop: unchecked_reply(["no"]), "environment: expected text or chat messages, got ['no']"),
        (lambda turn, text, stop: Reply(reward=True), "environment: expected a finite reward or None, got True"),
    ],
)
def test_a_failing_episode_faults_only_its_own_rollout(answer: Answer, reason: str) -> None:
    def second_fails(turn: int, text: str, stop: StopReason) -> Any:
        return answer(turn, text, stop) if text == "6" else Reply(content="no:", reward=0.0)

    class Two(QueuedEngine):
        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            text_of = lambda seed: "6" if seed == 2 else "5"  # noqa: E731
            return [[make_response(text_of(seed)) for seed in request.seeds] for request in requests]

    rollouts = play(make_runner(Two(), Replying(second_fails, max_turns=2)), make_start(seeds=(1, 2)))
    assert [rollout.fault for rollout in rollouts] == [None, reason]
    assert len(rollouts[0].tokens) == 7 and rollouts[1].tokens.tolist() == [*ids("6"), END]


def leave(turn: int, text: str, stop: StopReason) -> Reply:
    raise SystemExit(0)


def hang(turn: int, text: str, stop: StopReason) -> Reply:
    while True:
        time.sleep(1)


def answer_with_hanging_repr(turn: int, text: str, stop: StopReason) -> Reply:
    class State:
        def __repr__(self) -> str:
            return hang(turn, text, stop).content  # type: ignore[return-value]

    return Reply(content="no:", state=State())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (leave, "SystemExit: 0"),
        (hang, "timed out after 0.2 s"),
        (answer_with_hanging_repr, "timed out after 0.2 s"),
    ],
)
def test_an_environment_that_exits_or_hangs_costs_its_rollout(answer: Answer, reason: str) -> None:
    (rollout,) = play(make_runner(Speaking("5", "6"), Replying(answer), environment_seconds=0.2))
    assert rollout.fault == f"environment: {reason}"


def test_an_environment_cannot_alter_a_problem_or_its_earlier_messages() -> None:
    """It keeps what it was given and what it returned, and alters both."""
    problem = Problem(prompt="2+3=", fields={"moves": [1]})
    folder = os.getcwd()

    class Meddling(Replying):
        def episode(self, problem: Problem) -> "Replying.One":
            problem.fields["moves"].append(2)
            os.chdir("/")
            return super().episode(problem)

    message = {"role": "user", "content": "no:"}
    answer = _ask(Replying(lambda turn, text, stop: Reply(content=[message])).episode(problem), "5", StopReason.END_TOKEN)
    message["content"] = "yes:"
    assert answer is not None and answer.content == [{"role": "user", "content": "no:"}]
    start = replace(make_start(), problem=problem)
    play(make_runner(Speaking("5", "6"), Meddling(reply_twice)), start)
    assert problem.fields == {"moves": [1]} and os.getcwd() == folder


def test_a_number_of_turns_that_cannot_be_read_is_an_error_of_the_environment() -> None:
    leaving: list[bool] = []  # the shape checks of the tests read it as well

    class Broken(Replying):
        @property
        def max_turns(self) -> int:
            if leaving:
                raise SystemExit(0)
            return 2

        @max_turns.setter
        def max_turns(self, value: int) -> None:
            pass

    runner = make_runner(Speaking("5", "6"), Broken(reply_twice))
    leaving.append(True)
    with pytest.raises(InputError, match=r"got SystemExit: 0 \(max_turns of the environment\)"):
        play(runner)


def test_an_environment_that_cannot_start_an_episode_faults_the_rollout() -> None:
    class Closed:
        max_turns, deterministic = 2, True

        def episode(self, problem: Problem) -> Episode:
            raise OSError("no more games")

    (rollout,) = play(make_runner(Speaking("5"), Closed()))
    assert rollout.fault == "environment: OSError: no more games" and len(rollout.tokens) == 2


def make_response(text: str, **more: Any) -> Response:
    tokens = torch.tensor([*ids(text), END])
    fields = {"kept_logmass": None, "stop": StopReason.END_TOKEN, "version": torch.zeros(len(tokens), dtype=torch.int64)}
    fields |= {"text": text, **more}
    return Response(tokens=tokens, logprobs=torch.full((len(tokens),), -0.5), **fields)


def test_a_turn_is_submitted_while_other_episodes_still_decode() -> None:
    class OneAtATime(Engine):
        """Finishes the request that was submitted last first."""

        def __init__(self) -> None:
            self.waiting: list[tuple[Handle, Request]] = []
            self.log: list[tuple[str, int]] = []

        def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
            self.log.append(("submit", len(requests)))
            handles = [Handle(len(self.log) * 100 + place) for place in range(len(requests))]
            self.waiting += zip(handles, requests, strict=True)
            return handles

        def poll(self) -> list[Finished]:
            handle, request = self.waiting.pop()
            self.log.append(("finish", len(self.waiting)))
            return [Finished(handle=handle, responses=[make_response("5") for _ in request.seeds])]

    engine = OneAtATime()
    rollouts = play(make_runner(engine, Replying(reply_twice)), make_start("1+1=", (1,), 0), make_start("2+2=", (2,), 5))
    assert [rollout.rollout_id for rollout in rollouts] == [0, 5]
    assert [str(rollout.problem.prompt) for rollout in rollouts] == ["1+1=", "2+2="]
    assert all(len(rollout.tokens) == 7 for rollout in rollouts)
    # The second turn of the last problem is submitted while the first turn of the other problem waits.
    assert engine.log[:3] == [("submit", 2), ("finish", 1), ("submit", 1)]


def test_each_turn_is_limited_by_the_tokens_its_own_rollout_has_left() -> None:
    class ByNumber(QueuedEngine):
        """First turns of 1 and 5 characters; later turns use all remaining tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[int, int]] = []

        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            self.calls.append((len(requests), limits.max_response_tokens))
            if len(self.calls) == 1:
                return [
                    [make_response(text, kept_logmass=-torch.ones(len(text) + 1)) for text in ("1", "22222")]
                    for _ in requests
                ]
            most = limits.max_response_tokens
            fields = {"kept_logmass": torch.linspace(-2, 0, most), "stop": StopReason.LENGTH, "version": torch.arange(most)}
            return [[replace(make_response("9" * (most - 1)), **fields)] for _ in requests]

    engine = ByNumber()
    short, long = play(make_runner(engine, Replying(reply_twice), most=12), make_start(seeds=(1, 2)))
    assert engine.calls == [(1, 12), (1, 12 - 2 - 3), (1, 12 - 6 - 3)]
    assert len(short.tokens) == len(long.tokens) == 12
    assert long.stop is StopReason.LENGTH and long.version.tolist()[-3:] == [0, 1, 2]
    assert short.kept_logmass is not None and short.kept_logmass[:5].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0]


def test_requests_are_cancelled_when_the_runner_fails() -> None:
    class Silent(Speaking):
        def __init__(self) -> None:
            super().__init__("5")
            self.given_up = 0

        def cancel(self, handle: Handle) -> None:
            self.given_up += 1
            super().cancel(handle)

        def poll(self) -> list[Finished]:
            return []

    engine = Silent()
    with pytest.raises(RuntimeError, match="with 2 requests outstanding"):
        play(make_runner(engine, SingleTurn()), make_start("1+1="), make_start("2+2="))
    assert engine.given_up == 2


def test_routes_of_several_turns_come_from_the_first_forward_of_each_token() -> None:
    class Recording(Speaking):
        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            rows = super().respond(requests, sampling, limits)
            call = 1 + (len(requests[0].prompt) > 4)
            rows_with_routes = []
            for request, row in zip(requests, rows, strict=True):
                read = [torch.cat([request.prompt, each.tokens])[:-1] for each in row]
                routes = [Routes(tokens=r, experts=torch.full((len(r), 2, 1), call), count=4) for r in read]
                rows_with_routes.append([replace(each, routes=r) for each, r in zip(row, routes, strict=True)])
            return rows_with_routes

    (rollout,) = play(make_runner(Recording("5", "66"), Replying(reply_twice)))
    assert rollout.routes is not None
    assert rollout.routes.tokens.tolist() == torch.cat([rollout.prompt_tokens, rollout.tokens])[:-1].tolist()
    # The first call read four prompt tokens and one of the first turn. The second read its end token and the rest.
    assert rollout.routes.experts[:, 0, 0].tolist() == [1] * 5 + [2] * 6


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('=')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_rendering(template: str) -> Rendering:
    words = character_tokenizer()
    words.chat_template = template
    return Rendering(tokenizer=words)


def test_a_chat_template_adds_only_the_tokens_after_the_turn() -> None:
    rendering, problem = chat_rendering(TEMPLATE), Problem(prompt="2+3=")
    prompt = rendering.prompt(problem)
    engine = Speaking("5", "6 ", marker=":")
    runner = replace(make_runner(engine, Replying(reply_twice), most=80), rendering=rendering)
    (rollout,) = play(runner, replace(make_start(), prompt=prompt))
    suffix = [*ids("<user>no:"), END, *ids("<assistant>")]
    # The policy's end token is also the template's: it appears once.
    assert rollout.tokens.tolist() == [*ids("5"), END, *suffix, *ids("6 "), END]
    inside = rollout.author[~rollout.mask].tolist()
    tool, template = Author.TOOL.value, Author.TEMPLATE.value
    assert inside == [template] * len("<user>") + [tool] * len("no:") + [template] * (1 + len("<assistant>"))
    whole = rendering.tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no:"}],
        add_generation_prompt=True, tokenize=True, return_dict=True,
    )["input_ids"]  # fmt: skip
    assert engine.submitted[1][0].prompt.tolist() == whole


def test_a_third_turn_contains_all_earlier_turns() -> None:
    rendering = chat_rendering(TEMPLATE)
    engine = Speaking("5", " 6", "7")
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": f"no{turn}:"}]), max_turns=3)
    (rollout,) = play(replace(make_runner(engine, environment, most=90), rendering=rendering), make_start())
    assert rollout.dialogue == ("5", "no0:", " 6", "no1:", "7") and int(rollout.turn.max()) == 2
    inserted = WORDS.decode(rollout.tokens[~rollout.mask].tolist(), skip_special_tokens=True)
    assert inserted == "<tool>no0:<assistant><tool>no1:<assistant>"


def test_a_template_that_changes_earlier_turns_starts_a_new_row() -> None:
    rendering = chat_rendering(FORGETFUL)
    engine = Speaking("1=5", "6")
    runner = replace(make_runner(engine, Replying(reply_twice), most=80), rendering=rendering)
    (rollout,) = play(runner, replace(make_start(), prompt=rendering.prompt(Problem(prompt="2+3="))))
    (first,) = rollout.earlier
    assert first.tokens.tolist() == [*ids("1=5"), END] and rollout.tokens.tolist() == [*ids("6"), END]
    assert first.turn.tolist() == [0] * 4 and rollout.turn.tolist() == [1] * 2 and rollout.length == 6
    # The template forgot "1=": the policy reads what it renders.
    expected = [*ids("<user>2+3="), END, *ids("<assistant>5"), END, *ids("<user>no:"), END, *ids("<assistant>")]
    assert rollout.prompt_tokens.tolist() == engine.submitted[1][0].prompt.tolist() == expected
    assert rollout.dialogue == ("1=5", "no:", "6")


def test_a_template_that_refuses_messages_costs_the_rollout_and_the_fault_lists_their_roles() -> None:
    refusing = TEMPLATE.replace("<{{ m.role }}>", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": "no"}]))
    (rollout,) = play(replace(make_runner(Speaking("5", "6"), environment), rendering=chat_rendering(refusing)))
    assert re.search(r"environment: .*got user, assistant, tool .*no tools", rollout.fault or "")


def test_a_whole_number_is_a_reward() -> None:
    (rollout,) = play(make_runner(Speaking("5"), Replying(lambda turn, text, stop: Reply(reward=1, done=True))))
    assert rollout.turn_rewards == (1.0,) and type(rollout.turn_rewards[0]) is float


def test_chat_messages_need_a_template_and_cost_their_rollout_without() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": "no"}]))
    (rollout,) = play(make_runner(Speaking("5", "6"), environment))
    assert (rollout.fault or "").startswith("environment: expected replies of text, got chat messages")


@pytest.mark.parametrize(
    ("said", "steps", "texts"),
    [
        ("ab;c;d", [0, 0, 0, 1, 1, 2, 2], ["ab;", "c;", "d"]),
        ("ab;c;", [0, 0, 0, 1, 1, 1], ["ab;", "c;"]),
        ("abc", [0, 0, 0, 0], ["abc"]),
        (";;", [0, 1, 1], [";", ";"]),
    ],
)
def test_a_response_is_divided_into_steps(said: str, steps: list[int], texts: list[str]) -> None:
    words = character_tokenizer()
    tokens = torch.tensor([*words(said, add_special_tokens=False)["input_ids"], words.eos_token_id])
    divided, parts = divide_into_steps(tokens, words, ";")
    assert divided.tolist() == steps and parts == texts
