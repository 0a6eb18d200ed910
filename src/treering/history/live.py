"""What is running: the rollouts so far of every row, and their groups' prompts, searchable as they grow.

Knows rows and groups. Knows nothing of history, of acceptance and of drafts. Only what a step has appended is read; a
row that leaves gives its room to another. All of it goes when rows come of which none was there before: what is found
then is what a new one would find.

    B rows   S slots
"""

from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from treering.history.chains import make_chains
from treering.history.records import DraftRows
from treering.history.regions import UNIT, Regions
from treering.history.running import Running
from treering.history.threads import Threads, make_threads

Int64Array = NDArray[np.int64]

_Prompt = tuple[int, int]

_NO_LIMIT = np.iinfo(np.int64).max


class Live:
    """A slot for each running rollout, and one for each prompt that a group's rows have, with a region for its text.

    A text is a marker, tokens and a marker. A prompt's region is as large as its text; those of rollouts are all of one
    size, that of the longest and three quarters more, so that few steps move any. Of what does not fit into the largest
    there may be, the newest tokens are kept. Texts of rows that have left are found until their slots or regions are
    taken.

    Attributes:
        chains: all texts, linked within groups.
        threads: what the row of each slot followed at its latest step.
        row_scopes: int64 [B], scope of each row: its group, by number in the order in which groups came.

    Example: rows of a group with a prompt of 3 tokens take one slot for it and one each for their rollouts. Where one
    of them has another prompt, as behind a turn that its siblings did not take, that has a slot too.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keeps at most `max_tokens` of a rollout or prompt."""
        self._max_size = max_tokens + 2
        self._prompts: dict[object, _Prompt] = {}
        self._rows: DraftRows | None = None
        self._identity: tuple[object, ...] = ()
        self._slots, self._prompt_slots, self._full, self.row_scopes = np.zeros((4, 0), np.int64)
        self._width = 0
        self._empty(num_slots=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (*self.chains, *self.threads, self._num_noted, self._first, self._scopes)
        return self._regions.num_bytes + sum(array.nbytes for array in arrays)

    @property
    def running(self) -> Running:
        """What compiled calls read and bring up to date, for the rows that `slots` was called with."""
        regions = self._regions
        return Running(
            self.chains, self._num_noted, self._first, self._scopes, regions.begins, regions.sizes, regions.owners,
            self._slots, self._prompt_slots,
        )  # fmt: skip

    def slots(self, rows: DraftRows) -> tuple[Int64Array, bool]:
        """The slots of the rows' rollouts, int64 [B], with room for their texts, and whether all rows are new.

        What the slots hold is brought up to the contexts by `note_rows`, within the compiled call.
        """
        is_fresh = False
        if not self.has(rows) or (rows.num_tokens > self._full).any():
            # Should this fail, no rows are known.
            self._rows, self._identity = None, ()
            is_fresh = self._assign(rows)
            self._identity = _identity_of(rows)
        self._rows = rows
        return self._slots, is_fresh

    def has(self, rows: DraftRows) -> bool:
        """Whether these are the rows of the step before, the same object or another."""
        return rows is self._rows or _identity_of(rows) == self._identity

    def _assign(self, rows: DraftRows) -> bool:
        keys, groups = _keys_of(rows), rows.groups.tolist()
        num_prompt = np.maximum(rows.num_prompt_tokens, 0)
        num_own = np.maximum(rows.num_tokens - num_prompt, 0)
        is_fresh = self._by_row.keys().isdisjoint(keys)
        if is_fresh:
            # As a new one would: what is found must not depend on what ran before.
            self._empty(num_slots=2 * len(keys))
        known = map(self._prompts.get, keys)
        prompts = [prompt or _prompt_of(rows, b) for b, prompt in enumerate(known)]
        self._prompts = dict(zip(keys, prompts, strict=True))
        for owners, stays in ((self._by_row, set(keys)), (self._by_prompt, set(prompts))):
            for key in [key for key in owners if key not in stays]:
                self._release(owners.pop(key))
        for group in self._scope_of.keys() - set(groups):
            del self._scope_of[group]
        self._widen(int(num_own.max(initial=0)), len(keys))
        self._slots = self._slots_of(self._by_row, keys, np.full(len(keys), self._width))
        self._prompt_slots = self._slots_of(self._by_prompt, prompts, num_prompt + 2)
        self._fit_chains()
        self._full = num_prompt + self._width - 2 if self._width < self._max_size else np.full(len(keys), _NO_LIMIT)
        self.row_scopes = np.array([self._scope(group) for group in groups], np.int64)
        return is_fresh

    def _scope(self, group: int) -> int:
        """Not the caller's name for it: heads are chosen by scopes, and an engine that is made again names anew."""
        if group not in self._scope_of:
            self._num_scopes += 1
            self._scope_of[group] = self._num_scopes
        return self._scope_of[group]

    def _widen(self, longest: int, num_rows: int) -> None:
        """Has the longest rollout fit, and three quarters more: all are noted again when they get more room."""
        if longest + 2 <= self._width or self._width == self._max_size:
            return
        self._width = min(longest + 3 * longest // 4 + 2 * UNIT, self._max_size)
        # Links with them: those that lead to where texts stood before would have to be looked at.
        self._regions.forget(num_regions=num_rows, num_entries=self._width)
        self.chains = make_chains(0)

    def _slots_of(self, owners: dict[object, int], keys: Sequence[object], sizes: Int64Array) -> Int64Array:
        """The slot of each key; those whose region is smaller take one of that size."""
        for key, size in zip(keys, sizes.tolist(), strict=True):
            slot = owners.get(key)
            if slot is None:
                slot = owners[key] = self._free_slot()
            elif self._regions.holds(slot, size):
                continue
            self._regions.take(slot, size)
            self._num_noted[slot] = self._first[slot] = 0
        return np.array([owners[key] for key in keys], np.int64)

    def _free_slot(self) -> int:
        """The one that is free for longest: what it holds is still found."""
        if not self._free:
            self._add_slots(max(self._num_noted.size // 4, 4))
        slot = self._free.popleft()
        self.threads.num_tokens[slot] = -1
        return slot

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._regions.give_back(slot)

    def _empty(self, *, num_slots: int) -> None:
        self._by_row: dict[object, int] = {}
        self._by_prompt: dict[object, int] = {}
        self._scope_of: dict[int, int] = {}
        self._num_scopes = 0
        self._free: deque[int] = deque()
        self._regions = Regions(max_size=self._max_size)
        self._width = 0
        self._num_noted, self._first, self._scopes = np.zeros((3, 1), np.int64)
        self.threads = make_threads(1)
        self.chains = make_chains(0)
        self._add_slots(num_slots)

    def _add_slots(self, num_slots: int) -> None:
        first, none = self._num_noted.size, np.zeros(num_slots, np.int64)
        self._free.extend(range(first, first + num_slots))
        self._regions.add_slots(num_slots)
        self._num_noted, self._first = np.append(self._num_noted, none), np.append(self._first, none)
        self._scopes = np.append(self._scopes, none)
        self.threads = Threads(*map(_joined, self.threads, make_threads(num_slots)))

    def _fit_chains(self) -> None:
        """Makes the chains as long as the regions."""
        if self._regions.num_entries > self.chains.tokens.size:
            self.chains = make_chains(self._regions.num_entries)
            self._num_noted[:] = self._first[:] = 0


def _joined(first: Any, second: Any) -> Any:
    return np.concatenate([first, second])


def _prompt_of(rows: DraftRows, b: int) -> _Prompt:
    """Tells prompts of a group apart; were two of them taken for one, each would be noted anew in every step."""
    return int(rows.groups[b]), crc32(rows.tokens[b, : rows.num_prompt_tokens[b]].tobytes())


def _identity_of(rows: DraftRows) -> tuple[object, ...]:
    """Equal for equal rows. A copy: what rows hold are views of the engine's own."""
    row_ids = None if rows.row_ids is None else rows.row_ids.tobytes()
    return row_ids, rows.groups.tobytes(), rows.num_prompt_tokens.tobytes(), tuple(rows.prompt_ids)


def _keys_of(rows: DraftRows) -> list[object]:
    if rows.row_ids is not None:
        return list(rows.row_ids.tolist())
    return list(zip(range(len(rows.prompt_ids)), rows.prompt_ids, rows.groups.tolist(), strict=True))
