"""Routers in fused layers: they replace the forward of a layer but call its mixture of experts as a module."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from legato.core.outcome import Coefficients
from legato.policy.experts.routing import Balance, Directions, Record, Routed, Traffic
from legato.policy.layers.fused import why_not
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Piece, Policy
from tests.policy.exact import Words, accumulate
from tests.policy.fused import install, texts
from tests.policy.routes import as_published, sets

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the trainer's own tests go through fused layers"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]
ROWS = torch.arange(5)
Accumulated = tuple[Tensor, Routed | None, Traffic | None, dict[str, Tensor]]


def accumulate_all(policy: Policy, directions: Directions) -> Accumulated:
    """Log-probs, the recorded routes, and the gradient of a fixed weighted sum of the log-probs."""
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))

    def respond(piece: Piece) -> Coefficients:
        return Coefficients(logprobs=weight[piece.rows] * (piece.channels.logprobs != 0))

    policy.model.zero_grad()
    channels, traffic = accumulate(policy, texts(), ROWS, respond, directions)
    gradients = {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}
    return channels.logprobs, channels.routed, traffic, gradients


def all_directions(policy: Policy) -> dict[str, Directions]:
    """Directions of every kind by name. The forced routes differ from every router's own choice."""
    assert policy.routers is not None
    record = Record.empty(texts(), policy.routers, policy.device)
    traffic = policy.score(texts(), ROWS, Directions()).traffic
    assert traffic is not None
    record.note(traffic)
    record.experts.copy_((record.experts + 1) % policy.routers.experts)
    shares = torch.rand(2, policy.routers.experts, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    balance = Balance(shares=shares / shares.sum(1, keepdim=True), tokens=torch.tensor(17.0), scale=3.0)
    recorded = Directions(count=True)
    return {
        "recorded": recorded,
        "forced": replace(recorded, replay=record),
        "balanced": Directions(record=False, balance=balance),
        "forced and balanced": Directions(record=False, balance=balance, replay=record),
    }


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("qwen3-moe", False),
        pytest.param("olmoe", False, marks=pytest.mark.slow),
        pytest.param("mixtral", True, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", True, marks=pytest.mark.slow),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
    ],
)
def test_fused_layers_record_force_and_balance_routes_as_the_models_own_layers_do(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_published(name, head_dim=16, **({"hidden_size": 64} if name == "olmoe" else {}))  # 4 heads fill OLMoE's width
    loading = Loading(device="cpu", dtype="float32", gradient_checkpointing=checkpointing)
    policy = load_policy(model, loading, tokenizer=Words())
    assert why_not(policy.body.get_decoder()) is None
    directions_by_name = all_directions(policy)
    own = {kind: accumulate_all(policy, directions) for kind, directions in directions_by_name.items()}
    attentions = install(monkeypatch)
    assert policy.trains_fused
    for kind, directions in directions_by_name.items():
        attentions.clear()
        logprobs, routed, traffic, gradients = accumulate_all(policy, directions)
        assert len(attentions) == 2 * (2 if checkpointing else 1), kind
        expected, own_routed, own_traffic, own_gradients = own[kind]
        assert torch.allclose(logprobs, expected, atol=1e-5), kind
        for key in own_gradients:
            assert torch.allclose(gradients[key], own_gradients[key], atol=3e-5, rtol=1e-3), (kind, key)
        assert (routed is None) == (own_routed is None) == (not directions.record)
        if routed is not None and own_routed is not None and traffic is not None and own_traffic is not None:
            assert sets(routed.experts) == sets(own_routed.experts)
            assert torch.allclose(routed.logprobs, own_routed.logprobs, atol=1e-5)
            assert sets(traffic.experts) == sets(own_traffic.experts) and float(traffic.missing) == 0
            assert traffic.choices is not None and own_traffic.choices is not None
            assert torch.equal(traffic.choices, own_traffic.choices)
    assert not torch.allclose(own["forced"][0], own["recorded"][0], atol=1e-3)
    gate = next(key for key in own["balanced"][3] if key.endswith("gate.weight"))
    assert not torch.allclose(own["balanced"][3][gate], own["recorded"][3][gate], atol=1e-4)
    assert torch.equal(own["balanced"][0], own["recorded"][0])
