"""Slots for running rollouts and their groups' prompts, whose texts can be searched as they grow.

Each step reads only the tokens appended since the last one. A row that leaves frees its slot. If all rows of a step are
new, everything is cleared, so that matches do not depend on earlier rows.

    B rows   S slots
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np

from treering.arrays import Int64Array
from treering.compiling.lean import lean
from treering.history.draft_types import DraftRows, check_counts
from treering.history.features import NOT_TRIED
from treering.history.match.running import UNIT, Running, make_hash_chains


class RowStates(NamedTuple):
    """State of the row in each slot after its latest step, all [S]."""

    state: Int64Array  # see `features.NUM_STATES`
    num_tokens: Int64Array  # of the context in that step
    num_expected: Int64Array  # of the context now if only sampled tokens were added; -1 for a new row
    gain: Int64Array  # average gain of its drafts, see `worth.note_gains`; -1 for a new row


@lean
def update_state(states: RowStates, slot: int, num_tokens: int) -> None:
    """Store the length of a row's context; reset the latest draft's outcome if unsampled tokens were added."""
    if states.num_expected[slot] != num_tokens:
        states.state[slot] = NOT_TRIED
    states.num_tokens[slot] = num_tokens


@lean
def copy_state(states: RowStates, slot: int, source: int) -> None:
    """Copy the state of another slot, whose row has the same tokens."""
    states.state[slot], states.gain[slot] = states.state[source], states.gain[source]
    states.num_tokens[slot], states.num_expected[slot] = states.num_tokens[source], states.num_expected[source]


_Prompt = tuple[int, int]
"""Group and checksum of the tokens of a prompt."""

_NO_LIMIT = 1 << 40
_NOWHERE = 1 << 40
"""Begin of a slot without room: after every entry."""
_NEW_SLOT = np.array([0, 0, 0, _NOWHERE, 0, NOT_TRIED, -1, -1, -1])[:, None]
"""Columns of a new slot: tokens written, first of them, scope, begin and size of its room, and the state of its row."""

RowChange = Literal["none", "some", "all"]
"""How the rows of a step differ from those of the step before. none: they are the same. all: all of them are new."""


class _RowSlots(NamedTuple):
    """Slots and scope of a row."""

    slot: int
    prompt_slot: int
    scope: int


class RunningRows:
    """Slots for running rollouts and for the prompts of their groups, with room for their texts.

    A text is a marker, tokens and a marker. A prompt has room for its text. All rollouts have room for the longest one
    plus a quarter, so that few steps move any, and new rows take the room of removed ones. If a text exceeds the
    maximum size, its newest tokens are kept. Texts of removed rows are matched until their slots are reused, or until
    no room is left and all texts are laid out again.

    Attributes:
        chains: all texts, linked within groups.
        states: outcome of the latest draft of the row in each slot.
        row_scopes: int64 [B], scope of each row: its group, numbered in order of appearance.

    Example: rows of a group with a prompt of 3 tokens take one slot for it and one each for their rollouts. A row with
    another prompt, as after a turn that its siblings did not take, takes a slot for that too.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keep at most `max_tokens` tokens of a rollout or prompt."""
        self._max_size = max_tokens + 2
        self._rows: DraftRows | None = None
        self._identity: tuple[object, ...] = ()
        # `_full` is the number of tokens of each row, prompt included, that fit into its room.
        self._slots, self._prompt_slots, self.row_scopes, self._full = np.zeros((4, 0), np.int64)
        self._empty()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self.chains, self._table, self._owners))

    @property
    def running(self) -> Running:
        """Arrays for compiled calls, with the rows of the latest call of `slots`."""
        return Running(
            self.chains, self._num_noted, self._first, self._scopes, self._begins, self._sizes, self._owners,
            self._slots, self._prompt_slots,
        )  # fmt: skip

    def slots(self, rows: DraftRows) -> tuple[Int64Array, RowChange]:
        """Return the slots of the rows' rollouts, int64 [B], with room for their texts, and the change.

        `note_rows` appends the new tokens, within the compiled call.
        """
        change: RowChange = "none" if self.has(rows) else "some"
        if change == "some" or (rows.num_tokens > self._full).any():
            # If this fails, the rows are unknown.
            self._rows, self._identity = None, ()
            if self._assign(rows):
                change = "all"
            self._identity = _identity_of(rows)
        self._rows = rows
        return self._slots, change

    def has(self, rows: DraftRows) -> bool:
        """Return whether these are the rows of the previous step, as the same object or an equal one."""
        return rows is self._rows or _identity_of(rows) == self._identity

    def _empty(self) -> None:
        self._row_slots = dict[object, _RowSlots]()
        # The slot and the scope of each.
        self._prompts = dict[_Prompt, tuple[int, int]]()
        self._scope_of = dict[int, int]()
        self._num_scopes = 0
        # Prompts have separate free slots, because the room of a rollout is seldom large enough for a prompt.
        self._free, self._free_prompts = deque[int](), deque[int]()
        # `_width` is the room of a rollout, in entries.
        self._num_slots = self._num_units = self._width = 0
        self._owners = np.zeros(0, np.int32)
        self._table = _NEW_SLOT[:, :0]
        self._name_columns()
        self.chains = make_hash_chains(0)

    def _assign(self, rows: DraftRows) -> bool:
        """Assign slots to every row, with room for its text; return whether all rows are new."""
        check_counts(rows)
        keys = _keys_of(rows)
        is_fresh = self._row_slots.keys().isdisjoint(keys)
        if is_fresh:
            # Matches must not depend on earlier rows.
            self._empty()
        stays = set(keys)
        for key in [key for key in self._row_slots if key not in stays]:
            self._free.append(self._row_slots.pop(key).slot)
        self._add_rows(rows, keys)
        self._add_slots()
        table = np.array([self._row_slots[key] for key in keys], np.int64).reshape(-1, len(_RowSlots._fields))
        self._slots, self._prompt_slots, self.row_scopes = np.ascontiguousarray(table.T)
        self._make_room(rows.num_prompt_tokens, int((rows.num_tokens - rows.num_prompt_tokens).max(initial=0)))
        self._full = rows.num_prompt_tokens + (self._width - 2 if self._width < self._max_size else _NO_LIMIT)
        return is_fresh

    def _add_rows(self, rows: DraftRows, keys: Sequence[object]) -> None:
        for b, key in enumerate(keys):
            if key in self._row_slots:
                continue
            prompt = _prompt_of(rows, b)
            if prompt not in self._prompts:
                self._add_prompt(prompt, set(rows.groups.tolist()))
            self._row_slots[key] = _RowSlots(self._take_slot(self._free), *self._prompts[prompt])

    def _take_slot(self, free: deque[int]) -> int:
        """Return the slot that has been free longest, since free slots are still matched; a new one if none is free."""
        if not free:
            self._num_slots += 1
            return self._num_slots - 1
        slot = free.popleft()
        if slot < self._num_noted.size:
            self._num_noted[slot] = self._first[slot] = 0
            self.states.num_expected[slot] = self.states.gain[slot] = -1
        return slot

    def _scope(self, group: int) -> int:
        """Return the number of a group. Heads depend on it, so it must not depend on an engine's numbers."""
        if group not in self._scope_of:
            self._num_scopes += 1
            self._scope_of[group] = self._num_scopes
        return self._scope_of[group]

    def _add_prompt(self, prompt: _Prompt, groups: set[int]) -> None:
        """Assign a slot to a new prompt, after freeing those of prompts that no row has any more."""
        held = {row_slots.prompt_slot for row_slots in self._row_slots.values()}
        for other in [other for other, (slot, _) in self._prompts.items() if slot not in held]:
            self._free_prompts.append(self._prompts.pop(other)[0])
        for group in self._scope_of.keys() - groups:
            del self._scope_of[group]
        self._prompts[prompt] = self._take_slot(self._free_prompts), self._scope(prompt[0])

    def _add_slots(self) -> None:
        """Add the slots that were assigned, and at least a quarter more."""
        size = self._num_noted.size
        if self._num_slots <= size:
            return
        num_new = max(self._num_slots, size + size // 4) - size
        self._table = np.concatenate([self._table, np.repeat(_NEW_SLOT, num_new, axis=1)], axis=1)
        self._name_columns()

    def _name_columns(self) -> None:
        self._num_noted, self._first, self._scopes, self._begins, self._sizes, *states = self._table
        self.states = RowStates(*states)

    def _make_room(self, num_prompt: Int64Array, longest: int) -> None:
        """Give room to slots that lack it, after all others, or where nothing is left by laying out all texts again.

        Args:
            num_prompt: int64 [B], tokens of the rows' prompts.
            longest: tokens of the longest rollout.
        """
        is_wider = longest + 2 > self._width < self._max_size
        if is_wider:
            self._width = min(-(-5 * longest // (4 * UNIT)) * UNIT + UNIT, self._max_size)
        needed = np.zeros(self._num_noted.size, np.int64)
        needed[self._slots] = self._width
        needed[self._prompt_slots] = np.minimum(num_prompt + 2, self._max_size)
        lacking = (self._sizes < needed).nonzero()[0]
        num_units = -(-needed[lacking] // UNIT)
        if is_wider or self._num_units + num_units.sum() > self._owners.size:
            lacking = needed.nonzero()[0]
            num_units = -(-needed[lacking] // UNIT)
            self._begins[:], self._sizes[:], self._num_units = _NOWHERE, 0, 0
            num_spare = 0 if is_wider else int(num_units.sum()) // 8
            self._owners = np.zeros(int(num_units.sum()) + num_spare, np.int32)
            # Links are cleared too, because searches would follow them to old positions.
            self.chains = make_hash_chains(0)
        if lacking.size:
            ends = self._num_units + num_units.cumsum()
            self._owners[self._num_units : ends[-1]] = lacking.repeat(num_units)
            self._begins[lacking], self._sizes[lacking] = (ends - num_units) * UNIT, num_units * UNIT
            np.minimum(self._sizes, self._max_size, out=self._sizes)
            self._num_noted[lacking] = self._first[lacking] = 0
            self._num_units = int(ends[-1])
        # This also runs if the previous call failed here.
        if self._owners.size * UNIT > self.chains.tokens.size:
            self.chains = make_hash_chains(self._owners.size * UNIT)
            self._num_noted[:] = self._first[:] = 0


def _prompt_of(rows: DraftRows, b: int) -> _Prompt:
    """Identify a prompt of a group; prompts whose checksums collide would be rewritten in every step."""
    return int(rows.groups[b]), crc32(rows.tokens[b, : rows.num_prompt_tokens[b]].tobytes())


def _identity_of(rows: DraftRows) -> tuple[object, ...]:
    """Return a key of the rows, equal for equal rows. It copies arrays, which are views of the engine's."""
    row_ids = None if rows.row_ids is None else rows.row_ids.tobytes()
    return row_ids, rows.groups.tobytes(), rows.num_prompt_tokens.tobytes(), tuple(rows.prompt_ids)


def _keys_of(rows: DraftRows) -> list[object]:
    if rows.row_ids is not None:
        return list(rows.row_ids.tolist())
    return list(zip(range(len(rows.prompt_ids)), rows.prompt_ids, rows.groups.tolist(), strict=True))
