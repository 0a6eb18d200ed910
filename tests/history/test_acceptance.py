"""Estimates follow what was accepted, untried tokens do not count, and a poor source is retried ever more rarely."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of
from treering.errors import InputError
from treering.history.acceptance import NUM_CELLS
from treering.history.draft import Drafter

ROW = Row(rollout=(1,))


def drafter_of(min_acceptance: float = 1e-6, num_rollouts: int = 2) -> Drafter:
    """Drafts [2, 3, 4] from history behind 1, at the estimate of the longest match."""
    store = store_of({"q": {0: [[1, 2, 3, 4]] * num_rollouts}})
    return Drafter(store, min_acceptance=min_acceptance, sources=("history",))


def repeat(drafter: Drafter, accepted: int, num_times: int = 1, ended: bool = False) -> Iterator[list[float]]:
    """The estimates before each of so many observations."""
    for _ in range(num_times):
        rows = draft_rows([ROW])
        drafts = drafter.propose(rows)
        drafter.observe(rows, np.array([min(accepted, drafts.tokens.size)]), np.array([ended]))
        yield drafts.acceptance.tolist()


def test_estimates_rise_with_acceptance_and_fall_with_refusal() -> None:
    drafter = drafter_of()
    rising = [estimates[0] for estimates in repeat(drafter, 3, 20)]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(0.85, abs=1e-4)
    assert rising[-1] > 0.97
    falling = [estimates[0] for estimates in repeat(drafter, 0, 600)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.05


def test_an_estimate_is_the_smoothed_share_of_accepted_tries() -> None:
    drafter = drafter_of()
    list(repeat(drafter, 2))  # two accepted and one refused, all in the cell of the longest matches
    (after,) = list(repeat(drafter, 0))
    # Each try fades those before it by 1/256; the prior weighs as much as four tries.
    keep = 255 / 256
    accepted, tried = (keep + 1) * keep, (keep + 1) * keep + 1
    prior = 0.85 * (1 - 2**-16)
    assert after[0] == pytest.approx((accepted + 4 * prior) / (tried + 4), rel=1e-6)


def test_tokens_behind_the_first_refused_one_count_neither_way() -> None:
    drafter = drafter_of()
    list(repeat(drafter, 0))
    assert drafter.state()["num_tried"].sum() == 1
    list(repeat(drafter, 3))
    assert drafter.state()["num_accepted"].sum() == pytest.approx(3, abs=0.02)
    assert drafter.state()["num_tried"].sum() == pytest.approx(4, abs=0.05)


def test_a_row_that_ended_did_not_try_the_next_token() -> None:
    drafter = drafter_of()
    list(repeat(drafter, 0, ended=True))
    assert drafter.state()["num_tried"].sum() == 0
    list(repeat(drafter, 1, ended=True))
    assert drafter.state()["num_tried"].sum() == drafter.state()["num_accepted"].sum() == 1


def test_cells_are_told_apart_by_source_length_and_share() -> None:
    history = store_of({"q": {0: [[7, 1, 2], [8, 1, 2], [9, 1, 3]], 1: [[6, 5, 2]]}})
    drafter = Drafter(history, min_acceptance=1e-6, max_draft=1)
    rows = [
        Row(rollout=(4, 1), group=0),  # history, 1 token, 2 of 3
        Row(rollout=(4, 5), group=1),  # history, 1 token, 1 of 1
        Row(rollout=(4, 8, 1), group=2),  # history, 2 tokens, 1 of 1
        Row(rollout=(40, 41, 40), group=3),  # own, 1 token, 1 of 1
        Row(rollout=(50, 51, 52), group=4),
        Row(rollout=(49, 51), group=4),  # siblings, 1 token, 1 of 1
    ]
    cells = drafter.propose(draft_rows(rows)).cells.tolist()
    assert [np.unravel_index(cell, (3, 16, 5)) for cell in cells] == [
        (0, 0, 3),
        (0, 0, 0),
        (0, 1, 0),
        (2, 0, 0),
        (1, 0, 0),
    ]


def test_a_draft_ends_before_it_is_too_unlikely_as_a_whole() -> None:
    # 0.85 a token: 0.61 for three, 0.72 for two.
    for min_acceptance, num_drafted in ((0.5, 3), (0.65, 2), (0.8, 1), (0.9, 0)):
        (estimates,) = list(repeat(drafter_of(min_acceptance), 0))
        assert len(estimates) == num_drafted


def test_a_poor_source_is_tried_by_one_token_after_more_and_more_refusals() -> None:
    drafter = drafter_of(0.9)
    num_drafted = [len(estimates) for estimates in repeat(drafter, 0, 200)]
    tries = [i for i, n in enumerate(num_drafted) if n]
    assert set(num_drafted) == {0, 1}
    # 8 refusals for each try so far and one more, the fading of older tries rounded off.
    assert tries[:2] == [7, 23]
    waits = np.diff(tries)
    assert (waits >= 16).all()
    assert (np.diff(waits) > 0).all()


def test_a_poor_source_that_turns_good_is_drafted_from_again() -> None:
    drafter = drafter_of(0.5)
    bad = [len(estimates) for estimates in repeat(drafter, 0, 40)]
    assert bad[0] == 3
    assert bad[-1] == 0
    good = [len(estimates) for estimates in repeat(drafter, 3, 2000)]
    assert good[-1] == 3


def test_a_first_epoch_without_history_is_learnt_from() -> None:
    drafter = Drafter(store_of({}))
    tried = 0
    for _ in range(10):
        rows = draft_rows([Row(rollout=(3, 4, 5, 3, 4))])
        drafts = drafter.propose(rows)
        tried += drafts.tokens.size
        drafter.observe(rows, np.array([drafts.tokens.size]))
    assert tried >= 10


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("num_tried"),
        lambda state: state.update(extra=np.zeros(NUM_CELLS)),
        lambda state: state.update(num_tried=np.zeros(3)),
        lambda state: state.update(num_tried=np.full(NUM_CELLS, -1.0)),
        lambda state: state.update(num_tried=np.full(NUM_CELLS, np.nan)),
    ],
)
def test_another_state_is_refused_and_nothing_is_taken(change: object) -> None:
    drafter = drafter_of()
    list(repeat(drafter, 2, 3))
    before = drafter.state()
    state = {name: values * 0 for name, values in before.items()}
    change(state)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"pass a state\(\) unchanged"):
        drafter.load_state(state)
    assert all((drafter.state()[name] == values).all() for name, values in before.items())


def test_a_state_is_a_copy() -> None:
    drafter = drafter_of()
    state = drafter.state()
    list(repeat(drafter, 3, 3))
    assert not state["num_tried"].any()
    drafter.load_state(state)
    state["num_tried"][:] = 5
    assert not drafter.state()["num_tried"].any()
