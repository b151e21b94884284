"""Metrics of one run as columns of numbers, and their reduction to as many points as a picture can show.

The reduction keeps the smallest and the largest value of each interval of steps, so that a spike of one step is seen
whatever the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]

FIRST_CAPACITY: Final = 256


class MetricTable:
    """The metrics of one run: a row for each step, in order, and a column for each name; NaN where there is none."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._count = 0
        self._steps: IntColumn = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._times: FloatColumn = np.zeros(FIRST_CAPACITY)
        self._values: FloatColumn = np.full((FIRST_CAPACITY, 0), np.nan)

    def __len__(self) -> int:
        return self._count

    @property
    def steps(self) -> IntColumn:
        """`[N]` the steps, rising."""
        return self._steps[: self._count]

    @property
    def times(self) -> FloatColumn:
        """`[N]` Unix times at which the steps ended."""
        return self._times[: self._count]

    @property
    def last_step(self) -> int | None:
        return int(self._steps[self._count - 1]) if self._count else None

    @property
    def size_bytes(self) -> int:
        return self._steps.nbytes + self._times.nbytes + self._values.nbytes

    def name_columns(self, names: Sequence[str]) -> None:
        """Add columns, so that `names` are the names of all of them in order."""
        added = len(names) - len(self.names)
        if added > 0:
            empty = np.full((len(self._values), added), np.nan)
            self._values = np.concatenate([self._values, empty], axis=1)
            self.names = list(names)

    def put(self, step: int, time: float, numbers: FloatColumn) -> None:
        """Add a row, or replace that of the same step; `numbers` are those of the first columns."""
        at = self._place(step)
        self._steps[at], self._times[at] = step, time
        self._values[at] = np.nan
        self._values[at, : len(numbers)] = numbers

    def extend(self, rows: Sequence[tuple[int, float, bytes]]) -> None:
        """Add rows of steps after all others, in order; the numbers of each are little-endian float64."""
        while self._count + len(rows) > len(self._steps):
            self._grow()
        new = slice(self._count, self._count + len(rows))
        self._steps[new] = [step for step, _, _ in rows]
        self._times[new] = [time for _, time, _ in rows]
        self._values[new] = np.nan
        at = self._count
        # Rows before a name was first reported are shorter; there are few lengths, so each is read at once.
        for size, part in groupby(rows, key=lambda row: len(row[2])):
            texts = [text for _, _, text in part]
            numbers = np.frombuffer(b"".join(texts), dtype="<f8").reshape(len(texts), size // 8)
            self._values[at : at + len(texts), : size // 8] = numbers
            at += len(texts)
        self._count += len(rows)

    def drop(self, first: int, last: int) -> None:
        """Remove the rows from step `first` to step `last`."""
        kept = (self.steps < first) | (self.steps > last)
        count = int(kept.sum())
        for column in (self._steps, self._times, self._values):
            column[:count] = column[: self._count][kept]
        self._count = count

    def column(self, name: str) -> FloatColumn:
        """Return `[N]` the values of a metric; raises `KeyError` for a name that no step has."""
        if name not in self.names:
            raise KeyError(name)
        return self._values[: self._count, self.names.index(name)]

    def latest(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        found: dict[str, float] = {}
        for index, name in enumerate(self.names):
            known = np.flatnonzero(~np.isnan(self._values[: self._count, index]))
            if len(known):
                found[name] = float(self._values[known[-1], index])
        return found

    def _place(self, step: int) -> int:
        """Return the index at which the row of this step belongs; a new one is made for a step not seen yet."""
        at = int(np.searchsorted(self.steps, step))
        if at < self._count and self._steps[at] == step:
            return at
        if self._count == len(self._steps):
            self._grow()
        for column in (self._steps, self._times, self._values):
            column[at + 1 : self._count + 1] = column[at : self._count].copy()
        self._count += 1
        return at

    def _grow(self) -> None:
        more = len(self._steps)
        self._steps = np.concatenate([self._steps, np.zeros(more, dtype=np.int64)])
        self._times = np.concatenate([self._times, np.zeros(more)])
        self._values = np.concatenate([self._values, np.full((more, self._values.shape[1]), np.nan)])


def reduced(
    table: MetricTable, names: Iterable[str], points: int, *, first: int | None = None, last: int | None = None
) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of each metric from step `first` to step `last`, at most `points` of each.

    Names that no step has are left out.
    """
    found: dict[str, tuple[list[int], list[float]]] = {}
    steps = table.steps
    start = 0 if first is None else int(np.searchsorted(steps, first))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
    for name in names:
        if name not in table.names:
            continue
        values = table.column(name)[start:end]
        known = ~np.isnan(values)
        at, kept = steps[start:end][known], values[known]
        chosen = min_max_indices(at, kept, points)
        found[name] = (at[chosen].tolist(), kept[chosen].tolist())
    return found


def min_max_indices(steps: IntColumn, values: FloatColumn, points: int) -> IntColumn:
    """Return the indices of at most `points` values to show, rising: all, or the extremes of equal spans of steps.

    The first and the last value are always among them.
    """
    count = len(values)
    if count <= points:
        return np.arange(count)
    spans = max(1, (points - 2) // 2)
    bounds = np.linspace(steps[0], steps[-1] + 1, spans + 1)
    starts = np.searchsorted(steps, bounds)
    chosen = {0, count - 1}
    for start, end in pairwise(starts):
        if end > start:
            part = values[start:end]
            chosen.add(int(start + part.argmin()))
            chosen.add(int(start + part.argmax()))
    return np.array(sorted(chosen), dtype=np.int64)
