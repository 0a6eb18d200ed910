"""Collect measured times of passes, weight loads and updates, and fit a `Latency` to them by least squares."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from math import isfinite
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.cluster import Latency

_FEW = 16
"""Fewest passes of one size that a fit uses."""

_SLOW = 3
"""A pass this many bits above the median of its size, 8 to 16 times as slow, is an outlier and is dropped."""

_NO_TIME_S = 1e-9
"""Least time of a pass, because a coarse clock may measure 0."""


class Cell(NamedTuple):
    """A bucket of similar passes; each field is the bit length of a quantity."""

    rows: int
    """Bits of the rows: 0 for none, 1 for one, 2 for two, 3 for 3 or 4, 4 for 5 to 8, ..."""
    prefilled: int
    """Bits of the prefilled tokens."""
    duration: int
    """Bits of the nanoseconds."""


class Sums(NamedTuple):
    """Sums over the passes of a cell."""

    num_passes: int = 0
    num_rows: int = 0
    num_prefilled: int = 0
    num_sampled: int = 0
    duration_ns: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Return the sum of both."""
        passes, rows, prefilled, sampled, duration_ns = other
        return Sums(
            self.num_passes + passes,
            self.num_rows + rows,
            self.num_prefilled + prefilled,
            self.num_sampled + sampled,
            self.duration_ns + duration_ns,
        )


@dataclass(slots=True, kw_only=True)
class MeasuredTimes:
    """Times of passes, weight loads and updates, independent of the order in which they are added.

    Times are integers in nanoseconds, so sums are exact. Passes are stored as sums per cell, so memory stays small.

    Example: 20 passes of 1 row that took 3 ms each and 20 of 8 rows that took 10 ms have the latency 2 ms + 1 ms a row.
    """

    cells: dict[Cell, Sums] = field(default_factory=dict)
    loads_ns: list[int] = field(default_factory=list)
    """Time of each weight load, ascending."""
    trainings_ns: list[int] = field(default_factory=list)
    """Time of each update, ascending."""

    def note_pass(
        self, seconds: float, *, num_rows: int, num_prefilled: int, num_sampled: int, num_passes: int = 1
    ) -> None:
        """Add a pass, or several that were timed together.

        Args:
            seconds: time of all passes together.
            num_rows: decoding rows, summed over passes.
            num_prefilled: prefilled tokens, summed over passes.
            num_sampled: tokens that rollouts gained.
            num_passes: number of passes.

        Raises:
            InputError: the time is negative or not finite.
        """
        # A checkpoint can hold plain integers only.
        counts = (int(num_passes), int(num_rows), int(num_prefilled), int(num_sampled))
        sums = Sums(*counts, _nanoseconds(seconds))
        cell = _cell_of(sums)
        self.cells[cell] = self.cells.get(cell, Sums()).plus(sums)

    def note_load(self, seconds: float) -> None:
        """Add the time in which a worker loaded new weights.

        Raises:
            InputError: the time is negative or not finite.
        """
        self.loads_ns = sorted([*self.loads_ns, _nanoseconds(seconds)])

    def note_training(self, seconds: float) -> None:
        """Add the time of an update, from its last rollout to the new weights.

        Raises:
            InputError: the time is negative or not finite.
        """
        self.trainings_ns = sorted([*self.trainings_ns, _nanoseconds(seconds)])

    def add(self, other: "MeasuredTimes") -> None:
        """Add all times of another object."""
        for cell, sums in other.cells.items():
            self.cells[cell] = self.cells.get(cell, Sums()).plus(sums)
        self.loads_ns = sorted(self.loads_ns + other.loads_ns)
        self.trainings_ns = sorted(self.trainings_ns + other.trainings_ns)

    def latency(self) -> Latency | None:
        """Fit the seconds of a pass by a constant plus a cost per row and per prefilled token.

        The times of loads and updates are medians, 0 if not measured. The result is None unless there are 16 passes of
        each of two sizes, one at least twice the other: passes of one size do not determine the cost of a row.
        """
        sizes = _by_size(self.cells)
        by_rows = _by_rows(sizes)
        rows = [sums.num_rows / sums.num_passes for sums in by_rows]
        knots = np.unique(np.rint([1.0, *rows]).astype(np.int64))
        # Passes that were timed together may have less than one row each.
        if len(rows) < 2 or rows[-1] < 2 * rows[0] or knots.size < 2:
            return None
        step_s, row_s, prefill_s = _line(list(sizes.values()))
        gains = [sums.num_sampled / sums.num_rows for sums in by_rows]
        return Latency(
            num_rows=knots,
            decode_s=np.maximum(step_s + row_s * knots, _NO_TIME_S),
            tokens_per_step=np.maximum(np.interp(knots, rows, gains), 1.0) if max(gains) > 1.0 else None,
            prefill_s=prefill_s,
            load_s=median(self.loads_ns or [0]) / 1e9,
            training_s=median(self.trainings_ns or [0]) / 1e9,
        )

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, as lists of integers."""
        cells = [[*cell, *sums] for cell, sums in sorted(self.cells.items())]
        return {"cells": cells, "loads_ns": list(self.loads_ns), "trainings_ns": list(self.trainings_ns)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore an object from its `state`."""
        size = len(Cell._fields)
        cells = {Cell(*numbers[:size]): Sums(*numbers[size:]) for numbers in state["cells"]}
        return cls(cells=cells, loads_ns=list(state["loads_ns"]), trainings_ns=list(state["trainings_ns"]))


def merged(parts: Iterable[MeasuredTimes]) -> MeasuredTimes:
    """Return the sum of all parts."""
    whole = MeasuredTimes()
    for part in parts:
        whole.add(part)
    return whole


def _cell_of(sums: Sums) -> Cell:
    rows = -(-sums.num_rows // sums.num_passes)
    return Cell(
        rows=0 if rows == 0 else (rows - 1).bit_length() + 1,
        prefilled=(sums.num_prefilled // sums.num_passes).bit_length(),
        duration=(sums.duration_ns // sums.num_passes).bit_length(),
    )


def _nanoseconds(seconds: float) -> int:
    if not (isfinite(seconds) and seconds >= 0):
        raise InputError(f"a time must be finite and at least 0, got {seconds!r} seconds; correct the clock")
    return round(seconds * 1e9)


def _by_size(cells: Mapping[Cell, Sums]) -> dict[tuple[int, int], Sums]:
    """Return passes by rows and prefilled tokens, ascending, without outliers (see `_SLOW`)."""
    by_size: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for cell in sorted(cells):
        by_size[cell.rows, cell.prefilled].append(cell)
    found = {}
    for size, same_size in by_size.items():
        ends = np.cumsum([cells[cell].num_passes for cell in same_size])
        middle = same_size[int(np.searchsorted(ends, (ends[-1] + 1) // 2))]
        # Sum all kept cells of a size: only the cells of its short passes would bias the fit downwards.
        kept = [cells[cell] for cell in same_size if cell.duration <= middle.duration + _SLOW]
        found[size] = reduce(Sums.plus, kept)
    return found


def _by_rows(sizes: Mapping[tuple[int, int], Sums]) -> list[Sums]:
    """Return decoding passes by rows, ascending, for sizes with at least `_FEW` passes."""
    found: dict[int, Sums] = defaultdict(Sums)
    for (rows, _), sums in sizes.items():
        found[rows] = found[rows].plus(sums)
    return [sums for rows, sums in found.items() if rows and sums.num_passes >= _FEW]


def _line(sizes: Sequence[Sums]) -> tuple[float, float, float]:
    """Fit the seconds per pass, per row and per prefilled token, each at least 0."""
    passes, rows, prefilled, _, durations = np.array(sizes, np.float64).T
    seconds = np.maximum(durations / passes / 1e9, _NO_TIME_S)
    # Noise grows with the time of a pass, so errors are relative.
    weights = np.sqrt(passes) / seconds
    design = np.column_stack([np.ones(passes.size), rows / passes, prefilled / passes]) * weights[:, None]
    found = _least_squares(design, seconds * weights)
    return float(found[0]), float(found[1]), float(found[2])


def _least_squares(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve non-negative least squares by trying every subset of non-zero coefficients."""
    width = design.shape[1]
    best, least = np.zeros(width), np.inf
    for size in range(1, width + 1):
        for columns in map(list, combinations(range(width), size)):
            found, *_ = np.linalg.lstsq(design[:, columns], values, rcond=None)
            error = float(((design[:, columns] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(width), error
                best[columns] = found
    return best
