"""Index of one prompt: its rollouts as one text, newest version first, and its positions sorted by context.

A rollout is a marker and its tokens. The marker stands for the whole prompt, because every rollout of a prompt begins
after the same tokens.

    N entries of the text, markers included   E versions (epochs)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.errors import InputError
from treering.types import TokenIds

MARKER = -1
"""Entry of a text where a response begins; below every token id."""

SORT_DEPTH = 64
"""Positions are sorted by this many entries before them; longer matches are measured in the text."""


MAX_ENTRIES = 2**31 - 1
"""Most entries of one text, whose positions are int32."""


def check_entries(num_entries: int, text: str, fix: str) -> None:
    """Check that the positions of a text fit into int32.

    Raises:
        InputError: more than `MAX_ENTRIES`.

    Example: `check_entries(2**31, "a prompt's history", "keep fewer versions of it")` raises.
    """
    if num_entries > MAX_ENTRIES:
        raise InputError(f"{text} can have at most {MAX_ENTRIES} entries, got {num_entries}; {fix}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptIndex:
    """Rollouts of one prompt; arrays are read-only and take 8 bytes per token.

    Attributes:
        text: int32 [N], for each rollout a marker and its tokens.
        order: int32 [N], positions of the text sorted by the entries from there back to the beginning of their rollout
            (at most 64), so that positions with similar contexts are adjacent; equal ones ascending, so newest first.
        versions: int64 [E], descending.
        starts: int64 [E + 1], where each version begins in the text, and N.

    Example:
        >>> import numpy as np
        >>> index = PromptIndex.build({3: np.array([-1, 7, 5], np.int32), 4: np.array([-1, 5], np.int32)})
        >>> index.text.tolist(), index.versions.tolist(), index.starts.tolist()
        ([-1, 5, -1, 7, 5], [4, 3], [0, 2, 5])
        >>> index.order.tolist()  # read backwards: -1; -1; 5 -1; 5 7 -1; 7 -1
        [0, 2, 1, 4, 3]
    """

    text: Int32Array
    order: Int32Array
    versions: Int64Array
    starts: Int64Array

    def __post_init__(self) -> None:
        assert self.text.size == self.order.size == self.starts[-1]
        assert self.starts.size == self.versions.size + 1
        for field in fields(self):
            getattr(self, field.name).flags.writeable = False

    @classmethod
    def build(cls, texts: Mapping[int, Int32Array]) -> "PromptIndex":
        """Build the index of at least one version.

        Args:
            texts: version -> int32, see `as_text`.

        Raises:
            InputError: more than `MAX_ENTRIES`.
        """
        check_entries(
            sum(text.size for text in texts.values()), "the history of a prompt", "add fewer rollouts of it, or keep "
            "fewer versions (max_epochs)",
        )  # fmt: skip
        versions = sorted(texts, reverse=True)
        text = np.concatenate([texts[version] for version in versions])
        starts = np.zeros(len(versions) + 1, np.int64)
        np.cumsum([texts[version].size for version in versions], out=starts[1:])
        order = sort_contexts(text, np.argsort(text, kind="stable"))
        return cls(
            text=text,
            order=order,
            versions=np.array(versions, np.int64),
            starts=starts,
        )

    def without_oldest(self) -> "PromptIndex | None":
        """Return the index without its oldest version; None if nothing is left."""
        if self.versions.size <= 1:
            return None
        size = int(self.starts[-2])
        # The oldest rollouts come last, and no context reads beyond its rollout, so the rest keeps its order.
        kept = self.order[self.order < size]
        # Views would keep the dropped part in memory.
        return PromptIndex(
            text=self.text[:size].copy(),
            order=kept,
            versions=self.versions[:-1].copy(),
            starts=self.starts[:-1].copy(),
        )

    def copy(self) -> "PromptIndex":
        """Return the index with copies of the arrays."""
        return PromptIndex(**{field.name: getattr(self, field.name).copy() for field in fields(self)})

    def texts(self) -> dict[int, Int32Array]:
        """Return the part of the text of each version, newest first, as views."""
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
    """Concatenate rollouts, each after a marker.

    Example: [5, 6] and [7] give [-1, 5, 6, -1, 7].
    """
    marker = np.array([MARKER], np.int32)
    parts = [part for rollout in rollouts for part in (marker, rollout)]
    return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32)


def sort_contexts(text: Int32Array, order: Int64Array) -> Int32Array:
    """Return positions sorted by the entries from there back to the marker, by prefix doubling; equal ones ascending.

    Args:
        text: int32 [N].
        order: int64 [N], positions sorted stably by their entry; overwritten.
    """
    starts, rank, new_rank, by_second = np.empty((4, text.size), np.int64)
    _sort(text, order, np.zeros(text.size + 1, np.int64), starts, rank, new_rank, by_second)
    return order.astype(np.int32)


@kernel
def _sort(
    text: Int32Array, order: Int64Array, first: Int64Array, starts: Int64Array, rank: Int64Array, new_rank: Int64Array,
    by_second: Int64Array,
) -> None:  # fmt: skip
    """Sort `order`; `first` [N + 1] holds where the positions of each rank begin in it, and the rest is scratch."""
    size, num_ranks, start = text.size, 0, 0
    for i in range(size):
        if text[i] == MARKER:
            start = i
        starts[i] = start
    for i in range(size):
        if i > 0 and text[order[i]] != text[order[i - 1]]:
            num_ranks += 1
            first[num_ranks] = i
        rank[order[i]] = num_ranks
    num_ranks += 1
    width = 1
    while width < SORT_DEPTH and num_ranks < size:
        num_done = 0
        for position in range(size):
            if position - width < starts[position]:
                by_second[num_done] = position
                num_done += 1
        for i in range(size):
            position = order[i] + width
            if position < size and order[i] >= starts[position]:
                by_second[num_done] = position
                num_done += 1
        for i in range(size):
            position = by_second[i]
            order[first[rank[position]]] = position
            first[rank[position]] += 1
        before = num_ranks
        num_ranks = 0
        for i in range(size):
            if i == 0 or not _same(rank, starts, width, order[i - 1], order[i]):
                first[num_ranks] = i
                num_ranks += 1
            new_rank[order[i]] = num_ranks - 1
        rank, new_rank = new_rank, rank
        if num_ranks == before:
            break
        width *= 2


@lean
def _same(rank: Int64Array, starts: Int64Array, width: int, a: int, b: int) -> bool:
    """Return whether two positions agree in twice the width by which they are ranked."""
    if rank[a] != rank[b]:
        return False
    second_a = rank[a - width] if a - width >= starts[a] else -1
    second_b = rank[b - width] if b - width >= starts[b] else -1
    return bool(second_a == second_b)


def with_rollouts(index: PromptIndex | None, new: Mapping[int, Int32Array], max_epochs: int) -> PromptIndex:
    """Return the index with new rollouts, appended to existing ones of the same version.

    Args:
        index: the present index, None for a prompt without history.
        new: int32 text by version, at least one; see `as_text`.
        max_epochs: number of newest versions to keep.

    Example: adding rollouts of versions 5 and 4 to versions 4 and 3, with two versions kept, gives 5 and a longer 4.
    """
    texts = {} if index is None else index.texts()
    for version, text in new.items():
        texts[version] = np.concatenate([texts[version], text]) if version in texts else text
    return PromptIndex.build({version: texts[version] for version in sorted(texts, reverse=True)[:max_epochs]})


def with_newest(index: PromptIndex, max_epochs: int) -> PromptIndex | None:
    """Return the index with at most `max_epochs` of its newest versions, None if it has no rollouts."""
    while index.versions.size > max_epochs:
        rest = index.without_oldest()
        assert rest is not None
        index = rest
    return index if index.versions.size else None
