"""`training.shard = "layers"`: the weights and gradients of the decoder's layers are divided among ranks, by FSDP2.

A layer is gathered just before it runs and given back after it. Embedding, last norm, head, adapters and value head are
small or tied; each rank keeps them whole and optimises its pieces (`pieces.py`). Trained layers lie in float32 on their rank
and are gathered in the dtype of the model: the piece of a rank is its own master. Gradients are summed in float32.

All ranks must run equally many passes, because they exchange layers in each: a rank with fewer micro-batches runs passes
without effect (`idle.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.training.pieces import Divided, Exchange, Piece, join_runs, norm_of_pieces, run_of


def divide_layers(policy: Policy, ranks: Exchange) -> None:
    """Divide the layers of a policy among ranks. Its weights must be equal on all of them."""
    decoder = policy.body.get_decoder()
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(
            f"expected a decoder with a list of layers for training.shard = 'layers', got {type(decoder).__name__}"
            f" (policy.model = {policy.name}); use training.shard=optimizer"
        )
    dtype = policy.model.get_input_embeddings().weight.dtype
    exact = torch.promote_types(dtype, torch.float32)
    mesh = init_device_mesh(policy.device.type, (ranks.size,))
    for layer in layers:
        adapters = {each for name, each in layer.named_parameters() if ".lora_" in name or ".modules_to_save." in name}
        own = [each for each in layer.parameters() if each not in adapters]
        trained = any(each.requires_grad for each in own)
        if trained:
            for each in own:
                each.data = each.data.to(exact)
        mixed = MixedPrecisionPolicy(param_dtype=dtype if trained and dtype != exact else None, reduce_dtype=exact)
        fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=adapters)
    inside = {id(each) for each in layers.parameters()}
    outside = {each for each in decoder.parameters() if id(each) not in inside}
    adapters = {each for name, each in layers.named_parameters() if not isinstance(each, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=outside | adapters)
    modules: list[Any] = [decoder, *layers]
    for module in modules:
        # Gradients are sums over ranks. Gloo cannot divide while it adds.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for sharded in modules[1:]:
        sharded.unshard()
        for each in sharded.parameters():
            if each.requires_grad:
                each.grad_dtype = exact
        sharded.reshard()
    policy.divided = True


def gather_weights(policy: Policy, ranks: Exchange, *, trained: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The whole weights by name, one after the other, in the dtype of the model. All ranks must take all of them."""
    dtype = policy.model.get_input_embeddings().weight.dtype
    ranks.meet("gather weights")
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad or not trained:
            yield name, gather_weight(weight, ranks, dtype)


@torch.no_grad()
def gather_weight(weight: Tensor, ranks: Exchange, dtype: torch.dtype | None = None) -> Tensor:
    """A whole weight of which each rank has a shard, in this dtype; a weight that is not divided as it is.

    DTensor.full_tensor is not used: gloo crashes in it where tensors are on a GPU (pytorch issues 132471 and 152645).
    """
    if not isinstance(weight, DTensor):
        return weight.detach()
    own = weight.to_local().reshape(-1).to(dtype or weight.dtype)
    return join_runs(own, weight.shape, ranks)


class Layered:
    """The division of a policy whose layers are divided: their pieces are the shards of FSDP2."""

    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: Exchange, *, is_half: bool) -> None:
        self.ranks = ranks
        self.shards = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        self.rest = Divided({name: weight for name, weight in weights.items() if name not in self.shards}, ranks)
        self.pieces: Mapping[str, Piece] = {
            name: _own_piece(weight, ranks, is_half) if isinstance(weight, DTensor) else self.rest.pieces[name]
            for name, weight in weights.items()
        }

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        gradients = self.rest.gradients()
        for name, weight in self.shards.items():
            gradient: Any = weight.grad
            local = self.pieces[name].tensor
            gradients[name] = torch.zeros_like(local) if gradient is None else gradient.to_local().reshape(-1)
        return gradients

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return norm_of_pieces(gradients, self.ranks)

    def publish(self) -> None:
        self.rest.publish()


def _own_piece(weight: Any, ranks: Exchange, is_half: bool) -> Piece:
    inner = weight.numel() // weight.shape[0]
    rows = run_of(weight.shape[0], ranks.rank, ranks.size)
    flat = weight.detach().to_local().view(-1)
    return Piece(rows.start * inner, rows.stop * inner, weight.numel(), flat, weight.dim() >= 2, is_master=is_half)
