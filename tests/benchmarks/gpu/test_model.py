"""Whole models on a device: every way gives one gradient, work is counted by hand, ways that do not fit are skipped."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from benchmarks.common.timing import Step
from benchmarks.gpu.data import Workload
from benchmarks.gpu.model import gradient as gpu_model_gradient
from benchmarks.gpu.model.cases import (
    TINY_SHAPE,
    ModelPlan,
    build_on_device,
    tiny_plans,
)
from benchmarks.gpu.model.gradient import WrongGradientError, check_gradients, gradient_distance
from benchmarks.gpu.model.steps import Rows, build_step
from benchmarks.gpu.model.varlen import _torch_varlen
from transformers import PreTrainedModel


def by_hand(*groups: list[list[int]], masks: list[list[int]] | None = None) -> Workload:
    branches = [branch for group in groups for branch in group]
    flags = masks or [[1] * len(branch) for branch in branches]
    return Workload(
        name="by hand",
        groups=tuple(tuple(np.array(branch, np.int32) for branch in group) for group in groups),
        masks=tuple(np.array(mask, np.int8) for mask in flags),
    )


UNEVEN = by_hand(
    [[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 9, 9, 9, 9, 1]],
    [[3, 3], [4, 4, 4, 4, 4]],
    [[8, 8, 8]],
    masks=[[0, 0, 1, 1], [1, 0, 1], [0, 1, 1, 0, 1, 0, 1, 1], [0, 1], [1, 1, 0, 1, 1], [1, 0, 0]],
)
"""Trees of several shapes; the last one trains nothing, and first entries of masks do not count."""


def plan(**changes: Any) -> ModelPlan:
    (tiny,) = tiny_plans([])
    return replace(tiny, **changes)


def gradients(model: PreTrainedModel, step: Step) -> dict[str, torch.Tensor]:
    step()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def expected_gradients(model: PreTrainedModel, workload: Workload) -> dict[str, torch.Tensor]:
    """Return the gradients of each branch through the stock model, with all logits at once."""
    model.zero_grad()
    losses = []
    for branch, mask in zip(workload.sequences, workload.masks, strict=True):
        ids = torch.from_numpy(branch.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(1, ids[1:, None])[:, 0][torch.from_numpy(mask[1:] != 0)].sum())
    (torch.stack(losses).sum() / workload.num_trained_tokens).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("max_tokens", [6, 1000])
@pytest.mark.parametrize("rows", get_args(Rows))
def test_every_layout_gives_the_gradient_of_stock_code(
    rows: Rows, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of two rows, so that every micro-batch has several.
    monkeypatch.setattr("benchmarks.gpu.model.steps.HEAD_CHUNK_ENTRIES", 2 * TINY_SHAPE.vocab_size)
    model = build_on_device(plan(checkpointed=max_tokens == 6), "cpu")
    expected = expected_gradients(model, UNEVEN)
    got = gradients(model, build_step(rows, "chunks", model, UNEVEN, max_tokens))
    assert gradient_distance(got, expected) < 1e-5
    assert model.config._attn_implementation == "sdpa"


def test_torchs_packed_kernel_takes_grouped_heads_and_gives_gradients() -> None:
    # Without a device only shapes can be checked: tensors without data, through the operator that a device runs.
    leaves = [torch.empty(1, heads, 30, 128, device="meta", dtype=torch.bfloat16) for heads in (16, 8, 8)]
    for leaf in leaves:
        leaf.requires_grad_()
    bounds = torch.empty(4, device="meta", dtype=torch.int32)
    out, _ = _torch_varlen(torch.nn.Identity(), *leaves, None, scaling=0.1, cu_seq_lens_q=bounds, max_length_q=12)
    assert out.shape == (1, 30, 16, 128)
    grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


def test_a_wrong_gradient_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Rows, head: Any, model: PreTrainedModel, workload: Workload, tokens: int) -> Step:
        masks = tuple(np.r_[mask[:-2], 0, 0] for mask in workload.masks)
        return build_step(rows, head, model, replace(workload, masks=masks) if rows == "tree" else workload, tokens)

    check_gradients(plan(), "cpu")
    monkeypatch.setattr(gpu_model_gradient, "build_step", wrong)
    with pytest.raises(WrongGradientError, match="flat sequences"):
        check_gradients(plan(), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("rows", "dtype", "most"),
    [("tree", torch.float32, 1e-5), ("tree", torch.bfloat16, 0.05), ("varlen", torch.bfloat16, 0.05)],
)
def test_on_a_device_a_layout_gives_the_gradient_of_stock_code(rows: Rows, dtype: torch.dtype, most: float) -> None:
    model = build_on_device(plan(dtype=dtype), "cuda")
    got = gradients(model, build_step(rows, "chunks", model, UNEVEN, 1000))
    exact = gradients(model.float(), build_step("padded", "chunks", model, UNEVEN, 1000))
    assert gradient_distance(got, exact) < most
