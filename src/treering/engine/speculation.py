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

    def __init__(self, drafter: Drafter | None, *, vocab_size: int) -> None:
        """None never drafts; `vocab_size` is the model's."""
        self._drafter = drafter
        self._vocab_size = vocab_size
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
        return readable(drafts.tokens, drafts.offsets, self._vocab_size)

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


def readable(tokens: TokenIds, offsets: Int64Array, vocab_size: int) -> tuple[TokenIds, Int64Array]:
    """Each row's draft up to the first token that the model does not have: a history may be another tokenizer's.

    Example: with vocab_size=9 and offsets [0, 3, 5], the drafts [1, 9, 2] and [3, 4] become [1] and [3, 4].
    """
    is_foreign = (tokens < 0) | (tokens >= vocab_size)
    if not is_foreign.any():
        return tokens, offsets
    num_before = np.concatenate([[0], np.cumsum(is_foreign)])
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    stays = num_before[1:] == num_before[offsets[rows]]
    ends = np.cumsum(np.bincount(rows[stays], minlength=offsets.size - 1))
    return tokens[stays], np.concatenate([[0], ends])
