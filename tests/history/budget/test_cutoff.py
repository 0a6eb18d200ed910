"""The cutoff with costs is learnt from tokens that a step looked at and left out, never from probes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.history.budget.test_probe import CHEAP, KNOWN, hopeless_drafter
from tests.history.reference import Row, draft_rows, drafted, first_tokens, likeliest_path, same_drafts, store_of, walk
from treering.history.budget.controller import DraftController
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import ROWS_PER_PROBE
from treering.history.draft.output import BINS, Output, cut
from treering.history.features import FIRST, NO_DRAFT, NUM_KINDS, NUM_SOURCES, NUM_VOTES
from treering.history.types import DraftRows

# A second for a pass of one token and 0.1 s for each further one.
SIZES, SECONDS = np.array([1, 101]), np.array([1.0, 11.0])
DEAR = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1000.0]))


def cut_row(paths: list[float], *, probes: list[float] | None = None) -> tuple[float, list[int]]:
    """The cutoff and what stays, by number, of a row with independent tokens, and of rows that are probed."""
    chances = np.array([*paths, *(probes or [])])
    num = chances.size
    num_rows = 1 + len(probes or [])
    output = Output(
        offsets=np.array([0, *range(len(paths), num + 1)], np.int64),
        tokens=np.arange(num, dtype=np.int32),
        parents=np.full(num, -1, np.int32),
        estimates=chances.astype(np.float32),
        paths=chances,
        shares=np.zeros((num, NUM_VOTES), np.float32),
        features=np.zeros((num, NUM_KINDS), np.int32),
        is_probe=np.array([False] + [True] * (num_rows - 1)),
    )
    cutoff = cut(np.ones(num_rows), output, SIZES, SECONDS, BINS.new())
    return cutoff, output.tokens[: output.offsets[-1]].tolist()


@pytest.mark.parametrize(
    ("paths", "probes", "cutoff", "stay"),
    [
        # (1 + 0.9) / 1.1 tokens a second beat 1 and (1 + 0.95) / 1.2.
        ([0.9, 0.05], [], 0.9, [0]),
        ([0.05, 0.9, 0.8], [], 0.8, [1, 2]),
        # All pays, or nothing does: neither says from where on.
        ([0.9], [], 0.0, [0]),
        ([0.05], [], 0.0, []),
        # With two rows 3.89 / 1.3 beat 2 / 1.1, 2.99 / 1.2 and 3.94 / 1.4.
        ([0.9, 0.05], [0.99], 0.9, [0, 2]),
        ([0.9], [0.99], 0.0, [0, 1]),
        ([0.05], [0.99], 0.0, [1]),
        ([0.9], [0.01], 0.0, [0]),
    ],
)
def test_a_cutoff_is_the_least_that_stayed_where_something_went(
    paths: list[float], probes: list[float], cutoff: float, stay: list[int]
) -> None:
    assert cut_row(paths, probes=probes) == (cutoff, stay)


def test_what_pays_is_drafted_however_long_only_sure_tokens_were_there() -> None:
    history = {"sure": {0: [[1, 2]] * 8}, "mixed": {0: [[1, 2 + k] for k in range(4)]}}
    drafter = Drafter(store_of(history), sources=("history",))
    drafter.use_costs(CHEAP)
    sure = Row(prompt_id="sure", rollout=(1,), max_drafts=1)
    for _ in range(60):
        rows = draft_rows([sure] * 3)
        drafts = drafter.propose(rows)
        assert drafted(drafts) == [[2]] * 3
        drafter.observe(rows, np.ones(3, np.int64))
    fresh = Drafter(store_of(history), sources=("history",))
    fresh.load_state(drafter.state())
    fresh.use_costs(CHEAP)
    rows = draft_rows([Row(prompt_id="mixed", rollout=(1,), group=1), replace(sure, group=2)])
    drafts = drafter.propose(rows)
    assert same_drafts(drafts, fresh.propose(rows))
    assert first_tokens(drafts) == {2, 3, 4, 5}


def test_a_row_whose_tokens_were_all_taken_out_is_one_without_a_draft_at_its_next_step() -> None:
    history = {p: {0: [np.arange(first, first + 30).tolist()] * 4} for p, first in (("sure", 100), ("poor", 200))}
    drafter = Drafter(store_of(history), sources=("history",))
    drafter.use_costs(VerifyCosts(num_tokens=SIZES, seconds=SECONDS))
    state = drafter.state()
    state["weights"][FIRST.token + np.arange(200, 230)] = -8.0
    state["weights"][FIRST.outcome + NO_DRAFT * NUM_SOURCES] = 40.0
    drafter.load_state(state)

    def rows(num_sure: int, num_poor: int) -> DraftRows:
        sure = Row(prompt_id="sure", rollout=tuple(range(100, 100 + num_sure)), group=0)
        poor = Row(prompt_id="poor", rollout=tuple(range(200, 200 + num_poor)), group=1)
        return draft_rows([sure, poor], row_ids=[0, 1])

    first = rows(5, 5)
    drafts = drafter.propose(first)
    assert [len(tokens) > 0 for tokens in drafted(drafts)] == [True, False]
    accepted, leaf = walk(drafts, 0, range(105, 130))
    drafter.observe(first, np.array([accepted, 0]), None, np.array([leaf, -1]))
    # What the weight makes sure is the first token of a row that had no draft at the step before.
    assert likeliest_path(drafter.propose(rows(5 + accepted + 1, 6)), 1)[:1] == [206]


def test_a_probe_that_did_not_pay_is_still_due() -> None:
    drafter = hopeless_drafter()
    rows = draft_rows([KNOWN])
    for _ in range(ROWS_PER_PROBE):
        assert drafter.propose(rows).tokens.size == 0
    # A drafted token takes as long as a step of its own, be it ever so sure.
    drafter.use_costs(DEAR)
    assert drafter.propose(rows).tokens.size == 0
    drafter.use_costs(CHEAP)
    assert drafter.propose(rows).tokens.tolist() == [2]
    drafter.use_costs(None)
    assert [drafter.propose(rows).tokens.size for _ in range(ROWS_PER_PROBE + 1)] == [0] * ROWS_PER_PROBE + [1]


def test_what_is_looked_at_follows_what_paid_up_and_down() -> None:
    spending = DraftController(0.4)
    assert spending.leasts[0] == 0.4
    spending.use_costs(CHEAP)
    leasts = []
    for cutoff in (0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9):
        spending.note_drafts(1, 1, cutoff, 1)
        leasts.append(spending.leasts[0])
    # Half of 0.1, 0.5, 0.7 and so on: each time half way to what paid, and never below 0.02.
    assert leasts == pytest.approx([0.25, 0.35, 0.175, 0.0875, 0.04375, 0.021875, 0.02, 0.5 * (0.021875 / 2 + 0.45)])
