"""Walks one response through decoding and through training, operation by operation, and names the first difference.

For a policy whose engine is exact: both paths must have the same bits. The operations of a layer are the functions of
`fused.Parts`, which both paths call in the same order; each is wrapped so that it notes its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from legato.policy.head.head import Head
from legato.policy.layers.fused import Parts, Projected, run_body_without_backward
from legato.policy.policy import Policy
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.prefill import Opening, read_prompts
from legato.rollouts.gpu.slots import KVStore, Room, device_ints
from legato.rollouts.prompts import response_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first operation whose output differs."""

    token: int
    """Of the response; -1: the last token of the prompt."""
    operation: str
    unequal: int
    """How many of its `elements` differ in any bit."""
    elements: int
    largest: float
    """The largest absolute difference."""

    def __str__(self) -> str:
        where = "the last prompt token" if self.token < 0 else f"response token {self.token}"
        return (
            f"{self.operation} at {where}: {self.unequal} of {self.elements} numbers differ between decoding and training,"
            f" by up to {self.largest:.1e}"
        )


Outputs = list[tuple[str, Tensor]]


def first_difference(
    policy: Policy,
    prompt: Tensor,
    tokens: Tensor,
    *,
    rows: int = 1,
    temperature: float = 1.0,
    joined: bool = True,
) -> Difference | None:
    """The first operation that differs for a response [T] to a prompt [P]; None if every bit is equal.

    The policy must be exact. Decoding has `rows` rows, all with this response, and joins projections if `joined`.
    """
    with policy.serving():
        trained, index, hidden = _train(policy, prompt, tokens)
        store, bucket, ending = _open(policy, prompt, len(tokens), rows, joined)
        difference = _compare(-1, [("hidden state", ending)], [("hidden state", hidden[index[0]])])
        for place in range(len(tokens) - 1):
            if difference is not None:
                return difference
            store.token.fill_(int(tokens[place]))
            outputs: Outputs = []
            _decode(policy, bucket, outputs)
            expected = [(name, output[place + 1]) for name, output in trained]
            difference = _compare(place, [(name, output[0]) for name, output in outputs], expected)
            store.length += 1
        if difference is None:
            difference = _compare_head(policy, hidden[index], tokens, temperature, rows)
        return difference


def _train(policy: Policy, prompt: Tensor, tokens: Tensor) -> tuple[Outputs, Tensor, Tensor]:
    """Outputs of all operations at the tokens before each of the response's, their places in the pack, hidden states."""
    packed = policy.pack(response_texts([prompt], tokens.unsqueeze(0)), torch.tensor([0])).to(policy.device)
    outputs: Outputs = []
    wrap = _Recorder(policy.body.get_decoder(), outputs, packed.read).wrap
    hidden = policy.read_as_in_training(packed, lambda layer, keys, values: None, wrap)
    return outputs, packed.read, hidden


def _open(policy: Policy, prompt: Tensor, length: int, rows: int, joined: bool) -> tuple[KVStore, Bucket, Tensor]:
    """A store with the prompt, a bucket whose rows are responses to it, and the prompt's last hidden state."""
    columns = -(-len(prompt) // 64) * 64
    store = KVStore(Room(slots=rows, prompts=1, prompt_tokens=columns, response_tokens=length), policy.device, None)
    read_prompts(policy, store, [Opening(entry=0, prompt=prompt)])
    store.base.fill_(len(prompt))
    bucket = Bucket(rows, store, policy.device, exact=True, joined=joined)
    bucket.place(list(range(rows)), [0] * rows)
    assert store.ending is not None
    return store, bucket, store.ending[0]


def _decode(policy: Policy, bucket: Bucket, outputs: Outputs) -> None:
    """Decode one token per row and note the output of every operation."""
    store, decoder = bucket.store, policy.body.get_decoder()
    recording = _Recorder(decoder, outputs).wrap(bucket.parts())
    positions = store.base[bucket.slots] + store.length[bucket.slots]
    run_body_without_backward(decoder, store.token[bucket.slots], positions, recording)


class _Recorder:
    """Wraps layer parts so that each call notes its name and its output."""

    def __init__(self, decoder: Any, outputs: Outputs, rows: Tensor | None = None) -> None:
        self.outputs, self.rows = outputs, rows
        """`rows`: only these rows of every output are kept; None: all."""
        self.modules = {id(module): name for name, module in decoder.named_modules()}
        self.weights = {id(weight): name.removesuffix(".weight") for name, weight in decoder.named_parameters()}

    def wrap(self, parts: Parts) -> Parts:
        def note(name: str, output: Tensor) -> None:
            self.outputs.append((name, output if self.rows is None else output[self.rows]))

        def project(module: nn.Module, x: Tensor) -> Tensor:
            output = parts.project(module, x)
            note(self.modules[id(module)], output)
            return output

        def ready(layer: int, projected: Projected) -> Tensor:
            query = parts.ready(layer, projected)
            note(f"layers.{layer}.self_attn: norm and rotation of the queries", query)
            return query

        def attend(layer: int, query: Tensor, scaling: float) -> Tensor:
            output = parts.attend(layer, query, scaling)
            note(f"layers.{layer}.self_attn: attention", output)
            return output

        def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
            total, output = parts.add_norm(residual, update, weight, epsilon)
            note(f"{self.weights[id(weight)]}: sum", total)
            note(self.weights[id(weight)], output)
            return total, output

        def swiglu(gate: Tensor, up: Tensor) -> Tensor:
            output = parts.swiglu(gate, up)
            note(f"{self.outputs[-1][0].rsplit('.', 1)[0]}: SwiGLU", output)
            return output

        def project_many(modules: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
            assert parts.project_many is not None
            outputs = parts.project_many(modules, x)
            for module, output in zip(modules, outputs, strict=True):
                note(self.modules[id(module)], output)
            return outputs

        return replace(
            parts,
            project=project,
            project_many=None if parts.project_many is None else project_many,
            ready=ready,
            attend=attend,
            add_norm=add_norm,
            swiglu=swiglu,
            whole=None,
        )


def _compare(token: int, decoded: Outputs, trained: Outputs) -> Difference | None:
    names = [name for name, _ in decoded]
    assert names == [name for name, _ in trained], "both paths call the same operations in the same order"
    for (name, one), (_, other) in zip(decoded, trained, strict=True):
        unequal = one.flatten() != other.flatten()
        if bool(unequal.any()):
            gap = (one.flatten().double() - other.flatten().double()).abs().max()
            return Difference(
                token=token, operation=name, unequal=int(unequal.sum()), elements=one.numel(), largest=float(gap)
            )
    return None


def _compare_head(policy: Policy, hidden: Tensor, tokens: Tensor, temperature: float, rows: int) -> Difference | None:
    """Compare the head on all tokens at once with the head on each token in `rows` rows."""
    head, targets = Head.from_body(policy.body), tokens.to(hidden.device)
    warmth = torch.full((len(targets),), temperature, device=hidden.device)
    together, _ = head.score(hidden, targets, warmth)
    for place in range(len(targets)):
        here = device_ints([place] * rows, hidden.device)
        alone, _ = head.score(hidden[here], targets[here], warmth[here])
        difference = _compare(place, [("lm_head", alone[:1])], [("lm_head", together[place : place + 1])])
        if difference is not None:
            return difference
    return None
