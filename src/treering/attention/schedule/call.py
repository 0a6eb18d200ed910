"""A call: one rectangle of queries against keys, and which of its pairs are visible.

Schedules consist of calls, and kernels run them.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from treering.arrays import BoolArray, Int64Array
from treering.tree.plan.fragment import Sight


class Visibility(Enum):
    """Which pairs of a call are visible: all, those on or below the diagonal, or those in the mask."""

    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One rectangular attention: queries [query_start, query_stop) against keys, each row seeing at least one key.

    `keys` holds packed indices when the keys are not the range [key_start, key_stop). A masked call may have a window:
    its rows see only keys less than `window` positions before them.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    visibility: Visibility
    keys: Int64Array | None = None
    window: int | None = None

    @classmethod
    def of(
        cls, query_start: int, query_stop: int, keys: Int64Array, visibility: Visibility, window: int | None = None
    ) -> "Call":
        """A call of some keys, ascending packed indices, which become a range if they are one."""
        is_range = int(keys[-1] - keys[0]) == keys.size - 1
        return cls(
            query_start=query_start,
            query_stop=query_stop,
            key_start=int(keys[0]),
            key_stop=int(keys[-1]) + 1,
            visibility=visibility,
            keys=None if is_range else keys,
            window=window,
        )

    def key_indices(self) -> Int64Array:
        """Packed indices of the keys: int64 [num_keys]."""
        return self.keys if self.keys is not None else np.arange(self.key_start, self.key_stop)

    def mask(self, sight: Sight, position: Int64Array | None = None) -> BoolArray:
        """Visible pairs: bool [num_queries, num_keys].

        Args:
            sight: which queries see each key, ignoring the window.
            position: of the query tokens; required if the call has a window.
        """
        queries = np.arange(self.query_start, self.query_stop)[:, None]
        keys = self.key_indices()[None, :]
        visible = (sight.first[keys] <= queries) & (queries < sight.stop[keys])
        if self.window is None:
            return visible
        assert position is not None
        within: BoolArray = position[queries] - sight.position[keys] < self.window
        return visible & within
