from itertools import groupby

import numpy as np
from benchmarks.draft.drafters.waves import in_waves
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
