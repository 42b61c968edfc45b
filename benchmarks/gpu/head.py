"""B1 to B3: the head alone. Log-probs and entropy forward, a GSPO loss forward and backward, and rows without a gradient.

Our head processes whole sequences, as many at once as the policy holds logits for, and accumulates the weight's gradient, as
`Policy.accumulate_gradient` does. The bare matrix products are measured in the same rounds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import GIB, Bench, Part, describe_error
from benchmarks.gpu.peers import LOSSES, SCORERS, Scorer, Sequences, sequence_loss
from benchmarks.gpu.work import TINY, stored_lengths, tokenizer

BOLD = (16384, 2048, 151936)
SIZES = (BOLD, (16384, 1024, 151936), (8192, 4096, 151936), (32768, 2048, 151936), (16384, 576, 49152))
ACTIVE = (1.0, 0.7, 0.4)
GATE_TOKENS = 256
LARGEST_ERROR, SMALLEST_COSINE = 0.1, 0.995


def size_name(size: tuple[int, int, int]) -> str:
    return " x ".join(map(str, size))


class OurHead:
    """Our head on a body of one layer, cut into runs as the policy cuts a pack."""

    def __init__(self, bench: Bench, hidden: int, vocabulary: int) -> None:
        from transformers import AutoModelForCausalLM, Qwen3Config

        from legato.policy.head.head import Head
        from legato.policy.model.load import Loading, load_policy

        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            tie_word_embeddings=True,
        )
        automatic: Any = AutoModelForCausalLM
        with bench.device:
            body = automatic.from_config(config, dtype=bench.dtype)
        loading = Loading(device=bench.device.type, dtype="bfloat16" if bench.cuda else "float32")
        self.policy = load_policy(body, loading, tokenizer=tokenizer())
        self.head = Head.from_body(self.policy.body)
        self.weight: Tensor = self.policy.body.get_output_embeddings().weight
        # Gradients accumulate in float32, as the optimizer requires.
        self.weight.grad_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self._cut: dict[int, tuple[Sequences, list[Sequences]]] = {}

    def runs(self, batch: Sequences) -> list[Sequences]:
        """Cut the batch into runs of whole rows, as `Policy.accumulate_gradient` does. Each batch is cut once."""
        if id(batch) not in self._cut:
            parts = self.policy._parts(make_pack(batch.counts))
            self._cut[id(batch)] = (batch, [slice_sequences(batch, part.start, part.stop) for part in parts])
        return self._cut[id(batch)][1]

    @torch.no_grad()
    def score(self, batch: Sequences) -> Tensor:
        """Log-probs [N], as `Policy.score` computes them: all rows at once if the head holds no logits, else in runs."""
        whole = self.head.never_holds_logits(batch.hidden)
        results = [self._score_part(part, part.hidden)[0] for part in ([batch] if whole else self.runs(batch))]
        return torch.cat(results)

    def learn(self, batch: Sequences) -> Tensor:
        """Forward and backward, as `Policy.accumulate_gradient` does. Returns the gradient at the hidden states.

        The gradient of the weight is in `weight.grad`.
        """
        gradients = []
        for part in self.runs(batch):
            leaf = part.hidden.detach().requires_grad_()
            loss = sequence_loss(part, self._score_part(part, leaf)[0]) * (len(part.counts) / len(batch.counts))
            loss.backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            gradients.append(leaf.grad)
        return torch.cat(gradients)

    def _score_part(self, part: Sequences, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.score(hidden, part.targets, part.temperatures, self.policy.tokens_at_once)


def make_pack(counts: tuple[int, ...]) -> Any:
    """A pack of responses of these lengths. The policy reads it to decide for how many rows it holds logits."""
    from legato.core.texts import Texts
    from legato.policy.layout.packs import pack

    rows, widest = len(counts), max(counts)
    lengths = torch.tensor(counts)
    texts = Texts(
        prompts=torch.zeros(1, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(1, dtype=torch.int64),
        tokens=torch.zeros(rows, widest, dtype=torch.int64),
        lengths=lengths,
        mask=torch.arange(widest) < lengths[:, None],
        group=torch.zeros(rows, dtype=torch.int64),
        temperature=torch.ones(rows),
    )
    return pack(texts, torch.arange(rows))


def make_sequences(
    bench: Bench, size: tuple[int, int, int], temperature: float, weight: Tensor, active: float = 1.0
) -> Sequences:
    """Random sequences: logits with standard deviation 3, targets sampled from them, ratios within about 0.01 of 1.

    A share `active` of the sequences has an advantage; the others have 0. `weight` is overwritten with random numbers.
    """
    tokens, hidden, _ = size
    source = torch.Generator(device=bench.device).manual_seed(0)
    with torch.no_grad():
        weight.normal_(0.0, 0.02, generator=source)
        scale = 3.0 / (0.02 * hidden**0.5)
        states = torch.randn(tokens, hidden, device=bench.device, generator=source).mul_(scale).to(weight.dtype)
        counts = _counts(bench, tokens)
        targets, old = torch.empty(tokens, dtype=torch.int64, device=bench.device), torch.empty(tokens, device=bench.device)
        for start in range(0, tokens, 1024):
            logprobs = ((states[start : start + 1024] @ weight.t()).float() / temperature).log_softmax(-1)
            samples = torch.multinomial(logprobs.exp(), 1, generator=source)
            targets[start : start + 1024] = samples.squeeze(1)
            old[start : start + 1024] = logprobs.gather(1, samples).squeeze(1)
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(bench.device)
        drift = 0.01 * torch.randn(len(counts), device=bench.device, generator=source)
    advantages = torch.where(torch.arange(len(counts)) % 2 == 0, 1.0, -1.0)
    # Sequences without an advantage are spread over the list (0, 7, 14 ... modulo its length), long and short ones alike.
    order = [(7 * place) % len(counts) for place in range(len(counts))]
    advantages[order[round(active * len(counts)) :]] = 0.0
    return Sequences(
        hidden=states,
        weight=weight,
        targets=targets,
        owner=owner,
        counts=counts,
        lengths=torch.tensor(counts, device=bench.device),
        old=(old - drift[owner]).contiguous(),
        advantages=advantages.to(bench.device),
        temperature=temperature,
        temperatures=torch.full((tokens,), temperature, device=bench.device),
    )


def _counts(bench: Bench, tokens: int) -> tuple[int, ...]:
    """The stored sequence lengths, scaled so that they add up to `tokens`."""
    lengths = stored_lengths(bench.tiny)["head"]
    scaled = [max(1, length * tokens // sum(lengths)) for length in lengths]
    scaled[0] += tokens - sum(scaled)
    return tuple(scaled)


def slice_sequences(batch: Sequences, first: int, last: int) -> Sequences:
    """The sequences `first` to `last` (exclusive)."""
    here = slice(sum(batch.counts[:first]), sum(batch.counts[:last]))
    return Sequences(
        hidden=batch.hidden[here],
        weight=batch.weight,
        targets=batch.targets[here],
        owner=batch.owner[here] - first,
        counts=batch.counts[first:last],
        lengths=batch.lengths[first:last],
        old=batch.old[here],
        advantages=batch.advantages[first:last],
        temperature=batch.temperature,
        temperatures=batch.temperatures[here],
    )


def exact_logprobs(batch: Sequences, tokens: int) -> Tensor:
    """Log-probs of the first `tokens` tokens in float64, computed one slice of the vocabulary at a time."""
    states = batch.hidden[:tokens].double()
    slices = [states @ part.double().t() / batch.temperature for part in batch.weight.detach().split(16384)]
    logits = torch.cat(slices, 1)
    return logits.log_softmax(1).gather(1, batch.targets[:tokens, None]).squeeze(1)


def scorers(bench: Bench, ours: OurHead) -> dict[str, Any]:
    """Every head that returns log-probs, ours first. A head that cannot be built is replaced by the error message."""
    results: dict[str, Any] = {"Legato": ours.score}
    for name, build in SCORERS.items():
        try:
            results[name] = bench.check_allowed(name) and build()
        except Exception as error:
            results[name] = describe_error(error)
    return results


def forward_part(size: tuple[int, int, int], temperature: float) -> Part:
    """B1 at one shape and temperature."""

    def part(bench: Bench) -> dict[str, Any]:
        tokens, hidden, vocabulary = _size(bench, size)
        ours = OurHead(bench, hidden, vocabulary)
        batch = make_sequences(bench, (tokens, hidden, vocabulary), temperature, ours.weight)
        truth = exact_logprobs(batch, min(GATE_TOKENS, tokens))
        errors: dict[str, float] = {}
        calls: dict[str, Callable[[], Any]] = {}
        failed: dict[str, Any] = {}
        for name, scorer in scorers(bench, ours).items():
            try:
                errors[name] = _gate_forward(scorer, batch, truth)
                calls[name] = without_gradient(scorer, batch)
            except Exception as error:
                failed[name] = {"error": describe_error(error)}
        out = torch.empty(tokens, vocabulary, device=bench.device, dtype=bench.dtype)
        calls["bare product"] = lambda: torch.mm(batch.hidden, batch.weight.detach().t(), out=out)
        results = bench.time_interleaved(calls, **_rounds(bench, size))
        for name, error in errors.items():
            results[name]["max_error"] = error
        return {"size": [tokens, hidden, vocabulary], "temperature": temperature, "heads": {**results, **failed}}

    return part


def _gate_forward(scorer: Scorer | str, batch: Sequences, truth: Tensor) -> float:
    """The largest error of the first tokens' log-probs against float64. Raises ValueError if it is too large."""
    if isinstance(scorer, str):
        raise RuntimeError(scorer)
    with torch.no_grad():
        error = float((scorer(batch)[: len(truth)].double() - truth).abs().max())
    if not error <= LARGEST_ERROR:
        raise ValueError(f"its log-probs differ from float64 by {error:.2g}; not timed")
    return error


def without_gradient(scorer: Scorer, batch: Sequences) -> Callable[[], Any]:
    """A call that scores the batch under `no_grad`."""

    def call() -> None:
        with torch.no_grad():
            scorer(batch)

    return call


def _size(bench: Bench, size: tuple[int, int, int]) -> tuple[int, int, int]:
    return (64, 32, TINY["vocab_size"]) if bench.tiny else size


def _rounds(bench: Bench, size: tuple[int, int, int]) -> dict[str, Any]:
    """30 samples at the shape that has a target, 10 at the others."""
    if bench.tiny:
        return {"warm": 1, "samples": 2, "seconds": 5.0}
    return {"warm": 10, "samples": 30, "seconds": 75.0} if size == BOLD else {"warm": 3, "samples": 10, "seconds": 25.0}


def learners(bench: Bench, ours: OurHead) -> dict[str, Any]:
    """Every head as a function from sequences to the gradient at the hidden states, or the error message."""
    results: dict[str, Any] = {"Legato": ours.learn}
    for name, build in {**SCORERS, **LOSSES}.items():
        try:
            head = bench.check_allowed(name) and build()
        except Exception as error:
            results[name] = describe_error(error)
            continue
        results[name] = _learner(head, returns_loss=name in LOSSES)
    return results


def _learner(head: Callable[[Sequences], Tensor], *, returns_loss: bool) -> Callable[[Sequences], Tensor]:
    def call(batch: Sequences) -> Tensor:
        leaf = batch.hidden.detach().requires_grad_()
        inside = Sequences(**{**{name: getattr(batch, name) for name in Sequences.__slots__}, "hidden": leaf})
        output = head(inside)
        loss = output if returns_loss else sequence_loss(inside, output)
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    return call


def equal_lengths(batch: Sequences) -> Sequences:
    """The same tokens as sequences of one length, for heads that take rectangles: they pay for no padding."""
    rows, columns = batch.even()
    owner = torch.arange(rows, device=batch.owner.device).repeat_interleave(columns)
    fields = {name: getattr(batch, name) for name in Sequences.__slots__}
    tokens = rows * columns
    fields |= {name: fields[name][:tokens] for name in ("hidden", "targets", "old", "temperatures")}
    lengths = torch.full_like(batch.lengths, columns)
    return Sequences(**{**fields, "owner": owner, "counts": (columns,) * rows, "lengths": lengths})


def _gate_gradient(learner: Any, batch: Sequences) -> tuple[float, float]:
    """Cosines of the gradients at hidden states and weight with float64 autograd, on a few sequences.

    Raises ValueError if a cosine is too small.
    """
    if isinstance(learner, str):
        raise RuntimeError(learner)
    batch.weight.grad = None
    hidden_gradient = learner(batch).double()
    weight_gradient = batch.weight.grad
    assert weight_gradient is not None
    leaf, matrix = (x.detach().double().requires_grad_() for x in (batch.hidden, batch.weight))
    logprobs = (leaf @ matrix.t() / batch.temperature).log_softmax(1).gather(1, batch.targets[:, None]).squeeze(1)
    sums = torch.zeros(len(batch.counts), device=leaf.device, dtype=torch.float64)
    ratio = (sums.index_add(0, batch.owner, logprobs - batch.old.double()) / batch.lengths).exp()
    (-(ratio * batch.advantages.double()).mean()).backward()
    assert leaf.grad is not None and matrix.grad is not None
    cosines = (_cosine(hidden_gradient, leaf.grad), _cosine(weight_gradient.double(), matrix.grad))
    batch.weight.grad = None
    if not min(cosines) >= SMALLEST_COSINE:
        raise ValueError(f"its gradients have cosines {cosines[0]:.4f} and {cosines[1]:.4f} with float64; not timed")
    return cosines


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), 0))


def backward_part(size: tuple[int, int, int]) -> Part:
    """B2 at one shape. The weight's gradient is float32 for every head, because the optimizer needs that."""

    def part(bench: Bench) -> dict[str, Any]:
        tokens, hidden, vocabulary = _size(bench, size)
        ours = OurHead(bench, hidden, vocabulary)
        batch = make_sequences(bench, (tokens, hidden, vocabulary), 1.0, ours.weight)
        few = slice_sequences(batch, 0, 3)
        calls: dict[str, Callable[[], Any]] = {}
        cosines: dict[str, tuple[float, float]] = {}
        failed: dict[str, Any] = {}
        for name, learner in learners(bench, ours).items():
            even = name in LOSSES
            try:
                cosines[name] = _gate_gradient(learner, equal_lengths(few) if even else few)
                calls[name] = with_fresh_gradient(learner, equal_lengths(batch) if even else batch)
            except Exception as error:
                failed[name] = {"error": describe_error(error)}
            bench.free()
        calls["three bare products"] = bare_products(bench, batch)
        results = bench.time_interleaved(calls, **_rounds(bench, size))
        gradients = hidden * (tokens * bench.dtype.itemsize + 4 * vocabulary) / GIB
        for name, pair in cosines.items():
            results[name]["cosines"] = pair
            if "peak_gib" in results[name]:
                results[name]["extra_gib"] = results[name]["peak_gib"] - gradients
        return {"size": [tokens, hidden, vocabulary], "gradients_gib": gradients, "heads": {**results, **failed}}

    return part


def with_fresh_gradient(learner: Callable[[Sequences], Tensor], batch: Sequences) -> Callable[[], Any]:
    """A call that runs forward and backward and drops the weight's gradient."""

    def call() -> None:
        learner(batch)
        # A gradient kept until the next call would count as memory held before it.
        batch.weight.grad = None

    return call


def bare_products(bench: Bench, batch: Sequences) -> Callable[[], Any]:
    """A call of the products X W^T, dL W and dL^T X, each written into preallocated memory."""
    hidden, weight = batch.hidden, batch.weight.detach()
    logits = torch.empty(len(hidden), len(weight), device=bench.device, dtype=bench.dtype)
    towards, matrix = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=towards)
        torch.mm(logits.t(), hidden, out=matrix)

    return call


def only_active(batch: Sequences) -> Sequences:
    """The sequences with an advantage."""
    lives = [number for number, value in enumerate(batch.advantages.tolist()) if value]
    tokens = (batch.advantages != 0)[batch.owner]
    counts = tuple(batch.counts[number] for number in lives)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(batch.owner.device)
    return replace(
        batch,
        hidden=batch.hidden[tokens].contiguous(),
        targets=batch.targets[tokens],
        owner=owner,
        counts=counts,
        lengths=batch.lengths[lives],
        old=batch.old[tokens],
        advantages=batch.advantages[lives],
        temperatures=batch.temperatures[tokens],
    )


def active_part(bench: Bench) -> dict[str, Any]:
    """B3: the head over the sequences that have a gradient, as in the second pass of an update."""
    size = _size(bench, BOLD)
    ours = OurHead(bench, size[1], size[2])
    calls: dict[str, Callable[[], Any]] = {}
    share = {}
    for active in ACTIVE:
        batch = make_sequences(bench, size, 1.0, ours.weight, active)
        alive = (batch.advantages != 0)[batch.owner]
        share[f"{active:g}"] = float(alive.double().mean())
        calls[f"{active:g}"] = with_fresh_gradient(ours.learn, only_active(batch))
    calls["forward"] = without_gradient(ours.score, batch)
    rounds = _rounds(bench, BOLD) if bench.tiny else {"warm": 5, "samples": 15, "seconds": 20.0}
    return {"size": list(size), "active_tokens": share, "calls": bench.time_interleaved(calls, **rounds)}


B1: dict[str, Part] = {
    f"{size_name(size)}, temperature {temperature:g}": forward_part(size, temperature)
    for size in SIZES
    for temperature in ((1.0, 0.7) if size == BOLD else (1.0,))
}
B2: dict[str, Part] = {size_name(size): backward_part(size) for size in SIZES}
B3: dict[str, Part] = {"active": active_part}
