import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.calibration import calibrate, rank_groups, share_moved_up


def test_figures_of_three_predictions_are_those_by_hand():
    report = calibrate([100.0, 100.0, 400.0], [200, 50, 400])
    assert report.num_rollouts == 3
    assert report.bias == pytest.approx(0.0)
    # The errors are log 2, -log 2 and 0.
    assert report.sigma == pytest.approx(np.log(2) * np.sqrt(2 / 3))
    assert report.coverage == pytest.approx(2 / 3)
    # Ranks 1, 1, 2.5 and 1.5, 0.5, 2.5 deviate from their means by -.5, -.5, 1 and 0, -1, 1.
    assert report.spearman == pytest.approx(1.5 / np.sqrt(1.5 * 2.0))


def test_the_correlation_depends_only_on_order():
    lengths = np.array([3, 50, 700, 9000])
    assert calibrate(np.log(lengths), lengths).spearman == pytest.approx(1.0)
    assert calibrate(1.0 / lengths, lengths).spearman == pytest.approx(-1.0)
    assert calibrate(np.full(4, 10.0), lengths).spearman == 0.0


def test_groups_have_equal_size_and_equal_values_share_one():
    assert np.bincount(rank_groups(np.random.default_rng(0).permutation(40), 8)).tolist() == [5] * 8
    groups = rank_groups([1, 9, 9, 9, 9, 9, 9, 9], 4)
    # The nines span ranks 1 to 8, and the middle, 4.5 of 8, is in the third of four groups.
    assert groups.tolist() == [0, *[2] * 7]


@pytest.mark.parametrize("seed", range(3))
def test_the_share_that_moves_up_is_that_of_a_count_by_hand(seed):
    random = np.random.default_rng(seed)
    actual = random.permutation(4000)[:160] + 1
    predicted = actual * np.exp(0.4 * random.standard_normal(160))
    planned, real = (
        {at: rank // 20 for rank, at in enumerate(sorted(range(160), key=list(values).__getitem__))}
        for values in (predicted, actual)
    )
    expected = sum(real[at] > planned[at] for at in range(160)) / 160
    assert share_moved_up(predicted, actual) == pytest.approx(expected)
    assert expected > 0


@pytest.mark.parametrize(
    ("predicted", "actual"), [([], []), ([1.0], [1, 2]), ([0.0], [1]), ([1.0], [0]), ([np.nan], [1]), ([[1.0]], [[1]])]
)
def test_invalid_pairs_of_lengths_are_refused(predicted, actual):
    with pytest.raises(InputError):
        calibrate(predicted, actual)
    with pytest.raises(InputError):
        share_moved_up(predicted, actual)
