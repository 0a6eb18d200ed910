"""What a step searches: the history of running prompts, running rollouts, and the history of other prompts.

    B rows
"""

from collections.abc import Mapping

import numpy as np

from treering.arrays import Int64Array
from treering.history.match.arena import Arena, Histories
from treering.history.match.recent import Others, Recent
from treering.history.match.running_rows import RunningRows, Turnover
from treering.history.store.prompt_index import PromptIndex
from treering.history.types import DraftRows
from treering.types import PromptId


class SearchState:
    """Arena, running rollouts and other prompts' history, for the rows of the latest step.

    Attributes:
        live: what is running.
        live_slots: int64 [B], where each row's rollout stands there.
        rows: of the latest step; None before the first one, and where taking them in has failed.

    Example: as long as the same rows run over the same snapshot, a step reads what they have appended and nothing else.
    """

    def __init__(self, *, max_live_tokens: int, max_other_tokens: int) -> None:
        """Keeps at most so many of a running rollout's or prompt's tokens, and of other prompts' history."""
        self._arena = Arena()
        self._recent = Recent(max_other_tokens)
        self._max_live_tokens = max_live_tokens
        self._slots, self._own_spans = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        self.forget()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.num_bytes for part in (self._arena, self.live, self._recent))

    @property
    def prompt_slots(self) -> Int64Array:
        """Slots of the rows' prompts in the arena, int64 [B]."""
        return self._slots

    @property
    def own_spans(self) -> Int64Array:
        """Where each row's own prompt begins and ends in the text of other prompts, int64 [B, 2]."""
        return self._own_spans

    @property
    def history(self) -> Histories:
        """Histories of the rows' prompts."""
        return self._arena.arrays

    @property
    def others(self) -> Others:
        """Histories of other prompts."""
        return self._recent.arrays

    def forget(self) -> None:
        """Goes on as a new one: what rows that have left leave behind would be found by those that come."""
        self.live = RunningRows(self._max_live_tokens)
        self.live_slots = np.zeros(0, np.int64)
        self.rows: DraftRows | None = None
        self._snapshot: Mapping[PromptId, PromptIndex] | None = None

    def take(self, rows: DraftRows, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        """Finds the rows in what is kept; costs next to nothing where they are those of the step before.

        Raises:
            InputError: a row's counts contradict each other, or there is more than places can count.
        """
        is_read = self.rows is not None and snapshot is self._snapshot
        # Should what follows fail, they are not known.
        self.rows = None
        self.live_slots, turnover = self.live.slots(rows)
        if turnover != "none" or not is_read:
            self._read(rows, snapshot, turnover)
        self.rows, self._snapshot = rows, snapshot

    def _read(self, rows: DraftRows, snapshot: Mapping[PromptId, PromptIndex], turnover: Turnover) -> None:
        if turnover == "all":
            self._recent.take(snapshot)
            self._arena.forget()
        self._slots = self._arena.slots(rows.prompt_ids, snapshot)
        self._own_spans = self._recent.spans(rows.prompt_ids)
