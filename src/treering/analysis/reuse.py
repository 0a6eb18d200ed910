"""Measures the share of rollouts that could be copied from other text: RhymeRL's reuse (section 5.1), with controls.

An oracle: after each three tokens it copies the longest matching continuation, which no drafter can know. Compare it
with its control, the reuse from an unrelated prompt's rollouts.

    R rollouts   G groups: the rollouts of one prompt in one epoch   T tokens of all responses, with an end after each
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from treering.analysis.recording import Recorded, other_prompts
from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import kernel, lean

Source = Literal["history", "other_prompt", "own", "siblings"]
"""Text that may be copied. history: the prompt's rollouts of the previous epoch. other_prompt: those of another prompt.
own: the rollout's own earlier tokens. siblings: the complete other rollouts of the group."""

NUM_PREFIX = 3
"""Tokens that must match before a position counts."""
HIT_LENGTHS = ((1, 2), (3, 7), (8, 15), (16, None))
"""Classes of hits by copied tokens, both ends included."""

_END = -1
_UNBOUND = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Reuse of rollouts from one source.

    Example: 20 tokens with hits of 2 and 16 tokens have a rate of 0.9; half of the hits have 1 or 2 tokens, and they
    are a ninth of the copied tokens.
    """

    num_rollouts: int
    num_tokens: int
    """Sampled tokens."""
    num_copied: int
    num_after_prefix: int
    """Sampled tokens with `NUM_PREFIX` tokens before them: an upper bound of the copied tokens."""
    num_hits: tuple[int, ...]
    """By `HIT_LENGTHS`."""
    hit_tokens: tuple[int, ...]
    """By `HIT_LENGTHS`."""

    @property
    def rate(self) -> float:
        """Share of all tokens that could be copied."""
        return self.num_copied / self.num_tokens


class ReuseMeter:
    """Measures reuse in a recording; chains of equal triples are built once for all sources.

    Example: a prompt whose rollouts are [1, 2, 3, 4, 5] in epoch 0 and [1, 2, 3, 4, 9] in epoch 1 has a reuse of 0.2
    from history in epoch 1: only the 4 is copied, after 1 2 3. The first three tokens have no prefix, and 9 is new.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        sizes = recorded.offsets[1:] - recorded.starts + 1
        self._begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        shifts = np.repeat(recorded.starts - self._begins[:-1], sizes)
        places = np.minimum(shifts + np.arange(self._begins[-1]), recorded.tokens.size - 1)
        self._text = recorded.tokens[places]
        self._text[self._begins[1:] - 1] = _END
        self._run_ends = recorded.run_ends[places] - shifts
        after_prefix = np.minimum(self._begins[:-1] + NUM_PREFIX, self._begins[1:] - 1)
        is_sampled = np.concatenate([[0], np.cumsum(self._run_ends > np.arange(self._text.size))])
        self._num_after_prefix = is_sampled[self._begins[1:] - 1] - is_sampled[after_prefix]
        self._number_groups()
        self._link()

    def epochs(self) -> list[int]:
        """The epochs of the recording, ascending."""
        return [int(epoch) for epoch in self._epochs]

    def rollouts_of(self, epoch: int) -> Int64Array:
        """int64 [K]: the epoch's rollouts whose prompt ran in the previous epoch too; in the first epoch all."""
        rollouts = np.flatnonzero(self._recorded.epochs == epoch)
        return rollouts if epoch == self._epochs[0] else rollouts[self._earlier[self._groups[rollouts]] >= 0]

    def measure(self, rollouts: Int64Array, source: Source) -> Reuse | None:
        """The reuse of these rollouts, int64 [K]; None if none of them has such a source.

        Rollouts without the source copy nothing.
        """
        texts, is_any = self._source(rollouts, source)
        if not is_any:
            return None
        num_hits, hit_tokens = np.zeros((2, len(HIT_LENGTHS)), np.int64)
        least = np.array([least for least, _ in HIT_LENGTHS], np.int64)
        copied = np.zeros(rollouts.size, np.int64)
        copy_all(
            self._text, self._links, self._heads, self._head_offsets, self._run_ends, self._begins, rollouts, texts,
            source == "own", least, num_hits, hit_tokens, copied,
        )  # fmt: skip
        return Reuse(
            num_rollouts=rollouts.size,
            num_tokens=int(self._recorded.lengths[rollouts].sum()),
            num_copied=int(copied.sum()),
            num_after_prefix=int(self._num_after_prefix[rollouts].sum()),
            num_hits=tuple(num_hits.tolist()),
            hit_tokens=tuple(hit_tokens.tolist()),
        )

    def _source(self, rollouts: Int64Array, source: Source) -> tuple[Int64Array, bool]:
        """int64 [K], the group that each rollout copies from, -1 for none; and whether there is any."""
        groups = self._groups[rollouts]
        if source == "siblings":
            return groups, bool((self._group_sizes[groups] > 1).any())
        if source == "own":
            return groups, rollouts.size > 0
        texts = (self._earlier if source == "history" else self._other)[groups]
        return texts, bool((texts >= 0).any())

    def _number_groups(self) -> None:
        recorded = self._recorded
        num_prompts = len(recorded.prompt_ids)
        self._epochs, ranks = np.unique(recorded.epochs, return_inverse=True)
        keys, self._groups, self._group_sizes = np.unique(
            ranks * num_prompts + recorded.prompts, return_inverse=True, return_counts=True
        )
        # Group by epoch and prompt.
        table = np.full((self._epochs.size, num_prompts), -1, np.int64)
        table.reshape(-1)[keys] = np.arange(keys.size)
        self._earlier, self._other = np.full((2, keys.size), -1, np.int64)
        for before, now in pairwise(table):
            others = other_prompts(before >= 0)
            has_other = (now >= 0) & (others >= 0)
            self._earlier[now[now >= 0]] = before[now >= 0]
            self._other[now[has_other]] = before[others[has_other]]

    def _link(self) -> None:
        sizes = np.bincount(self._groups, weights=np.diff(self._begins)).astype(np.int64)
        # Powers of two, at least as many heads as tokens.
        num_heads = 1 << np.ceil(np.log2(np.maximum(sizes, 2))).astype(np.int64)
        self._head_offsets = np.concatenate([[0], np.cumsum(num_heads)]).astype(np.int64)
        self._heads = np.full(self._head_offsets[-1], -1, np.int32)
        self._links = np.full(self._text.size, -1, np.int32)
        _link_all(self._text, self._begins, self._groups, self._head_offsets, self._heads, self._links)


@lean
def _head(text: Int32Array, at: int, first: int, num_heads: int) -> int:
    """Index in `heads` of the chain for the three tokens before a position."""
    mixed = np.uint64(text[at - 3]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(text[at - 2])
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(text[at - 1])
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
    return int(first + np.int64(mixed >> np.uint64(20)) % num_heads)


@kernel
def _link_all(
    text: Int32Array,
    begins: Int64Array,
    groups: Int64Array,
    head_offsets: Int64Array,
    heads: Int32Array,
    links: Int32Array,
) -> None:
    """Links the positions after equal triples of tokens within each group, earliest first."""
    for r in range(groups.size - 1, -1, -1):
        first = head_offsets[groups[r]]
        num_heads = head_offsets[groups[r] + 1] - first
        for at in range(begins[r + 1] - 2, begins[r] + 2, -1):
            head = _head(text, at, first, num_heads)
            links[at] = heads[head]
            heads[head] = at


@kernel
def copy_all(
    text: Int32Array, links: Int32Array, heads: Int32Array, head_offsets: Int64Array, run_ends: Int64Array,
    begins: Int64Array, rollouts: Int64Array, groups: Int64Array, is_own: bool, least: Int64Array, num_hits: Int64Array,
    hit_tokens: Int64Array, copied: Int64Array,
) -> None:  # fmt: skip
    """Adds up the tokens that each rollout copies from its group's text, int64 [K], and the hits by class.

    If `is_own`, a rollout copies only its own earlier tokens, else only those of other rollouts.
    """
    for k in range(rollouts.size):
        if groups[k] < 0:
            continue
        begin, end = begins[rollouts[k]], begins[rollouts[k] + 1] - 1
        first, stop = head_offsets[groups[k]], head_offsets[groups[k] + 1]
        at = begin
        while at < end:
            length = 0
            # A given token has an empty run, so nothing is copied there.
            if at - begin >= NUM_PREFIX:
                place = heads[_head(text, at, first, stop - first)]
                length = _longest(text, links, place, at, run_ends[at], begin, end, is_own)
            if length > 0:
                copied[k] += length
                kind = least.size - 1
                while least[kind] > length:
                    kind -= 1
                num_hits[kind] += 1
                hit_tokens[kind] += length
            at += max(length, 1)


@lean
def _longest(
    text: Int32Array, links: Int32Array, place: int, at: int, run_end: int, begin: int, end: int, is_own: bool
) -> int:
    """Length of the longest match between the text after `at` and after a position of the chain, 0 for none."""
    best = 0
    bound = at if is_own else _UNBOUND
    while 0 <= place < bound and best < run_end - at:
        is_inside = begin <= place < end
        # A longer match must also agree at the end of the best one; test that first.
        if is_inside == is_own and place + best < text.size and text[place + best] == text[at + best]:
            most = min(run_end - at, bound - place)
            length = 0
            if text[place - 3] == text[at - 3] and text[place - 2] == text[at - 2] and text[place - 1] == text[at - 1]:
                while length < most and text[place + length] == text[at + length]:
                    length += 1
            best = max(best, length)
        place = links[place]
    return best
