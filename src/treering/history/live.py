"""What is running: the rollouts so far of every row, and their groups' prompts, searchable as they grow.

Knows rows and groups. Knows nothing of history, of acceptance and of drafts. Only what a step has appended is read; a
row that leaves gives its room to another. All of it goes when rows come of which none was there before: what is found
then is what a new one would find.

    B rows   S slots   W entries of a slot
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from treering.history.chains import LONG, Chains, append, ask_for_heads, link, make_chains, short_head
from treering.history.index import MARKER
from treering.history.lean import lean
from treering.history.records import DraftRows
from treering.history.threads import MAX_THREADS, Threads

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_Prompt = tuple[int, int]

_FIRST_WIDTH = 256
_NUM_COMPARED = 32
_NUM_SOON = 16

_CUT = -2
# Begins a slot whose first tokens have gone out: equal to nothing.


class Live:
    """Slots of equal width: one for each running rollout, one for each prompt that a group's rows have.

    A slot is a marker, tokens and a marker. Of what does not fit, the newest tokens are kept.

    Attributes:
        chains: the texts of all slots, linked within groups.
        num_noted: int64 [S], tokens of the row's context that are in the slot or have gone out of it.
        first: int64 [S], tokens of the context that stand before the slot's first one.
        scopes: int64 [S], scope of what is in the slot.
        row_scopes: int64 [B], scope of each row: its group, by number in the order in which groups came.
        width: W.
        threads: what the row of each slot followed at its latest step.

    Example: rows of a group with a prompt of 3 tokens take one slot for it and one each for their rollouts. Where one
    of them has another prompt, as behind a turn that its siblings did not take, that has a slot too.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keeps at most `max_tokens` of a rollout or prompt."""
        self._max_width = max_tokens + 2
        self._by_row: dict[object, int] = {}
        self._by_prompt: dict[object, int] = {}
        self._prompts: dict[object, _Prompt] = {}
        self._scope_of: dict[int, int] = {}
        self._num_scopes = 0
        self._free: list[int] = []
        self._rows: DraftRows | None = None
        self._identity: tuple[object, ...] = ()
        self._slots = np.zeros(0, np.int64)
        self._prompt_slots = np.zeros(0, np.int64)
        self.row_scopes = np.zeros(0, np.int64)
        self._reset(num_slots=0, width=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self.chains, *self.threads, self.num_noted, self.first, self.scopes))

    def slots(self, rows: DraftRows) -> tuple[Int64Array, Int64Array, bool]:
        """The slots of the rows' rollouts and of their prompts, int64 [B] each, and whether all rows are new.

        What the slots hold is brought up to the contexts by `note_rows`, within the compiled call.
        """
        is_fresh = False
        longest = max(rows.num_tokens.tolist(), default=0)
        if not self.has(rows) or longest + 2 > self.width < self._max_width:
            # Should this fail, no rows are known.
            self._rows, self._identity = None, ()
            is_fresh = self._assign(rows, longest)
            self._identity = _identity_of(rows)
        self._rows = rows
        return self._slots, self._prompt_slots, is_fresh

    def has(self, rows: DraftRows) -> bool:
        """Whether these are the rows of the step before, the same object or another."""
        return rows is self._rows or _identity_of(rows) == self._identity

    def _assign(self, rows: DraftRows, longest: int) -> bool:
        keys, groups = _keys_of(rows), rows.groups.tolist()
        is_fresh = self._by_row.keys().isdisjoint(keys)
        if is_fresh:
            self._by_row, self._by_prompt, self._scope_of, self._num_scopes = {}, {}, {}, 0
        known = map(self._prompts.get, keys)
        prompts = [prompt or _prompt_of(rows, b) for b, prompt in enumerate(known)]
        self._prompts = dict(zip(keys, prompts, strict=True))
        for owners, stays in ((self._by_row, set(keys)), (self._by_prompt, set(prompts))):
            for key in [key for key in owners if key not in stays]:
                self._free.append(owners.pop(key))
        for group in self._scope_of.keys() - set(groups):
            del self._scope_of[group]
        width = min(max(_FIRST_WIDTH, 2 * longest + 2), self._max_width)
        if is_fresh:
            # As a new one would: what is found must not depend on what ran before.
            self._reset(num_slots=2 * len(keys), width=width)
        elif 2 * len(keys) > self.num_noted.size or longest + 2 > self.width < self._max_width:
            self._reset(num_slots=max(2 * len(keys), self.num_noted.size), width=max(width, self.width))
        self._slots = self._slots_of(self._by_row, keys)
        self._prompt_slots = self._slots_of(self._by_prompt, prompts)
        self.row_scopes = np.array([self._scope(group) for group in groups], np.int64)
        return is_fresh

    def _scope(self, group: int) -> int:
        """Not the caller's name for it: heads are chosen by scopes, and an engine that is made again names anew."""
        if group not in self._scope_of:
            self._num_scopes += 1
            self._scope_of[group] = self._num_scopes
        return self._scope_of[group]

    def _slots_of(self, owners: dict[object, int], keys: Sequence[object]) -> Int64Array:
        """The slot of each key; those that have none are given a free one."""
        for key in keys:
            if key not in owners:
                slot = owners[key] = self._free.pop()
                self.num_noted[slot] = 0
                self.threads.num_tokens[slot] = -1
        return np.array([owners[key] for key in keys], np.int64)

    def _reset(self, *, num_slots: int, width: int) -> None:
        """Empty slots; what rows of before have is noted again."""
        self.width = width
        self.chains: Chains = make_chains(max(num_slots * width, 1))
        self.num_noted = np.zeros(num_slots, np.int64)
        self.first = np.zeros(num_slots, np.int64)
        self.scopes = np.zeros(num_slots, np.int64)
        self.threads = Threads(
            at=np.full((num_slots, MAX_THREADS), -1, np.int32),
            missed=np.zeros((num_slots, MAX_THREADS), np.int32),
            num_tokens=np.full(num_slots, -1, np.int64),
            num_expected=np.full(num_slots, -1, np.int64),
            generation=np.full(num_slots, -1, np.int64),
            state=np.zeros(num_slots, np.int64),
        )
        self._free = list(reversed(range(num_slots)))
        for owners in (self._by_row, self._by_prompt):
            for key in owners:
                owners[key] = self._free.pop()


def _prompt_of(rows: DraftRows, b: int) -> _Prompt:
    """Tells prompts of a group apart; were two of them taken for one, each would be noted anew in every step."""
    return int(rows.groups[b]), crc32(rows.tokens[b, : rows.num_prompt_tokens[b]].tobytes())


def _identity_of(rows: DraftRows) -> tuple[object, ...]:
    """Equal for equal rows. A copy: what rows hold are views of the engine's own."""
    row_ids = None if rows.row_ids is None else rows.row_ids.tobytes()
    return row_ids, rows.groups.tobytes(), tuple(rows.prompt_ids)


def _keys_of(rows: DraftRows) -> list[object]:
    if rows.row_ids is not None:
        return list(rows.row_ids.tolist())
    return list(zip(range(len(rows.prompt_ids)), rows.prompt_ids, rows.groups.tolist(), strict=True))


@lean
def _is_continued(chains: Chains, base: int, first: int, noted: int, context: Int32Array, end: int) -> bool:
    """Whether a context goes on from what its slot holds, as far as its newest tokens tell."""
    if noted > end:
        return False
    begin = max(first, noted - _NUM_COMPARED)
    held, differs = chains.tokens[base + 1 + begin - first : base + 1 + noted - first], False
    # All of them, which goes side by side: to stop at the first that differs is to look at one after another.
    for i in range(held.size):
        differs |= held[i] != context[begin + i]
    return not differs


@lean
def _note(
    chains: Chains, num_noted: Int64Array, firsts: Int64Array, scopes: Int64Array, width: int, slot: int, scope: int,
    context: Int32Array, begin: int, end: int,
) -> None:  # fmt: skip
    """Brings a slot up to the tokens `begin` to `end` of a context."""
    base = slot * width
    room = width - 2
    noted, first = num_noted[slot], firsts[slot]
    if noted > 0 and (end - first > room or not _is_continued(chains, base, first, noted, context, end)):
        noted = 0
    if noted == 0:
        # Half of the room stays free, so that a slot is written anew once in as many tokens.
        first = noted = begin if end - begin <= room else end - room // 2
        chains.tokens[base] = MARKER if first == begin else _CUT
        chains.tokens[base + 1] = MARKER
        if first == begin:
            link(chains.short, chains.heads, short_head(scope, MARKER, chains.heads.size), base)
    for i in range(noted, end):
        append(chains, base + 1 + i - first, base if first == begin else base + 1, context[i], scope)
    num_noted[slot], firsts[slot], scopes[slot] = end, first, scope


@lean
def note_rows(
    chains: Chains,
    num_noted: Int64Array,
    firsts: Int64Array,
    scopes: Int64Array,
    width: int,
    slots: Int64Array,
    prompt_slots: Int64Array,
    row_scopes: Int64Array,
    tokens: Int32Array,
    num_tokens: Int64Array,
    num_prompt: Int64Array,
) -> None:
    """Brings the slots of all rows up to their contexts."""
    for b in range(slots.size):
        noted = num_noted[slots[b]]
        if num_prompt[b] + LONG <= noted < num_tokens[b]:
            for i in range(noted, min(num_tokens[b], noted + _NUM_SOON)):
                ask_for_heads(chains, row_scopes[b], tokens[b], i)
    for b in range(slots.size):
        scope, context = row_scopes[b], tokens[b]
        _note(chains, num_noted, firsts, scopes, width, prompt_slots[b], scope, context, 0, num_prompt[b])
        _note(chains, num_noted, firsts, scopes, width, slots[b], scope, context, num_prompt[b], num_tokens[b])
