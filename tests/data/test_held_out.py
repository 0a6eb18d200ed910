"""Which tasks are held out depends on their ids and the seed alone."""

import pytest

from treering.data.held_out import is_held_out


@pytest.mark.parametrize("seed", [0, 7])
def test_the_share_that_is_held_out_is_the_one_asked_for(seed: int) -> None:
    num_held = sum(is_held_out(f"task-{i}", 0.2, seed=seed) for i in range(10_000))
    # Five standard deviations of a binomial count.
    assert abs(num_held - 2000) < 5 * 40


def test_a_larger_share_holds_out_the_same_tasks_and_more() -> None:
    small, large = ({i for i in range(500) if is_held_out(i, share, seed=0)} for share in (0.1, 0.3))
    assert small < large


def test_another_seed_chooses_anew() -> None:
    ours, theirs = ({i for i in range(2000) if is_held_out(i, 0.5, seed=seed)} for seed in (0, 1))
    assert 400 < len(ours & theirs) < 600


def test_a_number_is_another_id_than_its_digits() -> None:
    assert [is_held_out(i, 0.5, seed=0) for i in range(64)] != [is_held_out(str(i), 0.5, seed=0) for i in range(64)]
