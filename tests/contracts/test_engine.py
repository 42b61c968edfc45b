"""What every engine must do. On an engine of your own:

    python -m pytest tests/contracts/test_engine.py --engine my_engine.py:MyEngine

`MyEngine` has `build(policy, options)`, as `rollouts.engine` wants it. Each test says in its name what it demands. Log-probs
may differ between batches by BETWEEN_BATCHES, and from the policy's own score by the tolerance of its dtype.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.core.parts import names
from legato.core.rollout import StopReason
from legato.policy.layout.packs import Texts
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.selfcheck import tolerance
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Policy
from legato.rollouts import registry
from legato.rollouts.engine import Capabilities, Engine, Finished, Handle, Limits, Partial, Progress, Request, Response
from legato.rollouts.registry import EngineOptions, build_engine
from legato.rollouts.sampling import Sampling
from legato.serve.packages import has_server_packages

BETWEEN_BATCHES = 1e-4
"""How far the log-prob of one token may move when other rows are decoded beside it (float32)."""
PIPED = f"{Path(__file__).parents[2] / 'examples' / 'piped_engine.py'}:PipedEngine"
SLOTS = "slots"
"""The engine of a GPU, its kernels replaced by torch and its graphs switched off."""

FLEET = "fleet"
"""Two `legato serve` in this process, and the engine that spreads requests over them."""

LIMITS = Limits(max_response_tokens=12, end_tokens=(1,))


def random_policy(kind: str = "tiny") -> Policy:
    """A tiny model with larger random weights: its distributions are neither flat nor certain."""
    policy = load_policy(kind, Loading(device="cpu", dtype="float32", tiny=TinyShape(hidden=32, heads=2, experts=4)))
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.08 * torch.randn(weight.shape, generator=source))
    return policy


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine that is checked, and the policy it samples from."""

    policy: Policy
    engine: Engine

    def ask(self, *requests: Request, sampling: Sampling | None = None, limits: Limits = LIMITS) -> list[list[Response]]:
        handles = self.engine.submit(list(requests), sampling or Sampling(), limits)
        by_handle = {one.handle: one.responses for one in poll_until_idle(self.engine)}
        assert set(by_handle) == set(handles)
        return [by_handle[handle] for handle in handles]

    def publish(self, version: int) -> None:
        self.engine.publish(self.policy.model.named_parameters(), version)


def subjects(config: pytest.Config) -> list[str]:
    own = config.getoption("--engine", default=None)
    if own is not None:
        return [own]
    registry._register_engines()
    own = [name for name in names("engine") if not registry.is_remote(name)]
    return [*own, PIPED, *([SLOTS] if find_spec("triton") else []), *([FLEET] if has_server_packages() else [])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        listed = subjects(metafunc.config)
        metafunc.parametrize("subject", listed, indirect=True, ids=lambda name: str(name).split("/")[-1], scope="module")


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    policy = random_policy()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        yield Subject(policy, start_engine(request.param, policy, patch, stack))


def start_engine(name: str, policy: Policy, patch: pytest.MonkeyPatch, stack: ExitStack, **options: Any) -> Engine:
    if name == FLEET:
        from tests.fleet.serving import fleet_of, servers

        others = [copy.deepcopy(policy) for _ in range(2)]
        started, _ = stack.enter_context(servers(others))
        return stack.enter_context(fleet_of(policy, started))
    if name != SLOTS:
        return build_engine(name, policy, EngineOptions(rows_at_once=8, **options))
    from legato.rollouts.gpu.engine import GraphedEngine
    from tests.rollouts import in_torch

    in_torch.install(patch)
    return GraphedEngine(policy, 8, graphs=False, **options)


def prompts(*lengths: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 70, (length,), generator=source) for length in lengths]


def requests(*lengths: int, each: int = 3) -> list[Request]:
    return [
        Request(prompt=prompt, seeds=tuple(range(100 * place, 100 * place + each)))
        for place, prompt in enumerate(prompts(*lengths))
    ]


def poll_until_idle(engine: Engine) -> Iterator[Finished]:
    """All outstanding requests in the order in which they finish."""
    while reported := engine.poll():
        yield from reported


def assert_same_responses(left: Sequence[Sequence[Response]], right: Sequence[Sequence[Response]]) -> None:
    assert [len(row) for row in left] == [len(row) for row in right]
    for one, other in zip(chain(*left), chain(*right), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.text, one.stop) == (other.text, other.stop)
        assert float((one.logprobs - other.logprobs).abs().max()) <= BETWEEN_BATCHES


def score_with_policy(policy: Policy, prompt: Tensor, response: Response, temperature: float) -> Tensor:
    """[T]: the log-probs of a response under the trained policy."""
    length = len(response.tokens)
    texts = Texts(
        prompts=prompt[None],
        prompt_lengths=torch.tensor([len(prompt)]),
        tokens=response.tokens[None],
        lengths=torch.tensor([length]),
        mask=torch.ones(1, length, dtype=torch.bool),
        group=torch.tensor([0]),
        temperature=torch.tensor([temperature]),
    )
    return policy.score(texts, torch.tensor([0])).logprobs[0].cpu()


def match_policy(
    subject: Subject, batch: Sequence[Request], responses: list[list[Response]], temperature: float = 1.0
) -> bool:
    """Whether all log-probs are those of the policy's current weights."""
    allowed = tolerance(torch.float32)
    gaps = [
        float((response.logprobs - score_with_policy(subject.policy, request.prompt, response, temperature)).abs().max())
        for request, row in zip(batch, responses, strict=True)
        for response in row
    ]
    return max(gaps) <= allowed


# What a response is


def test_a_response_is_tensors_of_one_length_and_the_types_training_reads(subject: Subject) -> None:
    for response in chain(*subject.ask(*requests(3, 9))):
        length = len(response.tokens)
        assert 1 <= length <= LIMITS.max_response_tokens
        assert response.tokens.shape == response.logprobs.shape == response.version.shape == (length,)
        assert (response.tokens.dtype, response.version.dtype) == (torch.int64, torch.int64)
        assert response.logprobs.dtype == torch.float32 and float(response.logprobs.max()) <= 0
        assert {tensor.device.type for tensor in (response.tokens, response.logprobs, response.version)} == {"cpu"}


def test_every_request_gets_as_many_responses_as_seeds_in_their_order(subject: Subject) -> None:
    prompt = prompts(5)[0]
    batch = [
        Request(prompt=prompt, seeds=(7, 8, 9)),
        Request(prompt=prompt, seeds=()),
        Request(prompt=prompt, seeds=(9, 8, 7)),
    ]
    forward, nothing, backward = subject.ask(*batch)
    assert nothing == [] and subject.ask() == []
    assert_same_responses([forward], [backward[::-1]])


# Randomness


def test_the_same_seeds_write_the_same_and_other_seeds_something_else(subject: Subject) -> None:
    batch = requests(3, 9)
    assert_same_responses(subject.ask(*batch), subject.ask(*batch))
    (row,) = subject.ask(Request(prompt=batch[0].prompt, seeds=(4, 4, 5, 6)))
    assert row[0].tokens.tolist() == row[1].tokens.tolist()
    assert len({tuple(response.tokens.tolist()) for response in row}) == 3


def test_greedy_responses_do_not_depend_on_the_seed(subject: Subject) -> None:
    (row,) = subject.ask(*requests(6), sampling=Sampling(temperature=0))
    assert len({tuple(response.tokens.tolist()) for response in row}) == 1


def test_neighbours_change_no_response(subject: Subject) -> None:
    batch = requests(1, 4, 9, 15, each=4)
    together = subject.ask(*batch)
    for request, row in zip(batch, together, strict=True):
        for seed, response in zip(request.seeds, row, strict=True):
            assert_same_responses(subject.ask(Request(prompt=request.prompt, seeds=(seed,))), [[response]])


# Where responses end


def test_an_end_token_ends_a_response_is_counted_and_is_no_text(subject: Subject) -> None:
    ends = (1, *range(10, 14))
    responses = list(chain(*subject.ask(*requests(4, 7, each=16), limits=Limits(max_response_tokens=12, end_tokens=ends))))
    assert {response.stop for response in responses} == {StopReason.END_TOKEN, StopReason.LENGTH}
    for response in responses:
        *before, last = response.tokens.tolist()
        ended = response.stop is StopReason.END_TOKEN
        assert not set(before) & set(ends) and (last in ends) == ended and (ended or len(before) == 11)
        text_tokens = before if ended else [*before, last]
        assert response.text == subject.policy.tokenizer.decode(text_tokens, skip_special_tokens=True)


def test_a_response_is_at_most_as_long_as_allowed(subject: Subject) -> None:
    for most in (1, 2, 9):
        for response in chain(*subject.ask(*requests(4), limits=Limits(max_response_tokens=most, end_tokens=()))):
            assert len(response.tokens) == most and response.stop is StopReason.LENGTH


def test_a_stop_string_ends_a_response_and_is_no_text(subject: Subject) -> None:
    endless = Limits(max_response_tokens=12, end_tokens=())
    batch = requests(4, each=8)
    (free,) = subject.ask(*batch, limits=endless)
    stop = free[0].text[3:5]
    (cut,) = subject.ask(*batch, limits=replace(endless, stop=("~never~", stop)))
    assert len(stop) == 2 and cut[0].stop is StopReason.STOP_STRING
    for before, after in zip(free, cut, strict=True):
        if stop not in before.text:
            assert_same_responses([[before]], [[after]])
            continue
        assert after.stop is StopReason.STOP_STRING and after.text == before.text[: before.text.index(stop)]
        count = len(after.tokens)
        assert after.tokens.tolist() == before.tokens[:count].tolist()
        # It ends with the token that completes the stop string.
        decode = subject.policy.tokenizer.decode
        assert stop in decode(after.tokens.tolist()) and stop not in decode(after.tokens[:-1].tolist())


# Log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
def test_log_probs_are_those_of_the_policy_at_the_temperature(subject: Subject, temperature: float) -> None:
    if not subject.engine.capabilities.logprobs_at_temperature:
        pytest.skip("the engine says that it cannot")
    subject.publish(subject.engine.version)
    batch = requests(1, 7, 12)
    assert match_policy(subject, batch, subject.ask(*batch, sampling=Sampling(temperature=temperature)), temperature)


def test_without_truncation_there_is_no_kept_mass(subject: Subject) -> None:
    assert all(response.kept_logmass is None for response in chain(*subject.ask(*requests(4))))


@pytest.mark.parametrize("sampling", [Sampling(top_k=5), Sampling(top_p=0.6), Sampling(min_p=0.2, temperature=0.8)], ids=str)
def test_truncation_reports_the_mass_it_kept_and_log_probs_before_it(subject: Subject, sampling: Sampling) -> None:
    if not subject.engine.capabilities.truncation:
        pytest.skip("the engine says that it cannot")
    subject.publish(subject.engine.version)
    batch = requests(2, 9)
    responses = subject.ask(*batch, sampling=sampling)
    assert match_policy(subject, batch, responses, sampling.temperature)
    for request, row in zip(batch, responses, strict=True):
        for response in row:
            assert response.kept_logmass is not None and response.kept_logmass.shape == response.logprobs.shape
            with torch.no_grad():
                logits = subject.policy.model(torch.cat([request.prompt, response.tokens])[None]).logits[0]
            each = (logits[len(request.prompt) - 1 : -1] / sampling.temperature).softmax(-1)
            for place, shares in enumerate(each):
                mass = kept_mass(shares, sampling)
                assert abs(float(response.kept_logmass[place].exp()) - mass) < 1e-3
                assert float(shares[response.tokens[place]]) > 0


def kept_mass(shares: Tensor, sampling: Sampling) -> float:
    """The probability mass that truncation keeps of a distribution, in plain Python."""
    ordered = sorted(shares.tolist(), reverse=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    ordered = [share for share in ordered if share >= sampling.min_p * ordered[0]]
    total, kept = sum(ordered), 0.0
    for share in ordered:
        if kept >= sampling.top_p * total:
            break
        kept += share
    return kept


# Requests that come and go


def test_generate_waits_for_all_of_its_requests(subject: Subject) -> None:
    batch = requests(3, 8)
    assert_same_responses(subject.engine.generate(batch, Sampling(), LIMITS), subject.ask(*batch))


def test_polling_an_idle_engine_gives_nothing(subject: Subject) -> None:
    assert subject.engine.poll() == [] and subject.engine.poll() == []


def test_requests_may_be_submitted_while_others_decode(subject: Subject) -> None:
    engine, batch = subject.engine, requests(3, 8, 5, 20, 6)
    expected = [subject.ask(request)[0] for request in batch]
    handles = engine.submit(batch[:2], Sampling(), LIMITS)
    by_handle = {one.handle: one.responses for one in engine.poll()}
    assert by_handle, "a poll with requests outstanding reports at least one"
    for request in batch[2:]:
        handles += engine.submit([request], Sampling(), LIMITS)
    for one in poll_until_idle(engine):
        assert one.handle not in by_handle, "a request is reported once"
        by_handle[one.handle] = one.responses
    assert len(set(handles)) == 5
    assert_same_responses([by_handle[handle] for handle in handles], expected)


def test_requests_that_are_sampled_differently_may_be_outstanding_together(subject: Subject) -> None:
    engine, (one, other, third) = subject.engine, requests(3, 8, 5)
    ways = [
        (one, Sampling(), LIMITS),
        (other, Sampling(temperature=0), Limits(max_response_tokens=5, end_tokens=())),
        (third, Sampling(), Limits(max_response_tokens=3, end_tokens=())),
    ]
    expected = [subject.ask(request, sampling=sampling, limits=limits)[0] for request, sampling, limits in ways]
    handles = [engine.submit([request], sampling, limits)[0] for request, sampling, limits in ways]
    by_handle = {finished.handle: finished.responses for finished in poll_until_idle(engine)}
    assert_same_responses([by_handle[handle] for handle in handles], expected)


def test_a_cancelled_request_is_not_reported_and_the_others_are(subject: Subject) -> None:
    engine, batch = subject.engine, requests(3, 8, 5)
    expected = [subject.ask(request)[0] for request in batch]
    handles = engine.submit(batch, Sampling(), LIMITS)
    engine.cancel(handles[1])
    by_handle = {one.handle: one.responses for one in poll_until_idle(engine)}
    assert set(by_handle) == {handles[0], handles[2]}
    assert_same_responses([by_handle[handles[0]], by_handle[handles[2]]], [expected[0], expected[2]])
    engine.cancel(handles[0])  # it has finished: nothing happens
    handles = engine.submit(batch[:2], Sampling(), LIMITS)
    for handle in handles:
        engine.cancel(handle)
    assert engine.poll() == []


# Decoding in pieces, for servers


def decode_until_idle(
    engine: Engine, count: int, watched: Sequence[Handle] = ()
) -> tuple[dict[tuple[Handle, int], Response], dict[tuple[Handle, int], list[Partial]]]:
    """Decode briefly until `count` responses have ended: the responses, and the reports of those still decoding."""
    responses: dict[tuple[Handle, int], Response] = {}
    reports: dict[tuple[Handle, int], list[Partial]] = {}
    for _ in range(10_000):
        progress = engine.decode_briefly(watched)
        for report in progress.partial:
            reports.setdefault((report.handle, report.place), []).append(report)
        for ended in progress.ended:
            assert (ended.handle, ended.place) not in responses, "a response is reported once"
            responses[ended.handle, ended.place] = ended.response
        if len(responses) == count:
            assert engine.decode_briefly() == Progress()
            return responses, reports
    raise AssertionError(f"{len(responses)} of {count} responses after 10,000 rounds")


def test_decoding_briefly_gives_the_responses_of_polling(subject: Subject) -> None:
    batch = requests(3, 8, 5)
    expected = subject.ask(*batch)
    handles = subject.engine.submit(batch, Sampling(), LIMITS)
    responses, reports = decode_until_idle(subject.engine, 9)
    assert reports == {}, "nothing is watched"
    assert_same_responses([[responses[handle, place] for place in range(3)] for handle in handles], expected)
    assert subject.engine.decode_briefly(handles) == Progress(), "the engine is idle"


def test_requests_join_and_leave_between_any_two_tokens(subject: Subject) -> None:
    engine, batch = subject.engine, requests(3, 8, 5, 14, 2)
    expected = [subject.ask(request)[0] for request in batch]
    handles, responses = [], {}
    for number, request in enumerate(batch):
        handles += engine.submit([request], Sampling(), LIMITS)
        if number == 3:
            engine.cancel(handles[1])
        responses |= {(ended.handle, ended.place): ended.response for ended in engine.decode_briefly().ended}
    early = sum(handle == handles[1] for handle, _ in responses)
    left = 15 - len(responses) - (3 - early)
    if left:
        responses |= decode_until_idle(engine, left)[0]
    for handle, row in zip(handles, expected, strict=True):
        if handle != handles[1]:
            assert_same_responses([[responses[handle, place] for place in range(3)]], [row])


def test_partial_responses_are_the_beginning_of_the_whole_ones(subject: Subject) -> None:
    if not subject.engine.capabilities.partial:
        pytest.skip("the engine says that it cannot")
    endless = Limits(max_response_tokens=28, end_tokens=())
    watched, unwatched = subject.engine.submit(requests(3, 8), Sampling(), endless)
    responses, reports = decode_until_idle(subject.engine, 6, [watched])
    assert set(reports) == {(watched, 0), (watched, 1), (watched, 2)} and (unwatched, 0) in responses
    for key, pieces in reports.items():
        whole, length = responses[key], 0
        for piece in pieces:
            assert piece.start == length and len(piece.tokens) == len(piece.logprobs) == len(piece.version) >= 1
            length += len(piece.tokens)
        assert len(pieces) >= 2 and length <= 28
        for name in ("tokens", "logprobs", "version"):
            joined = torch.cat([getattr(piece, name) for piece in pieces])
            assert torch.equal(joined, getattr(whole, name)[:length]), name
            assert joined.dtype == getattr(whole, name).dtype


def test_tokens_are_reported_if_a_request_is_watched_now_and_then(subject: Subject) -> None:
    """A server asks for new tokens every 20 ms, in which a GPU decodes several times."""
    if not subject.engine.capabilities.partial:
        pytest.skip("the engine says that it cannot")
    (handle,) = subject.engine.submit(requests(5, each=1), Sampling(), Limits(max_response_tokens=28, end_tokens=()))
    pieces: list[Partial] = []
    ended: tuple[Any, ...] = ()
    for number in range(10_000):
        progress = subject.engine.decode_briefly([handle] if number % 2 == 0 else [])
        pieces += progress.partial
        if ended := progress.ended:
            break
    assert len(pieces) >= 2
    reported = torch.cat([piece.tokens for piece in pieces])
    assert torch.equal(reported, ended[0].response.tokens[: len(reported)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_response_across_a_publish_has_both_versions_and_the_log_probs_of_each(
    subject: Subject, temperature: float
) -> None:
    engine = subject.engine
    if not engine.capabilities.partial:
        pytest.skip("the engine says that it cannot")
    weight = subject.policy.model.get_decoder().norm.weight
    before, version = weight.detach().clone(), engine.version
    endless, sampling = Limits(max_response_tokens=28, end_tokens=()), Sampling(temperature=temperature)
    batch = requests(5, 9, each=2)
    handles = engine.submit(batch, sampling, endless)
    while not engine.decode_briefly(handles).partial:
        pass
    scores = {}
    try:
        with torch.no_grad():
            weight.mul_(1.5)
        subject.publish(version + 1)
        responses, _ = decode_until_idle(engine, 4)
        for name, values in (("new", weight.detach().clone()), ("old", before)):
            with torch.no_grad():
                weight.copy_(values)
            for (handle, place), response in responses.items():
                prompt = batch[handles.index(handle)].prompt
                scores[name, handle, place] = score_with_policy(subject.policy, prompt, response, temperature)
    finally:
        with torch.no_grad():
            weight.copy_(before)
        subject.publish(version + 2)
    for (handle, place), response in responses.items():
        old = response.version == version
        assert 0 < int(old.sum()) < 28 and set(response.version[~old].tolist()) == {version + 1}
        assert bool(old[: int(old.sum())].all()), "the old version comes first"
        expected = torch.where(old, scores["old", handle, place], scores["new", handle, place])
        assert float((response.logprobs - expected).abs().max()) <= 1e-4
        assert float((scores["old", handle, place] - scores["new", handle, place]).abs().max()) > 1e-2


# Weights and versions


def test_every_token_has_the_version_that_was_published_last(subject: Subject) -> None:
    for version in (3, 4):
        subject.publish(version)
        assert subject.engine.version == version
        for response in chain(*subject.ask(*requests(3, 8))):
            assert set(response.version.tolist()) == {version}


def test_new_weights_count_after_they_were_published(subject: Subject) -> None:
    weight = subject.policy.model.get_decoder().norm.weight
    batch = requests(3, 8)
    version = subject.engine.version
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(1.5)
        subject.publish(version + 1)
        responses = subject.ask(*batch)
        assert match_policy(subject, batch, responses)
    finally:
        with torch.no_grad():
            weight.copy_(before)
        subject.publish(version + 2)
    assert not match_policy(subject, batch, responses) and match_policy(subject, batch, subject.ask(*batch))


def test_the_engine_state_of_a_checkpoint_can_be_loaded(subject: Subject) -> None:
    state = subject.engine.state()
    assert all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items())
    subject.engine.before_update()
    subject.engine.load(state)
    assert subject.engine.settled in (True, False)
    assert set(subject.engine.state()) == set(state)


# What it says of itself


def test_an_engine_reports_its_capabilities(subject: Subject) -> None:
    can = subject.engine.capabilities
    assert isinstance(can, Capabilities) and subject.engine.name
    responses = list(chain(*subject.ask(*requests(3))))
    assert all((response.routes is not None) == can.routes for response in responses)


def test_routes_are_recorded_if_the_engine_says_so(subject: Subject, request: pytest.FixtureRequest) -> None:
    """On a mixture of experts: the routes of prompt and response without the last token."""
    policy = random_policy("tiny-moe")
    name = request.node.callspec.params["subject"]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        engine = start_engine(name, policy, patch, stack, record_routes=True)
        (single,) = requests(5)
        (row,) = engine.generate([single], Sampling(), LIMITS)
        for response in row:
            assert (response.routes is not None) == engine.capabilities.routes
            if response.routes is not None:
                read = torch.cat([single.prompt, response.tokens])[:-1]
                assert response.routes.tokens.tolist() == read.tolist()
                assert response.routes.experts.shape[0] == len(read)
