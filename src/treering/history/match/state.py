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
        live: the running rollouts.
        live_slots: int64 [B], the slot of each row's rollout in `live`.
        rows: of the latest step; None before the first one, and after `take` has failed.

    Example: while rows and snapshot stay the same, a step reads only the tokens that the rows have appended.
    """

    def __init__(self, *, max_live_tokens: int, max_other_tokens: int) -> None:
        """Limits the tokens kept of each running rollout or prompt, and of other prompts' history."""
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
        """Clears the state, so that later matches do not depend on earlier rows."""
        self.live = RunningRows(self._max_live_tokens)
        self.live_slots = np.zeros(0, np.int64)
        self.rows: DraftRows | None = None
        self._snapshot: Mapping[PromptId, PromptIndex] | None = None

    def take(self, rows: DraftRows, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        """Sets the rows of the step; cheap if they are those of the previous step.

        Raises:
            InputError: a row's counts contradict each other, or a text exceeds `MAX_ENTRIES`.
        """
        is_read = self.rows is not None and snapshot is self._snapshot
        # If the rest fails, no rows are known.
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
