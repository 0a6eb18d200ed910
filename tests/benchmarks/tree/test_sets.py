"""The bench sets: seeded samples of whole tasks, ids that fit the small vocabulary, files that are found or missing."""

from pathlib import Path

import pytest
from benchmarks.tree.sets import (
    FILES,
    SHAPE,
    TaskSource,
)

from tests.benchmarks.tree.trajectories import write_folder

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
