"""B7: decoding. 32 prompts x 8 through our engine, with and without shared prompts, beside `generate` and the roofline.

Responses have one fixed length or the ragged lengths of `lengths.json`. With ragged lengths, each of our rows ends at its
own length; `generate` decodes all rows to the longest length, because its rows end together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.gpu import work as work
from benchmarks.gpu.measure import Bench, Part
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.sampling import Sampling

PROMPT, NEW = 256, 512
REPEATS = 5
MOST_SECONDS, MOST_SECONDS_RAGGED = 90.0, 30.0
"""No further repeat of one side starts after this many seconds: five repeats of `generate` may take longer."""


def sizes(bench: Bench) -> tuple[int, int, int, int]:
    """Number of prompts, samples per prompt, prompt tokens, new tokens."""
    return (2, 3, 6, 5) if bench.tiny else (work.PROMPTS, work.SAMPLES, PROMPT, NEW)


def draw_prompts(bench: Bench, vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield new prompts [prompts, tokens] for every call, because an engine may cache the prompts it has read."""
    count, _, length, _ = sizes(bench)
    source = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(3, vocabulary, (count, length), generator=source)


def ragged_lengths(bench: Bench) -> list[int]:
    """The stored length of each response, prompt by prompt."""
    count, samples, _, _ = sizes(bench)
    lengths = work.stored_lengths(bench.tiny)["responses"]
    return [length for row in lengths[:count] for length in row[:samples]]


def floor_seconds(bench: Bench, model: Any, lengths: Sequence[int], *, shared: bool) -> float:
    """Roofline seconds of decoding these response lengths.

    Each step costs the slower of reading the weights and computing the products, plus reading the KV cache of the rows that
    are still being decoded.
    """
    config = model.config
    flops = work.Flops.of(model)
    rate, bandwidth = bench.ceilings["tflops"] * 1e12, bench.ceilings["terabytes_per_second"] * 1e12
    size = model.get_input_embeddings().weight.element_size()
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    weights = (flops.body + flops.head) * size
    count, samples, prompt, _ = sizes(bench)
    table = torch.tensor(lengths, dtype=torch.float64).reshape(count, samples)
    total = 0.0
    for step in range(int(table.max())):
        alive = table > step
        rows = int(alive.sum())
        keys_read = prompt * (int(alive.any(1).sum()) if shared else rows) + rows * step
        total += max(weights / bandwidth, 2 * (flops.body + flops.head) * rows / rate) + keys_read * per_token / bandwidth
    return total


@contextmanager
def limit_responses(lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """Inside this context, the response with seed n ends after `lengths[n]` tokens.

    The limit is set in the KV store when a slot is admitted.
    """
    from legato.rollouts.gpu.slots import KVStore

    table = torch.tensor(lengths, device=device)
    original = KVStore.admit

    def admit(self: Any, slots: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        original(self, slots, *arguments, **keywords)
        self.limit[slots] = table[self.seed[slots]]

    KVStore.admit = admit  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVStore.admit = original  # type: ignore[method-assign]


def make_engine(bench: Bench, policy: Any, *, fused: bool, graphs: bool = True) -> Any:
    rows = sizes(bench)[0] * sizes(bench)[1]
    if not bench.cuda:
        return LocalEngine(policy, rows)
    from legato.rollouts.gpu.engine import GraphedEngine

    return GraphedEngine(policy, rows, fused=fused, graphs=graphs)


def make_requests(prompts: torch.Tensor, samples: int, *, shared: bool) -> list[Request]:
    """One request per prompt (`shared`) or one per response. Seeds are row numbers."""
    rows = [(prompt, tuple(range(n * samples, (n + 1) * samples))) for n, prompt in enumerate(prompts)]
    if shared:
        return [Request(prompt=prompt, seeds=seeds) for prompt, seeds in rows]
    return [Request(prompt=prompt, seeds=(seed,)) for prompt, seeds in rows for seed in seeds]


def our_part(shape: str, *, shared: bool, fused: bool, uneven: bool) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        if uneven and not bench.cuda:
            raise RuntimeError("ragged lengths need the engine with slots, which needs a GPU")
        policy = work.make_policy(bench, shape)
        engine = make_engine(bench, policy, fused=fused)
        count, samples, _, new = sizes(bench)
        lengths = ragged_lengths(bench) if uneven else [new] * (count * samples)
        prompts = draw_prompts(bench, policy.vocabulary)
        # No model writes this end token, so every response has its full length.
        limits = Limits(max_response_tokens=max(lengths), end_tokens=(policy.vocabulary,))

        def call() -> None:
            requests = make_requests(next(prompts), samples, shared=shared)
            rows = [response for group in engine.generate(requests, Sampling(), limits) for response in group]
            token_counts = [len(response.tokens) for response in rows]
            assert token_counts == lengths, f"expected {sum(lengths)} tokens, got {sum(token_counts)}"

        measured: dict[str, Any] = {}
        before = bench.held_bytes()
        with bench.peak(measured, before), limit_responses(lengths, bench.device) if uneven else nullcontext():
            seconds = repeat_call(bench, call, call, MOST_SECONDS)
        floor = floor_seconds(bench, policy.body, lengths, shared=shared)
        return {
            "side": "Legato",
            "shape": shape,
            "shared": shared,
            "fused": getattr(engine, "fused", False),
            "uneven": uneven,
            "notes": list(policy.notes),
            **measured,
            **_rates(sum(lengths), seconds, floor),
            "steps": max(lengths),
        }

    return part


def repeat_call(bench: Bench, call: Callable[[], None], first: Callable[[], None], most: float) -> list[float]:
    """Seconds of each repeat. The first entry is the warm-up `first`, which compiles and captures graphs."""
    seconds = [bench.wall_seconds(first)]
    while len(seconds) <= (1 if bench.tiny else REPEATS):
        if len(seconds) > 1 and (sum(seconds[1:]) > most or bench.seconds_left() < 0):
            break
        seconds.append(bench.wall_seconds(call))
    return seconds


def _rates(tokens: int, seconds: list[float], floor: float) -> dict[str, Any]:
    best = min(seconds[1:])
    return {
        "tokens": tokens,
        "samples": seconds[1:],
        "first_seconds": seconds[0],
        "seconds": best,
        "tokens_per_second": tokens / best,
        "floor_seconds": floor,
        "of_roofline": floor / best,
    }


def generate_part(*, static: bool, uneven: bool) -> Part:
    """`generate` of transformers on the same shape, with its own attention."""

    def part(bench: Bench) -> dict[str, Any]:
        model = work.make_model(bench, "0.6B")
        count, samples, _, new = sizes(bench)
        lengths = ragged_lengths(bench) if uneven else [new] * (count * samples)
        prompt_batches = draw_prompts(bench, model.config.vocab_size)
        options = {"cache_implementation": "static"} if static else {}

        def call(new: int = max(lengths)) -> None:
            prompts = next(prompt_batches).to(bench.device)
            with torch.no_grad():
                tokens = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=new,
                    num_return_sequences=samples,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    eos_token_id=model.config.vocab_size,
                    pad_token_id=0,
                    **options,
                )
            assert tokens.shape == (count * samples, prompts.shape[1] + new)

        measured: dict[str, Any] = {}
        with bench.peak(measured):
            # A static cache is compiled for its length. Without one, a few tokens are enough to warm up.
            first = call if static else lambda: call(4)
            seconds = repeat_call(bench, call, first, MOST_SECONDS_RAGGED if uneven else MOST_SECONDS)
        side = "`generate`, static cache, compiled" if static else "`generate`, dynamic cache"
        floor = floor_seconds(bench, model, lengths, shared=False)
        return {"side": side, "shape": "0.6B", "uneven": uneven, **measured, **_rates(sum(lengths), seconds, floor)}

    return part


B7: dict[str, Part] = {}
for _uneven in (False, True):
    _word = "ragged" if _uneven else "fixed"
    B7[f"0.6B {_word} Legato, shared prompts"] = our_part("0.6B", shared=True, fused=True, uneven=_uneven)
    B7[f"0.6B {_word} Legato, prompts apart"] = our_part("0.6B", shared=False, fused=True, uneven=_uneven)
    if not _uneven:
        B7["0.6B fixed Legato, plain body, shared prompts"] = our_part("0.6B", shared=True, fused=False, uneven=False)
        B7["0.6B fixed Legato, plain body, prompts apart"] = our_part("0.6B", shared=False, fused=False, uneven=False)
    B7[f"1.7B {_word} Legato, shared prompts"] = our_part("1.7B", shared=True, fused=True, uneven=_uneven)
    if not _uneven:
        B7["1.7B fixed Legato, prompts apart"] = our_part("1.7B", shared=False, fused=True, uneven=False)
    B7[f"0.6B {_word} generate, dynamic"] = generate_part(static=False, uneven=_uneven)
B7["0.6B fixed generate, static"] = generate_part(static=True, uneven=False)
