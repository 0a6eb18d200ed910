"""Whole models on a device: every way gives one gradient, work counted by hand, ways that do not fit are left out."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from benchmarks.common.timing import Step
from benchmarks.gpu.data import Workload
from benchmarks.gpu.model import gradient as gpu_model_gradient
from benchmarks.gpu.model.bench import compare
from benchmarks.gpu.model.cases import (
    TINY_SHAPE,
    ModelPlan,
    build_on_device,
    count,
    num_scored_rows,
    tiny_plans,
)
from benchmarks.gpu.model.gradient import WrongGradientError, check_gradients, gradient_distance
from benchmarks.gpu.model.kernels import Kernel, group_of, summarize
from benchmarks.gpu.model.steps import Rows, build_step, packed_micro_batches
from benchmarks.gpu.model.varlen import TORCH_VARLEN, _torch_varlen, hidden_states, pack_row, varlen_attention
from benchmarks.gpu.workloads import shared_prefix
from transformers import PreTrainedModel

from treering.tree.forest import Forest
from treering.tree.stats import bounds, train_flops


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
    """Branch after branch through the stock model, with all logits at one time."""
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
    # Chunks of two rows: more than one in every micro-batch.
    monkeypatch.setattr("benchmarks.gpu.model.steps.HEAD_CHUNK_ENTRIES", 2 * TINY_SHAPE.vocab_size)
    model = build_on_device(plan(checkpointed=max_tokens == 6), "cpu")
    expected = expected_gradients(model, UNEVEN)
    got = gradients(model, build_step(rows, "chunks", model, UNEVEN, max_tokens))
    assert gradient_distance(got, expected) < 1e-5
    assert model.config._attn_implementation == "sdpa"


def test_rows_are_sequences_end_to_end() -> None:
    row = pack_row([np.array(ids, np.int32) for ids in ([5, 6], [7], [8, 8, 8])], torch.device("cpu"))
    assert row.ids.tolist() == [[5, 6, 7, 8, 8, 8]]
    assert row.positions.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert row.bounds.tolist() == [0, 2, 3, 6]
    assert (row.bounds.dtype, row.max_length) == (torch.int32, 3)


def test_torchs_packed_kernel_takes_grouped_heads_and_gives_gradients() -> None:
    # Without a device only shapes can be seen: tensors without numbers, through the operator that a device runs.
    leaves = [torch.empty(1, heads, 30, 128, device="meta", dtype=torch.bfloat16) for heads in (16, 8, 8)]
    for leaf in leaves:
        leaf.requires_grad_()
    bounds = torch.empty(4, device="meta", dtype=torch.int32)
    out, _ = _torch_varlen(torch.nn.Identity(), *leaves, None, scaling=0.1, cu_seq_lens_q=bounds, max_length_q=12)
    assert out.shape == (1, 30, 16, 128)
    grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


def test_packed_sequences_do_not_see_each_other() -> None:
    model = build_on_device(plan(), "cpu")
    sequences = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8], [9, 9], [1, 2, 3])]
    with torch.no_grad(), varlen_attention(model) as name:
        packed = hidden_states(model, pack_row(sequences, model.device))
    assert name == TORCH_VARLEN
    with torch.no_grad():
        alone = [
            model.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
            for ids in sequences
        ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_rows_are_packed_up_to_the_budget_and_long_sequences_stand_alone() -> None:
    lengths = [5, 9, 4, 8, 30]
    rows = packed_micro_batches(lengths, 13)
    assert sorted(i for row in rows for i in row) == [0, 1, 2, 3, 4]
    assert [4] in rows
    assert all(sum(lengths[i] for i in row) <= 13 for row in rows if row != [4])
    assert len(rows) == 3
    assert packed_micro_batches([], 13) == []


def test_counts_are_those_made_by_hand() -> None:
    found = count(by_hand([[5, 6, 7], [5, 6, 8]]), TINY_SHAPE)
    assert (found["flat_tokens"], found["unique_tokens"], found["trained_tokens"]) == (6, 4, 4)
    assert found["token_bound"] == 1.5
    # The head runs behind 5 and 6 of each branch, and behind 5 and 6 of the tree.
    head, body = TINY_SHAPE.hidden_size * TINY_SHAPE.vocab_size, TINY_SHAPE.params_per_token
    pair = 4 * TINY_SHAPE.num_layers * TINY_SHAPE.num_heads * TINY_SHAPE.head_size
    flat = 3 * (2 * (body - head) * 6 + 2 * head * 4 + pair * 12)
    tree = 3 * (2 * (body - head) * 4 + 2 * head * 2 + pair * 9)
    assert (found["flat_scored_flops"], found["tree_scored_flops"]) == (flat, tree)
    assert found["scored_flop_bound"] == flat / tree
    assert found["flop_bound"] == train_flops(TINY_SHAPE, 6, 12) / train_flops(TINY_SHAPE, 4, 9)
    assert found["flop_bound"] == bounds(Forest.from_sequences([[5, 6, 7], [5, 6, 8]]), TINY_SHAPE).flop_bound


def test_the_heads_rows_are_parents_of_what_any_branch_trains() -> None:
    forests = [Forest.from_sequences(group) for group in UNEVEN.groups]
    # Tree 1: behind 6 (7, 9), behind 5 (the third branch trains 6), behind 7 (8), behind the second, fourth and
    # fifth 9. Tree 2: behind 3, and behind the first, third and fourth 4. Tree 3: nothing.
    assert num_scored_rows(forests, UNEVEN.masks) == (1 + 1 + 1 + 3) + (1 + 3)


@pytest.mark.parametrize("sharing", [0.0, 0.5, 0.95])
def test_the_sweep_shares_what_it_says(sharing: float) -> None:
    workload = shared_prefix(sharing)
    found = count(workload, TINY_SHAPE)
    assert found["sharing"] == pytest.approx(sharing, abs=1e-3)
    assert found["flat_tokens"] == 65_536
    assert (found["sharing"] == 0.0) == (sharing == 0.0)


def row(way: str, *seconds: float) -> dict[str, Any]:
    shares = way.startswith("tree")
    flops = 2e12 if shares else 7.2e12
    return {"way": way, "is_tree": shares, "seconds": list(seconds), "flops": flops, "peak_bytes": None}


def test_the_fastest_tree_step_is_compared_with_the_fastest_baseline_by_medians() -> None:
    counts = {"flop_bound": 4.0, "scored_flop_bound": 3.6, "sharing": 0.5}
    rows = [row("varlen", 3.6, 3.0, 9.0), row("padded", 4.0), row("tree, stock", 2.0), row("tree", 1.0, 0.5, 1.1)]
    found = compare(rows, counts, 8.0)
    assert (found["tree"], found["tree_s"], found["baseline"], found["baseline_s"]) == ("tree", 1.0, "varlen", 3.6)
    assert found["speedup"] == 3.6
    assert found["share_of_flop_bound"] == pytest.approx(0.9)
    assert found["share_of_scored_flop_bound"] == pytest.approx(1.0)
    assert found["loss_without_sharing"] is None
    assert (found["tree_tflops"], found["baseline_tflops"]) == (2.0, pytest.approx(2.0))
    assert (found["mfu"], found["baseline_mfu"]) == (0.25, pytest.approx(0.25))
    assert compare(rows, counts | {"sharing": 0.0}, None)["loss_without_sharing"] == pytest.approx(1.0 / 3.6 - 1)


def test_the_devices_time_is_split_by_kernels_and_gaps() -> None:
    vocab_size = 1000
    found = summarize(
        [
            Kernel(name="nvjet_tst", start_us=0, stop_us=3, shapes=((8, 16), (16, 24))),
            # Beside it on another stream.
            Kernel(name="vectorized_elementwise_kernel", start_us=2, stop_us=4),
            Kernel(name="nvjet_tst", start_us=6, stop_us=10, shapes=((8, 16), (16, vocab_size))),
            Kernel(name="_gradient_kernel", start_us=10, stop_us=11),
            Kernel(name="key_gradient_kernel", start_us=12, stop_us=13),
        ],
        vocab_size,
    )
    assert (found["num_kernels"], found["busy_ms"], found["idle_ms"]) == (5, 0.01, 0.003)
    assert found["group_ms"] == {"head": 0.005, "products": 0.003, "elementwise": 0.002, "attention": 0.001}
    assert summarize([], vocab_size)["busy_ms"] == 0
    lookup = Kernel(name="indexSelectLargeIndex", start_us=0, stop_us=1, shapes=((vocab_size, 16), (8,)))
    assert group_of(lookup, vocab_size) == "elementwise"


def test_a_wrong_gradient_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Rows, head: Any, model: PreTrainedModel, workload: Workload, tokens: int) -> Step:
        masks = tuple(np.r_[mask[:-2], 0, 0] for mask in workload.masks)
        return build_step(rows, head, model, replace(workload, masks=masks) if rows == "tree" else workload, tokens)

    check_gradients(plan(), "cpu")
    monkeypatch.setattr(gpu_model_gradient, "build_step", wrong)
    with pytest.raises(WrongGradientError, match="flat sequences"):
        check_gradients(plan(), "cpu")


def test_distances_are_over_all_weights_together() -> None:
    got, expected = ({"a": torch.tensor([3.0]), "b": torch.tensor([b])} for b in (4.0, 5.0))
    assert gradient_distance(got, expected) == pytest.approx(1 / 34**0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", ["varlen", "tree"])
def test_on_a_device_packed_flash_attention_gives_the_gradient_of_stock_code(rows: Rows) -> None:
    model = build_on_device(plan(dtype=torch.bfloat16), "cuda")
    got = gradients(model, build_step(rows, "chunks", model, UNEVEN, 1000))
    exact = gradients(model.float(), build_step("padded", "chunks", model, UNEVEN, 1000))
    assert gradient_distance(got, exact) < 0.05
