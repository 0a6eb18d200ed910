"""Connects an engine to its drafter: requests drafts for the decoding rows and reports which were accepted.

It also weights rows by their expected remaining tokens.

    B rows
"""

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.engine.batch.commit import NOT_FINISHED, CommittedTokens
from treering.engine.batch.draft_tree import DraftTrees, clip_drafts, count_accepted, no_drafts
from treering.engine.batch.state import fill_max_drafts
from treering.engine.batch.table import Table
from treering.engine.speculation.observed_costs import ObservedCosts
from treering.engine.speculation.verify_costs import CostDrift, Costs
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.types import DraftRows, Drafts
from treering.types import PromptId

_MIN_WEIGHT, _MAX_WEIGHT = 0.5, 4.0
_LEAST_REMAINING = 0.25
"""Fraction of a rollout's length that is expected to follow at least, even beyond its prompt's usual length."""


class Speculation:
    """Runs an engine's drafter, if it has one."""

    def __init__(self, drafter: Drafter | None, *, vocab_size: int, costs: Costs | ObservedCosts) -> None:
        """Without a drafter nothing is drafted; `vocab_size` is the model's."""
        self._drafter = drafter
        self.wants_costs = drafter is not None and costs == "measured" and drafter.costs is None
        """Whether to measure the costs before the next pass."""
        self._watch = CostDrift() if costs == "measured" else None
        self._observed = costs if isinstance(costs, ObservedCosts) else None
        self._has_looked = False
        if isinstance(costs, VerifyCosts):
            self.use_costs(costs)
        self._vocab_size = vocab_size
        self._rows: DraftRows | None = None
        self._state = (-1, False)
        self._medians: dict[PromptId, float | None] = {}
        self._newest_row = -1
        self._latest: tuple[Drafts, DraftTrees] | None = None

    def use_costs(self, costs: VerifyCosts) -> None:
        """Passes the costs on to the drafter, if there is one."""
        self.wants_costs = False
        if self._drafter is not None:
            self._drafter.use_costs(costs)
        if self._watch is not None:
            self._watch.begin(costs)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Records the time of a pass without prefill; may set `wants_costs` if the measured costs no longer hold."""
        if self._watch is not None and self._watch.note(num_tokens, seconds):
            self.wants_costs = True
        if self._observed is not None:
            self._observed.note_pass(num_tokens, seconds)

    def note_step(self, committed: CommittedTokens, *, num_waiting: int, seconds: float) -> None:
        """Records a whole step without prefill."""
        if self._observed is not None and committed.num_new.size > 0:
            is_finished = committed.finish != NOT_FINISHED
            self._observed.note_step(
                committed.num_new, is_finished, num_waiting=num_waiting, drafted=self._has_looked, seconds=seconds
            )

    def propose(self, table: Table, leaders: Int64Array, *, num_waiting: int, has_prefill: bool = False) -> DraftTrees:
        """Drafts for all decoding rows that are not duplicates; weighted towards long rows once nothing is waiting.

        With `ObservedCosts`, steps with prefill make none: their times would tell nothing.
        """
        self._latest, self._has_looked = None, False
        if self._drafter is None or not self._may_draft(self._drafter, table.num_rows, has_prefill):
            return no_drafts(table.num_rows)
        self._has_looked = True
        state = (table.num_changes, num_waiting == 0)
        if self._rows is None or self._state != state:
            self._state = state
            self._rows = _rows_of(table, self._row_weights(table, self._drafter, num_waiting))
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

    def _row_weights(self, table: Table, drafter: Drafter, num_waiting: int) -> Float64Array | None:
        """Row weights; None while requests wait, because then each finished row is replaced and none is the last."""
        if num_waiting > 0:
            self._medians = {}
            return None
        c, rows = table.columns, slice(table.num_rows)
        # If all rows are new, cached medians are dropped, as in a resumed run, which starts here (law 8).
        if (c.row_ids[rows] > self._newest_row).all():
            self._medians = {}
        self._newest_row = int(c.row_ids[rows].max(initial=-1))
        prompt_ids = [request.prompt_id for request in table.requests]
        self._medians = {
            prompt_id: self._medians[prompt_id] if prompt_id in self._medians else drafter.median_tokens(prompt_id)
            for prompt_id in prompt_ids
        }
        medians = [self._medians[prompt_id] for prompt_id in prompt_ids]
        usual = np.array([np.nan if median is None else median for median in medians], np.float64)
        return row_weights(usual, c.num_tokens[rows] - _num_given(table), c.limit[rows] - c.num_tokens[rows])


def row_weights(usual: Float64Array, num_written: Int64Array, num_left: Int64Array) -> Float64Array | None:
    """Row weights: expected remaining tokens over their mean, clipped to [0.5, 4].

    Args:
        usual: float64 [B], median lengths of earlier rollouts, NaN if unknown: such a row has weight 1.
        num_written: int64 [B], tokens of the rollouts so far.
        num_left: int64 [B], tokens up to their limits.

    Returns:
        float64 [B], or None if no length is known.

    Example: with usual lengths of 40, 40 and 20 and 10, 38 and 28 tokens written, 30, 9.5 and 7 are expected (at least
    a quarter of what is written). Divided by their mean of 15.5 and clipped, the weights are 1.94, 0.61 and 0.5.
    """
    is_known = ~np.isnan(usual)
    if not is_known.any():
        return None
    expected = np.minimum(np.maximum(usual - num_written, np.maximum(_LEAST_REMAINING * num_written, 1)), num_left)
    mean = expected[is_known].mean()
    weights = np.where(is_known, expected / mean, 1.0)
    return np.clip(weights, _MIN_WEIGHT, _MAX_WEIGHT)


def _num_given(table: Table) -> Int64Array:
    """int64 [B], tokens of each row that its history does not have.

    None for a call of an episode: the history has whole episodes, so a turn is matched by what was observed before it.
    """
    is_call = np.array([request.call is not None for request in table.requests], bool)
    return np.where(is_call, 0, table.columns.num_prompt[: table.num_rows])


def _rows_of(table: Table, weights: Float64Array | None) -> DraftRows:
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
        worth=weights,
        leaders=np.arange(num_rows),
    )
