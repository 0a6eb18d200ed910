"""Cuts a tree over the budget into parts: each segment becomes runs, and each run gets the label of its part.

Works from the leaves up: the connected tokens below a segment are cut off where they no longer fit. Parts with
different parents in the end are separated later, in `grouping`. Plain Python over segments, of which a tree has
thousands at most.

    S segments   R runs (parts of one segment, without a gap)
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

Policy = Literal["largest_first", "full_parts"]
"""What is done if children do not fit together. largest_first: the largest are cut off whole until they do, and nothing
is cut below a fork. full_parts: parts of exactly the budget are cut off their lower ends."""


class Run(NamedTuple):
    """Tokens of one segment that stay together."""

    start: int  # packed index
    stop: int
    above: int  # run of the token before its first one, -1 at the root
    label: int  # equal for runs that were cut off together


def cut_runs(
    start: Sequence[int],
    parent: Sequence[int],
    num_tokens: int,
    budget: int,
    policy: Policy,
    is_cut: Sequence[bool],
    wholes: Sequence[tuple[int, int]] = (),
) -> list[Run]:
    """Cuts a tree into labelled parts of at most `budget` tokens; the runs are all of its tokens, in packed order.

    Args:
        start: [S] packed index of each segment's first token; one tree in depth-first pre-order.
        parent: [S] segment above, -1 at the root.
        num_tokens: of the tree.
        budget: at least 1.
        policy: see `Policy`.
        is_cut: [S] segments that are cut off at their upper end even if they fit.
        wholes: ranges of packed indices that stay together, ascending, of at most the budget each: pictures.

    Example: one segment of 10 tokens and budget 4 gives runs of 2, 4 and 4 tokens.
    """
    return _Cutter(start, parent, num_tokens, budget, wholes).runs(policy, is_cut)


class _Cutter:
    """What is not cut off yet: the upper part of each segment, as a linked list in packed order.

    Attributes:
        live: [S] tokens of each segment that are not cut off.
        size: [S] tokens in and below it that are not cut off.
        tail: [S] last segment below with a live token, or the segment itself.
        before, after: [S + 1] list links.
        cut: segment, start, stop and label of what is cut off.
        num_labels: used so far.
    """

    def __init__(
        self,
        start: Sequence[int],
        parent: Sequence[int],
        num_tokens: int,
        budget: int,
        wholes: Sequence[tuple[int, int]],
    ) -> None:
        num_segments = len(start)
        self.whole_starts, self.whole_stops = [first for first, _ in wholes], [stop for _, stop in wholes]
        self.start, self.parent, self.budget = start, parent, budget
        self.live = [stop - first for first, stop in zip(start, [*start[1:], num_tokens], strict=True)]
        self.size = list(self.live)
        self.tail = list(range(num_segments))
        self.before = list(range(-1, num_segments))
        self.after = list(range(1, num_segments + 2))
        self.cut: list[tuple[int, int, int, int]] = []
        self.num_labels = 0

    def runs(self, policy: Policy, is_cut: Sequence[bool]) -> list[Run]:
        """Cuts from the leaves up."""
        children: list[list[int]] = [[] for _ in self.start]
        for segment in range(1, len(self.start)):
            children[self.parent[segment]].append(segment)
        for segment in reversed(range(len(self.start))):
            for child in children[segment]:
                if is_cut[child]:
                    self._cut_range(child, self.tail[child])
                    self.num_labels += 1
            kept = self._largest_first(children[segment])
            if policy == "full_parts" and sum(self.size[child] for child in kept) > self.budget:
                self._cut_full_parts(kept)
                kept = self._largest_first(kept)
            self._cut_largest(kept)
            kept = self._largest_first(kept)
            if kept:
                self.tail[segment] = self.tail[max(kept)]
            self._cut_segment(segment, sum(self.size[child] for child in kept))
        self._cut_range(0, self.tail[0])
        return self._sorted_runs()

    def _beside_wholes(self, segment: int, first: int) -> int:
        """Token number `first` of a segment, or of one inside of what stays together the number after that."""
        at = self.start[segment] + first
        number = bisect_right(self.whole_starts, at) - 1
        is_inside = number >= 0 and self.whole_starts[number] < at < self.whole_stops[number]
        return self.whole_stops[number] - self.start[segment] if is_inside else first

    def _emit(self, segment: int, first: int) -> None:
        """Cuts off the live tokens of a segment from number `first` on."""
        if first == self.live[segment]:
            return
        start = self.start[segment]
        self.cut.append((segment, start + first, start + self.live[segment], self.num_labels))
        self.live[segment] = first

    def _unlink(self, first: int, last: int) -> None:
        before, after = self.before[first], self.after[last]
        if before >= 0:
            self.after[before] = after
        self.before[after] = before

    def _cut_range(self, first: int, last: int) -> None:
        """Cuts off all live tokens of the segments from `first` to `last`."""
        segment = first
        while segment <= last:
            self._emit(segment, 0)
            segment = self.after[segment]
        self._unlink(first, last)

    def _trim(self, top: int, num_tokens: int) -> int:
        """Cuts off the last `num_tokens` live tokens below `top`; at least one token must stay.

        Returns how many it could not cut off because they stay together with others.
        """
        while num_tokens > 0:
            tail = self.tail[top]
            first = self._beside_wholes(tail, max(0, self.live[tail] - num_tokens))
            taken = self.live[tail] - first
            if taken == 0:
                break
            num_tokens -= taken
            self.size[top] -= taken
            self._emit(tail, first)
            if self.live[tail] == 0:
                self.tail[top] = self.before[tail]
                self._unlink(tail, tail)
        return num_tokens

    def _cut_largest(self, children: Sequence[int]) -> None:
        """Cuts off children, largest first, until the rest fits. `children` are sorted by falling size."""
        total = sum(self.size[child] for child in children)
        for child in children:
            if total <= self.budget:
                return
            total -= self.size[child]
            self._cut_range(child, self.tail[child])
            self.num_labels += 1

    def _cut_full_parts(self, children: Sequence[int]) -> None:
        """Cuts off parts of exactly the budget while the children have as many; `children` are sorted by falling size.

        A part is whole children from both ends of the order, and the lower end of the smallest child that is left for
        the rest. That child is not cut again: the part below it would hang off the next part alone.
        """
        total = sum(self.size[child] for child in children)
        largest, smallest = 0, len(children) - 1
        while total >= self.budget and largest <= smallest:
            room = self.budget
            while largest <= smallest and self.size[children[largest]] <= room:
                room -= self.size[children[largest]]
                self._cut_range(children[largest], self.tail[children[largest]])
                largest += 1
            while largest <= smallest and self.size[children[smallest]] <= room:
                room -= self.size[children[smallest]]
                self._cut_range(children[smallest], self.tail[children[smallest]])
                smallest -= 1
            if room > 0 and largest <= smallest:
                room = self._trim(children[smallest], room)
                smallest -= 1
            self.num_labels += 1
            total -= self.budget - room

    def _cut_segment(self, segment: int, below: int) -> None:
        """Cuts full parts off the lower end of a segment; the first includes the `below` tokens that hang off it."""
        if below + self.live[segment] > self.budget:
            self._emit(segment, self._beside_wholes(segment, self.live[segment] - (self.budget - below)))
            if below > 0:
                self._cut_range(self.after[segment], self.tail[segment])
                self.tail[segment] = segment
            self.num_labels += 1
            below = 0
        while self.live[segment] > self.budget:
            self._emit(segment, self._beside_wholes(segment, self.live[segment] - self.budget))
            self.num_labels += 1
        self.size[segment] = below + self.live[segment]

    def _largest_first(self, children: Sequence[int]) -> list[int]:
        """The children that are not cut off whole, by falling size, ties in order."""
        return sorted((child for child in children if self.live[child] > 0), key=lambda child: -self.size[child])

    def _sorted_runs(self) -> list[Run]:
        runs: list[Run] = []
        last_run = [-1] * len(self.start)
        for segment, start, stop, label in sorted(self.cut, key=lambda cut: cut[1]):
            above = len(runs) - 1
            if start == self.start[segment]:
                above = last_run[self.parent[segment]] if segment else -1
            last_run[segment] = len(runs)
            runs.append(Run(start, stop, above, label))
        return runs
