"""The bench sets: seeded samples of whole tasks, ids that fit the small vocabulary, files that are found or missed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.tree.real import count, tokens_at_peak
from benchmarks.tree.sets import (
    FILES,
    NO_SHARING,
    SHAPE,
    TaskSample,
    TaskSource,
    fold_tasks,
    lone_branch,
    num_flat_tokens,
    sample_tasks,
    with_tools,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.tree.trajectories import write_folder
from treering.data import Message, Trajectory
from treering.errors import InputError
from treering.train.loop.batches import TrainingTask, task_order

NUM_TASKS = 4
GENERATED = [name for name in FILES if name != "tau_tools"]
"""Generated files have tokens, which tool schemas cannot extend."""


@pytest.fixture
def source(tmp_path: Path) -> TaskSource:
    return TaskSource(write_folder(tmp_path))


def task_of(*lengths: int, task_id: int = 0) -> TrainingTask:
    sequences = tuple(np.arange(length, dtype=np.int32) for length in lengths)
    return TrainingTask(task_id=task_id, sequences=sequences, loss_masks=tuple(np.ones(n, bool) for n in lengths))


def sample_of(*groups: list[list[int]], masks: list[list[int]] | None = None) -> TaskSample:
    flat_masks = iter(masks or [[1] * len(sequence) for group in groups for sequence in group])
    return TaskSample(
        name="by hand",
        tasks=tuple(
            TrainingTask(
                task_id=i,
                sequences=tuple(np.array(sequence, np.int32) for sequence in group),
                loss_masks=tuple(np.array(next(flat_masks), bool) for _ in group),
            )
            for i, group in enumerate(groups)
        ),
        num_tasks_of_set=len(groups),
    )


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_tokens=st.integers(1, 150),
    seed=st.integers(0, 9),
)
def test_a_sample_is_whole_tasks_in_order_each_of_which_brought_it_closer(
    sizes: list[int], num_tokens: int, seed: int
) -> None:
    all_tasks = [task_of(size, task_id=i) for i, size in enumerate(sizes)]
    taken = [task.task_id for task in sample_tasks(all_tasks, num_tokens, seed=seed)]
    assert taken == sorted(set(taken))
    order = task_order(len(sizes), seed=seed, epoch=0).tolist()
    total, expected = 0, []
    for i in order:
        if abs(num_tokens - total - sizes[i]) < abs(num_tokens - total):
            expected.append(i)
            total += sizes[i]
    assert taken == (sorted(expected) if expected else order[:1])


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


def test_folded_ids_lie_in_range_whatever_they_were() -> None:
    rng = np.random.default_rng(0)
    wide = [replace(task_of(500), sequences=(rng.integers(0, 2**31 - 1, 500).astype(np.int32),)) for _ in range(4)]
    folded = fold_tasks(wide, 64)
    ids = np.concatenate([task.sequences[0] for task in folded])
    assert (ids.min(), ids.max()) == (0, 63)
    assert [task.loss_masks[0].size for task in folded] == [500] * 4


def test_the_set_without_sharing_has_a_trained_branch_of_a_task_of_every_file(source: TaskSource) -> None:
    sample = source.sample(NO_SHARING, num_tokens=None)
    num_files = len(set(FILES.values()))
    assert len(sample.tasks) == sample.num_tasks_of_set == NUM_TASKS * num_files
    assert all(len(task.sequences) == 1 and task.num_trained_tokens for task in sample.tasks)
    assert count(sample).sharing == 0.0
    # Files in turn: the first round holds one branch of each.
    first = source.sample(NO_SHARING, num_tokens=1).tasks
    assert len(first) == 1
    total = sum(num_flat_tokens(task) for task in sample.tasks[:num_files])
    lengths = [task.sequences[0].size for task in source.sample(NO_SHARING, num_tokens=total).tasks]
    by_file = [
        {ids.size for task in source.tasks(name) for ids in task.sequences} for name in FILES if name != "tau_tools"
    ]
    assert len(lengths) == num_files
    assert all(length in known for length, known in zip(lengths, by_file, strict=True))


def test_a_lone_branch_is_the_first_that_trains_anything() -> None:
    task = replace(task_of(3, 4, 5), loss_masks=tuple(np.array(m, bool) for m in ([1, 0, 0], [0, 0, 0, 1], [1] * 5)))
    assert [ids.size for ids in lone_branch(task).sequences] == [4]
    with pytest.raises(InputError, match="task 7 has none"):
        lone_branch(replace(task_of(1), task_id=7))


def test_tool_schemas_end_the_system_prompt_and_touch_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "bücher"}, {"name": "b", "n": 1}]', encoding="utf-8")
    messages = tuple(Message(role=role, content=role) for role in ("system", "user", "assistant"))
    given = Trajectory(task_id=1, messages=messages, reward=0.5)
    (extended,) = with_tools([given], tmp_path / "tools.json")
    contents = [message.content for message in extended.messages or ()]
    assert contents == ['system\n\n# Tools\n\n{"name": "bücher"}\n{"name": "b", "n": 1}', "user", "assistant"]
    assert (extended.task_id, extended.reward) == (1, 0.5)


def test_counts_by_hand() -> None:
    counts = count(sample_of([[5, 6, 7], [5, 6, 8]], [[9, 9]], masks=[[1, 1, 0], [0, 1, 1], [1, 1]]))
    assert (counts.num_tasks, counts.num_branches, counts.flat_tokens, counts.unique_tokens) == (2, 3, 8, 6)
    assert (counts.sharing, counts.token_bound) == (0.25, pytest.approx(8 / 6))
    # First entries have nothing before them; segments are [5, 6], [7], [8] and [9, 9].
    assert (counts.trained_tokens, counts.mean_segment) == (4, 1.5)
    assert not counts.gated
    pairs = {"flat": 6 + 6 + 3, "tree": 1 + 2 + 3 + 3 + 3}
    per_pair = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_size
    flops = {"flat": 2 * SHAPE.params_per_token * 8 + per_pair * pairs["flat"]}
    flops["tree"] = 2 * SHAPE.params_per_token * 6 + per_pair * pairs["tree"]
    assert counts.flop_bound == pytest.approx(flops["flat"] / flops["tree"])


def test_a_set_is_gated_by_sharing_and_by_the_length_of_its_segments() -> None:
    long, short = list(range(32)), list(range(31))

    def gated(prompt: list[int], leaf: int, num_leaves: int) -> bool:
        leaves = [[*prompt, *([100 + i] * leaf)] for i in range(num_leaves)]
        return count(sample_of(leaves)).gated

    # Two leaves of 32 on a prompt of 32 share a quarter, eight share 0.49.
    assert not gated(long, 32, 2)
    assert gated(long, 32, 8)
    assert not gated(short, 32, 8)


def test_tokens_at_the_peak_are_those_of_the_largest_micro_batch_or_chain_of_partitions() -> None:
    groups = sample_of([[5, 6, 7], [5, 6, 8]], [[9, 9]]).groups
    assert [tokens_at_peak(groups, budget) for budget in (6, 5, 4)] == [6, 4, 4]
    # A chain of ten in partitions of three: all of them are alive when the last one is computed.
    assert tokens_at_peak(sample_of([list(range(10))]).groups, 3) == 10
