"""The reliability table counts tokens by their estimate; its error is the mean distance from observed acceptance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.history.draft.acceptance import ReliabilityBin, as_bins, calibration_error

OUTCOMES = st.lists(st.tuples(st.floats(0.01, 0.99), st.booleans()), max_size=60)


def table_of(outcomes: list[tuple[float, bool]]) -> np.ndarray:
    table = np.zeros((20, 3))
    for estimate, was_accepted in outcomes:
        table[int(estimate * 20)] += (1, estimate, was_accepted)
    return table


@given(OUTCOMES)
def test_bins_hold_means_and_leave_out_what_is_empty(outcomes: list[tuple[float, bool]]) -> None:
    bins = as_bins(table_of(outcomes))
    groups = {}
    for estimate, was_accepted in outcomes:
        groups.setdefault(int(estimate * 20), []).append((estimate, was_accepted))
    assert [item.num_drafted for item in bins] == [len(groups[k]) for k in sorted(groups)]
    for item, k in zip(bins, sorted(groups), strict=True):
        estimates, accepted = zip(*groups[k], strict=True)
        assert item.estimate == pytest.approx(np.mean(estimates))
        assert item.accepted == pytest.approx(np.mean(accepted))


def test_the_error_weighs_bins_by_their_tokens() -> None:
    bins = (
        ReliabilityBin(num_drafted=100, estimate=0.5, accepted=0.6),
        ReliabilityBin(num_drafted=300, estimate=0.9, accepted=0.9),
    )
    assert calibration_error(bins) == pytest.approx(0.025)
