"""Runs with adapters: published as adapters to a server that has them, else merged into the weights."""

from pathlib import Path

import pytest
import torch

from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from tests.fleet.serving import fleet_of, servers
from tests.fleet.test_folders import policy_of
from tests.serve.running import plain_engine

LIMITS = Limits(max_response_tokens=6, end_tokens=(1,))


@pytest.mark.parametrize("served_with_adapters", [True, False])
def test_adapters_reach_a_server(served_with_adapters: bool) -> None:
    policy = policy_of(lora=True)
    # The base of both is the same; the adapters, or the merged weights, come with the publish.
    other = policy_of(lora=True) if served_with_adapters else policy_of()
    with torch.no_grad():
        for name, weight in other.model.named_parameters():
            if not served_with_adapters or ".lora_" in name:
                weight.add_(0.2)
    batch = [Request(prompt=torch.tensor([5, 6, 7, 8]), seeds=(1, 2, 3, 4))]
    with servers([other]) as (started, plans), fleet_of(policy, started) as fleet:
        (row,) = fleet.generate(batch, Sampling(), LIMITS)
        (expected,) = plain_engine(policy).generate(batch, Sampling(), LIMITS)
        assert [each.tokens.tolist() for each in row] == [each.tokens.tolist() for each in expected]
        loads = [body["kwargs"]["weights_path"] for path, body in plans[0].requests if path == "/collective_rpc"]
        assert loads and (Path(loads[-1]) / "adapter_config.json").exists() is served_with_adapters


def test_adapters_are_not_sent_to_a_server_that_takes_none() -> None:
    wanted = pytest.raises(InputError, match=r"expected servers that take adapters for rollouts\.servers\.lora")
    with servers([policy_of()]) as (started, _), wanted:
        fleet_of(policy_of(lora=True), started, lora="adapters").__enter__()
