"""The engine with slots on a CPU, its kernels in Triton's interpreter: what the plain engine writes, for every family."""

import pytest
import torch

pytest.importorskip("triton")

from legato.rollouts.engine import Limits  # noqa: E402
from legato.rollouts.graphed import GraphedEngine  # noqa: E402
from legato.rollouts.local import LocalEngine  # noqa: E402
from legato.rollouts.sampling import Sampling  # noqa: E402
from rollouts.families import END, FAMILIES, OTHERS, asked, plainly, policy, same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # of Triton's interpreter, for numpy

LIMITS = Limits(max_response_tokens=10, end_tokens=(END, 5, 9))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_slots_write_what_the_plain_engine_and_a_plain_forward_say(name: str) -> None:
    made, requests = policy(name), asked(3, 9, 1, each=2)
    found = GraphedEngine(made, rows_at_once=4, graphs=False).generate(requests, Sampling(), LIMITS)
    same(found, LocalEngine(made).generate(requests, Sampling(), LIMITS))
    for request, row in zip(requests, found, strict=True):
        for response in row:
            assert torch.allclose(response.logprobs, plainly(made, request.prompt, response), atol=1e-5)
