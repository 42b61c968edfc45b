"""How many bytes training needs, by item. Computed from a transformers configuration; nothing is run.

Bytes that autograd saves for each token in one layer. Symbols: e bytes per number, h hidden size, q = heads x head size,
k = key heads x head size, f SwiGLU width; a token uses c of E experts, each of width g.

    plain layers (as transformers writes them)
      2 (4h + 4 + 2eh)            each norm: its float32 input, 1/rms, the normalised copy (for the gradient of the weight)
                                  and its output, which the next matrices save
      (4 + e)(q + k) + 4 (heads + key heads)   norms of queries and keys, if the model has them. Rotary embeddings save only
                                  cos and sin, once per forward
      e (2q + 2k) + 4 heads       attention: q, k, v, the output (the output matrix saves it too) and the log-sum-exp.
                                  In the padded tables of a pack on a CPU: e (3q + 2qs) + 4 heads. There keys and values are
                                  repeated for every head and s-fold for the responses of a prompt, and the output exists
                                  once more as tokens
      4ef                         SwiGLU: gate, silu(gate), up and their product
      ec (2h + 4g) + 4E + 64c     or experts: c copies of the token, gate and up, silu(gate), the product, the output that
                                  the router's weight multiplies; the router's softmax; the indices of the dispatch
    fused layers of plain matrices (`policy/layers/layer.py`), which recompute cheap activations
      e (2h + 2q + 2k + 2f) + 4 heads          the residual twice, queries, keys, values, the attention output, gate and up
    fused layers part by part: experts, adapters
      2 (2eh + 4)                 each norm: its input and its output (and one float32 of reserve)
      e (q + k) + 4 (heads + key heads)        norm and rotary embedding of the heads in one kernel: their input
      e (2q + 2k) + 4 heads       attention
      3ef, ec (2h + 3g)           SwiGLU: gate, up and the product, which the next matrix saves
    adapters (LoRA) on frozen matrices of plain layers
      2 (4h + 4) + 4 (q + k) + 4 (heads + key heads), attention and experts as above, 3ef for gate, silu(gate) and up, and
      for each adapter its input (a float32 copy if weights have 16 bits) and `rank` numbers. Adapters of experts are
      added to a copy of the experts' weights: 3Ehg numbers per layer, however many tokens there are

Bytes of recorded routes, for M layers with routers and b bytes per expert number (1 up to 256 experts, else 2):

    bMc + 4Mc   per response token of a step, of the rows that a rank trains on: the old policy's choices and their log-probs
    bMc         per response token of a step, of all rows, if the engine records its routes
    bMc + 8     per token of a step, of all rows and prompts included, if routes are replayed
    2 (bMc + 4Mc) + Mcc + 8M    per response token of an update, while its metrics are computed
    8Mc + ME (2e + 8)           per token of a pack at the end of its forward: choices, logits and their softmax

Each forward also holds indices, cos and sin once. With gradient checkpointing a layer saves only its input: eh, in fused
layers 2eh, since their input is a residual and an update that is not added to it yet. On top of the saved activations comes
the larger of two items, which are never held together: the head (last norm, the hidden states it reads, their gradient,
logits of some rows), or the backward of one layer (gradients of its activations and, with checkpointing, the recomputed
layer).

Gradients: the second pack of an update is computed while the gradients of the first are held. If an update has one pack,
only the head's gradient exists at the peak; those of the layers are made while the backward frees activations. Gradients of
autograd have the dtype of their weight until they are added to the float32 sum; fused layers and the GPU's head write into
that sum.

tests/training/test_memory.py compares these formulas with the bytes that autograd saves and with the peak of an update,
tests/capacity/test_measured_peaks.py with the peaks measured on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from legato.training.memory.shape import Shape
from legato.training.memory.sharding import Sharding

_SLACK = 0.06
"""Share of all other items: block rounding, fragmentation and matmul workspaces."""

_FLOAT32 = 4
OFFLOADED_TOGETHER = 2**28
"""Numbers of offloaded masters that are stepped together: a gigabyte of gradients in host memory, and their weights."""
EIGHT_BIT_MOMENT = 1 + _FLOAT32 / 256
"""Bytes per moment of 8-bit AdamW: one byte, and a float32 scale for each block of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The settings and sizes of a run that decide how much memory it needs."""

    shape: Shape
    size: int
    """Bytes per weight: 2, 4 or 8."""
    tokens_per_pack: int
    parameters: int | None = None
    """Number of the policy's weights without adapters, if they were counted; None: computed from the shape."""
    trained: int | None = None
    """Number of trained weights; None: all of them, or all adapters under LoRA."""
    adapter_rank: int = 0
    """LoRA rank, on every linear layer; 0: no LoRA. Adapters are float32 or wider, whatever the dtype of the weights."""
    eight_bit: bool = False
    """Whether the optimizer's moments have 8 bits."""
    offload: bool = False
    """Whether masters and moments are in host memory."""
    reference: bool = False
    """Whether there is a reference model. Under LoRA it needs no copy: it is the policy without its adapters."""
    value_head: bool = False
    head_tokens: int = 0
    """Tokens whose logits exist at the same time."""
    logit_bytes: int = 0
    """Bytes per logit; 0: the head in plain torch, which holds five copies at its peak."""
    cached_tokens: int = 0
    """Tokens that fit into the engine's KV cache."""
    fused: bool = False
    """Whether the layers use our fused kernels."""
    by_parts: bool = False
    """Whether fused layers run part by part though they have no adapters: a measurement that switches whole layers off."""
    tables: bool = False
    """Whether attention runs over padded tables."""
    scores: bool = False
    """With `tables`: whether attention scores are materialised (soft caps, sinks) and saved for the backward."""
    sharing: float = 1.0
    """With `tables`: rows of keys per token of a pack. Those of a prompt are repeated for each of its responses."""
    longest: int = 0
    """With `tables`: tokens of the longest text, which is the width of the attention bias."""
    routed: int = 0
    """Response tokens of a step whose routes the trainer records, of the rows that a rank trains on; 0: none are."""
    routed_per_update: int = 0
    """Response tokens of one update whose routes are recorded."""
    engine_routed: int = 0
    """Response tokens of a step whose routes the engine has recorded; every rank holds those of all rows."""
    replayed: int = 0
    """Tokens of a step, prompts included, whose routes are replayed."""
    several_packs: bool = True
    """Whether an update has more than one pack."""
    step_cells: int = 0
    """Responses of a step times the longest of them: the size of the step's tables, which every rank holds; 0: ignored."""
    sharding: Sharding = field(default_factory=Sharding)

    def memory(self, *, checkpointing: bool) -> "Memory":
        """The bytes of each item, with or without gradient checkpointing."""
        shape, exact = self.shape, max(self.size, _FLOAT32)
        parameters = shape.parameters if self.parameters is None else self.parameters
        adapters = self.adapter_rank > 0
        trainable = shape.adapters(self.adapter_rank) if adapters else parameters
        trained = trainable if self.trained is None else self.trained
        trained_size = exact if adapters else self.size
        # Adapters are on matrices of the layers.
        outside = min(shape.parameters_outside, parameters)
        trained_outside = 0 if adapters else trained * outside // max(parameters, 1)
        spread = self.sharding
        stepped = spread.state(trained)
        masters = stepped * exact if trained_size < exact or self.offload else 0
        moments = int(2 * stepped * (EIGHT_BIT_MOMENT if self.eight_bit else exact))
        layer = max(self.layer(sparse=sparse) for sparse in (False, True) if self._has_layers(sparse=sparse))
        merged = 3 * shape.experts * shape.hidden * shape.expert_intermediate * self.size if adapters else 0
        held = spread.weights(parameters - outside, outside)
        weights = held * self.size
        if spread.way == "layers" and trained and trained_size < exact:
            # Trained layers lie in float32 on their rank: the shard is the master. Offloaded masters are a copy of it.
            weights += (held - outside) * ((exact if self.offload else 0) - self.size)
        # Adapters are whole on every rank.
        summed = trained if adapters else spread.gradients(trained - trained_outside, trained_outside)
        inputs = (2 if self.fused else 1) * self.size * shape.hidden
        in_layer = (trained - trained_outside) // max(shape.layers, 1) if adapters else shape.largest_layer
        items = {
            "weights": weights + (trained * exact if adapters else 0),
            "reference": held * self.size if self.reference and not adapters else 0,
            "gradients": summed * exact + self._half_gradient(trained),
            "masters": 0 if self.offload else masters,
            "moments": 0 if self.offload else moments,
            "activations": self.tokens_per_pack * (self._layers() + self._inputs()) + shape.sparse_layers * merged,
            "activations_checkpointed": self.tokens_per_pack * (shape.layers * inputs + self._inputs()),
            "head": self.tokens_per_pack * self.states() + self._logits(),
            "layer": self.tokens_per_pack * self._backward()
            + (self.tokens_per_pack * layer + merged if checkpointing else 0),
            "kv_cache": 2 * shape.layers * shape.key * self.size * self.cached_tokens,
            "routes": self._routes() if self.routed else 0,
            "step_tables": self.step_cells * self._cell(),
            "gathered": spread.gathered(
                shape.largest_layer, in_layer if trained else 0, self.size, exact, parameters - outside
            ),
            "resident": spread.copied(parameters - outside) * self.size,
        }
        if not self.several_packs:
            saved = items["activations_checkpointed" if checkpointing else "activations"]
            in_head = exact * shape.hidden * shape.vocabulary if trained_outside else 0
            items["gradients"] = min(items["gradients"], max(in_head, items["gradients"] - saved))
        memory = Memory(
            **{name: int(value) for name, value in items.items()},
            host=masters + moments + self._host_buffers(stepped) if self.offload else 0,
            checkpointing=checkpointing,
            slack=0,
        )
        return replace(memory, slack=int(_SLACK * memory.total))

    def _host_buffers(self, stepped: int) -> int:
        """Bytes through which gradients come to an offloaded optimizer and 16-bit weights go back.

        They are one piece of pinned memory, which torch rounds up to a power of two.
        """
        exact = max(self.size, _FLOAT32)
        each = exact + (self.size if self.size < exact and not self.adapter_rank else 0)
        size = min(stepped, max(OFFLOADED_TOGETHER, self.sharding.state(self.shape.largest))) * each
        return 1 << (size - 1).bit_length() if size else 0

    def _half_gradient(self, trained: int) -> int:
        """Bytes of the largest 16-bit gradient that autograd makes while activations are held; 0 if all are float32."""
        if self.size >= _FLOAT32 or self.adapter_rank or not trained:
            return 0
        if self._fuses_whole_layers and not self._has_layers(sparse=True):
            return 0
        return self.size * (self.shape.largest_in_layers if self.fused else self.shape.largest)

    def layer(self, *, sparse: bool = False) -> float:
        """Bytes that autograd saves per token in one layer without checkpointing; see the formulas above."""
        shape = self.shape
        if self._fuses_whole_layers and not sparse:
            numbers = 2 * (shape.hidden + shape.query + shape.key + shape.intermediate)
            return self.size * numbers + _FLOAT32 * shape.heads
        return self._norms() + self._attention() + (self._experts() if sparse else self._dense(shape.intermediate))

    @property
    def _fuses_whole_layers(self) -> bool:
        """Whether each dense layer is one autograd function, which recomputes cheap activations."""
        return self.fused and not self.adapter_rank and not self.by_parts

    def states(self) -> float:
        """Bytes per token after the layers: the last norm, the hidden states that the head reads, and their gradient."""
        norm = (2 * self.size if self.fused else _FLOAT32 + 2 * self.size) * self.shape.hidden + _FLOAT32
        return norm + 2 * self.size * self.shape.hidden

    def _inputs(self) -> float:
        """Bytes per token before the layers: indices, cos and sin, and with `tables` the attention bias."""
        indices = 8 * (12 if self.tables else 8)
        return indices + 2 * self.size * self.shape.width + (self.size * self.longest if self.tables else 0)

    def _has_layers(self, *, sparse: bool) -> bool:
        """Whether the model has layers with experts (`sparse`), or layers without."""
        return self.shape.sparse_layers > 0 if sparse else self.shape.sparse_layers < self.shape.layers

    def _layers(self) -> float:
        """Bytes that autograd saves per token in all layers."""
        sparse = self.shape.sparse_layers
        dense = self.shape.layers - sparse
        return (dense * self.layer() if dense else 0.0) + (sparse * self.layer(sparse=True) if sparse else 0.0)

    def _norms(self) -> float:
        shape, size = self.shape, self.size
        statistics = _FLOAT32 * (2 + (shape.heads + shape.key_heads if shape.head_norms else 0))
        own = shape.query + shape.key if shape.head_norms else 0
        if self.fused:
            # The fused kernel of norm and rotary embedding saves its input, also for models without such a norm.
            return statistics + size * (4 * shape.hidden + shape.query + shape.key)
        if self.adapter_rank:
            return statistics + _FLOAT32 * (2 * shape.hidden + own)
        return statistics + 2 * (_FLOAT32 + 2 * size) * shape.hidden + (_FLOAT32 + size) * own

    def _attention(self) -> float:
        shape, size = self.shape, self.size
        numbers = 3.0 * shape.query + 2 * shape.query * self.sharing if self.tables else 2.0 * (shape.query + shape.key)
        if self.scores:
            # Scores, capped scores and their softmax, each as wide as the longest text.
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
        step = (index + exact * choice) * self.routed + index * self.engine_routed + (index + 8) * self.replayed
        update = 2 * (index + exact * choice) + choice * shape.experts_per_token + 8 * shape.sparse_layers
        logits = shape.sparse_layers * shape.experts * (2 * self.size + 2 * exact)
        return step + update * self.routed_per_update + self.tokens_per_pack * (8 * choice + logits)

    def _cell(self) -> int:
        """Bytes of a token in the tables of a step: mask, turn, log-probs of sampler, old policy and reference, value."""
        exact = max(self.size, _FLOAT32)
        return 1 + 8 + 2 * exact + (exact if self.reference else 0) + (exact if self.value_head else 0)

    def _adapters(self, count: int, inputs: int) -> float:
        """Bytes per token of `count` adapters that read one input. Each has a float32 copy of an input in 16 bits."""
        exact = max(self.size, _FLOAT32)
        copies = count if self.size < exact else 1
        return exact * (copies * inputs + count * self.adapter_rank)

    def _logits(self) -> float:
        exact = max(self.size, _FLOAT32)
        per_logit = self.logit_bytes or self.size + 4 * exact
        values = exact * self.shape.hidden if self.value_head else 0
        return self.head_tokens * (self.shape.vocabulary * per_logit + values)

    def _backward(self) -> float:
        """Bytes per token of the gradients of activations inside one layer."""
        shape = self.shape
        widest = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate, shape.query)
        if self._fuses_whole_layers and self._has_layers(sparse=False):
            # The MLP's product or its gradient, the gradients of gate and up, and three of the residual.
            return self.size * 3 * (widest + shape.hidden)
        return self.size * (2 * widest + shape.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes of each item on the policy's device."""

    weights: int
    reference: int
    gradients: int
    masters: int
    """Float32 copies of 16-bit weights."""
    moments: int
    activations: int
    """Of one pack, without checkpointing."""
    activations_checkpointed: int
    """Of one pack with gradient checkpointing."""
    head: int
    """Logits of some rows, and the last hidden states of all rows."""
    layer: int
    """Bytes of the backward of one layer. The head is done by then, so only the larger of `head` and `layer` counts."""
    kv_cache: int
    """Keys and values of the engine."""
    routes: int
    """Recorded experts of each token and their probabilities."""
    slack: int
    """Reserve for the allocator."""
    host: int
    """Host memory of an offloaded optimizer; not part of the total."""
    checkpointing: bool
    """Whether `activations_checkpointed` counts instead of `activations`."""
    gathered: int = 0
    """Whole layers and their gradients, where layers are sharded."""
    resident: int = 0
    """The local engine's copy of the layers, where layers are sharded."""
    step_tables: int = 0
    """Log-probs and masks of all responses of a step."""

    @property
    def total(self) -> int:
        return sum(size for _, size in self.items())

    @property
    def peak(self) -> int:
        """The bytes that tensors take at the peak, without the reserve: what `max_memory_allocated` measures."""
        return self.total - self.slack

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the bytes of each item that counts in the total."""
        yield "weights", self.weights
        yield "copy for the engine", self.resident
        yield "gathered layers", self.gathered
        yield "reference", self.reference
        yield "gradients", self.gradients
        yield "float32 masters", self.masters
        yield "moments", self.moments
        if self.checkpointing:
            yield "activations, checkpointed", self.activations_checkpointed
        else:
            yield "activations", self.activations
        yield ("head", self.head) if self.head >= self.layer else ("backward of one layer", self.layer)
        yield "KV cache", self.kv_cache
        yield "routes of experts", self.routes
        yield "tables of the step", self.step_tables
        yield "slack", self.slack

    def lines(self) -> list[str]:
        """Lines to print: one per item, the largest first, then the total."""
        items = sorted(self.items(), key=lambda item: -item[1])
        listed = [f"{name:<28}{gigabytes(size):>10}" for name, size in items if size]
        if self.host:
            listed.append(f"{'host memory, in addition':<28}{gigabytes(self.host):>10}")
        return [*listed, f"{'total':<28}{gigabytes(self.total):>10}"]


def gigabytes(size: float) -> str:
    """Bytes as text in units of 10^9, with two digits below 0.95 GB."""
    amount = size / 1e9
    return f"{amount:.1f} GB" if amount >= 0.95 else f"{amount:.2g} GB"
