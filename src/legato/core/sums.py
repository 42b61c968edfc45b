"""Sums behind metrics, which merge over micro-batches, updates and ranks.

A metric is never averaged twice. Each call contributes pieces: a total with its count, a maximum, or the counts of a
histogram. Pieces merge exactly, and only the merged piece becomes a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_MANTISSA_BITS = 3
_SHIFT = 23 - _MANTISSA_BITS
_BINS = 2 ** (1 + 8 + _MANTISSA_BITS)
QUANTILES = (0.01, 0.05, 0.1, 0.5, 0.95, 0.99)


class Piece:
    """One quantity that merges over micro-batches and ranks and then becomes a number."""

    __slots__ = ()

    def merge(self, other: Piece) -> Piece:
        """The piece of both samples together; `other` has the same class."""
        raise NotImplementedError

    def report(self) -> Mapping[str, float]:
        """The numbers of the piece, by suffix of the metric key ('' for the plain value); NaN if nothing was counted."""
        raise NotImplementedError


def tensors_of(piece: Piece) -> tuple[Tensor, ...]:
    """The tensors of a piece, in the order of its fields."""
    names: tuple[str, ...] = type(piece).__match_args__  # type: ignore[attr-defined]
    return tuple(map(getattr, [piece] * len(names), names))


@dataclass(frozen=True, slots=True)
class _Additive(Piece):
    def merge(self, other: Piece) -> Piece:
        assert type(other) is type(self)
        return type(self)(*map(operator.add, tensors_of(self), tensors_of(other)))


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if denominator else math.nan


@dataclass(frozen=True, slots=True)
class Total(_Additive):
    """A plain sum, for quantities that already carry the normaliser of the whole update (the loss and its terms)."""

    total: Tensor

    def report(self) -> Mapping[str, float]:
        return {"": float(self.total)}


@dataclass(frozen=True, slots=True)
class Mean(_Additive):
    """total / count."""

    total: Tensor
    count: Tensor

    def report(self) -> Mapping[str, float]:
        return {"": _ratio(self.total, self.count)}


@dataclass(frozen=True, slots=True)
class Deviation(_Additive):
    """Population standard deviation from the sums of x and x^2 (float64, so that the difference survives)."""

    total: Tensor
    squares: Tensor
    count: Tensor

    def report(self) -> Mapping[str, float]:
        mean = _ratio(self.total, self.count)
        variance = _ratio(self.squares, self.count) - mean * mean
        return {"": math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance))}


@dataclass(frozen=True, slots=True)
class EffectiveSize(_Additive):
    """(sum w)^2 / (count * sum w^2): the share of samples that the weights leave effective; 1 when all are equal."""

    total: Tensor
    squares: Tensor
    count: Tensor

    def report(self) -> Mapping[str, float]:
        return {"": _ratio(self.total * self.total, self.squares * self.count)}


@dataclass(frozen=True, slots=True)
class Explained(_Additive):
    """1 - Var(residual) / Var(target): the share of the target's variance that a prediction explains."""

    residual: Tensor
    residual_squares: Tensor
    target: Tensor
    target_squares: Tensor
    count: Tensor

    def report(self) -> Mapping[str, float]:
        left = _ratio(self.residual_squares, self.count) - _ratio(self.residual, self.count) ** 2
        whole = _ratio(self.target_squares, self.count) - _ratio(self.target, self.count) ** 2
        return {"": 1 - left / whole if whole > 0 else math.nan}


@dataclass(frozen=True, slots=True)
class Maximum(Piece):
    """The largest value seen."""

    value: Tensor

    def merge(self, other: Piece) -> Piece:
        assert isinstance(other, Maximum)
        return Maximum(torch.maximum(self.value, other.value))

    def report(self) -> Mapping[str, float]:
        return {"": float(self.value) if self.value > -math.inf else math.nan}


@dataclass(frozen=True, slots=True)
class Minimum(Piece):
    """The smallest value seen."""

    value: Tensor

    def merge(self, other: Piece) -> Piece:
        assert isinstance(other, Minimum)
        return Minimum(torch.minimum(self.value, other.value))

    def report(self) -> Mapping[str, float]:
        return {"": float(self.value) if self.value < math.inf else math.nan}


@dataclass(frozen=True, slots=True)
class Binned(_Additive):
    """A mean per bin of a fixed list of bins."""

    word: ClassVar[str] = "bin"
    totals: Tensor
    counts: Tensor

    def report(self) -> Mapping[str, float]:
        pairs = zip(self.totals.unbind(), self.counts.unbind(), strict=True)
        return {f"_{self.word}{index}": _ratio(total, count) for index, (total, count) in enumerate(pairs)}


@dataclass(frozen=True, slots=True)
class Layered(Binned):
    """A mean per layer."""

    word: ClassVar[str] = "layer"


@dataclass(frozen=True, slots=True)
class Correlation(_Additive):
    """Pearson's correlation of two quantities, from the sums of x, y and their products (float64)."""

    count: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    def report(self) -> Mapping[str, float]:
        x, y = _ratio(self.x, self.count), _ratio(self.y, self.count)
        spread = (_ratio(self.xx, self.count) - x * x) * (_ratio(self.yy, self.count) - y * y)
        # A quantity without variance has no correlation. Rounding errors do not count as variance.
        tiny = 1e-14 * _ratio(self.xx, self.count) * _ratio(self.yy, self.count)
        correlation = (_ratio(self.xy, self.count) - x * y) / math.sqrt(spread) if spread > tiny else math.nan
        return {"": correlation}


@dataclass(frozen=True, slots=True)
class Load(_Additive):
    """How evenly choices fall on experts, from their counts [layers, experts]."""

    choices: Tensor

    def report(self) -> Mapping[str, float]:
        total = self.choices.sum(-1, keepdim=True)
        if not bool((total > 0).all()):
            return {"_max": math.nan, "_unused": math.nan}
        shares = self.choices / total
        return {
            "_max": float(shares.amax(-1).mean() * shares.shape[-1]),
            "_unused": float((self.choices == 0).double().mean()),
        }


@dataclass(frozen=True, slots=True)
class Histogram(Piece):
    """Counts on fixed signed-log edges: each octave of the positive and the negative axis in eight equal parts.

    A bin is the leading bits of the float32 pattern (sign, exponent, three bits of mantissa), so the edges are the same
    everywhere and binning is a shift. Quantiles interpolate inside a bin, with a relative error of at most 1/8, and stay
    between the smallest and the largest counted value.
    """

    counts: Tensor
    least: Tensor
    most: Tensor

    @classmethod
    def from_values(cls, values: Tensor, included: Tensor) -> Histogram:
        """The histogram of the included values (any shape; `included` is bool of the same shape)."""
        values, included = values.detach().to(torch.float32).contiguous().reshape(-1), included.reshape(-1)
        pattern = values.view(torch.int32)
        # Negative floats run backwards as integers: flip their lower bits so that bins ascend with the value.
        ascending = pattern ^ ((pattern >> 31) & 0x7FFFFFFF)
        bins = (ascending >> _SHIFT) + _BINS // 2
        table = torch.zeros(_BINS, dtype=torch.int64, device=values.device)
        if not len(values):
            return cls(table, values.new_full((), torch.inf), values.new_full((), -torch.inf))
        return cls(
            table.index_add_(0, bins, included.to(torch.int64)),
            torch.where(included, values, torch.inf).amin(),
            torch.where(included, values, -torch.inf).amax(),
        )

    def merge(self, other: Piece) -> Piece:
        assert isinstance(other, Histogram)
        return Histogram(
            self.counts + other.counts,
            torch.minimum(self.least, other.least),
            torch.maximum(self.most, other.most),
        )

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The values below which these shares of the counted values lie; NaN if nothing was counted."""
        total = int(self.counts.sum())
        if total == 0:
            return [math.nan] * len(shares)
        cumulative, least, most = self.counts.cumsum(0).double(), float(self.least), float(self.most)
        values = []
        for share in shares:
            rank = share * (total - 1) + 0.5
            index = int(torch.searchsorted(cumulative, torch.tensor(rank, dtype=torch.float64), right=False))
            before = int(cumulative[index - 1]) if index else 0
            lower, upper = _lower_edges(torch.tensor([index, index + 1])).tolist()
            value = lower + (upper - lower) * (rank - before) / int(self.counts[index])
            values.append(min(max(value, least), most))
        return values

    def bars(self) -> dict[str, list[float]]:
        """Counts from the first filled bin to the last, and their edges (one more), as a figure draws them.

        Empty bins between two filled ones are one bin: there are hundreds of them around 0.
        """
        filled = self.counts.nonzero().squeeze(1)
        if not len(filled):
            return {"edges": [], "counts": []}
        # A bin begins at each filled one, and at each empty one that follows it.
        bins = torch.tensor(sorted({*filled.tolist(), *(filled + 1).tolist()}))
        counts = self.counts.cpu()[bins[:-1]]
        # Six digits tell two edges apart, which differ by a sixteenth or more.
        return {"edges": [float(f"{edge:.6g}") for edge in _lower_edges(bins).tolist()], "counts": counts.tolist()}

    def report(self) -> Mapping[str, float]:
        return {
            f"_p{round(share * 100):02d}": value for share, value in zip(QUANTILES, self.quantiles(QUANTILES), strict=True)
        }


def _lower_edges(bins: Tensor) -> Tensor:
    """The lower edge of each bin."""
    integers = (bins - _BINS // 2) << _SHIFT
    patterns = torch.where(integers < 0, (-1 - integers) | (1 << 31), integers)
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


class Sums(Mapping[str, Piece]):
    """Pieces by metric key. `a + b` merges; keys present on one side only are taken over."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Mapping[str, Piece] | None = None) -> None:
        self._pieces = dict(pieces or {})

    def __getitem__(self, key: str) -> Piece:
        return self._pieces[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    # Faster than those of Mapping, which look up every key again.

    def items(self) -> ItemsView[str, Piece]:
        return self._pieces.items()

    def values(self) -> ValuesView[Piece]:
        return self._pieces.values()

    def __repr__(self) -> str:
        return f"Sums({', '.join(self._pieces)})"

    def __add__(self, other: Sums) -> Sums:
        merged = dict(self._pieces)
        for key, piece in other.items():
            merged[key] = merged[key].merge(piece) if key in merged else piece
        return Sums(merged)

    def __radd__(self, other: int) -> Sums:
        """So that the built-in sum() works."""
        return self if other == 0 else NotImplemented

    def report(self) -> dict[str, float]:
        """Every metric as a number, by key. One transfer from the device, whatever the number of metrics."""
        (on_host,) = fetch([self])
        return {key + suffix: value for key, piece in on_host.items() for suffix, value in piece.report().items()}


def fetch(many: Sequence[Sums]) -> list[Sums]:
    """The sums with all tensors on the host, copied in one transfer."""
    tensors: list[Tensor] = []
    on_device = False
    for sums in many:
        for piece in sums.values():
            for tensor in tensors_of(piece):
                tensors.append(tensor)
                on_device = on_device or tensor.device.type != "cpu"
    return _fetch_at_once(many, tensors) if on_device else list(many)


def _fetch_at_once(many: Sequence[Sums], tensors: Sequence[Tensor]) -> list[Sums]:
    """Copy `tensors`, the tensors of all pieces in order, as float64. Counts stay exact up to 2^53."""
    # One launch per dtype instead of one for each of some hundred tensors.
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(number)
    order = [number for numbers in kinds.values() for number in numbers]
    parts = [torch.cat([tensors[number].reshape(-1) for number in numbers]).double() for numbers in kinds.values()]
    together = torch.split(torch.cat(parts).cpu(), [tensors[number].numel() for number in order])
    on_host = {number: flat.reshape(tensors[number].shape) for number, flat in zip(order, together, strict=True)}
    numbers = iter(range(len(tensors)))

    def copy(piece: Piece) -> Piece:
        return type(piece)(*(on_host[next(numbers)] for _ in tensors_of(piece)))

    return [Sums({key: copy(piece) for key, piece in sums.items()}) for sums in many]
