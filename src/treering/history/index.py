"""The index of one prompt: its kept rollouts as one text, newest version first, and the sorted order of its suffixes.

Knows tokens and versions. Knows nothing of files, of budgets and of how drafts are chosen. A rollout stands in the text
as a marker and its tokens; the marker is where the response begins, which is the same place in every rollout of a
prompt, so it stands for the whole prompt.

    N entries of the text, markers included   E versions (epochs)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.types import TokenIds

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

MARKER = -1
"""Entry of a text where a response begins; below every token id."""

MAX_DEPTH = 64
"""Suffixes are sorted by this many entries: a match and the draft that goes on from it are no longer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptIndex:
    """The rollouts of one prompt; arrays are read-only, 8 bytes a token.

    Attributes:
        text: int32 [N], for each rollout a marker and its tokens.
        suffixes: int32 [N], places of the text sorted by the entries from there to the end of their rollout (the first
            64 of them); equal ones by place, so newest first.
        versions: int64 [E], descending.
        starts: int64 [E + 1], where each version begins in the text, and N.

    Example:
        >>> import numpy as np
        >>> index = PromptIndex.build({3: np.array([-1, 7, 5], np.int32), 4: np.array([-1, 5], np.int32)})
        >>> index.text.tolist(), index.versions.tolist(), index.starts.tolist()
        ([-1, 5, -1, 7, 5], [4, 3], [0, 2, 5])
        >>> index.suffixes.tolist()  # -1 5; -1 7 5; 5; 5; 7 5
        [0, 2, 1, 4, 3]
    """

    text: Int32Array
    suffixes: Int32Array
    versions: Int64Array
    starts: Int64Array

    def __post_init__(self) -> None:
        assert self.text.size == self.suffixes.size == self.starts[-1]
        assert self.starts.size == self.versions.size + 1
        for field in fields(self):
            getattr(self, field.name).flags.writeable = False

    @classmethod
    def build(cls, texts: Mapping[int, Int32Array]) -> "PromptIndex":
        """The index of version -> rollouts as `as_text` gives them, at least one version."""
        versions = sorted(texts, reverse=True)
        text = np.concatenate([texts[version] for version in versions])
        starts = np.zeros(len(versions) + 1, np.int64)
        np.cumsum([texts[version].size for version in versions], out=starts[1:])
        suffixes = sort_suffixes(text, np.argsort(text, kind="stable"))
        return cls(text=text, suffixes=suffixes, versions=np.array(versions, np.int64), starts=starts)

    def without_oldest(self) -> "PromptIndex | None":
        """The index without its oldest version; None where that is the only one."""
        if self.versions.size == 1:
            return None
        size = int(self.starts[-2])
        # The oldest rollouts stand last, and no suffix reads beyond its own rollout: the order of the rest stays.
        kept = self.suffixes[self.suffixes < size]
        return PromptIndex(
            text=self.text[:size].copy(), suffixes=kept, versions=self.versions[:-1].copy(), starts=self.starts[:-1]
        )

    def texts(self) -> dict[int, Int32Array]:
        """Version -> its rollouts in the text, newest first; views."""
        bounds = zip(self.starts[:-1], self.starts[1:], strict=True)
        return {int(version): self.text[a:b] for version, (a, b) in zip(self.versions, bounds, strict=True)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(getattr(self, field.name).nbytes) for field in fields(self))

    @property
    def num_tokens(self) -> int:
        """Tokens of the rollouts."""
        return int(np.count_nonzero(self.text != MARKER))


def as_text(rollouts: Iterable[TokenIds]) -> Int32Array:
    """Rollouts one after another, each behind a marker.

    Example: [5, 6] and [7] give [-1, 5, 6, -1, 7].
    """
    marker = np.array([MARKER], np.int32)
    parts = [part for rollout in rollouts for part in (marker, rollout)]
    return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32)


@njit
def _rollout_ends(text: Int32Array) -> Int64Array:
    """For every place one past the last entry of its rollout."""
    ends = np.empty(text.size, np.int64)
    end = text.size
    for place in range(text.size - 1, -1, -1):
        ends[place] = end
        if text[place] == MARKER:
            end = place
    return ends


@njit
def _same(rank: Int64Array, ends: Int64Array, width: int, a: int, b: int) -> bool:
    """Whether two places agree in twice the width by which they are ranked."""
    if rank[a] != rank[b]:
        return False
    second_a = rank[a + width] if a + width < ends[a] else -1
    second_b = rank[b + width] if b + width < ends[b] else -1
    return bool(second_a == second_b)


@njit(cache=True, nogil=True)
def sort_suffixes(text: Int32Array, order: Int64Array) -> Int32Array:
    """Places sorted by what follows up to the end of their rollout, by prefix doubling; equal ones ascending.

    Args:
        text: int32 [N].
        order: int64 [N], places sorted stably by their own entry.
    """
    size = text.size
    ends = _rollout_ends(text)
    rank = np.zeros(size, np.int64)
    first = np.zeros(size + 1, np.int64)  # by rank: where its places begin in the order
    num_ranks = 0
    for i in range(size):
        if i > 0 and text[order[i]] != text[order[i - 1]]:
            num_ranks += 1
            first[num_ranks] = i
        rank[order[i]] = num_ranks
    num_ranks += 1
    by_second = np.empty(size, np.int64)
    new_rank = np.empty(size, np.int64)
    width = 1
    while width < MAX_DEPTH and num_ranks < size:
        num_done = 0
        for place in range(size):
            if place + width >= ends[place]:
                by_second[num_done] = place
                num_done += 1
        for i in range(size):
            place = order[i] - width
            if place >= 0 and order[i] < ends[place]:
                by_second[num_done] = place
                num_done += 1
        for i in range(size):
            place = by_second[i]
            order[first[rank[place]]] = place
            first[rank[place]] += 1
        before = num_ranks
        num_ranks = 0
        for i in range(size):
            if i == 0 or not _same(rank, ends, width, order[i - 1], order[i]):
                first[num_ranks] = i
                num_ranks += 1
            new_rank[order[i]] = num_ranks - 1
        rank, new_rank = new_rank, rank
        if num_ranks == before:
            break
        width *= 2
    return order.astype(np.int32)
