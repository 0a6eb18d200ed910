"""The expected lengths of a step's rollouts, as siblings finish."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.runtime.open_step import ExpectedLengths


def expectations(predicted, *, initial=None, ratios=(1.0,), max_tokens=1000) -> ExpectedLengths:
    predicted = np.array(predicted, float)
    return ExpectedLengths(
        predicted,
        initial=predicted if initial is None else np.array(initial, float),
        group_size=4,
        ratios=np.array(ratios),
        max_tokens=max_tokens,
    )


def test_the_example() -> None:
    group = expectations([100] * 4)
    group.note_finished(0, 300)
    group.note_finished(1, 320)
    # Two lengths that were seen, and the prediction with the weight of two: (300 + 320 + 2 * 100) / 4.
    assert group.expected[2:].tolist() == [205, 205]
    assert group.lengths.tolist() == [300, 320, 0, 0]


@given(st.permutations(range(4)))
def test_groups_know_nothing_of_each_other(order) -> None:
    alone, beside = expectations([100] * 4), expectations([100] * 8)
    for number in order[:3]:
        alone.note_finished(number, 10 * (number + 1))
        beside.note_finished(number, 10 * (number + 1))
        beside.note_finished(4 + number, 900)
    assert beside.expected[:4].tolist() == alone.expected.tolist()
