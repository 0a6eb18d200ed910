"""Between engine and drafter: which rows ask for drafts, and what the drafter learns from what became of them.

Knows the columns and the drafter's records. Knows nothing of how drafts are found or verified.
"""

import numpy as np
from numpy.typing import NDArray

from treering.engine.drawing import Drawn
from treering.engine.rows import Gains, Work
from treering.engine.table import Table
from treering.history.draft import Drafter, DraftRows
from treering.types import TokenIds

Int64Array = NDArray[np.int64]


class Speculation:
    """A drafter at work in an engine, or none."""

    def __init__(self, drafter: Drafter | None) -> None:
        """None never drafts."""
        self._drafter = drafter
        self._asked: DraftRows | None = None

    def propose(self, table: Table) -> tuple[TokenIds, Int64Array]:
        """Drafts of all rows, one after another, and their offsets [B + 1]."""
        num_rows = table.num_rows
        if self._drafter is None:
            return np.zeros(0, np.int32), np.zeros(num_rows + 1, np.int64)
        c = table.columns
        decodes = c.is_ready[:num_rows] & (c.num_tokens[:num_rows] - c.num_computed[:num_rows] == 1)
        # The last token that a rollout has room for is drawn, never computed.
        room = c.limit[:num_rows] - c.num_tokens[:num_rows] - 1
        self._asked = DraftRows(
            prompt_ids=[request.prompt_id for request in table.requests],
            groups=c.groups[:num_rows],
            tokens=c.tokens[:num_rows],
            num_tokens=c.num_tokens[:num_rows],
            num_prompt_tokens=c.num_prompt[:num_rows],
            max_drafts=np.where(decodes, room, 0),
        )
        drafts = self._drafter.propose(self._asked)
        return drafts.tokens, drafts.offsets

    def learn(self, work: Work, drawn: Drawn, gains: Gains) -> None:
        """Tells the drafter how many of each row's drafts were accepted."""
        if self._drafter is None or self._asked is None:
            return
        num_rows = len(self._asked.prompt_ids)
        accepted, ended = np.zeros(num_rows, np.int64), np.zeros(num_rows, bool)
        accepted[work.rows] = gains.num_accepted
        # A row that stopped inside its drafts says nothing of those behind.
        ended[work.rows] = gains.num_new < drawn.num_tokens
        self._drafter.observe(self._asked, accepted, ended)
