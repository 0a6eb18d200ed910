from itertools import groupby

import numpy as np
from benchmarks.draft.drafters.waves import NEVER, generations_later, in_waves
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.draft.recordings import recording
from treering.analysis.recording import Recorded

ROLLOUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=20).map(
    # A recording has its epochs in order.
    lambda rollouts: sorted(rollouts, key=lambda rollout: rollout[1])
)


def of(rollouts: list[tuple[str, int]]) -> Recorded:
    return recording([(task, [1], "1") for task, _ in rollouts], epochs=[epoch for _, epoch in rollouts])


def test_samples_of_equal_number_run_side_by_side() -> None:
    found = of([(task, 0) for task in "aabbb"])
    for num_rows, expected in ((2, [0, 0, 1, 1, 2]), (1, [0, 1, 2, 3, 4]), (64, [0, 0, 1, 1, 2])):
        order, waves = in_waves(found, np.arange(5), num_rows)
        assert order.tolist() == [0, 2, 1, 3, 4]
        assert waves.tolist() == expected
    three = of([(task, 0) for task in "abcabc"])
    assert in_waves(three, np.arange(6), 2)[1].tolist() == [0, 0, 1, 2, 2, 3]


@given(rollouts=ROLLOUTS, num_rows=st.integers(1, 4))
def test_waves_go_by_generation_then_by_sample_and_are_as_full_as_they_can_be(
    rollouts: list[tuple[str, int]], num_rows: int
) -> None:
    numbers: dict[tuple[str, int], int] = {}
    keys = []
    for i, (task, epoch) in enumerate(rollouts):
        rank = numbers[task, epoch] = numbers.get((task, epoch), -1) + 1
        first_seen = [name for name, _ in rollouts].index(task)
        keys.append((epoch, rank, first_seen, i))
    expected = sorted(keys)
    order, waves = in_waves(of(rollouts), np.arange(len(rollouts)), num_rows)
    assert order.tolist() == [i for *_, i in expected]
    sizes = []
    for _, same in groupby(expected, key=lambda key: key[:2]):
        size = len(list(same))
        sizes += [min(num_rows, size - begin) for begin in range(0, size, num_rows)]
    assert waves.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()


@given(rollouts=ROLLOUTS, count=st.integers(1, 3))
def test_a_tasks_later_generations_are_counted_without_those_of_others(
    rollouts: list[tuple[str, int]], count: int
) -> None:
    for (task, epoch), later in zip(rollouts, generations_later(of(rollouts), count).tolist(), strict=True):
        behind = sorted({other for name, other in rollouts if name == task and other > epoch})
        assert later == (behind[count - 1] if len(behind) >= count else NEVER)
