"""`training.shard = "layers"`: the weights and gradients of the decoder's layers are divided among ranks, by FSDP2.

A layer is gathered just before it runs and given back after it. Embedding, last norm, head, adapters and value head are
small or tied; each rank keeps them whole and optimises its pieces (`pieces.py`). Trained layers lie in float32 on their rank
and are gathered in the dtype of the model: the piece of a rank is its own master. Gradients are summed in float32.

All ranks must run equally many passes, because they exchange layers in each: a rank with fewer micro-batches runs passes
without effect (`idle.py`).

Weights change only in an update, so gathering a layer in every pass, and adding up its gradient in every backward, repeats
work where there is memory for more than a layer. `Keep` says what a rank holds whole during a step:

    NOTHING     a layer while it runs
    WEIGHTS     all layers; gathered once before the first pass and after every update. Gradients are added up in each pass
    GRADIENTS   all layers and their float32 gradients, which are added up once per update. Passes exchange nothing, so that
                ranks may run different numbers of them, and run without FSDP2
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from legato.core.world import others_waiting
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.training.pieces import Divided, Exchange, Piece, join_runs, run_of, total_norm
from legato.training.ranks.process_group import all_gather_single, reduce_scatter_single

_PASS = "a pass over divided layers"
"""The operation in which ranks wait that exchange a layer inside a pass."""


class Keep(IntEnum):
    """What a rank holds whole during the passes and updates of a step."""

    NOTHING = 0
    WEIGHTS = 1
    GRADIENTS = 2


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
        mixed = MixedPrecisionPolicy(
            param_dtype=dtype if trained and dtype != exact else None,
            reduce_dtype=exact,
            cast_forward_inputs=False,  # they have the dtype of the model
        )
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
        module.set_custom_all_gather(_Followed(all_gather_single, ranks, on_host=policy.device.type == "cpu"))
        module.set_custom_reduce_scatter(_Followed(reduce_scatter_single, ranks, on_host=policy.device.type == "cpu"))
    for sharded in modules[1:]:
        sharded.unshard()
        for each in sharded.parameters():
            if each.requires_grad:
                each.grad_dtype = exact
        sharded.reshard()
    policy.divided = policy.exchanges = True
    policy.exchanging = partial(_in_pass, ranks)


class _Followed:
    """A collective of FSDP2 that the watch over ranks knows as an exchange of its own.

    Only an exchange is waited for: a rank that computes for long keeps nobody waiting until others have begun the next one.
    On a CPU the exchange is over when the call returns. On a GPU the call returns at once, and the rank waits later, where
    its host needs a result: it counts as waiting from one exchange to the next, and from the last to the end of the pass.
    """

    def __init__(self, collective: Callable[..., Any], ranks: Exchange, *, on_host: bool) -> None:
        self.collective, self.ranks, self.on_host = collective, ranks, on_host

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if self.on_host:
            with self.ranks.exchanging(_PASS):
                return self.collective(output_tensor, input_tensor, **options)
        self.ranks.begin_exchange(_PASS)
        return self.collective(output_tensor, input_tensor, **options)


@contextmanager
def _in_pass(ranks: Exchange) -> Iterator[None]:
    """A pass in which ranks exchange layers; after it no rank waits for one."""
    try:
        with others_waiting():
            yield
    finally:
        ranks.end_exchange()


def gather_weights(policy: Policy, ranks: Exchange, *, trained: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The whole weights by name, one after the other, in the dtype of the model. All ranks must take all of them."""
    dtype = policy.model.get_input_embeddings().weight.dtype
    ranks.meet("gather weights")
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad or not trained:
            with others_waiting():
                whole = gather_weight(weight, ranks, dtype)
            yield name, whole


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
    """The division of a policy whose layers are divided (`divide_layers`): their pieces are the shards of FSDP2."""

    def __init__(self, policy: Policy, ranks: Exchange, *, is_half: bool, keep: Keep = Keep.NOTHING) -> None:
        """`is_half`: whether the weights of the model have 16 bits. All ranks must keep the same."""
        self.policy, self.ranks, self.keep = policy, ranks, keep
        weights = policy.parameters()
        self.shards = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        self.rest = Divided({name: weight for name, weight in weights.items() if name not in self.shards}, ranks)
        self.pieces: Mapping[str, Piece] = {
            name: _own_piece(weight, ranks, is_half) if isinstance(weight, DTensor) else self.rest.pieces[name]
            for name, weight in weights.items()
        }
        self._whole: Divided | None = None
        """During a step in which whole layers are kept: their trained weights, with the shards as pieces."""

    @property
    def _layers(self) -> list[Any]:
        return list(self.policy.body.get_decoder().layers)

    @contextmanager
    def training(self) -> Iterator[None]:
        if self.keep is Keep.NOTHING:
            yield
            return
        # Without trained layers there are no gradients of theirs to add up.
        exchanges = self.keep is Keep.WEIGHTS and bool(self.shards)
        self.ranks.meet("gather layers")
        try:
            with self.ranks.exchanging("gathering layers"):
                for layer in self._layers:
                    layer.set_reshard_after_forward(False, recurse=False)
                    layer.set_reshard_after_backward(False, recurse=False)
                    layer.set_requires_gradient_sync(exchanges, recurse=False)
                    layer.unshard()
            gathered = self.policy.parameters()
            pieces = {name: self.pieces[name] for name in self.shards}
            self._whole = Divided({name: gathered[name] for name in self.shards}, self.ranks, pieces)
            self.policy.exchanges = exchanges
            modules = [self.policy.body.get_decoder(), *self._layers]
            with nullcontext() if exchanges else _without_hooks(modules):
                yield
        finally:
            for weight in () if self._whole is None else self._whole.weights.values():
                weight.grad = None  # of an update that an error has torn
            self._whole, self.policy.exchanges = None, True
            for layer in self._layers:
                layer.set_reshard_after_forward(True, recurse=False)
                layer.set_reshard_after_backward(True, recurse=False)
                layer.set_requires_gradient_sync(True, recurse=False)
                layer.reshard()

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        gradients = self.rest.gradients()
        if self._whole is not None and not self.policy.exchanges:
            return gradients | self._whole.gradients()
        for name, weight in self.shards.items():
            gradient: Any = weight.grad
            local = self.pieces[name].tensor
            gradients[name] = torch.zeros_like(local) if gradient is None else gradient.to_local().reshape(-1)
        return gradients

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return total_norm(self.pieces, gradients, self.ranks)

    def publish(self) -> None:
        self.rest.publish()
        if self._whole is not None:
            self._whole.publish()


@contextmanager
def _without_hooks(modules: Sequence[Any]) -> Iterator[None]:
    """Call modules without the hooks of FSDP2: layers are whole, nothing is exchanged, and hooks take the host's time."""
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is state}
            for key in own:
                del hooks[key]
            removed.append((hooks, own))
    try:
        yield
    finally:
        for hooks, own in removed:
            others = dict(hooks)
            hooks.clear()
            hooks.update({**own, **others})


def _own_piece(weight: Any, ranks: Exchange, is_half: bool) -> Piece:
    inner = weight.numel() // weight.shape[0]
    rows = run_of(weight.shape[0], ranks.rank, ranks.size)
    flat = weight.detach().to_local().view(-1)
    return Piece(rows.start * inner, rows.stop * inner, weight.numel(), flat, weight.dim() >= 2, is_master=is_half)
