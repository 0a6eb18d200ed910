"""Whether a step looks for drafts: where they gain next to nothing, most steps do not."""

from collections.abc import Mapping

import numpy as np

from treering.history.match.sources import GainGate
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId


class DraftGate:
    """Lets every step look for drafts while they gain enough, and else one in 16 until they do or history is news.

    A step with drafts costs vLLM more than one without, however few rows have one.

    Example: with a `min_gain` of 1/16, 64 rows must gain 4 tokens a look. If they gain none, 8 steps look at first,
    then 15 do not, one does, and so on.
    """

    def __init__(self, min_gain: float) -> None:
        """Demands so many accepted tokens a row and look; 0 lets every step look."""
        self._min_gain = min_gain
        self._history: Mapping[PromptId, PromptIndex] | None = None
        self._num_rows = self._num_accepted = 0

    def is_due(self, history: Mapping[PromptId, PromptIndex]) -> bool:
        """Whether this step looks, in this history; counts the step."""
        if history is not self._history:
            # The price of a row is in tokens, too.
            self._history, self._gate = history, GainGate(np.zeros(3), self._min_gain)
        return self._gate.is_due()

    def note(self, num_rows: int, num_accepted: int) -> None:
        """Takes the rows of a look, and all tokens that looks before it have gained."""
        self._gate.note(self._num_rows, num_accepted - self._num_accepted, 1.0)
        self._num_rows, self._num_accepted = num_rows, num_accepted
