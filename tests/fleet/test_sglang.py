"""SGLang's words, against a fake server with its request schema: a real one was never tried."""

from collections.abc import Iterator

import pytest
import torch

from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.dialects.sglang import Sglang
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.settings import ServerSettings
from tests.fleet.fake_sglang import FakeSglang
from tests.serve.running import chat_policy, plain_engine

LIMITS = Limits(max_response_tokens=8, end_tokens=(1, 82))


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    server = FakeSglang(chat_policy(4))
    yield server
    server.close()


def fleet_of(server: FakeSglang) -> Fleet:
    return Fleet(chat_policy(3), Sglang(), ServerSettings(urls=(server.url,)), rows_at_once=4, context_tokens=64)


def test_responses_and_weights_go_through_sglangs_endpoints(server: FakeSglang) -> None:
    fleet = fleet_of(server)
    batch = [Request(prompt=torch.tensor([5, 6, 7 + number]), seeds=(number, number + 50)) for number in range(3)]
    sampling = Sampling(temperature=0.8)
    try:
        fleet.publish(fleet.policy.model.named_parameters(), 4)
        for limits in (LIMITS, Limits(max_response_tokens=8, end_tokens=())):
            expected = plain_engine(fleet.policy).generate(batch, sampling, limits)
            for row, other in zip(fleet.generate(batch, sampling, limits), expected, strict=True):
                for one, two in zip(row, other, strict=True):
                    assert (one.tokens.tolist(), one.text, one.stop) == (two.tokens.tolist(), two.text, two.stop)
                    assert torch.allclose(one.logprobs, two.logprobs, atol=1e-4) and set(one.version.tolist()) == {4}
        order = [path for path in server.calls if "generation" in path or "weights" in path]
        assert order == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        server.takes_weights = False
        with torch.no_grad():
            fleet.policy.model.get_decoder().norm.weight.mul_(1.5)
        fleet.publish(fleet.policy.model.named_parameters(), 5)
        with pytest.raises(InputError, match="the server did not take the weights"):
            fleet.poll()
    finally:
        fleet.close()


def test_an_old_sglang_is_refused(server: FakeSglang) -> None:
    server.version = "0.4.9"
    with pytest.raises(InputError, match=r"expected SGLang 0\.5\.11 or later at .*, got version '0\.4\.9'"):
        fleet_of(server)
