"""The calls in which a partition's queries see keys of a partition above it.

Turns a range of query rows per key into a short list of rectangles. A long run of keys that the same queries see is one
unmasked call that reads the keys in place; short runs are gathered and computed together under a small mask.

    M keys of the ancestor   Q query rows
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treering.arrays import Int64Array
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeySpan:
    """Keys [start, stop) that query rows [first, last) see."""

    start: int
    stop: int
    first: int
    last: int


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
        more = _wasted(group[0], run) if group and _is_within(run, group[0]) else None
        num_keys += run.stop - run.start
        # Rows that see all keys of the group need no mask.
        has_room = wasted + (more or 0) == 0 or num_keys * _num_rows(group[0]) <= MAX_STEP_ENTRIES
        if more is None or wasted + more > MAX_WASTED_PAIRS or not has_room:
            if group:
                yield _as_call(group)
            group, wasted, num_keys = [run], 0, run.stop - run.start
            continue
        group.append(run)
        wasted += more
    if group:
        yield _as_call(group)


def _runs(sight: Sight) -> Iterator[_KeySpan]:
    """Maximal runs of neighbouring keys that the same query rows see; keys that no row sees are left out."""
    changes = (np.diff(sight.first) != 0) | (np.diff(sight.stop) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), sight.first.size]
    for start, stop in pairwise(bounds):
        if start < stop and sight.first[start] < sight.stop[start]:
            yield _KeySpan(start=start, stop=stop, first=int(sight.first[start]), last=int(sight.stop[start]))


def _is_within(run: _KeySpan, outer: _KeySpan) -> bool:
    return outer.first <= run.first and run.last <= outer.last


def _num_rows(run: _KeySpan) -> int:
    return run.last - run.first


def _wasted(outer: _KeySpan, run: _KeySpan) -> int:
    return (run.stop - run.start) * (_num_rows(outer) - _num_rows(run))


def _as_call(runs: list[_KeySpan]) -> Call:
    is_full = all((run.first, run.last) == (runs[0].first, runs[0].last) for run in runs)
    return Call(
        query_start=runs[0].first,
        query_stop=runs[0].last,
        key_start=runs[0].start,
        key_stop=runs[-1].stop,
        visibility=Visibility.FULL if is_full else Visibility.MASKED,
        keys=_gathered(runs),
    )


def _gathered(runs: list[_KeySpan]) -> Int64Array | None:
    if all(left.stop == right.start for left, right in pairwise(runs)):
        return None
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])
