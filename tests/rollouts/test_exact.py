"""An exact engine in Triton's interpreter: log-probs of sampled tokens equal the trainer's to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from legato.core.texts import Texts
from legato.policy.head import head as heads
from legato.policy.head.head import Head
from legato.policy.layers import products
from legato.policy.layers.fused import Parts
from legato.policy.layout.packs import Pack, pack
from legato.policy.layout.spans import Spans, Uses
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu import prefill
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.walk import first_difference
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.sampling import Sampling
from tests.policy import fused
from tests.rollouts.families import make_policy, make_requests

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]

LIMITS = Limits(max_response_tokens=4, end_tokens=())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU paths of engine and trainer on a CPU.

    A CPU's matrix product depends on the number of rows, so products are made row by row here; on a GPU `products.linear`
    pads them.
    """
    fused.install(monkeypatch)
    monkeypatch.setattr(prefill, "pack", _pack_with_spans)
    monkeypatch.setattr(products, "plain_linear", _row_by_row)
    monkeypatch.setattr(Head, "_product", lambda self, hidden: heads._product_of(self.linear, hidden))
    monkeypatch.setattr(Head, "exact", lambda self, hidden: self.linear(hidden).detach())


def _pack_with_spans(texts: Texts, rows: Tensor) -> Pack:
    packed = pack(texts, rows)
    spans = Spans.from_lengths(packed.prefix_lengths, packed.suffix_lengths, packed.owner, packed.positions)
    return replace(packed, spans=spans, reads=Uses.from_index(packed.read, len(packed.tokens)))


def _row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output = torch.stack([weight @ row for row in x])
    return output if bias is None else output + bias


def trainer_logprobs(policy: Policy, requests: list[Request], responses: list[list[Response]], temperature: float) -> Any:
    """[rows, tokens]: what the trainer scores for the responses, packed in one pack and each in a pack of its own."""
    tokens = torch.stack([response.tokens for row in responses for response in row])
    group = torch.repeat_interleave(torch.tensor([len(row) for row in responses]))
    texts = replace(
        prompt_texts([request.prompt for request in requests]),
        tokens=tokens,
        lengths=torch.full((len(tokens),), tokens.shape[1]),
        mask=torch.ones_like(tokens, dtype=torch.bool),
        group=group,
        temperature=torch.full((len(tokens),), temperature),
    )
    together = policy.score(texts, torch.arange(len(tokens))).logprobs
    alone = torch.cat([policy.score(texts, torch.tensor([row])).logprobs for row in range(len(tokens))])
    return together, alone


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "temperature"), [("qwen3", 1.0), ("qwen2", 0.7), ("llama", 1.0)])
def test_sampled_tokens_have_the_trainers_logprobs_to_the_bit(name: str, temperature: float) -> None:
    policy, requests = make_policy(name), make_requests(3, 9, each=2)
    sampling = Sampling(temperature=temperature)
    responses = {}
    for exact in (True, False):
        policy.exact = exact
        responses[exact] = GraphedEngine(policy, rows_at_once=3, graphs=False).generate(requests, sampling, LIMITS)
    policy.exact = True
    for exact, listed in responses.items():
        logprobs = torch.stack([response.logprobs for row in listed for response in row])
        together, alone = trainer_logprobs(policy, requests, listed, temperature)
        assert torch.equal(together, alone)
        # Without `exact` sums are made in another order: a comparison that cannot fail would not show that.
        assert torch.equal(logprobs, together) is exact
        assert torch.allclose(logprobs, together, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_the_walk_names_the_first_operation_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, request = make_policy("qwen3"), make_requests(5, each=1)[0]
    policy.exact = True
    engine = GraphedEngine(policy, graphs=False)
    tokens = torch.tensor([7, 9, 11, 4])
    assert first_difference(policy, engine.layer_parts, request.prompt, tokens, rows=2) is None

    def spoil(bucket: Bucket) -> Parts:
        parts = engine.layer_parts(bucket)
        layers = policy.body.get_decoder().layers

        def project(module: Any, x: Tensor) -> Tensor:
            output = parts.project(module, x)
            later = module is layers[1].mlp.up_proj and int(bucket.store.length[0]) == 2
            return torch.nextafter(output, output + 1) if later else output

        return replace(parts, project=project)

    difference = first_difference(policy, spoil, request.prompt, tokens)
    assert difference is not None and (difference.token, difference.operation) == (2, "layers.1.mlp.up_proj")
    assert difference.unequal == difference.elements == 48 and 0 < difference.largest < 1e-5
    assert "response token 2" in str(difference)
