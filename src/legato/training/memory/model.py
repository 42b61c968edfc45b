"""How much memory training asks for, by arithmetic alone: from a configuration of transformers to bytes by item.

What autograd keeps per token and layer, for e bytes a number, h the width of the residual stream, q = heads x width of a
head, k = key heads x width, f the width of the SwiGLU, c experts a token of width g out of E:

    plain layers (as transformers writes them)
      2 (4h + 4 + 2eh)            each norm: its input in float32, 1/rms, the normalised copy its weight multiplies, and its
                                  output, which the matrices after it keep
      (4 + e)(q + k) + 4 (heads + key heads)   norms of queries and keys, where a family has them; rotary keeps nothing of
                                  its own but cos and sin, once a pass
      e (2q + 2k) + 4 heads       attention: q, k, v, out (which the output matrix keeps too) and the log-sum-exp; or, in the
                                  padded tables of a pack on a CPU, e (3q + 2qs) + 4 heads: keys and values repeated for
                                  every head and, s-fold, for every response of a prompt, and the output once more as tokens
      4ef                         SwiGLU: gate, silu(gate), up and their product
      ec (2h + 4g) + 4E + 64c     or experts: the token c times over, gate and up, silu(gate), the product, the output that
                                  the router's weight multiplies; the router's softmax; who goes where
    fused layers of plain matrices (`policy/layers/layer.py`), which make again what comes from little
      e (2h + 2q + 2k + 2f) + 4 heads          the residual twice, queries, keys, values, what attention gave, gate and up
    fused layers part by part: experts, adapters
      2 (2eh + 4)                 each norm: its input and its output (and a float32 for good measure)
      e (q + k) + 4 (heads + key heads)        heads made ready (norm and rotary in one): their input
      e (2q + 2k) + 4 heads       attention
      3ef, ec (2h + 3g)           SwiGLU: gate and up, and the product, which the matrix after it keeps
    adapters (LoRA) on frozen matrices of plain layers
      2 (4h + 4) + 4 (q + k) + 4 (heads + key heads), attention and experts as above, 3ef for gate, silu(gate) and up, and
      each adapter's input: a float32 copy of its own beside 16-bit weights; and its rank numbers. Adapters of experts are
      added to the experts' weights in a copy, 3Ehg numbers a layer, whatever the tokens

Routers of M layers that are looked at hold, with b bytes for the number of an expert (1 up to 256 of them, else 2):

    bMc + 4Mc a response token of a step    the old policy's choice and its log-probs; bMc more where the engine records
    bMc + 8     a token of a step, prompts included, where routes are replayed
    2 (bMc + 4Mc) + Mcc + 8M    a response token of an update, while it is measured
    8Mc + ME (2e + 8)           a token of a pack, when its forward is over: choices, logits and their softmax

Once a pass come indices, cos and sin. With gradient checkpointing a layer keeps its input, eh. Beside what is kept stands,
one after the other, the head (the last norm, the states that are read, their gradient, logits of some rows) or the inside
of one layer on the way back: gradients of its activations and, with checkpointing, the layer itself once more.
tests/training/test_memory.py counts what autograd keeps and what an update holds at its peak, and holds this to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from legato.training.memory.shape import Shape

_SLACK = 0.06
"""Of everything else: rounding of blocks, fragments, workspaces of matrix products."""

_FLOAT32 = 4
EIGHT_BIT_MOMENT = 1 + _FLOAT32 / 256
"""A byte, and a float32 scale for each block of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run wants to hold at once."""

    shape: Shape
    size: int
    """Bytes of a number in the weights: 2, 4 or 8."""
    tokens_per_pack: int
    parameters: int | None = None
    """Weights of the policy, adapters apart, where they were counted; None: those of the shape."""
    trained: int | None = None
    """How many are trained; None: all, under LoRA all adapters."""
    adapter_rank: int = 0
    """Of LoRA, on every linear layer; 0: none. Adapters are float32 or better, whatever the weights are."""
    eight_bit: bool = False
    """Moments of a byte each."""
    offload: bool = False
    """Masters and moments in the memory of the host."""
    reference: bool = False
    """A frozen copy of the policy beside it. Under LoRA there is none: it is the policy without its adapters."""
    value_head: bool = False
    head_tokens: int = 0
    """Tokens whose logits are held at once."""
    logit_bytes: int = 0
    """Bytes for each of those logits; 0: those of the head in plain torch, which holds five copies at its worst."""
    stored_keys: int = 0
    """Tokens whose keys and values the engine has room for."""
    fused: bool = False
    """Layers of fused parts."""
    tables: bool = False
    """Attention over padded tables."""
    scores: bool = False
    """In tables: scores are written out (soft-capped, or with sinks), and kept for the backward."""
    sharing: float = 1.0
    """In tables: keys that are attended to for each token of a pack. A prompt's are repeated for each of its responses."""
    longest: int = 0
    """In tables: the longest text; the bias has so many numbers a token."""
    routed: int = 0
    """Response tokens of a step whose routes are measured; 0: routers are not looked at."""
    routed_at_once: int = 0
    """Those of one update."""
    engine_routes: bool = False
    """Whether the engine's routes are kept beside the trainer's."""
    replayed: int = 0
    """Tokens of a step, prompts included, whose routes are replayed."""

    def memory(self, *, checkpointing: bool) -> "Memory":
        """Bytes by item."""
        shape, exact = self.shape, max(self.size, _FLOAT32)
        parameters = shape.parameters if self.parameters is None else self.parameters
        adapters = self.adapter_rank > 0
        all_of_it = shape.adapters(self.adapter_rank) if adapters else parameters
        trained = all_of_it if self.trained is None else self.trained
        trained_size = exact if adapters else self.size
        masters = trained * exact if trained_size < exact or self.offload else 0
        moments = int(2 * trained * (EIGHT_BIT_MOMENT if self.eight_bit else exact))
        # A 16-bit gradient is a tensor of its own until it is added to the float32 one.
        passing = shape.largest * self.size if self.size < exact and not adapters and trained else 0
        layer = max(self.layer(sparse=sparse) for sparse in (False, True) if self._has(sparse=sparse))
        merged = 3 * shape.experts * shape.hidden * shape.expert_intermediate * self.size if adapters else 0
        everything = {
            "weights": parameters * self.size + (trained * exact if adapters else 0),
            "reference": parameters * self.size if self.reference and not adapters else 0,
            "gradients": trained * exact + passing,
            "masters": 0 if self.offload else masters,
            "moments": 0 if self.offload else moments,
            "activations": self.tokens_per_pack * (self._layers() + self._once()) + shape.sparse_layers * merged,
            "activations_checkpointed": self.tokens_per_pack * (shape.layers * self.size * shape.hidden + self._once()),
            "head": self.tokens_per_pack * self.states() + self._logits(),
            "layer": self.tokens_per_pack * self._backward()
            + (self.tokens_per_pack * layer + merged if checkpointing else 0),
            "keys_and_values": 2 * shape.layers * shape.key * self.size * self.stored_keys,
            "routes": self._routes() if self.routed else 0,
        }
        found = Memory(
            **{name: int(value) for name, value in everything.items()},
            host=masters + moments + trained * exact if self.offload else 0,
            checkpointing=checkpointing,
            slack=0,
        )
        return replace(found, slack=int(_SLACK * found.total))

    def layer(self, *, sparse: bool = False) -> float:
        """Bytes that autograd keeps for a token in one layer, without checkpointing; the formulas are above."""
        shape = self.shape
        if self._whole and not sparse:
            kept = 2 * (shape.hidden + shape.query + shape.key + shape.intermediate)
            return self.size * kept + _FLOAT32 * shape.heads
        return self._norms() + self._attention() + (self._experts() if sparse else self._dense(shape.intermediate))

    @property
    def _whole(self) -> bool:
        """Whether dense layers are one function each, which makes again what comes from little."""
        return self.fused and not self.adapter_rank

    def states(self) -> float:
        """Bytes for a token behind the layers: the last norm, the states that are read, and their gradient."""
        norm = (2 * self.size if self.fused else _FLOAT32 + 2 * self.size) * self.shape.hidden + _FLOAT32
        return norm + 2 * self.size * self.shape.hidden

    def _once(self) -> float:
        """Bytes for a token before the layers: indices, cos and sin, and in tables the bias."""
        indices = 8 * (12 if self.tables else 8)
        return indices + 2 * self.size * self.shape.width + (self.size * self.longest if self.tables else 0)

    def _has(self, *, sparse: bool) -> bool:
        return self.shape.sparse_layers > 0 if sparse else self.shape.sparse_layers < self.shape.layers

    def _layers(self) -> float:
        sparse = self.shape.sparse_layers
        dense = self.shape.layers - sparse
        return (dense * self.layer() if dense else 0.0) + (sparse * self.layer(sparse=True) if sparse else 0.0)

    def _norms(self) -> float:
        shape, size = self.shape, self.size
        statistics = _FLOAT32 * (2 + (shape.heads + shape.key_heads if shape.head_norms else 0))
        own = shape.query + shape.key if shape.head_norms else 0
        if self.fused:
            # Heads are made ready from what the projections gave, with or without a norm.
            return statistics + size * (4 * shape.hidden + shape.query + shape.key)
        if self.adapter_rank:
            return statistics + _FLOAT32 * (2 * shape.hidden + own)
        return statistics + 2 * (_FLOAT32 + 2 * size) * shape.hidden + (_FLOAT32 + size) * own

    def _attention(self) -> float:
        shape, size = self.shape, self.size
        numbers = 3.0 * shape.query + 2 * shape.query * self.sharing if self.tables else 2.0 * (shape.query + shape.key)
        if self.scores:
            # Scores, what the cap makes of them, and their softmax, each as wide as the longest text.
            numbers += 3.0 * shape.heads * self.longest
        adapters = 0.0
        if self.adapter_rank:
            adapters = self._adapters(3, shape.hidden) + self._adapters(1, shape.query)
        return size * numbers + _FLOAT32 * shape.heads + adapters

    def _dense(self, intermediate: int) -> float:
        size = self.size
        if self.adapter_rank:
            adapters = self._adapters(2, self.shape.hidden) + self._adapters(1, intermediate)
            return 3 * size * intermediate + adapters
        return (3 if self.fused else 4) * size * intermediate

    def _experts(self) -> float:
        shape, size = self.shape, self.size
        routed = size * (2 * shape.hidden + (3 if self.fused else 4) * shape.expert_intermediate) + 64
        shared = self._dense(shape.shared_intermediate) if shape.shared_intermediate else 0
        return shape.experts_per_token * routed + _FLOAT32 * shape.experts + shared

    def _routes(self) -> float:
        shape, exact = self.shape, max(self.size, _FLOAT32)
        choice = shape.sparse_layers * shape.experts_per_token
        index = choice * (1 if shape.experts <= 256 else 2)
        kept = (index * (2 if self.engine_routes else 1) + exact * choice) * self.routed + (index + 8) * self.replayed
        measures = 2 * (index + exact * choice) + choice * shape.experts_per_token + 8 * shape.sparse_layers
        logits = shape.sparse_layers * shape.experts * (2 * self.size + 2 * exact)
        return kept + measures * self.routed_at_once + self.tokens_per_pack * (8 * choice + logits)

    def _adapters(self, count: int, inputs: int) -> float:
        """Adapters that read the same numbers: each keeps a float32 copy where those have 16 bits, else they share them."""
        exact = max(self.size, _FLOAT32)
        copies = count if self.size < exact else 1
        return exact * (copies * inputs + count * self.adapter_rank)

    def _logits(self) -> float:
        exact = max(self.size, _FLOAT32)
        each = self.logit_bytes or self.size + 4 * exact
        values = exact * self.shape.hidden if self.value_head else 0
        return self.head_tokens * (self.shape.vocabulary * each + values)

    def _backward(self) -> float:
        """Gradients of activations inside one layer, for a token."""
        shape = self.shape
        widest = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate, shape.query)
        if self._whole and self._has(sparse=False):
            # The MLP's product or its gradient, the gradients of gate and up, and of the residual three times.
            return self.size * 3 * (widest + shape.hidden)
        return self.size * (2 * widest + shape.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes by item on the device of the policy."""

    weights: int
    reference: int
    gradients: int
    masters: int
    """Float32 copies of 16-bit weights."""
    moments: int
    activations: int
    """Of one pack, everything kept."""
    activations_checkpointed: int
    """Of one pack with gradient checkpointing."""
    head: int
    """Logits of some rows, and the states of all."""
    layer: int
    """What is made inside one layer on the way back. The head's work is over by then: the larger of the two counts."""
    keys_and_values: int
    """The engine's store."""
    routes: int
    """Which experts tokens were sent to, and with what probability."""
    slack: int
    """For the allocator."""
    host: int
    """In the memory of the host, beside the total: an optimizer that is offloaded."""
    checkpointing: bool
    """Which of the two activations count."""

    @property
    def total(self) -> int:
        return sum(size for _, size in self._items())

    def _items(self) -> Iterator[tuple[str, int]]:
        yield "weights", self.weights
        yield "reference", self.reference
        yield "gradients", self.gradients
        yield "float32 masters", self.masters
        yield "moments", self.moments
        if self.checkpointing:
            yield "activations, checkpointed", self.activations_checkpointed
        else:
            yield "activations", self.activations
        yield ("head", self.head) if self.head >= self.layer else ("one layer on the way back", self.layer)
        yield "keys and values", self.keys_and_values
        yield "routes of experts", self.routes
        yield "slack", self.slack

    def lines(self) -> list[str]:
        """For people: an item a line, the largest first, then the total."""
        items = sorted(self._items(), key=lambda item: -item[1])
        listed = [f"{name:<28}{gigabytes(size):>10}" for name, size in items if size]
        if self.host:
            listed.append(f"{'beside it, on the host':<28}{gigabytes(self.host):>10}")
        return [*listed, f"{'total':<28}{gigabytes(self.total):>10}"]


def gigabytes(size: float) -> str:
    """Bytes for people, in units of 10^9; small amounts with as many places as it takes to see them."""
    amount = size / 1e9
    return f"{amount:.1f} GB" if amount >= 0.95 else f"{amount:.2g} GB"
