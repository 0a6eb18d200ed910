"""Slots for running rollouts and their groups' prompts, whose texts can be searched as they grow.

Each step reads only the tokens appended since the last one. A row that leaves frees its slot. If no row of a step was
in the step before, everything is cleared, so that matches do not depend on earlier rows.

    B rows   S slots
"""

from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np

from treering.arrays import Int64Array
from treering.history.features import NOT_TRIED
from treering.history.match.hash_chains import make_hash_chains
from treering.history.match.regions import NOWHERE, UNIT, Regions
from treering.history.match.running import Running
from treering.history.types import DraftRows, check_counts
from treering.lean import lean


class RowStates(NamedTuple):
    """The latest step of the row in each slot, all [S]."""

    state: Int64Array  # see `features.NUM_STATES`
    num_tokens: Int64Array  # of the context then
    num_expected: Int64Array  # of the context now if only sampled tokens were added; -1 for a new row


def make_row_states(num_slots: int) -> RowStates:
    """States of slots whose rows have had no step yet."""
    num_tokens, num_expected = np.full((2, num_slots), -1, np.int64)
    return RowStates(np.full(num_slots, NOT_TRIED, np.int64), num_tokens, num_expected)


@lean
def update_state(states: RowStates, slot: int, num_tokens: int) -> None:
    """Stores the length of a row's context; if unsampled tokens were added, the latest draft's outcome is reset."""
    if states.num_expected[slot] != num_tokens:
        states.state[slot] = NOT_TRIED
    states.num_tokens[slot] = num_tokens


@lean
def copy_state(states: RowStates, slot: int, source: int) -> None:
    """Gives a slot the state of another one, whose row has the same tokens."""
    states.state[slot] = states.state[source]
    states.num_tokens[slot], states.num_expected[slot] = states.num_tokens[source], states.num_expected[source]


_Prompt = tuple[int, int]

_NO_LIMIT = 1 << 40

Turnover = Literal["none", "some", "all"]
"""How the rows of a step differ from those of the one before. none: they are the same. all: none of them was there."""


class _RowSlots(NamedTuple):
    """Slots and scope of a row."""

    slot: int
    prompt_slot: int
    scope: int
    num_prompt: int


class RunningRows:
    """A slot for each running rollout and for each prompt of a group, with a region for its text.

    A text is a marker, tokens and a marker. A prompt's region is as large as its text. All rollouts' regions have the
    size of the longest rollout plus a quarter, so that few steps move any and new rows reuse the regions of removed
    ones. If a text exceeds the maximum size, its newest tokens are kept. Texts of removed rows are matched until their
    slots or regions are reused.

    Attributes:
        chains: all texts, linked within groups.
        states: outcome of the latest draft of the row in each slot.
        row_scopes: int64 [B], scope of each row: its group, numbered in order of appearance.

    Example: rows of a group with a prompt of 3 tokens take one slot for it and one each for their rollouts. A row with
    another prompt, as after a turn that its siblings did not take, takes a slot for that too.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keeps at most `max_tokens` tokens of a rollout or prompt."""
        self._max_size = max_tokens + 2
        self._rows: DraftRows | None = None
        self._identity: tuple[object, ...] = ()
        self._slots, self._prompt_slots, self.row_scopes, self._full = np.zeros((4, 0), np.int64)
        self.chains = make_hash_chains(0)
        self._empty(num_rows=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (*self.chains, *self.states, self._num_noted, self._first, self._scopes)
        return self._regions.num_bytes + sum(array.nbytes for array in arrays)

    @property
    def running(self) -> Running:
        """The arrays for compiled calls, for the rows of the latest call of `slots`."""
        regions = self._regions
        return Running(
            self.chains, self._num_noted, self._first, self._scopes, regions.begins, regions.sizes, regions.owners,
            self._slots, self._prompt_slots,
        )  # fmt: skip

    def slots(self, rows: DraftRows) -> tuple[Int64Array, Turnover]:
        """The slots of the rows' rollouts, int64 [B], with regions for their texts, and the turnover.

        `note_rows` appends the new tokens, within the compiled call.
        """
        turnover: Turnover = "none" if self.has(rows) else "some"
        if turnover == "some" or (rows.num_tokens > self._full).any():
            # If this fails, no rows are known.
            self._rows, self._identity = None, ()
            if self._assign(rows):
                turnover = "all"
            self._identity = _identity_of(rows)
        self._rows = rows
        return self._slots, turnover

    def has(self, rows: DraftRows) -> bool:
        """Whether these are the rows of the previous step, as the same object or an equal one."""
        return rows is self._rows or _identity_of(rows) == self._identity

    def _empty(self, *, num_rows: int) -> None:
        """Starts with free slots for so many rows and as many prompts."""
        self._row_slots = dict[object, _RowSlots]()
        # The slot and the scope of each.
        self._prompts = dict[_Prompt, tuple[int, int]]()
        self._scope_of = dict[int, int]()
        self._num_scopes = 0
        # Slots without regions, and the sizes that they need.
        self._missing_regions = list[tuple[int, int]]()
        self._regions = Regions(num_slots=2 * num_rows, max_size=self._max_size)
        self._width = 0
        self._num_noted, self._first, self._scopes = np.zeros((3, 1 + 2 * num_rows), np.int64)
        self.states = make_row_states(1 + 2 * num_rows)
        self._free = deque(range(1, 1 + num_rows))
        self._free_prompts = deque(range(1 + num_rows, 1 + 2 * num_rows))

    def _assign(self, rows: DraftRows) -> bool:
        """Assigns slots and regions to every row; returns whether all rows are new."""
        check_counts(rows)
        keys, num_prompt = _keys_of(rows), rows.num_prompt_tokens.tolist()
        is_fresh = self._row_slots.keys().isdisjoint(keys)
        if is_fresh:
            # Matches must not depend on earlier rows.
            self._empty(num_rows=len(keys))
        self._remove_rows(set(keys))
        self._add_rows(rows, keys, num_prompt)
        longest = max(map(sub, rows.num_tokens.tolist(), num_prompt), default=0)
        if longest + 2 > self._width < self._max_size:
            self._widen(longest)
        if self._missing_regions:
            self._assign_regions()
        # Also if the previous call failed here.
        if self._regions.num_entries > self.chains.tokens.size:
            self._make_chains()
        table = np.array([self._row_slots[key] for key in keys], np.int64).reshape(-1, len(_RowSlots._fields))
        self._slots, self._prompt_slots, self.row_scopes, sizes = np.ascontiguousarray(table.T)
        self._full = sizes + (self._width - 2 if self._width < self._max_size else _NO_LIMIT)
        return is_fresh

    def _remove_rows(self, stays: set[object]) -> None:
        """Frees the slots of all rows except those that stay."""
        for key in [key for key in self._row_slots if key not in stays]:
            self._free.append(self._row_slots.pop(key).slot)

    def _add_rows(self, rows: DraftRows, keys: Sequence[object], num_prompt: Sequence[int]) -> None:
        """Assigns slots to new rows, and to rows whose prompt has changed."""
        for b, (key, size) in enumerate(zip(keys, num_prompt, strict=True)):
            row_slots = self._row_slots.get(key)
            if row_slots is None:
                prompt = _prompt_of(rows, b)
                if prompt not in self._prompts:
                    self._add_prompt(prompt, size, set(rows.groups.tolist()))
                self._row_slots[key] = _RowSlots(self._free_slot(), *self._prompts[prompt], size)
            elif row_slots.num_prompt != size:
                self._row_slots[key] = row_slots._replace(num_prompt=size)
                self._missing_regions.append((row_slots.prompt_slot, size + 2))

    def _free_slot(self) -> int:
        """The rollout slot that has been free longest, since free slots are still matched."""
        if not self._free:
            self._free.extend(self._add_slots(max(self._num_noted.size // 4, 4)))
        slot = self._free.popleft()
        self._num_noted[slot] = self._first[slot] = 0
        self.states.num_expected[slot] = -1
        if self._regions.begins[slot] == NOWHERE:
            self._missing_regions.append((slot, self._width))
        return slot

    def _scope(self, group: int) -> int:
        """The number of a group. Heads are chosen by it, so it must not depend on how an engine numbers groups."""
        if group not in self._scope_of:
            self._num_scopes += 1
            self._scope_of[group] = self._num_scopes
        return self._scope_of[group]

    def _add_prompt(self, prompt: _Prompt, size: int, groups: set[int]) -> None:
        """Assigns a slot to a new prompt."""
        self._release_prompts()
        for group in self._scope_of.keys() - groups:
            del self._scope_of[group]
        if not self._free_prompts:
            self._free_prompts.extend(self._add_slots(max(self._num_noted.size // 4, 4)))
        slot = self._free_prompts.popleft()
        self._prompts[prompt] = slot, self._scope(prompt[0])
        self._missing_regions.append((slot, size + 2))

    def _release_prompts(self) -> None:
        """Frees the slots of prompts without rows, which were kept in case a new row has the same prompt."""
        held = {row_slots.prompt_slot for row_slots in self._row_slots.values()}
        for prompt in [prompt for prompt, (slot, _) in self._prompts.items() if slot not in held]:
            slot, _ = self._prompts.pop(prompt)
            self._regions.give_back(slot)
            self._free_prompts.append(slot)

    def _widen(self, longest: int) -> None:
        """Sizes regions for the longest rollout plus a quarter; all texts are rewritten."""
        self._width = min(-(-5 * longest // (4 * UNIT)) * UNIT + UNIT, self._max_size)
        self._release_prompts()
        sizes = {row_slots.slot: self._width for row_slots in self._row_slots.values()}
        for row_slots in self._row_slots.values():
            sizes[row_slots.prompt_slot] = max(row_slots.num_prompt + 2, sizes.get(row_slots.prompt_slot, 0))
        self._regions.lay_out(np.array(list(sizes), np.int64), np.array(list(sizes.values()), np.int64))
        self._missing_regions = []
        # Links too, since searches would follow those that lead to old positions.
        self.chains = make_hash_chains(0)

    def _assign_regions(self) -> None:
        """Allocates missing regions; their texts are rewritten."""
        for slot, size in self._missing_regions:
            if self._regions.take(slot, size):
                self._num_noted[slot] = self._first[slot] = 0
        self._missing_regions = []

    def _make_chains(self) -> None:
        """Allocates empty chains as long as the regions."""
        self.chains = make_hash_chains(self._regions.num_entries)
        self._num_noted[:] = self._first[:] = 0

    def _add_slots(self, num_slots: int) -> range:
        """Adds so many slots; returns their numbers."""
        first, none = self._num_noted.size, np.zeros(num_slots, np.int64)
        self._regions.add_slots(num_slots)
        self._num_noted, self._first = np.append(self._num_noted, none), np.append(self._first, none)
        self._scopes = np.append(self._scopes, none)
        self.states = RowStates(*map(_joined, self.states, make_row_states(num_slots)))
        return range(first, first + num_slots)


def _joined(first: Any, second: Any) -> Any:
    return np.concatenate([first, second])


def _prompt_of(rows: DraftRows, b: int) -> _Prompt:
    """Distinguishes prompts of a group; on a collision each would be rewritten in every step."""
    return int(rows.groups[b]), crc32(rows.tokens[b, : rows.num_prompt_tokens[b]].tobytes())


def _identity_of(rows: DraftRows) -> tuple[object, ...]:
    """Equal for equal rows. Copies, because the rows' arrays are views of the engine's."""
    row_ids = None if rows.row_ids is None else rows.row_ids.tobytes()
    return row_ids, rows.groups.tobytes(), rows.num_prompt_tokens.tobytes(), tuple(rows.prompt_ids)


def _keys_of(rows: DraftRows) -> list[object]:
    if rows.row_ids is not None:
        return list(rows.row_ids.tolist())
    return list(zip(range(len(rows.prompt_ids)), rows.prompt_ids, rows.groups.tolist(), strict=True))
