import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.predict.calibration import calibrate, group_ranks, rank_groups


def test_figures_of_three_predictions_are_those_by_hand():
    report = calibrate([100.0, 100.0, 400.0], [200, 50, 400])
    assert report.num_rollouts == 3
    assert report.bias == pytest.approx(0.0)
    # Errors log 2, -log 2 and 0.
    assert report.sigma == pytest.approx(np.log(2) * np.sqrt(2 / 3))
    assert report.coverage == pytest.approx(2 / 3)
    # Ranks 1, 1, 2.5 against 1.5, 0.5, 2.5: deviations -.5, -.5, 1 and 0, -1, 1.
    assert report.spearman == pytest.approx(1.5 / np.sqrt(1.5 * 2.0))


def test_the_correlation_is_that_of_order_alone():
    lengths = np.array([3, 50, 700, 9000])
    assert calibrate(np.log(lengths), lengths).spearman == pytest.approx(1.0)
    assert calibrate(1.0 / lengths, lengths).spearman == pytest.approx(-1.0)
    assert calibrate(np.full(4, 10.0), lengths).spearman == 0.0


def test_groups_have_equal_size_and_equal_values_share_one():
    assert np.bincount(rank_groups(np.random.default_rng(0).permutation(40), 8)).tolist() == [5] * 8
    groups = rank_groups([1, 9, 9, 9, 9, 9, 9, 9], 4)
    # Ranks from 1 to 8 of the nines: 4.5 of 8 is in the third of four groups.
    assert groups.tolist() == [0, *[2] * 7]


def by_hand(predicted, actual, before, num_groups):
    """The four shares and the one beside them, rollout by rollout as the paper words them."""
    size = len(actual) // num_groups
    order = lambda values: {at: place for place, at in enumerate(sorted(range(len(values)), key=values.__getitem__))}  # noqa: E731
    planned = {at: place // size for at, place in order(predicted).items()}
    places = order(actual)
    counts = dict.fromkeys(("accurate", "not_last", "within_reach", "migrated", "crossed"), 0)
    for at, length in enumerate(actual):
        group, real = planned[at], places[at] // size
        if real == group + 1 and places[at] % size < size / 2:
            counts["crossed"] += 1
        if real <= group:
            counts["accurate"] += 1
            continue
        members = [other for other in planned if planned[other] == group]
        longer = sum(actual[other] > length for other in members)
        if longer >= 0.1 * size:
            counts["not_last"] += 1
        elif length <= 1.1 * max(before[other] for other in members):
            counts["within_reach"] += 1
        else:
            counts["migrated"] += 1
    return [count / len(actual) for count in counts.values()]


@pytest.mark.parametrize("seed", range(5))
def test_the_shares_of_the_papers_table_are_those_of_a_count_by_hand(seed):
    random = np.random.default_rng(seed)
    actual = random.permutation(4000)[:160] + 1
    predicted = actual * np.exp(0.4 * random.standard_normal(160))
    before = predicted * random.uniform(0.9, 1.2, 160)
    report = group_ranks(predicted, actual, num_groups=8, longest_before=before)
    shares = [report.accurate, report.not_last, report.within_reach, report.migrated, report.crossed_boundary]
    expected = by_hand(list(predicted), list(actual), list(before), 8)
    assert shares == pytest.approx(expected)
    assert min(expected) > 0
    assert sum(shares[:4]) == pytest.approx(1.0)


def test_the_matrix_has_a_row_for_each_predicted_group():
    # Predicted in groups 0 0 1 1, and really in 0 1 1 0.
    report = group_ranks([1.0, 2.0, 3.0, 4.0], [10, 30, 40, 20], num_groups=2)
    assert report.matrix.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    report = group_ranks([1.0, 2.0, 3.0, 4.0], [10, 20, 40, 30], num_groups=2)
    assert report.matrix.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    # All predicted alike: one row, and rows of nobody are 0.
    report = group_ranks([5.0] * 4, [10, 20, 30, 40], num_groups=4)
    assert report.matrix.tolist() == [[0.0] * 4, [0.0] * 4, [0.25] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    ("predicted", "actual"), [([], []), ([1.0], [1, 2]), ([0.0], [1]), ([1.0], [0]), ([np.nan], [1]), ([[1.0]], [[1]])]
)
def test_pairs_that_are_no_lengths_are_refused(predicted, actual):
    with pytest.raises(InputError):
        calibrate(predicted, actual)
    with pytest.raises(InputError):
        group_ranks(predicted, actual)
