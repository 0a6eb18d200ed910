"""Law 1: a forest returns its sequences, stores ancestors first and each distinct token once, and takes O(N) memory."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given

from tests.forests import SHAPES, comb, reversed_comb, sequence_sets, star
from treering.errors import InputError
from treering.tree.forest import Forest

ARRAYS = [field.name for field in fields(Forest) if field.name not in ("images", "routed_experts")]


def ancestors(forest: Forest, token: int) -> set[int]:
    found = set()
    while token >= 0:
        found.add(token)
        token = int(forest.parent[token])
    return found


def assert_is_forest_of(forest: Forest, sequences: list[list[int]]) -> None:
    assert [forest.tokens[forest.path(i)].tolist() for i in range(len(sequences))] == sequences
    prefixes = {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}
    assert forest.num_tokens == len(prefixes)
    assert (forest.parent < np.arange(forest.num_tokens)).all()
    assert forest.num_branches == len(sequences)
    assert forest.num_branch_tokens == sum(map(len, sequences))


@given(sequence_sets(min_sequences=0))
def test_walking_a_branch_gives_back_its_sequence(sequences: list[list[int]]) -> None:
    assert_is_forest_of(Forest.from_sequences(sequences), sequences)


@given(sequence_sets())
def test_a_key_is_visible_exactly_to_its_descendants_and_itself(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    index = np.arange(forest.num_tokens)
    for query in range(forest.num_tokens):
        visible = set(np.flatnonzero((index <= query) & (query < forest.subtree_end)).tolist())
        assert visible == ancestors(forest, query)
        assert forest.position[query] == len(visible) - 1


@given(sequence_sets())
def test_segments_are_maximal_unbranched_runs(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    num_children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_tokens)
    starts = [t for t in range(forest.num_tokens) if forest.parent[t] < 0 or num_children[forest.parent[t]] > 1]
    assert forest.segment_start.tolist() == starts
    owner = np.searchsorted(forest.segment_start, np.arange(forest.num_tokens), side="right") - 1
    above = [-1 if forest.parent[s] < 0 else int(owner[forest.parent[s]]) for s in starts]
    assert forest.segment_parent.tolist() == above


@given(sequence_sets(min_sequences=0))
def test_paths_concatenates_every_path(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    indices, offsets = forest.paths()
    assert offsets.tolist() == np.cumsum([0, *map(len, sequences)]).tolist()
    for i in range(len(sequences)):
        assert indices[offsets[i] : offsets[i + 1]].tolist() == forest.path(i).tolist()


@given(sequence_sets())
def test_splitting_into_trees_and_joining_them_is_the_same_forest(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    trees = forest.trees()
    assert all(tree.num_trees == 1 for tree in trees)
    joined = Forest.concatenate(trees)
    for name in (name for name in ARRAYS if name != "branch_end"):
        assert getattr(joined, name).tolist() == getattr(forest, name).tolist(), name
    order = np.argsort(forest.branch_tree, kind="stable")
    assert joined.branch_end.tolist() == forest.branch_end[order].tolist()


@given(sequence_sets())
def test_siblings_stand_in_the_order_of_their_first_appearance(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    first_branch = np.full(forest.num_tokens, len(sequences))
    for i in reversed(range(len(sequences))):
        first_branch[forest.path(i)] = i
    for parent in range(-1, forest.num_tokens):
        siblings = np.flatnonzero(forest.parent == parent)
        assert (np.diff(first_branch[siblings]) > 0).all()


@pytest.mark.parametrize(
    "sequences",
    [comb(400), reversed_comb(400), star(1000), [[t % 5 for t in range(400 - i)] for i in range(400)]],
    ids=["comb 400 deep", "reversed comb", "star 1000 wide", "400 prefixes of each other"],
)
def test_deep_and_wide_forests_keep_law_1_in_linear_memory(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    assert_is_forest_of(forest, sequences)
    held = sum(getattr(forest, name).nbytes for name in ARRAYS)
    assert held <= 16 * forest.num_tokens + 4 * forest.num_branches + 8 * forest.num_segments
    assert forest.num_segments < 2 * len(sequences)


def test_nothing_at_all_is_an_empty_forest() -> None:
    forest = Forest.from_sequences([])
    assert (forest.num_tokens, forest.num_branches, forest.num_trees, forest.sharing) == (0, 0, 0, 0.0)
    assert forest.trees() == []


def test_arrays_are_int32_and_read_only() -> None:
    forest = Forest.from_sequences([np.array([1, 2], np.uint8), (1, 3)])
    for name in ARRAYS:
        parts = [forest, *Forest.from_sequences([[1, 2], [2, 1]]).trees(), Forest.concatenate([forest, forest])]
        assert {getattr(part, name).dtype for part in parts} == {np.dtype(np.int32)}
    with pytest.raises(ValueError, match="read-only"):
        forest.tokens[0] = 9
    with pytest.raises(IndexError):
        forest.path(2)
    assert Forest.from_sequences([[2**31 - 1, 0]]).tokens.tolist() == [2**31 - 1, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda forest: pickle.loads(pickle.dumps(forest))])
def test_copies_are_equal_and_read_only(copied: Callable[[Forest], Forest]) -> None:
    forest = Forest.from_sequences(SHAPES["prefixes of each other"])
    twin = copied(forest)
    for name in ARRAYS:
        assert getattr(twin, name).tolist() == getattr(forest, name).tolist()
        assert not getattr(twin, name).flags.writeable


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1], []], "sequence 1 is empty"),
        ([[1, [2, 3]]], "sequence 0 must be a flat list"),
        ([[[1, 2], [3, 4]]], "sequence 0 must be one-dimensional, got shape"),
        ([3], "sequence 0 must be one-dimensional"),
        ([[1.5]], "integer token ids, got dtype float64"),
        ([[True]], "integer token ids, got dtype bool"),
        ([["a"]], "integer token ids"),
        ([[1, -4]], r"sequence 0, token 1: id -4 is out of range \[0, 2147483647\]"),
        ([[2**31]], "id 2147483648 is out of range"),
        ([[2**70]], "integer token ids"),
        ("abc", "iterable of integer sequences, got str"),
        (5, "iterable of integer sequences, got int"),
        (None, "iterable of integer sequences, got NoneType"),
    ],
)
def test_bad_sequences_are_refused_with_their_location(sequences: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Forest.from_sequences(sequences)  # type: ignore[arg-type]
