"""Partitions: the parts in which a tree over the token budget is computed, and which tokens above they see.

A tree is cut from the leaves up: each segment becomes runs, and connected tokens below a segment are cut off where they
no longer fit. Then runs are joined into partitions from the top down, because the children of a partition depend on
its contents. A tree has at most a few thousand segments, so plain Python is fast enough.

    S segments   R runs (parts of one segment, without a gap)   Q components (connected runs of one label)
    P partitions   M tokens of a partition
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.image_tokens import image_spans, image_tokens
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Tokens of one tree that are computed together.

    It may have several subtrees. All hang off tokens of one other partition, its parent, so the partitions of a tree
    form a tree themselves.

    Attributes:
        tokens: int32 [M] packed indices of its tokens in the tree, ascending.
        parent: index of its parent among the tree's partitions, smaller than its own; -1 for the top one.
    """

    tokens: NDArray[np.int32]
    parent: int

    def __post_init__(self) -> None:
        assert self.tokens.size > 0, "a partition without tokens"
        self.tokens.flags.writeable = False

    @property
    def num_tokens(self) -> int:
        """M, the number of tokens that it computes."""
        return self.tokens.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionedTree:
    """One tree in partitions; every token is in exactly one of them.

    Attributes:
        forest: the whole tree.
        branches: int64 [K] index of each of its branches among all branches of the plan, in the forest's order.
        partitions: parents before children, depth-first.
    """

    forest: Forest
    branches: NDArray[np.int64]
    partitions: tuple[Partition, ...]

    def __post_init__(self) -> None:
        assert self.branches.shape == (self.forest.num_branches,)
        assert sum(part.num_tokens for part in self.partitions) == self.forest.num_tokens
        assert all(-1 <= part.parent < number for number, part in enumerate(self.partitions))

    @property
    def chain_tokens(self) -> int:
        """Tokens of the longest chain of partitions from the top down: the peak when parents are kept."""
        depths: list[int] = []
        for part in self.partitions:
            depths.append(part.num_tokens + (depths[part.parent] if part.parent >= 0 else 0))
        return max(depths)


class QueryRanges(NamedTuple):
    """Range of query rows that see each key: `first[k] <= q < stop[k]`; empty if `first == stop`.

    `position` is the key's depth in the whole tree, which sliding windows use.
    """

    first: Int64Array
    stop: Int64Array
    position: Int64Array

    @classmethod
    def within(cls, forest: Forest, *, sees_whole_images: bool = False) -> "QueryRanges":
        """Return the ranges of a forest's own tokens: each token is seen by itself and its descendants.

        With `sees_whole_images` a token of an image is seen by all tokens of that image, the earlier ones too.

        Example: in a forest of the branches 5, 6 and 5, 7 the rows that see the three tokens are 0:3, 1:2 and 2:3.
        """
        first = np.arange(forest.num_tokens)
        if sees_whole_images and forest.images:
            placed_tokens = image_tokens(forest)
            first[placed_tokens.at] -= placed_tokens.offset
        return cls(
            first=first,
            stop=forest.subtree_end.astype(np.int64),
            position=forest.position.astype(np.int64),
        )


def take_fragment(tree: Forest, tokens: Int32Array) -> Forest:
    """Return some tokens of a tree, ascending int32 [M], as a forest without branches.

    Tokens whose parent is outside become roots. Positions stay those of the whole tree, so a root's need not be 0.

    Example: the last two tokens of the chain 5, 6, 7 are a forest with parents -1, 0 and positions 1, 2.
    """
    parent = tree.parent[tokens]
    above = np.searchsorted(tokens, parent)
    is_inside = (parent >= 0) & (tokens[np.minimum(above, tokens.size - 1)] == parent)
    subtree_end = np.searchsorted(tokens, tree.subtree_end[tokens]).astype(np.int32)
    # Tokens in a row with the same subtree end form a chain; the end changes where a chain branches or stops.
    is_start = np.concatenate([np.ones(min(1, tokens.size), bool), subtree_end[1:] != subtree_end[:-1]])
    segment_start = np.flatnonzero(is_start)
    local_parent = np.where(is_inside, above, -1)
    segment_of = np.cumsum(is_start) - 1
    first_parent = local_parent[segment_start]
    return Forest(
        tokens=tree.tokens[tokens],
        parent=local_parent.astype(np.int32),
        position=tree.position[tokens],
        subtree_end=subtree_end,
        branch_end=np.empty(0, np.int32),
        segment_start=segment_start.astype(np.int32),
        segment_parent=np.where(first_parent < 0, -1, segment_of[first_parent]).astype(np.int32),
        images=tree.images,
        routed_experts=None if tree.routed_experts is None else tree.routed_experts[tokens],
    )


def query_ranges(tree: Forest, keys: Int32Array, queries: Int32Array) -> QueryRanges:
    """Return which query tokens see each key token, as ranges of indices into `queries`.

    Args:
        tree: the whole tree.
        keys: int32 [M], packed indices.
        queries: int32, packed indices, ascending. Depth-first order makes the queries that see a key contiguous.

    Example: in a tree with the branches 5, 6 and 5, 7 the query 7 sees the key 5 and not the key 6.
    """
    return QueryRanges(
        first=np.searchsorted(queries, keys).astype(np.int64),
        stop=np.searchsorted(queries, tree.subtree_end[keys]).astype(np.int64),
        position=tree.position[keys].astype(np.int64),
    )


def cut_tree(tree: Forest, max_tokens: int) -> tuple[Partition, ...]:
    """Cut one tree into partitions of at most `max_tokens` tokens: as few as two policies find, in short chains.

    A cut may fall anywhere but inside an image. One policy cuts at forks, the other cuts full parts that end inside
    segments; both take O(n log n) time.

    Raises:
        InputError: the forest is not one tree, or the budget is below 1 or below the tokens of an image.

    Example: one sequence of 10 tokens and a budget of 4 give partitions of 2, 4 and 4 tokens, each below the last.
    """
    if tree.num_trees != 1:
        raise InputError(f"only one tree can be cut, got a forest of {tree.num_trees}; cut each of forest.trees()")
    if not is_count(max_tokens, least=1):
        raise InputError(f"max_tokens of a partition must be an integer of at least 1, got {max_tokens!r}")
    wholes = image_spans(tree)
    largest = max((stop - first for first, stop in wholes), default=0)
    if largest > max_tokens:
        raise InputError(
            f"an image is never cut, and one of {largest} tokens does not fit max_tokens={max_tokens} of a partition; "
            f"raise max_tokens to at least {largest}, or make images smaller"
        )
    start, parent = tree.segment_start.tolist(), tree.segment_parent.tolist()
    runs, grouping = search_cuts(start, parent, tree.num_tokens, max_tokens, wholes)
    number, partition_parent = _depth_first(grouping.parent)
    of_token = np.repeat(number[grouping.partition], [run.stop - run.start for run in runs])
    order = np.argsort(of_token, kind="stable").astype(np.int32)
    tokens = np.split(order, np.cumsum(np.bincount(of_token))[:-1])
    return tuple(Partition(tokens=part, parent=above) for part, above in zip(tokens, partition_parent, strict=True))


def _depth_first(parent: list[int]) -> tuple[NDArray[np.int64], list[int]]:
    """Return the new index of each partition in depth-first pre-order, and the parents of the new indices."""
    children: list[list[int]] = [[] for _ in parent]
    for child, above in enumerate(parent):
        if above >= 0:
            children[above].append(child)
    number = np.empty(len(parent), np.int64)
    parents: list[int] = []
    stack = [(0, -1)]
    while stack:
        old, above = stack.pop()
        number[old] = len(parents)
        stack.extend((child, len(parents)) for child in reversed(children[old]))
        parents.append(above)
    return number, parents


def pack(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the bin of each size; every size must lie in [1, capacity].

    First-fit decreasing, ties in input order: at most 11/9 of the fewest bins, plus one.

    Example: sizes 4, 4, 3, 3, 3, 3 in bins of 10 take the bins 0 0 1 1 1 2.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    bins = [0] * len(sizes)
    for i, number in zip(order, _first_fit([sizes[i] for i in order], capacity), strict=True):
        bins[i] = number
    return bins


def _first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the bin of each size: the first with room for it; all bins are open from the start."""
    width = 1
    while width < len(sizes):
        width *= 2
    # A tournament tree over the bins: each node holds the largest room of any bin below it.
    room = [capacity] * (2 * width)
    bins = []
    for size in sizes:
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        bins.append(node - width)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


CutPolicy = Literal["largest_first", "full_parts"]
"""What to do if children do not fit together. largest_first: cut the largest off whole until they fit, and nothing
below a fork. full_parts: cut parts of exactly the budget off their lower ends."""


class CutRun(NamedTuple):
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
    policy: CutPolicy,
    is_cut: Sequence[bool],
    wholes: Sequence[tuple[int, int]] = (),
) -> list[CutRun]:
    """Cut a tree into labelled parts of at most `budget` tokens; the runs hold all of its tokens, in packed order.

    Args:
        start: [S] packed index of each segment's first token; one tree in depth-first pre-order.
        parent: [S] segment above, -1 at the root.
        num_tokens: tokens of the tree.
        budget: at least 1.
        policy: see `CutPolicy`.
        is_cut: [S] segments that are cut off at their upper end even if they fit.
        wholes: ranges of packed indices that stay together (images), ascending, of at most the budget each.

    Example: one segment of 10 tokens and budget 4 gives runs of 2, 4 and 4 tokens.
    """
    return _Cutter(start, parent, num_tokens, budget, wholes).runs(policy, is_cut)


class _Cutter:
    """Tokens that are not cut off yet: the upper part of each segment, as a linked list in packed order.

    Attributes:
        live: [S] tokens of each segment that are not cut off.
        size: [S] tokens in and below it that are not cut off.
        tail: [S] last segment below with a live token, or the segment itself.
        before, after: [S + 1] list links.
        cut: segment, start, stop and label of each run that was cut off.
        num_labels: labels used so far.
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

    def runs(self, policy: CutPolicy, is_cut: Sequence[bool]) -> list[CutRun]:
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

    def _outside_wholes(self, segment: int, first: int) -> int:
        """Move a cut before token `first` of a segment behind the range that stays together, if it is inside one."""
        at = self.start[segment] + first
        number = bisect_right(self.whole_starts, at) - 1
        is_inside = number >= 0 and self.whole_starts[number] < at < self.whole_stops[number]
        return self.whole_stops[number] - self.start[segment] if is_inside else first

    def _emit(self, segment: int, first: int) -> None:
        """Cut off the live tokens of a segment from index `first` on."""
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
        segment = first
        while segment <= last:
            self._emit(segment, 0)
            segment = self.after[segment]
        self._unlink(first, last)

    def _trim(self, top: int, num_tokens: int) -> int:
        """Cut off the last `num_tokens` live tokens below `top`; at least one token must stay.

        Return the number that it could not cut off because they stay together with others.
        """
        while num_tokens > 0:
            tail = self.tail[top]
            first = self._outside_wholes(tail, max(0, self.live[tail] - num_tokens))
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
        """Cut off children, largest first, until the rest fits. `children` are sorted by falling size."""
        total = sum(self.size[child] for child in children)
        for child in children:
            if total <= self.budget:
                return
            total -= self.size[child]
            self._cut_range(child, self.tail[child])
            self.num_labels += 1

    def _cut_full_parts(self, children: Sequence[int]) -> None:
        """Cut off parts of exactly the budget while the children have enough tokens; `children` are sorted by size.

        A part is whole children from both ends of the order, then the lower end of the smallest child that is left, to
        fill it up. That child is not cut again: the part below it could only hang off the next part.
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
        """Cut full parts off the lower end of a segment; the first includes the `below` tokens that hang off it."""
        if below + self.live[segment] > self.budget:
            self._emit(segment, self._outside_wholes(segment, self.live[segment] - (self.budget - below)))
            if below > 0:
                self._cut_range(self.after[segment], self.tail[segment])
                self.tail[segment] = segment
            self.num_labels += 1
            below = 0
        while self.live[segment] > self.budget:
            self._emit(segment, self._outside_wholes(segment, self.live[segment] - self.budget))
            self.num_labels += 1
        self.size[segment] = below + self.live[segment]

    def _largest_first(self, children: Sequence[int]) -> list[int]:
        """Return the children that are not cut off whole, by falling size, ties in order."""
        return sorted((child for child in children if self.live[child] > 0), key=lambda child: -self.size[child])

    def _sorted_runs(self) -> list[CutRun]:
        runs: list[CutRun] = []
        last_run = [-1] * len(self.start)
        for segment, start, stop, label in sorted(self.cut, key=lambda cut: cut[1]):
            above = len(runs) - 1
            if start == self.start[segment]:
                above = last_run[self.parent[segment]] if segment else -1
            last_run[segment] = len(runs)
            runs.append(CutRun(start, stop, above, label))
        return runs


class Grouping(NamedTuple):
    """Partitions in order of discovery: parents before children."""

    partition: list[int]  # [R] partition of each run
    parent: list[int]  # [P] partition above, -1 for the top one
    size: list[int]  # [P] tokens

    @property
    def cost(self) -> tuple[int, int]:
        """Number of partitions, and tokens of the longest chain of them, from the top one down."""
        depth: list[int] = []
        for above, size in zip(self.parent, self.size, strict=True):
            depth.append(size + (depth[above] if above >= 0 else 0))
        return len(self.parent), max(depth)


class _Component(NamedTuple):
    parent: int
    label: int


def group_runs(runs: Sequence[CutRun], budget: int) -> Grouping:
    """Join runs into partitions of at most `budget` tokens.

    Example: three leaves of 4 tokens that hang off one partition make two partitions under a budget of 8.
    """
    of_run, components, size = _components(runs)
    children: list[list[int]] = [[] for _ in components]
    for child, component in enumerate(components[1:], 1):
        children[component.parent].append(child)
    members: list[list[int]] = [[0]]
    parent = [-1]
    for number, own in enumerate(members):
        hanging = [child for member in own for child in children[member]]
        joined = _put_together(hanging, components, size, budget)
        # The loop also reaches the partitions added here.
        members += joined
        parent += [number] * len(joined)
    partition = [0] * len(components)
    for number, own in enumerate(members):
        for member in own:
            partition[member] = number
    totals = [sum(size[member] for member in own) for own in members]
    return Grouping([partition[component] for component in of_run], parent, totals)


def _components(runs: Sequence[CutRun]) -> tuple[list[int], list[_Component], list[int]]:
    """Return the component of each run, and the components in packed order with their sizes."""
    of_run: list[int] = []
    components: list[_Component] = []
    size: list[int] = []
    for run in runs:
        if run.above >= 0 and runs[run.above].label == run.label:
            of_run.append(of_run[run.above])
        else:
            components.append(_Component(of_run[run.above] if run.above >= 0 else -1, run.label))
            of_run.append(len(size))
            size.append(0)
        size[of_run[-1]] += run.stop - run.start
    return of_run, components, size


def _put_together(
    hanging: Sequence[int], components: Sequence[_Component], size: Sequence[int], budget: int
) -> list[list[int]]:
    """Put components into bins; those of one label were cut to fit one bin and stay in it together."""
    by_label: dict[int, list[int]] = {}
    for component in hanging:
        by_label.setdefault(components[component].label, []).append(component)
    labels = sorted(by_label)
    bins = pack([sum(size[component] for component in by_label[label]) for label in labels], budget)
    joined: list[list[int]] = [[] for _ in range(max(bins, default=-1) + 1)]
    bin_of_label = dict(zip(labels, bins, strict=True))
    for component in hanging:
        joined[bin_of_label[components[component].label]].append(component)
    return joined


def search_cuts(
    start: Sequence[int], parent: Sequence[int], num_tokens: int, budget: int, wholes: Sequence[tuple[int, int]] = ()
) -> tuple[list[CutRun], Grouping]:
    """Return the best grouping over both policies, each without forced cuts and with those of `_off_trunk`.

    The best has the fewest partitions; ties go to the one with the shortest longest chain, then to the first that was
    tried. `wholes` are never cut; see `cut_runs`.
    """
    found: list[tuple[list[CutRun], Grouping]] = []
    for is_cut in ([False] * len(start), _off_trunk(start, parent, num_tokens, budget)):
        for policy in get_args(CutPolicy):
            runs = cut_runs(start, parent, num_tokens, budget, policy, is_cut, wholes)
            found.append((runs, group_runs(runs, budget)))
    return min(found, key=lambda one: one[1].cost)


def _off_trunk(start: Sequence[int], parent: Sequence[int], num_tokens: int, budget: int) -> list[bool]:
    """Mark the segments that fit with all below them, and hang off one that does not.

    Cut off there, they are computed while only the trunk is kept, and no sibling.

    Example: a prompt of 1,024 tokens with 32 responses of 1,024 and a budget of 8,192: the responses are marked.
    """
    size = [stop - first for first, stop in zip(start, [*start[1:], num_tokens], strict=True)]
    for segment in reversed(range(1, len(start))):
        size[parent[segment]] += size[segment]
    return [False, *(size[i] <= budget < size[parent[i]] for i in range(1, len(start)))]
