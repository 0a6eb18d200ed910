"""Counts of accepted tokens without leaves teach what leaves would have taught, once contexts have gone on."""

from dataclasses import replace

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of, walk
from treering.history.draft.drafter import Drafter
from treering.history.features import REFUSED
from treering.history.types import DraftRows, Drafts

FORKS = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4, 8], [1, 5, 3, 4], [1, 5, 3, 9]]
NOTHING = np.zeros(0, np.int64)


def drafter_of() -> Drafter:
    return Drafter(store_of({"q": {0: FORKS}}), min_acceptance=1e-6, sources=("history",))


def answer(drafts: Drafts, truths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    counts, leaves = zip(*(walk(drafts, b, truth) for b, truth in enumerate(truths)), strict=True)
    return np.array(counts), np.array(leaves)


def num_learnt(drafter: Drafter) -> tuple[int, int]:
    """Observations, and how many of them were accepted tokens; from the table, so that nothing is settled by asking."""
    table = drafter._acceptance.reliability
    return int(table[:, 0].sum()), int(table[:, 2].sum())


def weights(drafter: Drafter) -> bytes:
    return drafter._acceptance.weights.tobytes()


def test_what_counts_leave_open_is_learnt_from_the_next_contexts_as_from_leaves() -> None:
    told, untold = drafter_of(), drafter_of()
    rng, num_open = np.random.default_rng(0), 0
    for number in range(40):
        truth, rollout = FORKS[rng.integers(5)] if rng.random() < 0.8 else [1, 5, 6], [1]
        while len(rollout) < len(truth):
            rows = draft_rows([Row(rollout=tuple(rollout))], row_ids=[number])
            drafts = told.propose(rows)
            untold.propose(rows)
            assert weights(told) == weights(untold)
            counts, leaves = answer(drafts, [truth[len(rollout) :]])
            told.observe(rows, counts, None, leaves)
            untold.observe(rows, counts)
            num_open += weights(told) != weights(untold)
            rollout += truth[len(rollout) : len(rollout) + int(counts[0]) + 1]
        # A row that ends is settled by what comes after it alone where that goes on from it.
        rows = draft_rows([Row(rollout=tuple(rollout))], row_ids=[number])
        told.propose(rows)
        untold.propose(rows)
    assert num_open > 20


def test_the_state_of_a_row_is_the_same_with_leaves_and_without() -> None:
    rollouts = [[1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 9], [1, 2, 4, 8, 9, 9]]
    states = []
    for is_told in (True, False):
        drafter = Drafter(store_of({"q": {0: rollouts}}), min_acceptance=1e-6, sources=("history",))
        rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
        counts, leaves = answer(drafter.propose(rows), [[2, 3, 9]])
        drafter.observe(rows, counts, None, leaves if is_told else None)
        # Two accepted, and 9 where 4 was drafted.
        assert drafter.propose(draft_rows([Row(rollout=(1, 2, 3, 9))], row_ids=[0])).tokens.size > 0
        states.append(drafter._searched.live.threads.state[drafter._searched.live_slots[0]])
    assert states == [REFUSED, REFUSED]


def moved_on(rows: DraftRows, truths: list[list[int]], counts: np.ndarray) -> None:
    """The engine's own buffers, a step later."""
    for b, truth in enumerate(truths):
        gained = truth[: int(counts[b]) + 1]
        begin = int(rows.num_tokens[b])
        rows.tokens[b, begin : begin + len(gained)] = gained
        rows.num_tokens[b] += len(gained)


def test_rows_may_have_moved_on_in_place_before_they_are_observed() -> None:
    drafter, truths = drafter_of(), [[2, 4, 6], [5, 3, 9]]
    rows = draft_rows([Row(rollout=(1,), group=b) for b in range(2)], num_spare=8)
    counts, _ = answer(drafter.propose(rows), truths)
    moved_on(rows, truths, counts)
    drafter.observe(rows, counts)
    before = num_learnt(drafter)
    drafter.propose(rows)
    assert num_learnt(drafter)[1] == before[1] + counts.sum()


def test_rows_that_move_up_because_one_has_left_are_still_told_apart() -> None:
    drafter, truths = drafter_of(), [[2, 3, 4], [5, 3, 9], [2, 4, 8]]
    # Prompts differ, so that every context does.
    lines = [Row(prompt=(5, 6 + b), rollout=(1,), group=b) for b in range(3)]
    rows = draft_rows(lines)
    counts, _ = answer(drafter.propose(rows), truths)
    drafter.observe(rows, counts)
    before = num_learnt(drafter)
    left = [replace(line, rollout=(1, *truth)) for line, truth in zip(lines, truths, strict=True)][1:]
    drafter.propose(draft_rows(left))
    assert num_learnt(drafter)[1] == before[1] + counts[1:].sum()


def test_rows_with_the_same_context_are_each_settled_by_their_own() -> None:
    told, untold, truths = drafter_of(), drafter_of(), [[2, 3, 4], [5, 3, 9]]
    rows = draft_rows([Row(rollout=(1,))] * 2, row_ids=[3, 4])
    counts, leaves = answer(told.propose(rows), truths)
    untold.propose(rows)
    told.observe(rows, counts, None, leaves)
    untold.observe(rows, counts)
    following = draft_rows([Row(rollout=(1, *truth)) for truth in truths], row_ids=[3, 4])
    untold.propose(following)
    assert weights(told) == weights(untold)


def test_a_context_that_does_not_go_on_settles_nothing_more_than_is_known_without_it() -> None:
    unseen, settled = drafter_of(), drafter_of()
    for drafter, rollout in ((unseen, (1,)), (settled, (1, 6, 6, 6, 6))):
        rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
        drafter.propose(rows)
        drafter.observe(rows, np.array([3]))
        drafter.propose(draft_rows([Row(rollout=rollout)], row_ids=[0]))
    assert num_learnt(unseen) == num_learnt(settled) == (0, 0)


def test_what_stands_behind_a_context_is_not_read() -> None:
    drafter = drafter_of()
    rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
    rows.tokens[0, 3:6] = 2, 3, 4
    drafter.propose(rows)
    drafter.observe(rows, np.array([3]))
    drafter.propose(rows)
    assert num_learnt(drafter) == (0, 0)


def test_what_was_settled_is_not_learnt_again() -> None:
    drafter = drafter_of()
    rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
    drafter.propose(rows)
    drafter.observe(rows, np.array([3]))
    for _ in range(2):
        drafter.propose(draft_rows([Row(rollout=(1, 2, 3, 4))], row_ids=[0]))
        assert num_learnt(drafter)[1] == 3


def test_a_trunk_that_all_branches_share_is_learnt_in_any_case() -> None:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3], [1, 2, 4]]}}), min_acceptance=1e-6, sources=("history",))
    rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
    assert sorted(drafter.propose(rows).parents.tolist()) == [-1, 0, 0]
    drafter.observe(rows, np.array([2]))
    assert num_learnt(drafter) == (0, 0)
    assert sum(bin_.num_drafted for bin_ in drafter.reliability()) == 1
    # Asked for once, it is not learnt again.
    drafter.propose(draft_rows([Row(rollout=(1, 2, 3))], row_ids=[0]))
    assert num_learnt(drafter) == (1, 1)


def test_a_checkpoint_has_what_is_known_by_then_and_a_new_start_forgets_the_rest() -> None:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3], [1, 2, 4]]}}), min_acceptance=1e-6, sources=("history",))
    fresh = drafter.state()
    rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
    drafter.propose(rows)
    drafter.observe(rows, np.array([2]))
    assert drafter.state()["reliability"][:, 0].sum() == 1
    drafter.propose(rows)
    drafter.observe(rows, np.array([2]))
    drafter.load_state(fresh)
    drafter.propose(draft_rows([Row(rollout=(1, 2, 3))], row_ids=[0]))
    assert num_learnt(drafter) == (0, 0)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_row_that_accepts_nothing_leaves_nothing_open(leaves: bool) -> None:
    drafter = drafter_of()
    rows = draft_rows([Row(rollout=(1,))], row_ids=[0])
    num_first = int((drafter.propose(rows).parents == -1).sum())
    drafter.observe(rows, np.array([0]), None, np.array([-1]) if leaves else None)
    assert num_learnt(drafter) == (num_first, 0)
