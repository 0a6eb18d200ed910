"""The bench sets: seeded samples of whole tasks, ids that fit the small vocabulary, files that are found or missing."""

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from benchmarks.tree.sets import FILES, SHAPE, TaskSource, fold_ids
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.tree.trajectories import write_folder
from treering.errors import InputError

NUM_TASKS = 4
GENERATED = [name for name in FILES if name != "tau_tools"]
"""Generated files have tokens, which tool schemas cannot extend."""


@pytest.fixture
def source(tmp_path: Path) -> TaskSource:
    return TaskSource(write_folder(tmp_path))


@pytest.mark.parametrize("name", GENERATED)
def test_a_sample_of_a_set_keeps_every_branch_and_mask_of_its_tasks(name: str, source: TaskSource) -> None:
    whole = {task.task_id: task for task in source.tasks(name)}
    sample = source.sample(name, num_tokens=200)
    assert 0 < len(sample.tasks) < sample.num_tasks_of_set == len(whole) == NUM_TASKS
    folding: dict[int, int] = {}
    for task in sample.tasks:
        original = whole[task.task_id]
        assert [mask.tolist() for mask in task.loss_masks] == [mask.tolist() for mask in original.loss_masks]
        for folded, ids in zip(task.sequences, original.sequences, strict=True):
            assert folded.max() < SHAPE.vocab_size
            # These few ids all fit, so folding renames them one to one.
            assert all(folding.setdefault(a, b) == b for a, b in zip(ids.tolist(), folded.tolist(), strict=True))
    assert len(set(folding.values())) == len(folding)


SETS = st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 12), min_size=1, max_size=15), max_size=6)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def test_frequent_ids_come_first_and_rare_ones_share() -> None:
    assert [part.tolist() for part in fold_ids(arrays([[7, 9], [9, 5]]))] == [[2, 0], [0, 1]]
    assert [part.tolist() for part in fold_ids(arrays([[7, 9], [9, 5]]), 2)] == [[1, 0], [0, 1]]
    # Fold twenty ids, id i occurring i times, into 16: 14 ids stay separate, the rest alternate between 14 and 15.
    [folded] = fold_ids(arrays([[i for i in range(1, 21) for _ in range(i)]]), 16)
    assert folded[-20:].tolist() == [0] * 20
    assert folded[:21].tolist() == [15] + [14] * 2 + [15] * 3 + [14] * 4 + [15] * 5 + [14] * 6
    assert folded.dtype == np.int32


@given(SETS)
def test_without_a_limit_folding_is_one_to_one_and_keeps_frequencies_in_order(sequences: list[list[int]]) -> None:
    folded = [part.tolist() for part in fold_ids(arrays(sequences))]
    pairs = set(zip(chain(*sequences), chain(*folded), strict=True))
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    counts = Counter(chain(*folded))
    assert sorted(counts) == list(range(len(counts)))
    assert [counts[i] for i in range(len(counts))] == sorted(counts.values(), reverse=True)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_size must be at least 1, got 0"):
        fold_ids(arrays([[1]]), 0)
