"""The calls in which a partition's queries see keys of a partition above it.

Turns a range of query rows per key into a short list of rectangles. A long run of keys that the same queries see is one
unmasked call that reads the keys in place; short runs are gathered and computed together under a small mask.

    M keys of the ancestor   Q query rows
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treering.attention.gateway import Gateway
from treering.attention.schedule.build import MAX_STEP_ENTRIES, MAX_WASTED_PAIRS
from treering.attention.schedule.call import Call, Visibility
from treering.tree.plan.fragment import Sight

MIN_RUN_TOKENS = 128
"""A run of keys this long is read in place; shorter ones are gathered with their neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ancestor:
    """A partition above: its keys and values, and which query rows see them.

    Attributes:
        gateway: holds the ancestor's keys and values.
        sight: for each of its M tokens the query rows that see it.
        calls: cover every visible pair once.
    """

    gateway: Gateway
    sight: Sight
    calls: tuple[Call, ...]

    @classmethod
    def from_sight(cls, gateway: Gateway, sight: Sight) -> "Ancestor":
        """Builds the calls from the sight."""
        return cls(gateway=gateway, sight=sight, calls=tuple(ancestor_calls(sight)))


class _KeySpan(NamedTuple):
    """Keys [start, stop) that query rows [first, last) see."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def ancestor_calls(sight: Sight) -> Iterator[Call]:
    """Rectangles of visible pairs; every row of a rectangle sees at least one key.

    Example: 200 keys that rows 0 to 9 see are one unmasked call; 2 keys that rows 0 to 9 see, followed by 1 that rows 3
    to 5 see, are one masked call of 10 rows and 3 keys.
    """
    group: list[_KeySpan] = []
    wasted = num_keys = 0
    for run in _runs(sight):
        if run.stop - run.start >= MIN_RUN_TOKENS:
            yield _as_call([run])
            continue
        # All rows of a group see its first run; later runs may be seen by fewer of these rows, never by other rows.
        is_within = bool(group) and group[0].first <= run.first and run.last <= group[0].last
        more = (run.stop - run.start) * (group[0].num_rows - run.num_rows) if is_within else 0
        num_keys += run.stop - run.start
        # Rows that see all keys of the group need no mask.
        has_room = wasted + more == 0 or num_keys * group[0].num_rows <= MAX_STEP_ENTRIES
        if is_within and wasted + more <= MAX_WASTED_PAIRS and has_room:
            group.append(run)
            wasted += more
            continue
        if group:
            yield _as_call(group)
        group, wasted, num_keys = [run], 0, run.stop - run.start
    if group:
        yield _as_call(group)


def _runs(sight: Sight) -> Iterator[_KeySpan]:
    """Maximal runs of neighbouring keys that the same query rows see; keys that no row sees are left out."""
    changes = (np.diff(sight.first) != 0) | (np.diff(sight.stop) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), sight.first.size]
    for start, stop in pairwise(bounds):
        if start < stop and sight.first[start] < sight.stop[start]:
            yield _KeySpan(start, stop, int(sight.first[start]), int(sight.stop[start]))


def _as_call(runs: list[_KeySpan]) -> Call:
    is_full = all((run.first, run.last) == (runs[0].first, runs[0].last) for run in runs)
    keys = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    return Call.of(runs[0].first, runs[0].last, keys, Visibility.FULL if is_full else Visibility.MASKED)
