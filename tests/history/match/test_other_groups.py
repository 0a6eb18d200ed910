"""Running rollouts of other groups are matched if three tokens agree, by the source "others" alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.history.reference import Allowed, Row, draft_rows, drafted, first_tokens
from treering.history.draft.drafter import Drafter
from treering.history.features import Source
from treering.history.store.store import HistoryStore

AHEAD = Row(rollout=(7, 8, 9, 10, 11), group=0)


def drafter_of(*sources: Source) -> Drafter:
    return Drafter(HistoryStore(), sources=sources, min_acceptance=1e-6)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [((50, 7, 8, 9), [10, 11]), ((8, 9, 10), [11]), ((8, 9), []), ((50, 8, 9), []), ((7, 8, 9, 50), [])],
)
def test_three_tokens_that_agree_lead_into_another_groups_rollout(
    rollout: tuple[int, ...], expected: list[int]
) -> None:
    row = Row(prompt_id="p", rollout=rollout, group=1)
    assert drafted(drafter_of("others").propose(draft_rows([AHEAD, row])))[1] == expected


def test_nothing_of_the_rows_own_group_counts_as_another_groups() -> None:
    rows = [replace(AHEAD, prompt=(30, 7, 8, 9, 31)), Row(prompt=(30, 7, 8, 9, 31), rollout=(7, 8, 9, 12, 7, 8, 9))]
    assert drafted(drafter_of("others").propose(draft_rows(rows))) == [[], []]


def test_what_runs_of_other_groups_is_no_other_source() -> None:
    row = Row(prompt_id="p", rollout=(7, 8, 9), group=1)
    drafts = drafter_of("history", "siblings", "own").propose(draft_rows([AHEAD, row]))
    assert drafted(drafts)[1] == []


def test_the_newest_four_places_count() -> None:
    queries = [Row(rollout=(7, 8, 9, 20 + k), group=k) for k in range(6)]
    row = Row(prompt_id="p", rollout=(7, 8, 9), group=9)
    drafts = drafter_of("others").propose(draft_rows([*queries, row]))
    assert first_tokens(drafts, 6) == {22, 23, 24, 25}


def test_what_was_written_over_is_drafted_no_more() -> None:
    rng = np.random.default_rng(0)
    drafter = drafter_of("others")
    rows, ids, gone = [Row(group=b // 2) for b in range(6)], list(range(6)), []
    num_drafted = 0
    for step in range(150):
        if step % 3 == 2:
            leaving = int(rng.integers(6))
            gone.append(rows[leaving])
            rows[leaving] = Row(group=rows[leaving].group, rollout=tuple(rng.integers(0, 4, 2)))
            ids[leaving] = step + 100
        drafts = drafter.propose(draft_rows(rows, row_ids=ids))
        # Six rows and three groups have 12 slots: what left more than nine leaves ago has been written over.
        Allowed(history={}, rows=rows, sources=("others",), gone=gone[-9:]).check(drafts, 64, 1e-6, is_chain=False)
        num_drafted += drafts.tokens.size
        rows = [replace(row, rollout=(*row.rollout, *rng.integers(0, 4, 2))) for row in rows]
    assert num_drafted > 1000
