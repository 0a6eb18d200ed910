"""The choice of held-out tasks depends only on their ids and the seed."""

import pytest

from treering.data.held_out_tasks import is_held_out, split_held_out


@pytest.mark.parametrize("seed", [0, 7])
def test_the_share_that_is_held_out_is_the_one_asked_for(seed: int) -> None:
    num_held = sum(is_held_out(f"task-{i}", 0.2, seed=seed) for i in range(10_000))
    # Five standard deviations of a binomial count.
    assert abs(num_held - 2000) < 5 * 40


def test_another_seed_chooses_other_tasks() -> None:
    ours, theirs = ({i for i in range(2000) if is_held_out(i, 0.5, seed=seed)} for seed in (0, 1))
    assert 400 < len(ours & theirs) < 600


def test_a_number_is_another_id_than_its_digits() -> None:
    assert [is_held_out(i, 0.5, seed=0) for i in range(64)] != [is_held_out(str(i), 0.5, seed=0) for i in range(64)]


@pytest.mark.parametrize("num_tasks", [2, 3, 5, 30])
def test_some_tasks_are_on_both_sides_of_every_share_and_a_larger_one_holds_out_the_same_and_more(
    num_tasks: int,
) -> None:
    before = set[int]()
    for share in (1e-9, 0.01, 0.1, 0.2, 0.5, 0.9, 0.999, 1 - 1e-9):
        flags = split_held_out(range(num_tasks), share, seed=0)
        held = {i for i in range(num_tasks) if flags[i]}
        plain = {i for i in range(num_tasks) if is_held_out(i, share, seed=0)}
        assert before <= held
        assert 0 < len(held) < num_tasks
        assert held == plain or (len(held ^ plain) == 1 and len(plain) in (0, num_tasks))
        before = held
