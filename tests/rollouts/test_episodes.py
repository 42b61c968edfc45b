"""The runner of episodes: who wrote which token, what is submitted when, where a rollout ends, and what a fault costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.core.rollout import START_STATE, Author, Problem, Rollout, Routes, StopReason
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Engine, Finished, Handle, Limits, QueuedEngine, Request, Response
from legato.rollouts.episodes import Environment, Episode, Reply, Runner, SingleTurn, Start
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
    """Calls `answer(turn, text, stop)`; remembers the calls of each episode."""

    deterministic = True

    def __init__(self, answer: Answer, max_turns: int = 5) -> None:
        self.answer, self.max_turns = answer, max_turns
        self.heard: list[list[tuple[str, StopReason]]] = []

    def episode(self, problem: Problem) -> "Replying.One":
        self.heard.append([])
        return Replying.One(self.answer, self.heard[-1])

    class One:
        def __init__(self, answer: Answer, heard: list[tuple[str, StopReason]]) -> None:
            self.answer, self.heard = answer, heard

        def reply(self, text: str, stop: StopReason) -> Any:
            self.heard.append((text, stop))
            return self.answer(len(self.heard) - 1, text, stop)


class Speaking(ScriptedEngine):
    """Says the texts in turn, by how often a marker stands in the prompt; remembers what it was asked."""

    def __init__(self, *texts: str, marker: str = ":") -> None:
        self.asked: list[tuple[Request, Limits]] = []

        def script(prompt: list[int], sample: int) -> tuple[list[int], list[float]]:
            tokens = [*ids(texts[prompt.count(ids(marker)[0])]), END]
            return tokens, [-0.5] * len(tokens)

        super().__init__(script, WORDS.decode)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        self.asked += [(request, limits) for request in requests]
        return super().submit(requests, sampling, limits)


def runner(engine: Engine, environment: Environment, most: int = 30, **more: Any) -> Runner:
    limits = Limits(max_response_tokens=most, end_tokens=(END,))
    return Runner(engine=engine, rendering=Rendering(tokenizer=WORDS), limits=limits, environment=environment, **more)


def start(prompt: str = "2+3=", seeds: tuple[int, ...] = (11,), first: int = 0) -> Start:
    tokens = torch.tensor(ids(prompt))
    return Start(problem=Problem(prompt=prompt), prompt=tokens, seeds=seeds, ids=range(first, first + len(seeds)))


def play(this: Runner, *starts: Start) -> list[Rollout]:
    return [rollout for row in this.play(starts or [start()], Sampling()) for rollout in row]


def once(turn: int, text: str, stop: StopReason) -> Reply:
    return Reply(content="no:", reward=float(turn), state=text, done=turn == 1)


def test_a_single_turn_is_the_response_itself() -> None:
    engine = Speaking("5")
    engine.version = 0
    this = runner(engine, SingleTurn(), version=7)
    (found,) = play(this)
    assert found.tokens.tolist() == [*ids("5"), END] and found.text == "5" and found.stop is StopReason.END_TOKEN
    assert found.turn.tolist() == [0, 0] and found.author.tolist() == [0, 0] and found.mask.all()
    assert found.version.tolist() == [7, 7] and found.temperature == 1.0
    assert (found.turn_rewards, found.turn_states, found.dialogue, found.fault) == (None, None, None, None)


def test_every_token_has_its_author_turn_and_version() -> None:
    (found,) = play(runner(Speaking("5", "66"), Replying(once), version=3))
    policy, environment = Author.POLICY.value, Author.TOOL.value
    assert found.tokens.tolist() == [*ids("5"), END, *ids("no:"), *ids("66"), END]
    assert found.mask.tolist() == [True, True, False, False, False, True, True, True]
    assert found.turn.tolist() == [0, 0, -1, -1, -1, 1, 1, 1]
    assert found.author.tolist() == [policy] * 2 + [environment] * 3 + [policy] * 3
    assert found.version.tolist() == [3, 3, -1, -1, -1, 3, 3, 3]
    assert found.sampler_logprobs[found.mask].tolist() == [-0.5] * 5
    assert found.text == "66" and found.dialogue == ("5", "no:", "66") and found.stop is StopReason.ENVIRONMENT
    assert found.turn_rewards == (0.0, 1.0) and found.turn_states == (START_STATE, seed_of(repr("5")))


def test_the_next_prompt_is_everything_so_far_and_its_seed_follows_from_the_first() -> None:
    engine = Speaking("5", "66")
    play(runner(engine, Replying(once)), start(seeds=(11, 12)))
    prompts = [request.prompt.tolist() for request, _ in engine.asked]
    assert prompts == [ids("2+3="), *[[*ids("2+3="), *ids("5"), END, *ids("no:")]] * 2]
    assert [request.seeds for request, _ in engine.asked] == [(11, 12), (seed_of("turn", 11, 1),), (seed_of("turn", 12, 1),)]


def test_what_was_sampled_is_never_tokenised_again() -> None:
    """The script writes a token that stands for no text: decoding and encoding would lose it."""
    unknown = WORDS.unk_token_id

    class Odd(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(lambda prompt, sample: ([unknown, unknown, END], [-1.0] * 3), lambda tokens: "")

    (found,) = play(runner(Odd(), Replying(once)))
    assert found.tokens.tolist() == [unknown, unknown, END, *ids("no:"), unknown, unknown, END]


def test_the_limit_is_of_the_whole_rollout() -> None:
    engine = Speaking("5", "6666")
    (found,) = play(runner(engine, Replying(once), most=7))
    assert [limits.max_response_tokens for _, limits in engine.asked] == [7, 7 - 2 - 3]
    assert len(found.tokens) == 7 and found.stop is StopReason.LENGTH and found.text == "66"
    assert found.turn_rewards == (0.0, 1.0)


def test_a_reply_behind_which_nothing_fits_is_not_written() -> None:
    (found,) = play(runner(Speaking("5", "6"), Replying(once), most=5))
    assert found.tokens.tolist() == [*ids("5"), END] and found.stop is StopReason.LENGTH
    assert found.turn_rewards == (0.0,) and found.turn.tolist() == [0, 0]


def test_a_turn_that_ran_out_of_tokens_is_the_last_and_still_rewarded() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", reward=0.25))
    (found,) = play(runner(Speaking("5555"), environment, most=3))
    assert environment.heard == [[("555", StopReason.LENGTH)]]
    assert found.turn_rewards == (0.25,) and found.stop is StopReason.LENGTH


def test_an_episode_ends_after_its_most_turns() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:"), max_turns=2)
    (found,) = play(runner(Speaking("5", "6", "7"), environment))
    assert int(found.turn.max()) == 1 and found.stop is StopReason.ENVIRONMENT and found.turn_rewards is None


def test_a_none_ends_an_episode_and_rewards_nothing() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", reward=0.5) if turn == 0 else None)
    (found,) = play(runner(Speaking("5", "6"), environment))
    assert found.turn_rewards == (0.5, 0.0) and found.stop is StopReason.END_TOKEN


def test_a_state_without_a_name_is_shared_with_nobody() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content="no:", done=turn == 1))
    rollouts = play(runner(Speaking("5", "6"), environment), start(seeds=(1, 2)))
    states = [rollout.turn_states for rollout in rollouts]
    assert [each[0] for each in states if each] == [START_STATE] * 2 and len({each[1] for each in states if each}) == 2


def odd(content: Any) -> Reply:
    """A reply past the checks of types that tests have and runs have not."""
    reply = Reply()
    object.__setattr__(reply, "content", content)
    return reply


def raising(turn: int, text: str, stop: StopReason) -> Reply:
    raise RuntimeError("the tool is down")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raising, "environment: RuntimeError: the tool is down"),
        (lambda turn, text, stop: "no:", "environment: expected a Reply or None, got 'no:'"),
        (lambda turn, text, stop: Reply(reward=float("nan")), "environment: expected a finite reward or None, got nan"),
        (lambda turn, text, stop: odd(5), "environment: expected text or chat messages, got 5"),
        (lambda turn, text, stop: odd(["no"]), "environment: expected text or chat messages, got ['no']"),
        (lambda turn, text, stop: Reply(reward=True), "environment: expected a finite reward or None, got True"),
    ],
)
def test_an_episode_that_fails_costs_its_rollout_and_no_other(answer: Answer, reason: str) -> None:
    def second_fails(turn: int, text: str, stop: StopReason) -> Any:
        return answer(turn, text, stop) if text == "6" else Reply(content="no:", reward=0.0)

    class Two(QueuedEngine):
        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            said = lambda seed: "6" if seed == 2 else "5"  # noqa: E731
            return [[response(said(seed)) for seed in request.seeds] for request in requests]

    rollouts = play(runner(Two(), Replying(second_fails, max_turns=2)), start(seeds=(1, 2)))
    assert [rollout.fault for rollout in rollouts] == [None, reason]
    assert len(rollouts[0].tokens) == 7 and rollouts[1].tokens.tolist() == [*ids("6"), END]


def test_an_environment_that_makes_no_episode_costs_the_rollout() -> None:
    class Closed:
        max_turns, deterministic = 2, True

        def episode(self, problem: Problem) -> Episode:
            raise OSError("no more games")

    (found,) = play(runner(Speaking("5"), Closed()))
    assert found.fault == "environment: OSError: no more games" and len(found.tokens) == 2


def response(text: str, **more: Any) -> Response:
    tokens = torch.tensor([*ids(text), END])
    given = {"kept_logmass": None, "stop": StopReason.END_TOKEN, "version": torch.zeros(len(tokens), dtype=torch.int64)}
    given |= {"text": text, **more}
    return Response(tokens=tokens, logprobs=torch.full((len(tokens),), -0.5), **given)


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
            return [Finished(handle=handle, responses=[response("5") for _ in request.seeds])]

    engine = OneAtATime()
    rollouts = play(runner(engine, Replying(once)), start("1+1=", (1,), 0), start("2+2=", (2,), 5))
    assert [rollout.rollout_id for rollout in rollouts] == [0, 5]
    assert [str(rollout.problem.prompt) for rollout in rollouts] == ["1+1=", "2+2="]
    assert all(len(rollout.tokens) == 7 for rollout in rollouts)
    # The second turn of the last problem is submitted while the first turn of the other one is waiting.
    assert engine.log[:3] == [("submit", 2), ("finish", 1), ("submit", 1)]


def test_each_turn_has_the_room_that_its_own_rollout_has_left() -> None:
    class ByNumber(QueuedEngine):
        """First turns of 1 and 5 tokens; then as many as there is room for."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[int, int]] = []

        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            self.calls.append((len(requests), limits.max_response_tokens))
            if len(self.calls) == 1:
                return [
                    [response(text, kept_logmass=-torch.ones(len(text) + 1)) for text in ("1", "22222")] for _ in requests
                ]
            most = limits.max_response_tokens
            given = {"kept_logmass": torch.linspace(-2, 0, most), "stop": StopReason.LENGTH, "version": torch.arange(most)}
            return [[replace(response("9" * (most - 1)), **given)] for _ in requests]

    engine = ByNumber()
    short, long = play(runner(engine, Replying(once), most=12), start(seeds=(1, 2)))
    assert engine.calls == [(1, 12), (1, 12 - 2 - 3), (1, 12 - 6 - 3)]
    assert len(short.tokens) == len(long.tokens) == 12
    assert long.stop is StopReason.LENGTH and long.version.tolist()[-3:] == [0, 1, 2]
    assert short.kept_logmass is not None and short.kept_logmass[:5].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0]


def test_requests_are_given_up_where_the_runner_fails() -> None:
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
        play(runner(engine, SingleTurn()), start("1+1="), start("2+2="))
    assert engine.given_up == 2


def test_routes_of_several_turns_are_those_of_the_first_reading() -> None:
    class Recording(Speaking):
        def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
            rows = super().respond(requests, sampling, limits)
            call = 1 + (len(requests[0].prompt) > 4)
            found = []
            for request, row in zip(requests, rows, strict=True):
                read = [torch.cat([request.prompt, each.tokens])[:-1] for each in row]
                routes = [Routes(tokens=r, experts=torch.full((len(r), 2, 1), call), count=4) for r in read]
                found.append([replace(each, routes=r) for each, r in zip(row, routes, strict=True)])
            return found

    (rollout,) = play(runner(Recording("5", "66"), Replying(once)))
    assert rollout.routes is not None
    assert rollout.routes.tokens.tolist() == torch.cat([rollout.prompt_tokens, rollout.tokens])[:-1].tolist()
    # Four of the prompt and one of the first turn were read by the first call; its end token and the rest by the second.
    assert rollout.routes.experts[:, 0, 0].tolist() == [1] * 5 + [2] * 6


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('=')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chatting(template: str) -> Rendering:
    words = character_tokenizer()
    words.chat_template = template
    return Rendering(tokenizer=words)


def test_a_chat_template_adds_only_what_follows_the_turn() -> None:
    rendering, problem = chatting(TEMPLATE), Problem(prompt="2+3=")
    prompt = rendering.prompt(problem)
    engine = Speaking("5", "6 ", marker=":")
    this = replace(runner(engine, Replying(once), most=80), rendering=rendering)
    (found,) = play(this, replace(start(), prompt=prompt))
    suffix = [*ids("<user>no:"), END, *ids("<assistant>")]
    # The end token that the policy wrote is the template's own: it stands there once.
    assert found.tokens.tolist() == [*ids("5"), END, *suffix, *ids("6 "), END]
    inside = found.author[~found.mask].tolist()
    tool, template = Author.TOOL.value, Author.TEMPLATE.value
    assert inside == [template] * len("<user>") + [tool] * len("no:") + [template] * (1 + len("<assistant>"))
    whole = rendering.tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no:"}],
        add_generation_prompt=True, tokenize=True, return_dict=True,
    )["input_ids"]  # fmt: skip
    assert engine.asked[1][0].prompt.tolist() == whole


def test_a_third_turn_knows_what_was_said_before() -> None:
    rendering = chatting(TEMPLATE)
    engine = Speaking("5", " 6", "7")
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": f"no{turn}:"}]), max_turns=3)
    (found,) = play(replace(runner(engine, environment, most=90), rendering=rendering), start())
    assert found.dialogue == ("5", "no0:", " 6", "no1:", "7") and int(found.turn.max()) == 2
    written = WORDS.decode(found.tokens[~found.mask].tolist(), skip_special_tokens=True)
    assert written == "<tool>no0:<assistant><tool>no1:<assistant>"


def test_a_template_that_changes_earlier_turns_is_refused_by_name() -> None:
    this = replace(runner(Speaking("1=5", "6"), Replying(once), most=80), rendering=chatting(FORGETFUL))
    with pytest.raises(ValueError, match="expected a chat template that leaves earlier turns as they were"):
        play(this)


def test_a_template_that_refuses_messages_is_named() -> None:
    refusing = TEMPLATE.replace("<{{ m.role }}>", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": "no"}]))
    with pytest.raises(ValueError, match=r"got user, assistant, tool .*no tools"):
        play(replace(runner(Speaking("5", "6"), environment), rendering=chatting(refusing)))


def test_a_whole_number_is_a_reward() -> None:
    (found,) = play(runner(Speaking("5"), Replying(lambda turn, text, stop: Reply(reward=1, done=True))))
    assert found.turn_rewards == (1.0,) and type(found.turn_rewards[0]) is float


def test_chat_messages_need_a_template() -> None:
    environment = Replying(lambda turn, text, stop: Reply(content=[{"role": "tool", "content": "no"}]))
    with pytest.raises(ValueError, match="expected replies of text"):
        play(runner(Speaking("5", "6"), environment))
