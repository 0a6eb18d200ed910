"""Whole models on every attention backend: gradients of triton's kernels in the interpreter, and flex forward."""

import pytest
import torch

import treering
from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.model.context import tree_attention
from treering.tree.forest import Forest

pytest.importorskip("triton")
launch = pytest.importorskip("treering.attention.triton_launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="float64 runs in triton's interpreter only")

SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 8], [1, 2, 3, 4, 9, 7, 6, 5], [5, 6]]
# gemma2 has windows and softcaps, gpt_oss windows and sinks.
FAMILIES = ("gemma2", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_model_on_triton_equal_those_on_segments(family: str) -> None:
    model = build_float64(family)
    forest = Forest.from_sequences(SEQUENCES)
    grads, losses = [], []
    for backend in ("triton", "segments"):
        with tree_attention(model, backend) as active:
            assert active.backend == backend
            losses.append(treering.backward(model, forest, treering.objectives.sft()).loss)
        grads.append(take_gradients(model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert_gradients_equal(*grads, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_model_on_flex_equal_those_on_segments(family: str) -> None:
    model = build_float64(family).float()
    forest = Forest.from_sequences(SEQUENCES)
    found = []
    for backend in ("flex", "segments"):
        with torch.no_grad(), tree_attention(model, backend):
            found.append(treering.forward(model, forest).logprobs)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
