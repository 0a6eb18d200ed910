"""What became of drafts, learnt: at once where the engine's answer tells, else when contexts have gone on.

A count of accepted tokens leaves open which branch they were on. The next contexts hold those tokens, so the answers of
such rows are held until then. Knows drafts, answers and contexts. Knows nothing of how drafts are made.

    B rows   D drafted tokens   H rows that are held
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from treering.history.draft.acceptance import Acceptance, learn
from treering.history.draft.duplicate_rows import repeat
from treering.history.draft.feedback import NO_LEAF, mark, set_states
from treering.history.match.alignment import Threads
from treering.history.match.source_gate import EnabledSources
from treering.history.types import DraftRows, Drafts

_NUM_COMPARED = 16
"""Tokens before a draft that tell a row's context from those of others."""


class Answers(NamedTuple):
    """The drafts of rows, and what the engine says of each."""

    drafts: Drafts
    shares: Float32Array  # [D or more, votes], of the drafted tokens
    features: Int32Array  # [D or more, kinds], likewise
    counts: Int64Array  # [B], accepted tokens
    was_cut: BoolArray  # [B], rows whose further drafted tokens were not tried
    leaves: Int64Array  # [B], number of the last accepted token, -1 for none, `NO_LEAF` where it is not said
    slots: Int64Array  # [B], of the rows
    token_s: float  # what a token takes without drafts

    def of(self, lines: Int64Array, *, leaves: Int64Array, slots: Int64Array) -> "Answers":
        """Those of some rows, with copies of what the next drafts are written over."""
        drafts, places = repeat(self.drafts, lines)
        return Answers(
            drafts=drafts,
            shares=self.shares[places],
            features=self.features[places],
            counts=self.counts[lines],
            was_cut=self.was_cut[lines],
            leaves=leaves,
            slots=slots,
            token_s=self.token_s,
        )


class _Held(NamedTuple):
    """Answers that leave open which branch was accepted, and where each row stood."""

    answers: Answers
    ends: Int64Array  # [H], tokens of its context
    tails: Int32Array  # [H, 16], the last of them


class Lessons:
    """Learns from answers, in the order in which they come.

    Args:
        acceptance: what is learnt, changed in place.
        looks: told what each source has brought.

    Example: of a draft of 8 and 9 behind one token, 1 accepted without a leaf tells nothing at first. Where the row's
    next context has 9 there, 9 was accepted and 8 refused.
    """

    def __init__(self, acceptance: Acceptance, looks: EnabledSources) -> None:
        """Holds nothing yet."""
        self._acceptance, self._looks = acceptance, looks
        self._held: _Held | None = None

    def take(self, answers: Answers, rows: DraftRows, threads: Threads) -> None:
        """Learns from all rows that tell which tokens were accepted, and holds the others."""
        was_accepted, num_left, num_open = _marked(answers)
        if num_open > 0:
            lines = np.flatnonzero(num_left < 0)
            self._hold(answers, lines, rows, threads)
            for line in lines.tolist():
                was_accepted[answers.drafts.offsets[line] : answers.drafts.offsets[line + 1]] = -1
        self._learn(answers, was_accepted)
        _note_states(answers, num_left, threads)

    def settle(self, rows: DraftRows, slots: Int64Array, threads: Threads) -> None:
        """Learns from the rows that are held, as far as these contexts go on from theirs.

        Args:
            rows: of the next step, any.
            slots: int64 [B], of these rows.
            threads: of the slots.
        """
        if self._held is None:
            return
        held, self._held = self._held, None
        answers = held.answers
        drafts, leaves, lines = answers.drafts, np.full_like(held.ends, NO_LEAF), np.full_like(held.ends, -1)
        find_leaves(
            rows.tokens, rows.num_tokens, slots, held.ends, held.tails, answers.slots, answers.counts, drafts.offsets,
            drafts.tokens, drafts.parents, leaves, lines,
        )  # fmt: skip
        found = answers.of(np.arange(lines.size), leaves=leaves, slots=answers.slots)
        was_accepted, num_left, _ = _marked(found)
        self._learn(found, was_accepted)
        stays = np.flatnonzero((lines >= 0) & (slots[lines] == answers.slots))
        _note_states(found.of(stays, leaves=leaves[stays], slots=answers.slots[stays]), num_left[stays], threads)

    def flush(self) -> None:
        """Learns from the rows that are held what is known without their next contexts."""
        if self._held is not None:
            answers, self._held = self._held.answers, None
            self._learn(answers, _marked(answers)[0])

    def forget(self) -> None:
        """Holds nothing any more, and learns nothing of it."""
        self._held = None

    def _hold(self, answers: Answers, lines: Int64Array, rows: DraftRows, threads: Threads) -> None:
        slots = answers.slots[lines]
        # The engine may have moved its rows on by now: where they stood is kept with their slots.
        ends = threads.num_tokens[slots]
        self._held = _Held(
            answers=answers.of(lines, leaves=answers.leaves[lines], slots=slots),
            ends=ends,
            tails=_tails(rows.tokens, lines, ends),
        )

    def _learn(self, answers: Answers, was_accepted: NDArray[np.int8]) -> None:
        drafts, table = answers.drafts, self._acceptance
        learn(
            drafts.offsets, drafts.parents, drafts.acceptance, answers.shares, answers.features, was_accepted,
            table.weights, table.squares, table.token_weights, table.token_roots, table.reliability,
        )  # fmt: skip
        self._looks.note(drafts.offsets, drafts.parents, answers.features, was_accepted, answers.token_s)


def _marked(answers: Answers) -> tuple[NDArray[np.int8], Int64Array, int]:
    """What became of every drafted token, how many stood behind each row's last one, and how many rows are open."""
    drafts = answers.drafts
    was_accepted, num_left = np.empty(drafts.tokens.size, np.int8), np.empty(answers.counts.size, np.int64)
    num_open = mark(
        drafts.offsets, drafts.parents, answers.counts, answers.leaves, answers.was_cut, was_accepted, num_left
    )
    return was_accepted, num_left, num_open


def _note_states(answers: Answers, num_left: Int64Array, threads: Threads) -> None:
    set_states(
        threads.state, threads.num_expected, threads.num_tokens, answers.slots, answers.drafts.offsets, answers.counts,
        num_left, answers.was_cut,
    )  # fmt: skip


def _tails(tokens: Int32Array, lines: Int64Array, ends: Int64Array) -> Int32Array:
    """The last tokens of each context, int32 [H, 16]; what stands before its first one is 0."""
    at = ends[:, None] + np.arange(-_NUM_COMPARED, 0)
    return np.where(at >= 0, tokens[lines[:, None], np.maximum(at, 0)], 0)


@njit(cache=True)
def find_leaves(
    tokens: Int32Array, num_tokens: Int64Array, slots: Int64Array, ends: Int64Array, tails: Int32Array,
    held_slots: Int64Array, counts: Int64Array, offsets: Int64Array, drafted: Int32Array, parents: Int32Array,
    leaves: Int64Array, lines: Int64Array,
) -> None:  # fmt: skip
    """The last accepted token of each held row, and the line that it has now: of its slot, else one that goes on alike.

    Args:
        tokens: int32 [B, L], contexts now.
        num_tokens: int64 [B], of each.
        slots: int64 [B], theirs.
        ends: int64 [H], tokens of each held row's context then.
        tails: int32 [H, 16], the last of them.
        held_slots: int64 [H].
        counts: int64 [H], accepted tokens.
        offsets: int64 [H + 1], of the held rows' drafts.
        drafted: int32 [D].
        parents: int32 [D], within the row.
        leaves: int64 [H], a number within the row's draft; written where a line tells.
        lines: int64 [H], likewise.
    """
    for h in range(ends.size):
        is_told = False
        draft, above = drafted[offsets[h] : offsets[h + 1]], parents[offsets[h] : offsets[h + 1]]
        for b in range(slots.size):
            if is_told and slots[b] != held_slots[h]:
                continue
            leaf = _leaf_in(tokens[b, : num_tokens[b]], ends[h], tails[h], counts[h], draft, above)
            if leaf >= 0:
                leaves[h], lines[h], is_told = leaf, b, True


@njit
def _leaf_in(context: Int32Array, end: int, tail: Int32Array, count: int, draft: Int32Array, above: Int32Array) -> int:
    """The node of a draft that a context goes down to from `end` on, `count` tokens deep; -1 where it does not."""
    if context.size < end + count:
        return -1
    for k in range(max(end - _NUM_COMPARED, 0), end):
        if context[k] != tail[k - end + _NUM_COMPARED]:
            return -1
    leaf = -1
    for k in range(end, end + count):
        child = leaf + 1
        while child < draft.size and not (above[child] == leaf and draft[child] == context[k]):
            child += 1
        if child == draft.size:
            return -1
        leaf = child
    return leaf
