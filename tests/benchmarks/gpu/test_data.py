"""Bench sets that are carried to a device machine: written and read back whole, and small."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu.data import FILE, SETS, Workload, read_workloads, sample_workloads, write_workloads
from benchmarks.gpu.workloads import GENERATED, deep_tree, forest_of, set_workloads, star
from benchmarks.tree.sets import FILES, NO_SHARING

from tests.benchmarks.tree.trajectories import write_folder
from treering.data import DATA_VARIABLE, AgentSpec
from treering.tree.forest import Forest


def workload(name: str, *groups: list[list[int]], seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    arrays = tuple(tuple(np.array(branch, np.int32) for branch in group) for group in groups)
    masks = tuple(rng.integers(0, 2, branch.size).astype(np.int8) for group in arrays for branch in group)
    return Workload(name=name, groups=arrays, masks=masks)


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    written = [
        workload("b", [[5, 6, 7], [5, 65_535]], [[1]], seed=1),
        workload("a", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]], seed=2),
    ]
    write_workloads(written, tmp_path / "new")
    read = read_workloads(tmp_path / "new")
    assert [some.name for some in read] == ["b", "a"]
    for got, expected in zip(read, written, strict=True):
        assert [len(group) for group in got.groups] == [len(group) for group in expected.groups]
        for name in ("sequences", "masks"):
            for one, other in zip(getattr(got, name), getattr(expected, name), strict=True):
                np.testing.assert_array_equal(one, other)
        assert got.num_trained_tokens == expected.num_trained_tokens
    assert {branch.dtype for some in read for branch in some.sequences} == {np.dtype(np.int32)}


def test_samples_are_taken_of_the_real_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(SETS) <= {*FILES, NO_SHARING}
    monkeypatch.setenv(DATA_VARIABLE, str(write_folder(tmp_path)))
    samples = sample_workloads(500)
    assert [sample.name for sample in samples] == [*SETS]
    assert write_workloads(samples, tmp_path / "out").name == FILE
    assert [read.num_flat_tokens for read in read_workloads(tmp_path / "out")] == [
        sample.num_flat_tokens for sample in samples
    ]


def test_without_carried_sets_trees_are_generated(tmp_path: Path) -> None:
    (generated,) = set_workloads(tmp_path, AgentSpec(num_tasks=3, num_trials=2))
    assert generated.name == GENERATED
    assert [len(group) for group in generated.groups] == [2, 2, 2]
    assert generated.num_trained_tokens > 0
    write_workloads([workload("a", [[1, 2]])], tmp_path)
    assert [some.name for some in set_workloads(tmp_path, AgentSpec())] == ["a"]


def test_forests_are_as_large_as_they_are_said_to_be() -> None:
    assert deep_tree(segment=10, depth=3).num_tokens == 70
    assert deep_tree(segment=10, depth=3).num_branches == 4
    assert star(prompt=40, response=12, group=3).num_tokens == 40 + 36
    trees = workload("a", [[1, 2, 3], [1, 2, 4]], [[5] * 9], [[6, 6]])
    # 4 tokens, then 9 that do not fit, then 2.
    assert forest_of(trees, 7).num_tokens == 6
    assert forest_of(trees, 1).num_tokens == 4
    assert (
        forest_of(trees, 100).tokens.tolist()
        == Forest.concatenate([Forest.from_sequences(group) for group in trees.groups]).tokens.tolist()
    )
