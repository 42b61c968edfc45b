"""Curves of any length in bounded memory: neighbouring points are merged, keeping mean, minimum and maximum."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import numpy.typing

from legato.pages.curves import round_six
from legato.pages.summary import number

BUCKETS = 384
"""An even number; a curve on a screen shows no more points."""
MOST_KEYS = 1000
"""Most keys of a run, 6 kB each; our trainer writes fewer."""

Floats = numpy.typing.NDArray[numpy.float32]
_TOTAL, _COUNT, _LOW, _HIGH = range(4)


class Series:
    """Every number of a run's records by key, each key in at most BUCKETS buckets of equally many records."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.width = 1
        self.records = 0
        self.last_step = 0.0
        self._steps = numpy.zeros(BUCKETS)
        self._table = numpy.zeros((4, 0, BUCKETS), dtype=numpy.float32)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records with "step", in order. Values that are not finite numbers are ignored."""
        records = [record for record in records if number(record, "step") is not None]
        for start in range(0, len(records), 512):
            self._add(records[start : start + 512])

    def _add(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            for key, value in record.items():
                if key not in self.keys and type(value) in (int, float) and len(self.keys) < MOST_KEYS and _is_drawn(key):
                    self.keys[key] = len(self.keys)
        self._grow()
        keys = list(self.keys)
        rows = [[v if type(v := record.get(key)) in (int, float) else None for key in keys] for record in records]
        try:
            values = numpy.array(rows, dtype=numpy.float32)
        except OverflowError:  # JSON has whole numbers of any size
            values = numpy.array([[number(record, key) for key in keys] for record in records], dtype=numpy.float32)
        values = values.reshape(len(records), len(keys))
        steps = numpy.array([record["step"] for record in records], dtype=float)
        while self.records + len(records) > BUCKETS * self.width:
            self._merge_pairs()
        places = (self.records + numpy.arange(len(records))) // self.width
        starts = numpy.flatnonzero(numpy.diff(places, prepend=-1))
        known = numpy.isfinite(values)
        here = places[starts]
        for index, (of, over, missing) in enumerate(
            (
                (values, numpy.add, 0.0),
                (known, numpy.add, 0.0),
                (values, numpy.minimum, numpy.inf),
                (values, numpy.maximum, -numpy.inf),
            )
        ):
            filled = numpy.where(known, of, missing).astype(numpy.float32)
            reduced = over.reduceat(filled, starts, axis=0).T
            self._table[index][:, here] = over(self._table[index][:, here], reduced)
        begins = numpy.concatenate([[self.records], self.records + starts[1:]]) % self.width == 0
        self._steps[here[begins]] = steps[starts[begins]]
        self.records += len(records)
        self.last_step = float(steps[-1]) if len(steps) else self.last_step

    def _grow(self) -> None:
        """Grow the table for new keys."""
        missing = len(self.keys) - self._table.shape[1]
        if missing > 0:
            more = numpy.zeros((4, missing, BUCKETS), dtype=numpy.float32)
            more[_LOW], more[_HIGH] = numpy.inf, -numpy.inf
            self._table = numpy.concatenate([self._table, more], axis=1)

    def _merge_pairs(self) -> None:
        """Merge pairs of buckets."""
        left, right = self._table[:, :, ::2], self._table[:, :, 1::2]
        half = BUCKETS // 2
        joined = numpy.zeros_like(self._table)
        joined[_LOW], joined[_HIGH] = numpy.inf, -numpy.inf
        joined[_TOTAL, :, :half], joined[_COUNT, :, :half] = left[_TOTAL] + right[_TOTAL], left[_COUNT] + right[_COUNT]
        joined[_LOW, :, :half] = numpy.minimum(left[_LOW], right[_LOW])
        joined[_HIGH, :, :half] = numpy.maximum(left[_HIGH], right[_HIGH])
        self._table = joined
        self._steps[:half], self._steps[half:] = self._steps[::2].copy(), 0.0
        self.width *= 2

    def curve(self, key: str, points: int = BUCKETS) -> dict[str, list[float]] | None:
        """Return steps with mean, minimum and maximum, at most about `points` of them; None if no record has the key.

        "breaks" are the indices of points that start a new line, because records before them lack the key.
        """
        if key not in self.keys:
            return None
        total, count, low, high = self._table[:, self.keys[key]]
        used = numpy.flatnonzero(count)
        if not len(used):
            return None
        stride = -(-int(used[-1] - used[0] + 1) // max(1, points)) if len(used) > points else 1
        places = (used - used[0]) // stride
        starts = numpy.flatnonzero(numpy.diff(places, prepend=-1))
        jumps = numpy.diff(places[starts])
        # Beside the median: a key of every tenth record is whole, and drawn so. Buckets round such jumps up or down by one.
        usual = numpy.median(jumps) if len(jumps) else 1
        breaks = numpy.flatnonzero(jumps > (1.5 * usual if stride * self.width == 1 else usual + 1)) + 1
        sums, counts = (numpy.add.reduceat(each[used], starts) for each in (total, count))
        steps = self._steps[used][starts]
        if stride * self.width > 1 and used[-1] == (self.records - 1) // self.width:
            # The end of a curve is what people look at: its last bucket stands where it has come to.
            steps[-1] = self.last_step
        return {
            "x": [round_six(value) for value in steps.tolist()],
            "mean": [round_six(value) for value in (sums / counts).tolist()],
            "low": [round_six(value) for value in numpy.minimum.reduceat(low[used], starts).tolist()],
            "high": [round_six(value) for value in numpy.maximum.reduceat(high[used], starts).tolist()],
            "breaks": breaks.tolist(),
        }


def _is_drawn(key: str) -> bool:
    """Whether a key is drawn. Keys per update ("@") are not: they would take most of the memory."""
    return key != "step" and "@" not in key
