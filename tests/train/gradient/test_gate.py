"""Skipping sharing changes what is computed together, never the gradient."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forests import sequence_sets
from tests.models import assert_gradients_equal, take_gradients
from tests.train.gradient.test_backward import MODEL, NORMALIZERS, SHARED, batch_of, forests_of, objective_of
from treering.train.gradient.backward import backward
from treering.tree.plan.costs import CostModel

BY_SEGMENT = CostModel(token_s=1e-6, pair_s=0.0, segment_s=1.0)


@settings(max_examples=12)
@given(
    st.lists(sequence_sets(max_sequences=4, max_extra=6), min_size=1, max_size=2),
    st.sampled_from(NORMALIZERS),
    st.sampled_from(SHARED),
    st.sampled_from([None, 5]),
)
def test_separate_chains_give_the_gradient_of_the_trees(
    groups: list[list[list[int]]], normalizer: str, shared: str, max_tokens: int | None
) -> None:
    batch = batch_of([*groups, [[1, 2, 3], [1, 2, 4], [1, 5]]])
    objective = objective_of("grpo", batch, normalizer, shared)
    expected = backward(MODEL, forests_of(batch), objective)
    gradients = take_gradients(MODEL)
    result = backward(MODEL, forests_of(batch), objective, max_tokens, costs=BY_SEGMENT)
    assert result.plan.unshared
    assert result.plan.num_tokens > expected.plan.num_tokens
    assert result.loss == pytest.approx(expected.loss, rel=1e-10, abs=1e-10)
    assert result.num_trained_tokens == pytest.approx(expected.num_trained_tokens)
    assert_gradients_equal(take_gradients(MODEL), gradients, 1e-10)
