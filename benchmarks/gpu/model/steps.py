"""Ways to compute a batch's gradient on a device: the tree step, and tuned baselines without trees.

Each is a closure that clears `.grad`, computes, and leaves the same gradient: that of the mean negative log-probability
over all trained tokens. Baselines run their head on trained rows only, in large chunks whose gradient is taken at once,
or by Liger's fused kernel, so that no logits are kept and none are computed twice.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.common.timing import Step
from benchmarks.gpu.data import Workload
from benchmarks.gpu.model.varlen import hidden_states, pack_row, varlen_attention
from benchmarks.tree.steps import packed_chains, padded_micro_batches, tree
from treering.tree.partition import pack

HEAD_CHUNK_ENTRIES = 2**30
"""Logits of a chunk: 7,067 rows of a vocabulary of 151,936; 4 GiB in float32."""

Head = Literal["chunks", "liger"]
MicroBatch = int | Literal["auto"]
"""Most tokens of a micro-batch; auto, for Treering's ways: what free memory holds."""

Rows = Literal["varlen", "padded", "chains", "tree"]
"""How a way lays out sequences; chains are Treering's flat sequences, a baseline without sharing."""


def build_step(rows: Rows, head: Head, model: PreTrainedModel, workload: Workload, max_tokens: MicroBatch) -> Step:
    """The step of a layout; Treering's two layouts have their own head and attention."""
    if rows == "tree":
        return tree(model, workload, max_tokens)
    if rows == "chains":
        return packed_chains(model, workload, max_tokens)
    assert max_tokens != "auto", "stock code has no budget by memory"
    return (varlen if rows == "varlen" else padded)(model, workload, max_tokens, head)


def varlen(model: PreTrainedModel, workload: Workload, max_tokens: int, head: Head) -> Step:
    """Stock Hugging Face, sequences packed end to end with varlen flash attention."""
    sequences, total = workload.sequences, workload.num_trained_tokens
    micro_batches = packed_micro_batches([sequence.size for sequence in sequences], max_tokens)

    def step() -> None:
        model.zero_grad()
        with varlen_attention(model):
            for branches in micro_batches:
                starts = np.cumsum([0, *(sequences[i].size for i in branches)])
                loss = _find_loss(workload, branches, starts)
                if loss.rows.numel():
                    row = pack_row([sequences[i] for i in branches], model.device)
                    _run_backward(model, hidden_states(model, row), loss, total, head)

    return step


def padded(model: PreTrainedModel, workload: Workload, max_tokens: int, head: Head) -> Step:
    """Stock Hugging Face with SDPA, branches of similar length in batches, padded on the right to the longest.

    No padding mask is passed: causal attention never looks right, so SDPA keeps its fast path.
    """
    sequences, total = workload.sequences, workload.num_trained_tokens
    micro_batches = padded_micro_batches([sequence.size for sequence in sequences], max_tokens)

    def step() -> None:
        model.zero_grad()
        for branches in micro_batches:
            ids = np.zeros((len(branches), max(sequences[i].size for i in branches)), np.int64)
            for row, i in zip(ids, branches, strict=True):
                row[: sequences[i].size] = sequences[i]
            loss = _find_loss(workload, branches, np.arange(len(branches)) * ids.shape[1])
            if loss.rows.numel():
                on_device = torch.from_numpy(ids).to(model.device)
                hidden = model.get_decoder()(input_ids=on_device, use_cache=False).last_hidden_state
                _run_backward(model, hidden.flatten(0, 1), loss, total, head)

    return step


def packed_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Numbers of the sequences of each packed row; a sequence longer than the budget has its own row.

    Example: lengths 5, 9, 4 and 8 with 13 tokens give [1, 2] and [0, 3].
    """
    bins = pack([min(length, max_tokens) for length in lengths], max_tokens)
    return [[i for i, own in enumerate(bins) if own == number] for number in range(max(bins, default=-1) + 1)]


class _Loss:
    """The rows of a micro-batch that carry loss, and their targets; int64 [R] each."""

    def __init__(self, rows: NDArray[Any], targets: NDArray[Any]) -> None:
        self.rows, self.targets = torch.from_numpy(rows), torch.from_numpy(targets.astype(np.int64))


def _find_loss(workload: Workload, branches: Sequence[int], starts: NDArray[Any]) -> _Loss:
    """The rows of branches that start at the given places: a token is scored by the row before it."""
    trained = [np.flatnonzero(workload.masks[i][1:]) for i in branches]
    sequences = workload.sequences
    rows = [start + before for start, before in zip(starts, trained, strict=False)]
    targets = [sequences[i][before + 1] for i, before in zip(branches, trained, strict=True)]
    return _Loss(np.concatenate(rows), np.concatenate(targets))


def _run_backward(model: PreTrainedModel, hidden: Tensor, loss: _Loss, total: int, head: Head) -> None:
    """Adds the gradients of the summed loss over `total`; `hidden` is [T, C]."""
    picked, targets = hidden[loss.rows.to(hidden.device)], loss.targets.to(hidden.device)
    if head == "liger":
        (_liger_sum(model, picked, targets) / total).backward()  # type: ignore[no-untyped-call]
        return
    picked.backward(_head_in_chunks(model, picked, targets, total))


def _liger_sum(model: PreTrainedModel, picked: Tensor, targets: Tensor) -> Tensor:
    """The summed loss by Liger's fused product and cross entropy, which takes gradients in its forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    head = model.get_output_embeddings()
    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(head.weight, picked, targets)
    return loss


def _head_in_chunks(model: PreTrainedModel, picked: Tensor, targets: Tensor, total: int) -> Tensor:
    """The gradient of the rows, [R, C]; that of the head's weight is added."""
    head = model.get_output_embeddings()
    grad = torch.empty_like(picked)
    num_rows = max(1, HEAD_CHUNK_ENTRIES // head.out_features)
    for start in range(0, picked.shape[0], num_rows):
        chunk = slice(start, start + num_rows)
        rows = picked[chunk].detach().requires_grad_()
        summed = F.cross_entropy(head(rows).float(), targets[chunk], reduction="sum")
        (summed / total).backward()  # type: ignore[no-untyped-call]
        grad[chunk] = rows.grad
    return grad
