"""An engine that two threads share: whose requests are whose, and what a publish in the middle of a response does to it."""

import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.policy import Policy
from legato.rollouts.copied import CopiedEngine
from legato.rollouts.engine import Finished, Limits, QueuedEngine, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.rollouts.shared import SharedEngine, TurnLock

WORDS = character_tokenizer()
LIMITS = Limits(max_response_tokens=80, end_tokens=())


def tiny_policy() -> Policy:
    model = tiny_model(TinyShape(hidden=32, heads=2), vocabulary=len(WORDS), seed=1, dtype=torch.float32)
    return load_policy(model, Loading(dtype="float32", device="cpu"), tokenizer=WORDS)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_both_halves_of_a_response_across_a_publish_have_the_log_probs_of_their_versions(temperature: float) -> None:
    """Weights change while a thread decodes. Each token's log-prob is that of a forward of the version that it names."""
    policy = tiny_policy()
    engine = CopiedEngine(policy)
    shared = SharedEngine(engine)
    models = {0: copy.deepcopy(policy.model)}
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    requests = [Request(prompt=prompt, seeds=(1, 2, 3)) for prompt in prompts]
    answers: list[list[Response]] = []
    client = shared.client()
    thread = threading.Thread(
        target=lambda: answers.extend(client.generate(requests, Sampling(temperature=temperature), LIMITS))
    )
    thread.start()
    generator = torch.Generator().manual_seed(0)
    version = 0
    while thread.is_alive() and version < 12:
        time.sleep(0.02)
        version += 1
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
        models[version] = copy.deepcopy(policy.model)
        shared.publish(policy.model.named_parameters(), version)
    thread.join(60)
    spans = 0
    for prompt, responses in zip(prompts, answers, strict=True):
        for response in responses:
            versions = response.version.unique().tolist()
            spans += len(versions) > 1
            for each in versions:
                exact = forward_at(models[each], prompt, response, temperature)
                here = response.version == each
                assert float((exact - response.logprobs.double())[here].abs().max()) < 1e-4
                if len(versions) > 1:
                    # The other half was not sampled by these weights: the test would see a wrong version.
                    assert float((exact - response.logprobs.double())[~here].abs().max()) > 1e-2
    assert spans > 0, "no response was in flight when weights were published"


def forward_at(model: Any, prompt: torch.Tensor, response: Response, temperature: float) -> torch.Tensor:
    tokens = torch.cat([prompt, response.tokens]).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, response.tokens.unsqueeze(1)).squeeze(1)


class Slow(QueuedEngine):
    """Answers the requests it has, after a while."""

    def __init__(self) -> None:
        super().__init__()
        self._scripted = ScriptedEngine(lambda prompt, sample: ([prompt[0], 1], [-0.1, -0.1]))

    def respond(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        time.sleep(0.002)
        return self._scripted.respond(requests, sampling, limits)


def test_each_client_gets_the_answers_to_its_own_requests() -> None:
    shared, wrong = SharedEngine(Slow()), []

    def ask(first: int) -> None:
        client = shared.client()
        for number in range(first, first + 20):
            requests = [Request(prompt=torch.tensor([number + place]), seeds=(1, 2)) for place in range(2)]
            answers = client.generate(requests, Sampling(), LIMITS)
            wrong.extend(
                (number, place) for place in range(2) if {int(r.tokens[0]) for r in answers[place]} != {number + place}
            )

    threads = [threading.Thread(target=ask, args=(100 * place,)) for place in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert wrong == [] and not any(each.is_alive() for each in threads) and shared.client().poll() == []


def test_a_failing_poll_fails_the_client_that_polls_and_leaves_the_others_working() -> None:
    class Once(Slow):
        failed = False

        def poll(self) -> list[Finished]:
            if not self.failed:
                self.failed = True
                raise OSError("the connection is gone")
            return super().poll()

    shared = SharedEngine(Once())
    one, other = shared.client(), shared.client()
    requests = [Request(prompt=torch.tensor([7]), seeds=(1,))]
    with pytest.raises(OSError, match="the connection is gone"):
        one.generate(requests, Sampling(), LIMITS)
    assert int(other.generate(requests, Sampling(), LIMITS)[0][0].tokens[0]) == 7


def test_a_lock_in_turn_is_given_to_the_thread_that_asked_first() -> None:
    lock, order = TurnLock(), []

    def take(name: int) -> None:
        with lock.held():
            order.append(name)

    with lock.held():
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(lock._queue) < name + 2:
                time.sleep(0.001)
    for each in threads:
        each.join()
    assert order == list(range(5))
