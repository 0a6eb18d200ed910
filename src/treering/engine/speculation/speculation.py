"""Connects an engine to its drafter: requests drafts for the decoding rows and reports which were accepted.

B rows
"""

import numpy as np

from treering.arrays import Int64Array
from treering.engine.batch.commit import NOT_FINISHED, CommittedTokens
from treering.engine.batch.draft_tree import DraftTrees, clip_drafts, count_accepted, no_drafts
from treering.engine.batch.state import fill_max_drafts
from treering.engine.batch.table import Table
from treering.engine.speculation.observed_costs import ObservedCosts
from treering.engine.speculation.verify_costs import Costs
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.types import DraftRows, Drafts


class Speculation:
    """Runs an engine's drafter, if it has one."""

    def __init__(self, drafter: Drafter | None, *, vocab_size: int, costs: Costs | ObservedCosts) -> None:
        """Without a drafter nothing is drafted; `vocab_size` is the model's."""
        self._drafter = drafter
        self.wants_costs = drafter is not None and costs == "measured" and drafter.costs is None
        """Whether to measure the costs before the next pass."""
        self._observed = costs if isinstance(costs, ObservedCosts) else None
        self._has_looked = False
        if isinstance(costs, VerifyCosts):
            self.use_costs(costs)
        self._vocab_size = vocab_size
        self._rows: DraftRows | None = None
        self._num_changes = -1
        self._latest: tuple[Drafts, DraftTrees] | None = None

    def use_costs(self, costs: VerifyCosts) -> None:
        """Passes the costs on to the drafter, if there is one."""
        self.wants_costs = False
        if self._drafter is not None:
            self._drafter.use_costs(costs)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Records the time of a pass without prefill."""
        if self._observed is not None:
            self._observed.note_pass(num_tokens, seconds)

    def note_step(self, committed: CommittedTokens, *, num_waiting: int, seconds: float) -> None:
        """Records a whole step without prefill."""
        if self._observed is not None and committed.num_new.size > 0:
            is_finished = committed.finish != NOT_FINISHED
            self._observed.note_step(
                committed.num_new, is_finished, num_waiting=num_waiting, drafted=self._has_looked, seconds=seconds
            )

    def propose(self, table: Table, leaders: Int64Array, *, has_prefill: bool = False) -> DraftTrees:
        """Drafts for all decoding rows that are not duplicates.

        With `ObservedCosts`, steps with prefill make none: their times would tell nothing.
        """
        self._latest, self._has_looked = None, False
        if self._drafter is None or not self._may_draft(self._drafter, table.num_rows, has_prefill):
            return no_drafts(table.num_rows)
        self._has_looked = True
        if self._rows is None or self._num_changes != table.num_changes:
            self._num_changes = table.num_changes
            self._rows = _rows_of(table)
        c = table.columns
        rows = self._rows
        assert rows.leaders is not None
        rows.leaders[:] = leaders
        fill_max_drafts(c.is_ready, c.num_tokens, c.num_computed, c.limit, rows.leaders, rows.max_drafts)
        drafts = self._drafter.propose(rows)
        proposed = clip_drafts(drafts, rows.max_drafts, self._vocab_size, c.stop_tokens[: table.num_rows])
        if drafts.tokens.size > 0:
            self._latest = drafts, proposed
        return proposed

    def give_feedback(self, committed: CommittedTokens) -> None:
        """Reports the acceptance of the latest drafts to the drafter, if there were any.

        No draft exceeds a row's limit (`fill_max_drafts`), so the tokens alone tell which drafts were accepted.
        """
        if self._drafter is None or self._rows is None or self._latest is None:
            return
        rows = self._rows
        assert rows.leaders is not None
        accepted, leaves = count_accepted(
            *self._latest, rows.leaders, rows.tokens, rows.num_tokens, committed.num_accepted, committed.leaves
        )
        self._drafter.observe(rows, accepted, leaves=leaves)

    def _may_draft(self, drafter: Drafter, num_rows: int, has_prefill: bool) -> bool:
        if self._observed is None:
            return not drafter.is_backing_off()
        if has_prefill or not self._observed.may_draft(num_rows):
            return False
        costs = self._observed.new_costs()
        if costs is not None:
            drafter.use_costs(costs)
        return not drafter.is_backing_off()


def _num_given(table: Table) -> Int64Array:
    """int64 [B], tokens of each row that its history does not have.

    None for a call of an episode: the history has whole episodes, so a turn is matched by what was observed before it.
    """
    is_call = np.array([request.call is not None for request in table.requests], bool)
    return np.where(is_call, 0, table.columns.num_prompt[: table.num_rows])


def _rows_of(table: Table) -> DraftRows:
    """Views of the running rows, valid until a row is added or removed; each step updates them in place."""
    c, num_rows = table.columns, table.num_rows
    return DraftRows(
        prompt_ids=[request.prompt_id for request in table.requests],
        groups=c.groups[:num_rows],
        tokens=c.tokens[:num_rows],
        num_tokens=c.num_tokens[:num_rows],
        num_prompt_tokens=_num_given(table),
        max_drafts=np.zeros(num_rows, np.int64),
        row_ids=c.row_ids[:num_rows],
        leaders=np.arange(num_rows),
    )
