"""The layers of a pack in tensors that keep their address: filled-up packs give what packs as they are give.

Here the layers are launched one by one, in Triton's interpreter; tests/training/test_gpu.py records and replays them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from legato.core.outcome import Coefficients
from legato.policy import graphs
from legato.policy.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.policy.tiny import TinyShape
from policy.fused import install, texts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own tests, in 16 bits"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]


def learnt(policy: Policy, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs as the update sees them, and the gradient of a fixed mixture of them."""
    weight, seen = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), list[Tensor]()

    def respond(part: range, channels: Any) -> Coefficients:
        seen.append(channels.logprobs.detach())
        width = channels.logprobs.shape[1]
        mixture = weight[rows[part.start : part.stop], :width]
        return Coefficients(logprobs=mixture * (channels.logprobs.detach() != 0))

    policy.model.zero_grad()
    policy.learn(policy.pack(texts(), rows), respond)
    return torch.cat(seen), {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}


def made() -> Policy:
    return load_policy("tiny", Loading(device="cpu", dtype="float32"))


def test_sizes_waste_at_most_a_sixteenth_and_are_few() -> None:
    sizes = {graphs.rounded(tokens) for tokens in range(1, 40000)}
    assert all(tokens <= graphs.rounded(tokens) < tokens + max(64, tokens / 16 + 1) for tokens in range(1, 40000))
    assert len([size for size in sizes if 8192 < size <= 16384]) == 16
    assert all(graphs.rounded(size) == size for size in sizes)


def test_a_pack_that_is_filled_up_is_the_pack_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of two sizes by turns, the smaller after the larger: what is left of the larger is not seen."""
    policy, plain = made(), made()
    plain.graphs = False
    install(monkeypatch)
    every, few = torch.arange(5), torch.tensor([3, 4])
    for rows in (every, few, every):
        (found, mine), (right, slopes) = learnt(policy, rows), learnt(plain, rows)
        assert torch.allclose(found, right, atol=1e-6)
        assert mine.keys() == slopes.keys()
        assert all(torch.allclose(mine[name], slopes[name], atol=2e-6, rtol=1e-4) for name in slopes)
        assert torch.equal(policy.score(texts(), rows).logprobs, found)
    assert policy._graphs.turns == 6 and plain._graphs.turns == 0


def test_gradients_add_up_over_packs_and_on_top_of_those_begun_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made()
    install(monkeypatch)
    _, right = learnt(policy, torch.arange(5))
    policy.model.zero_grad()
    begun = {name: torch.ones_like(p) for name, p in policy.parameters().items()}
    for name, weight in policy.parameters().items():
        weight.grad = begun[name].clone()
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4])):

        def respond(part: range, channels: Any, rows: Tensor = rows) -> Coefficients:
            width = channels.logprobs.shape[1]
            mixture = weight[rows[part.start : part.stop], :width]
            return Coefficients(logprobs=mixture * (channels.logprobs.detach() != 0))

        policy.learn(policy.pack(texts(), rows), respond)
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad - begun[name], right[name], atol=1e-5, rtol=1e-3), name


def test_frozen_embeddings_leave_the_layers_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, plain = made(), made()
    plain.graphs = False
    install(monkeypatch)
    for one in (policy, plain):
        one.model.get_input_embeddings().weight.requires_grad_(False)
    (_, mine), (_, slopes) = learnt(policy, torch.arange(5)), learnt(plain, torch.arange(5))
    assert policy._graphs.turns == 1 and mine.keys() == slopes.keys()
    assert all(torch.allclose(mine[name], slopes[name], atol=2e-6, rtol=1e-4) for name in slopes)


def test_a_backward_after_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made()
    install(monkeypatch)
    with policy.reading(policy.pack(texts(), torch.arange(5))) as channels:
        policy.score(texts(), torch.arange(5))
        with pytest.raises(RuntimeError, match="another pack went forward"):
            channels.logprobs.sum().backward()


def test_what_cannot_be_recorded_is_left_to_the_layers() -> None:
    policy = made()
    decoder = policy.body.get_decoder()
    assert policy._graphs.serve(decoder, 1000)
    weights = sum(weight.numel() for weight in decoder.layers[0].parameters() if weight.dim() == 2)
    assert not policy._graphs.serve(decoder, int(graphs.MOST_WORK / weights) + 1000)
    decoder.layers[0].input_layernorm.weight.requires_grad_(False)
    assert not policy._graphs.serve(decoder, 1000)
    checkpointed = load_policy("tiny", Loading(device="cpu", dtype="float32", gradient_checkpointing=True))
    assert not checkpointed._graphs.serve(checkpointed.body.get_decoder(), 1000)
    experts = load_policy("tiny-moe", Loading(device="cpu", dtype="float32", tiny=TinyShape(experts=8)))
    assert not experts._graphs.serve(experts.body.get_decoder(), 1000)


def test_the_sizes_least_lately_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made()
    install(monkeypatch)
    monkeypatch.setattr(graphs, "_GRAPHS", 1)
    for _ in range(2):
        learnt(policy, torch.arange(5))
        policy.score(texts(), torch.arange(5))
    assert len(policy._graphs.ways) == 1
