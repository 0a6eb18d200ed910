"""Attention through gateways covers each visible pair once; values and gradients equal the whole tree's."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention import fake_flash
from tests.attention.given import CPU, assert_partitions_equal_the_tree, random_inputs
from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES, sequence_sets
from tests.partitions import random_partitions
from treering.attention import Backend, ScoreOptions, TreeLayout, triton, triton_tables
from treering.attention.gateway import Gateway, KeysValues
from treering.attention.layout import Ancestor, join
from treering.attention.rectangles import MAX_STEP_ENTRIES, AttentionCall, Visibility, ancestor_calls
from treering.attention.triton_tables import Tiles, TileSize
from treering.errors import StateError
from treering.tree.forest import Forest
from treering.tree.partition import QueryRanges, query_ranges, take_fragment

PART = st.one_of(st.none(), st.integers(1, 12))


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@given(sequences=sequence_sets(), seed=st.integers(0, 10**6), size=st.integers(1, 12), window=PART)
@settings(max_examples=60)
def test_gradients_through_gateways_equal_those_of_the_whole_tree(
    backend: Backend, sequences: list[list[int]], seed: int, size: int, window: int | None
) -> None:
    tree = Forest.from_sequences(sequences).trees()[0]
    options = ScoreOptions(scale=0.3, window=window)
    inputs = random_inputs(tree.num_tokens, size=8)
    assert_partitions_equal_the_tree(inputs, tree, random_partitions(tree, seed, size), backend, options)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_exact_through_gateways(shape: str, window: int | None) -> None:
    tree = max(Forest.from_sequences(SHAPES[shape]).trees(), key=lambda tree: tree.num_tokens)
    inputs, partitions = random_inputs(tree.num_tokens, size=8), random_partitions(tree, 0, 60, cut=0.02)
    assert_partitions_equal_the_tree(inputs, tree, partitions, "segments", ScoreOptions(scale=0.3, window=window))


@pytest.mark.parametrize(
    ("backend", "window", "size", "cut"),
    [
        ("flash", None, 8, 0.15),
        ("flash", 14, 20, 0.02),
        ("flex", None, 8, 0.15),
        ("flex", 14, 20, 0.02),
        ("triton", 14, 12, 0.02),
    ],
)
def test_backends_that_join_keys_are_exact_through_gateways(
    backend: Backend, window: int | None, size: int, cut: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "flash":
        fake_flash.install(monkeypatch, (8, 6))
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(triton, "choose_tiles", lambda *_: Tiles(*[TileSize(16, 16)] * 3))
        monkeypatch.setattr(triton_tables, "MIN_TILES", 4)
    tree = Forest.from_sequences([[0] * 17 + [1] * 3, [0] * 17 + [2] * 6 + [3] * 2, [0] * 17 + [2] * 6 + [4] * 3])
    # Torch has no gradients of flex on CPU.
    inputs = [tensor.requires_grad_(backend != "flex") for tensor in random_inputs(tree.num_tokens, (2, 1), size=8)]
    partitions = random_partitions(tree, 1, size, cut)
    assert_partitions_equal_the_tree(inputs, tree, partitions, backend, ScoreOptions(scale=0.3, window=window))


@given(
    sequences=sequence_sets(max_sequences=12, max_extra=30),
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_calls_cover_each_visible_pair_once_and_leave_no_row_blind(
    sequences: list[list[int]], seed: int, size: int, window: int | None
) -> None:
    tree = Forest.from_sequences(sequences).trees()[0]
    partitions = random_partitions(tree, seed, size)
    for part in partitions:
        above = part.parent
        while above >= 0:
            ancestor = Ancestor.from_ranges(Gateway(), query_ranges(tree, partitions[above].tokens, part.tokens))
            layout = TreeLayout(take_fragment(tree, part.tokens), CPU, ancestors=(ancestor,))
            assert_covered(ancestor.ranges, layout.ancestor_calls(ancestor, window), layout.ranges.position, window)
            above = partitions[above].parent


def assert_covered(
    ranges: QueryRanges, calls: Iterable[AttentionCall], position: NDArray[np.int64], window: int | None
) -> None:
    rows = np.arange(position.size)[:, None]
    visible = (ranges.first[None, :] <= rows) & (rows < ranges.stop[None, :])
    if window is not None:
        visible &= position[:, None] - ranges.position[None, :] < window
    covered = np.zeros(visible.shape, int)
    for call in calls:
        seen = call.mask(ranges, position)
        assert seen.any(1).all(), "a row without a key has no softmax"
        assert call.visibility is Visibility.MASKED or seen.all()
        covered[np.ix_(np.arange(call.query_start, call.query_stop), call.key_indices())] += seen
    assert np.array_equal(covered, visible)


def test_a_spine_that_all_rows_see_is_one_unmasked_call_however_many_leaves_hang_off_it() -> None:
    # In a comb whose last branch continues in two rows, every second key is on their path.
    keys = np.arange(40_000)
    ranges = QueryRanges(first=np.zeros_like(keys), stop=np.where(keys % 2 == 0, 2, 0), position=keys)
    (call,) = ancestor_calls(ranges)
    assert call.keys is not None
    assert (call.keys.tolist(), call.visibility) == (keys[::2].tolist(), Visibility.FULL)


def test_masks_stay_small_where_one_key_is_seen_by_fewer_rows() -> None:
    keys = np.arange(10_000)
    stop = np.where(keys % 2 == 0, 2000, 0)
    stop[2] = 1999
    calls = list(ancestor_calls(QueryRanges(first=np.zeros_like(keys), stop=stop, position=keys)))
    masked = [call for call in calls if call.visibility is Visibility.MASKED]
    assert len(masked) == 1
    assert 2000 * masked[0].key_indices().size <= MAX_STEP_ENTRIES
    assert np.concatenate([call.key_indices() for call in calls]).tolist() == keys[::2].tolist()


def test_gradients_are_summed_in_float32_for_bfloat16() -> None:
    gateway = Gateway()
    ones = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    gateway.export(0, KeysValues(ones, ones))
    for _ in range(257):
        gateway.add_gradient(0, slice(None), KeysValues(ones, ones))
    total = gateway.take_gradient(0)
    assert total is not None
    assert (total.key.dtype, total.key[0, 0, 0, 0].item()) == (torch.float32, 257.0)
    assert gateway.take_gradient(0) is None


def test_a_partition_that_runs_before_its_parent_is_refused() -> None:
    gateway = Gateway()
    with pytest.raises(StateError, match="layer 2 of an ancestor partition is missing: it must run before"):
        gateway.read(2)
    gateway.export(2, KeysValues(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)))
    gateway.close()
    gateway.export(2, KeysValues(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)))
    with pytest.raises(StateError, match="is missing"):
        gateway.read(2)


def test_joined_keys_lie_in_memory_token_by_token_as_those_of_a_layer_do() -> None:
    # A layer projects its keys by tokens, [1, N, G, D].
    above, own = (torch.randn(1, num_tokens, 2, 4).transpose(1, 2) for num_tokens in (3, 5))
    gateway = Gateway()
    gateway.export(0, KeysValues(above, above))
    ranges = QueryRanges(first=np.zeros(3, np.int64), stop=np.full(3, 5), position=np.arange(3))
    layout = TreeLayout(Forest.from_sequences([[0] * 5]), CPU, ancestors=(Ancestor.from_ranges(gateway, ranges),))
    for joined in join(KeysValues(own, own), layout, 0):
        assert joined.transpose(1, 2).is_contiguous()
        assert torch.equal(joined, torch.cat([above, own], 2))
