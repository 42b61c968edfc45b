"""The parts of the experiment. Each counts unequal bits between training's sizes and every size of decoding, and its time.

products    the projections of a layer and the head, by default cuBLAS, cuBLASLt without split-K, and Triton tiles
attention   the chained decode kernel, in several layouts, against the forward kernel of training
heads       norm and rotation of queries and keys: training's kernel for few rows
head        training's projection for few rows, beside the engine's product and sampling
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.exact.kernels import product
from legato.policy.kernels.attention import attend_forward
from legato.policy.kernels.decode import Workspace, attend_slots, rows_per_block
from legato.policy.kernels.exact import attend_chained, rows_per_tile
from legato.policy.kernels.gradients import rotate_forward
from legato.policy.kernels.head import project, wide_product
from legato.policy.kernels.layers import heads as heads_ready
from legato.policy.kernels.sample import sample
from legato.policy.layout.spans import Spans
from legato.rollouts.gpu.buckets import BUCKETS
from legato.rollouts.gpu.slots import group_by_prompt

TIMED = (8, 64, 256)
"""Rows at which decoding is timed."""
PACK = 16384
OTHER_PACKS = (2500, 4096, 9999)
"""Packs of other sizes: training's own rows must not depend on them either."""
TILES = ((64, 32), (64, 64), (128, 128))
LAYOUTS = ((16, 1), (16, 4), (64, 4))
"""Queries in a tile and warps of the chained attention kernel."""
SLICES = (1, 2, 4)
COPIED_BYTES = 200e6
"""Copies of a weight that timed calls read in turn, so that no call finds its weight in the cache of 50 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a dense model that its kernels see."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    width: int
    vocabulary: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each product; joined projections as well as single ones."""
        queries, keys = self.heads * self.width, self.key_heads * self.width
        return {
            "q": (queries, self.hidden),
            "k": (keys, self.hidden),
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate": (self.inner, self.hidden),
            "gate and up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SHAPES = {
    "0.6B": Shape(hidden=1024, inner=3072, heads=16, key_heads=8, width=128, vocabulary=151936),
    "1.7B": Shape(hidden=2048, inner=6144, heads=16, key_heads=8, width=128, vocabulary=151936),
    "Llama-1B": Shape(hidden=2048, inner=8192, heads=32, key_heads=8, width=64, vocabulary=128256),
    "Qwen2.5-1.5B": Shape(hidden=1536, inner=8960, heads=12, key_heads=2, width=128, vocabulary=151936),
}
TINY = Shape(hidden=32, inner=64, heads=4, key_heads=2, width=16, vocabulary=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where the experiment runs. Without a GPU the shapes are tiny, kernels are interpreted and nothing is timed."""

    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        # Triton's interpreter multiplies the raw bits of 16-bit numbers.
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def pack(self) -> int:
        return PACK if self.cuda else 200

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS if self.cuda else (1, 8, 16)

    @property
    def timed(self) -> tuple[int, ...]:
        return TIMED if self.cuda else (8,)

    def random(self, *sizes: int, seed: int, scale: float = 1.0) -> Tensor:
        source = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(*sizes, generator=source, device=self.device) * scale).to(self.dtype)

    def seconds(self, calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float | None:
        """Seconds of one call, by replaying a CUDA graph of all of them; the median of the repeats. None on a CPU."""
        if not self.cuda:
            return None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
        return statistics.median(times[1:])


def unequal(one: Tensor, other: Tensor) -> int:
    """How many elements differ in any bit but the sign of zero."""
    return int((one != other).sum())


def offsets(rows: int, count: int, of: int) -> list[int]:
    """Three places at which `count` of `of` rows begin: odd ones too, since a pack does not align its rows."""
    last = max(0, of - count)
    return sorted({min(last, place) for place in (0, 1037 * (1 + rows % 7), last)})


# Products


def make_ways(way: str) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The products of one way by name; "default" and "lt" differ in the process's settings (`configure`)."""
    if way == "triton":
        return {f"triton {tile[0]}x{tile[1]}": _tiled(tile) for tile in TILES}
    return {way: torch.nn.functional.linear}


def _tiled(tile: tuple[int, int]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: product(x, weight, tile=tile)


def configure(way: str) -> None:
    """Set up a way of multiplying for this process. The workspace is set in the environment before torch starts."""
    if way.startswith("lt"):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        # The second word forbids split-K.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]


def products(lab: Lab, shape: Shape, way: str) -> dict[str, Any]:
    """Unequal elements between the pack and every bucket, and seconds, for each product and function of a way."""
    results: dict[str, Any] = {}
    for number, (name, (outputs, inputs)) in enumerate(shape.products.items()):
        x = lab.random(lab.pack, inputs, seed=number)
        weight = lab.random(outputs, inputs, seed=100 + number, scale=inputs**-0.5)
        for kind, multiply in make_ways(way).items():
            results[f"{name}: {kind}"] = {
                "unequal": {str(size): _unequal_rows(multiply, x, weight, size) for size in _sizes(lab)},
                "seconds": {str(rows): _product_seconds(lab, multiply, x[:rows], weight) for rows in lab.timed},
            }
    return results


def _sizes(lab: Lab) -> list[int]:
    return sorted({*lab.buckets, *(size for size in OTHER_PACKS if size < lab.pack)})


def _unequal_rows(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, size: int) -> int:
    whole = multiply(x, weight)
    return sum(unequal(multiply(x[at : at + size], weight), whole[at : at + size]) for at in offsets(size, size, len(x)))


def _product_seconds(lab: Lab, multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float | None:
    if not lab.cuda:
        return None
    copies = max(2, int(COPIED_BYTES / (weight.numel() * weight.element_size())))
    weights = [weight.clone() for _ in range(copies)]
    return lab.seconds([lambda each=each: multiply(x, each) for each in weights])  # type: ignore[misc]


def products_agree(lab: Lab, shape: Shape) -> dict[str, int]:
    """Unequal elements of a pack between this process's library and Triton's largest tile."""
    counts = {}
    for number, (name, (outputs, inputs)) in enumerate(shape.products.items()):
        x = lab.random(lab.pack, inputs, seed=number)
        weight = lab.random(outputs, inputs, seed=100 + number, scale=inputs**-0.5)
        counts[name] = unequal(torch.nn.functional.linear(x, weight), product(x, weight, tile=TILES[-1]))
    return counts


# Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A batch in decoding and the same texts as a pack of training, up to the same token of every row."""

    query: Tensor
    prompt_keys: Tensor
    prompt_values: Tensor
    keys: Tensor
    values: Tensor
    length: Tensor
    """Of each row, the new token counted."""
    prompt_length: Tensor
    owners: list[int]
    trained: Tensor
    """[R, H, D]: the attention of training at the last token of each row."""


def make_rows(lab: Lab, shape: Shape, count: int, longest: int) -> Rows:
    """`count` rows, eight to a prompt, of random lengths up to `longest`."""
    groups = -(-count // 8)
    owners = [row // 8 for row in range(count)]
    source = torch.Generator().manual_seed(count)
    prompt_length = torch.randint(1, longest // 2 + 2, (groups,), generator=source)
    length = torch.randint(1, longest + 1, (count,), generator=source)
    heads, key_heads, width = shape.heads, shape.key_heads, shape.width
    tokens = int(prompt_length.sum() + length.sum())
    query, key, value = (lab.random(tokens, many, width, seed=many + 7) for many in (heads, key_heads, key_heads))
    value = value.roll(1, 0)
    positions = torch.cat(
        [torch.arange(int(each)) for each in prompt_length]
        + [torch.arange(int(each)) + prompt_length[owner] for each, owner in zip(length, owners, strict=True)]
    )
    spans = Spans.from_lengths(prompt_length, length, torch.tensor(owners), positions)
    trained, _ = attend_forward(
        query, key, value, spans.places.to(lab.device), spans.query_tiles.to(lab.device), width**-0.5
    )
    prompt_ends, ends = prompt_length.cumsum(0), prompt_length.sum() + length.cumsum(0)
    prompts = _stores(key, value, prompt_ends, prompt_length)
    own = _stores(key, value, ends, length)
    last = (ends - 1).to(lab.device)
    return Rows(
        query=query[last].contiguous(),
        prompt_keys=prompts[0],
        prompt_values=prompts[1],
        keys=own[0],
        values=own[1],
        length=length.to(lab.device),
        prompt_length=prompt_length.to(lab.device),
        owners=owners,
        trained=trained[last],
    )


def _stores(key: Tensor, value: Tensor, ends: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of spans as the engine stores them, [spans, K, T, D]."""
    stores = []
    for table in (key, value):
        store = table.new_zeros(len(lengths), table.shape[1], int(lengths.max()), table.shape[2])
        for place, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
            store[place, :, :length] = table[end - length : end].transpose(0, 1)
        stores.append(store)
    return stores[0], stores[1]


def attention(lab: Lab, shape: Shape) -> dict[str, Any]:
    """Unequal elements of the chained kernel against training, and its seconds beside today's decode attention."""
    results: dict[str, Any] = {}
    longest = 1024 if lab.cuda else 150
    for count in (1, 8, 64, 256) if lab.cuda else (1, 9):
        rows = make_rows(lab, shape, count, longest)
        slots = torch.arange(count, device=lab.device)
        today = _today(lab, shape, rows, slots)
        results.setdefault("today", {})[str(count)] = {
            "unequal": unequal(today(), rows.trained),
            "seconds": lab.seconds([today] * 20),
        }
        for lanes, warps in LAYOUTS:
            per_block = rows_per_tile(shape.heads, shape.key_heads, lanes)
            owners, members = group_by_prompt(rows.owners, per_block, count)
            for slices in SLICES:
                if shape.width // slices < 16:
                    continue
                call = _chained(lab, shape, rows, slots, (lanes, warps, slices), owners, members)
                results.setdefault(f"{lanes} queries, {warps} warps, {slices} slices", {})[str(count)] = {
                    "unequal": unequal(call(), rows.trained),
                    "seconds": lab.seconds([call] * 20),
                }
    return results


def _chained(
    lab: Lab,
    shape: Shape,
    rows: Rows,
    slots: Tensor,
    layout: tuple[int, int, int],
    owners: Sequence[int],
    members: Any,
) -> Callable[[], Tensor]:
    lanes, warps, slices = layout
    block_prompt, block_rows = torch.tensor(owners, device=lab.device), torch.tensor(members, device=lab.device)
    # The kernel adds the new token to the stored length itself.
    length = rows.length - 1
    return lambda: attend_chained(
        rows.query,
        rows.prompt_keys,
        rows.prompt_values,
        rows.keys,
        rows.values,
        slots=slots,
        slot_length=length,
        prompt_length=rows.prompt_length,
        block_prompt=block_prompt,
        block_rows=block_rows,
        scale=shape.width**-0.5,
        lanes=lanes,
        warps=warps,
        slices=slices,
    )


def _today(lab: Lab, shape: Shape, rows: Rows, slots: Tensor) -> Callable[[], Tensor]:
    count = len(rows.query)
    splits = max(1, min(8, 512 // max(1, count * shape.key_heads))) if lab.cuda else 1
    workspace = Workspace(count, shape.heads, shape.width, splits, splits, lab.device)
    owners, members = group_by_prompt(rows.owners, rows_per_block(shape.heads, shape.key_heads), count)
    block_prompt, block_rows = torch.tensor(owners, device=lab.device), torch.tensor(members, device=lab.device)
    # The kernel adds the new token to the stored length itself.
    length = rows.length - 1
    return lambda: attend_slots(
        rows.query,
        rows.prompt_keys,
        rows.prompt_values,
        rows.keys,
        rows.values,
        slots=slots,
        slot_length=length,
        prompt_length=rows.prompt_length,
        block_prompt=block_prompt,
        block_rows=block_rows,
        workspace=workspace,
        scale=shape.width**-0.5,
    )


# Norm and rotation of the heads


def heads(lab: Lab, shape: Shape) -> dict[str, Any]:
    """Unequal elements of training's rotation for few rows, and of today's decode kernel; seconds of both."""
    source = lab.random(lab.pack, shape.heads * shape.width, seed=1)
    keys = lab.random(lab.pack, shape.key_heads * shape.width, seed=2)
    norm = lab.random(shape.width, seed=3)
    angle = torch.linspace(0, 50, lab.pack * shape.width, device=lab.device).view(lab.pack, shape.width)
    cosine, sine = angle.cos().to(lab.dtype), angle.sin().to(lab.dtype)
    whole = rotate_forward(source, cosine, sine, norm, 1e-6, shape.width)
    results: dict[str, Any] = {"training's kernel": {}, "today": {}}
    for rows in lab.buckets:
        at = 1037 % max(1, lab.pack - rows)
        some = slice(at, at + rows)
        small = [each[some].contiguous() for each in (source, keys, cosine, sine)]
        store = torch.zeros(rows, shape.key_heads, 4, shape.width, dtype=lab.dtype, device=lab.device)
        place = torch.arange(rows, device=lab.device), torch.zeros(rows, dtype=torch.int64, device=lab.device)

        def trained(small: list[Tensor] = small) -> Tensor:
            rotate_forward(small[1], small[2], small[3], norm, 1e-6, shape.width)
            return rotate_forward(small[0], small[2], small[3], norm, 1e-6, shape.width)

        def decoded(small: list[Tensor] = small, store: Tensor = store, place: Any = place) -> Tensor:
            norms = (norm, norm, 1e-6)
            return heads_ready(
                small[0], small[1], small[1], small[2], small[3], norms, store, store.clone(), *place, shape.width
            )

        for name, call in (("training's kernel", trained), ("today", decoded)):
            timed = lab.seconds([call] * 20) if rows in lab.timed else None
            results[name][str(rows)] = {"unequal": unequal(call(), whole[some]), "seconds": timed}
    return results


# The head


def head(lab: Lab, shape: Shape) -> dict[str, Any]:
    """Unequal log-probs of training's projection for few rows, and of the engine's; seconds of both."""
    pack = 4096 if lab.cuda else lab.pack
    hidden = lab.random(pack, shape.hidden, seed=1)
    weight = lab.random(shape.vocabulary, shape.hidden, seed=2, scale=4 * shape.hidden**-0.5)
    source = torch.Generator().manual_seed(3)
    targets = torch.randint(0, shape.vocabulary, (pack,), generator=source).to(lab.device)
    results: dict[str, Any] = {}
    for temperature in (1.0, 0.7):
        warm = torch.full((pack,), temperature, device=lab.device)
        whole = project(hidden, weight, targets, warm).logprobs
        rows_of: dict[str, Any] = {"training's projection": {}, "its distances kept": {}, "today": {}}
        for rows in (size for size in lab.buckets if size <= pack):
            at = 1037 % max(1, pack - rows)
            some = slice(at, at + rows)
            x, y, t = hidden[some].contiguous(), targets[some].contiguous(), warm[some].contiguous()
            slots = torch.arange(rows, device=lab.device)
            seeds, places = slots + 5, torch.zeros_like(slots)

            def trained(x: Tensor = x, y: Tensor = y, t: Tensor = t) -> Tensor:
                return project(x, weight, y, t).logprobs

            def kept(x: Tensor = x, y: Tensor = y, t: Tensor = t) -> Tensor:
                return project(x, weight, y, t, keep=True).logprobs

            def today(
                x: Tensor = x,
                slots: Tensor = slots,
                seeds: Tensor = seeds,
                places: Tensor = places,
                temperature: float = temperature,
            ) -> tuple[Tensor, Tensor]:
                return sample(wide_product(x, weight.t()), slots, seeds, places, temperature=temperature)

            for name, call in (("training's projection", trained), ("its distances kept", kept)):
                timed = lab.seconds([call] * 4) if rows in lab.timed else None
                rows_of[name][str(rows)] = {"unequal": unequal(call(), whole[some]), "seconds": timed}
            tokens, logprobs = today()
            again = project(x, weight, tokens, t).logprobs
            timed = lab.seconds([today] * 4) if rows in lab.timed else None
            rows_of["today"][str(rows)] = {"unequal": unequal(logprobs, again), "seconds": timed}
        results[f"temperature {temperature}"] = rows_of
    return results
