"""Laws 2 and 4 for models with recurrent layers."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forests import SHAPES, bushy, comb
from tests.hybrids import DENSE, HYBRIDS, PLANNINGS, build_wide, no_float32, planned
from tests.partitions import random_partitions
from tests.train.flat import Batch, batches
from tests.train.gradient.test_backward import assert_step_is_exact, batch_of
from tests.train.gradient.test_partitioned import MODES, cut_by, gradients_of
from treering.model.layers import enable_gradient_checkpointing
from treering.tree.forest import Forest
from treering.tree.partition import Partition

MODELS = {family: build_wide(family) for family in DENSE}
LONG = [[1] * 70 + [2] * 75, [1] * 70 + [3], [1] * 70 + [3, 4] * 40, [1] * 64 + [5] * 3, [1] * 2]
FORKS = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 2, 8, 8], [3, 1, 7, 7, 2], [3, 1, 7, 7, 3, 3], [3, 1, 8]]
"""Two forks below one, after different tokens, so that rows cannot swap states or contexts unnoticed."""


@pytest.fixture(autouse=True, scope="module")
def wide() -> Iterator[None]:
    with no_float32():
        yield
    for model in MODELS.values():
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
@given(batch=batches(), shared=st.sampled_from(["sum", "once"]))
@settings(max_examples=10)
def test_gradients_equal_those_of_flat_sequences(batch: Batch, shared: str, planning: str, family: str) -> None:
    with planned(planning):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean", shared)


@pytest.mark.parametrize(("family", "tied"), [(family, bool(i % 2)) for i, family in enumerate(HYBRIDS)])
def test_every_family_is_exact_with_tied_and_untied_heads(family: str, tied: bool) -> None:
    model = build_wide(family, tie_word_embeddings=tied)
    assert_step_is_exact(model, batch_of([LONG, SHAPES["prefixes of each other"]]), "grpo", "token_mean")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", PLANNINGS)
@pytest.mark.parametrize("sequences", [comb(40)[::4], FORKS, LONG], ids=["comb", "forks", "long"])
def test_shapes_are_exact_whatever_the_plan(sequences: list[list[int]], planning: str, family: str) -> None:
    with planned(planning):
        assert_step_is_exact(build_wide(family, vocab_size=64), batch_of([sequences]), "dapo", "token_mean")


@pytest.mark.parametrize("family", DENSE)
@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=12)
def test_any_partition_gives_the_gradients_of_flat_sequences(batch: Batch, seed: int, size: int, family: str) -> None:
    with cut_by(lambda tree: random_partitions(tree, seed, size)):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("planning", ["fork, padded", "rescan"])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_partitions_are_exact_whatever_the_plan(size: int, planning: str, family: str) -> None:
    batch = batch_of([FORKS]) if size < 40 else batch_of([LONG, bushy(12)])
    with planned(planning), cut_by(lambda tree: random_partitions(tree, 1, size, cut=0.1)):
        assert_step_is_exact(MODELS[family], batch, "dapo", "sequence_mean")


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_family_is_exact_in_partitions(family: str) -> None:
    batch = batch_of([SHAPES["long segments"], SHAPES["prefixes of each other"]])
    with cut_by(lambda tree: random_partitions(tree, 1, 20, cut=0.05)):
        assert_step_is_exact(build_wide(family), batch, "grpo", "sequence_mean", temperature=0.8)


@pytest.mark.parametrize("family", DENSE)
@given(batch=batches(), seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=10)
def test_keeping_and_recomputing_parents_agree_bit_for_bit(batch: Batch, seed: int, size: int, family: str) -> None:
    model = MODELS[family]
    kept, again = (gradients_of(model, batch, lambda tree: random_partitions(tree, seed, size), mode) for mode in MODES)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(("checkpointing", "parents"), [("reentrant", "keep"), ("non_reentrant", "recompute")])
def test_activation_checkpointing_in_partitions_changes_nothing(parents: str, checkpointing: str, family: str) -> None:
    batch = batch_of([SHAPES["long segments"]])
    cut: Callable[[Forest], tuple[Partition, ...]] = lambda tree: random_partitions(tree, 3, 30, cut=0.03)  # noqa: E731
    expected = gradients_of(build_wide(family), batch, cut, "keep")
    model = build_wide(family)
    enable_gradient_checkpointing(model, checkpointing)
    actual = gradients_of(model, batch, cut, parents)  # type: ignore[arg-type]
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-12, rtol=1e-10)
