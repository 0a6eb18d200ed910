"""Ways to compute one optimizer batch's gradient: the tree step and the baselines that it must beat.

Each is a closure that clears `.grad`, computes, and leaves the same gradient: that of the mean negative log-probability
over all trained tokens. Every baseline is tuned as its user would tune it: the head runs only on rows with loss, in
chunks, and batches keep the same token budget as the tree step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.common.timing import Step
from treering.objectives import sft
from treering.train.memory import MaxTokens
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.types import TokenIds

BASELINES = ("one_by_one", "padded_batch", "packed_chains")

HEAD_CHUNK_ROWS = 512
"""Rows that a baseline's head takes at one time: faster than all of thousands, whose logits leave the caches."""

PADDED_TOKENS = 2048
"""Most tokens of a padded batch under a larger budget: on a CPU batches four times as large take a quarter longer, and
short sequences one by one half as long again."""


class Trainable(Protocol):
    """What is trained: trees of branches, and which tokens carry loss."""

    @property
    def groups(self) -> Sequence[Sequence[TokenIds]]:
        """The branches of each tree."""

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all branches together: the denominator of the loss."""

    def loss_masks(self) -> Sequence[NDArray[Any]]:
        """One 0/1 mask per branch, trees in order, then branches; first entries are ignored."""


def build_steps(model: PreTrainedModel, batch: Trainable, max_tokens: int | None = None) -> dict[str, Step]:
    """The tree step and all baselines by name, `one_by_one` (which defines the gradient) first.

    `max_tokens` bounds the tokens of a micro-batch, padding included, for every way; None puts all into one. A padded
    batch keeps to `PADDED_TOKENS` too, which is its fastest size.
    """
    return {
        "one_by_one": one_by_one(model, batch),
        "padded_batch": padded_batch(model, batch, max_tokens),
        "packed_chains": packed_chains(model, batch, max_tokens),
        "tree": tree(model, batch, max_tokens),
    }


def one_by_one(model: PreTrainedModel, batch: Trainable) -> Step:
    """Stock Hugging Face with SDPA: a forward and a backward per branch that trains anything."""
    return _stock_steps(model, batch, [[branch] for branch in range(len(_sequences(batch)))])


def padded_batch(model: PreTrainedModel, batch: Trainable, max_tokens: int | None = None) -> Step:
    """Stock Hugging Face with SDPA: branches of similar length in one batch, padded on the right to the longest.

    No padding mask is passed: causal attention never looks right, so padding reaches no row that carries loss, and SDPA
    keeps its fast path.
    """
    budget = None if max_tokens is None else min(max_tokens, PADDED_TOKENS)
    return _stock_steps(model, batch, padded_micro_batches([s.size for s in _sequences(batch)], budget))


def packed_chains(model: PreTrainedModel, batch: Trainable, max_tokens: MaxTokens = None) -> Step:
    """Treering without sharing: every branch its own chain, packed in rows without padding."""
    sequences, masks = _sequences(batch), batch.loss_masks()

    def step() -> None:
        model.zero_grad()
        chains = [Forest.from_sequences([sequence]) for sequence in sequences]
        backward(model, chains, sft(masks), max_tokens)

    return step


def tree(model: PreTrainedModel, batch: Trainable, max_tokens: MaxTokens = None) -> Step:
    """Treering: branches merged, every distinct token computed once. Merging is part of the step."""
    masks = batch.loss_masks()

    def step() -> None:
        model.zero_grad()
        forests = [Forest.from_sequences(group) for group in batch.groups]
        backward(model, forests, sft(masks), max_tokens)

    return step


def padded_micro_batches(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Numbers of the sequences of each padded batch: longest first, as many as fit, so that little is padded.

    A sequence longer than the budget has its own batch. Example: lengths 5, 9, 4 and 8 with 18 tokens give [1, 3]
    (2 x 9) and [0, 2] (2 x 5).
    """
    if max_tokens is None:
        return [list(range(len(lengths)))]
    micro_batches: list[list[int]] = []
    for branch in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        last = micro_batches[-1] if micro_batches else []
        if last and (len(last) + 1) * lengths[last[0]] <= max_tokens:
            last.append(branch)
            continue
        micro_batches.append([branch])
    return micro_batches


def padded_inputs(batch: Trainable, micro_batches: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and trained tokens of each micro-batch of branches that trains anything, padded on the right; [K, T] each."""
    sequences, masks = _sequences(batch), batch.loss_masks()
    for branches in micro_batches:
        shape = len(branches), max(sequences[i].size for i in branches)
        ids, trained = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, i in enumerate(branches):
            ids[row, : sequences[i].size] = sequences[i]
            trained[row, 1 : sequences[i].size] = masks[i][1:]
        if trained.any():
            yield torch.from_numpy(ids), torch.from_numpy(trained)


def gradient(model: PreTrainedModel) -> Tensor:
    """The whole gradient as one vector, float64 on CPU."""
    return torch.cat([weight.grad.flatten().cpu().double() for weight in model.parameters() if weight.grad is not None])


def gradient_after(model: PreTrainedModel, step: Step) -> Tensor:
    """The whole gradient that a step leaves."""
    step()
    return gradient(model)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance. Example: [3, 4] against [3, 5] is 1 / 5.83 = 0.171."""
    return float((got - expected).norm() / expected.norm())


def _sequences(batch: Trainable) -> list[TokenIds]:
    return [sequence for group in batch.groups for sequence in group]


def _stock_steps(model: PreTrainedModel, batch: Trainable, micro_batches: Sequence[Sequence[int]]) -> Step:
    """A forward and a backward of stock Hugging Face per micro-batch of branches; those without loss are skipped."""

    def step() -> None:
        model.zero_grad()
        for ids, trained in padded_inputs(batch, micro_batches):
            loss = _summed_loss(model, ids, trained) / batch.num_trained_tokens
            loss.backward()  # type: ignore[no-untyped-call]

    return step


def _summed_loss(model: PreTrainedModel, ids: Tensor, trained: Tensor) -> Tensor:
    """Summed negative log-probability of the trained tokens of a right-padded batch: ids and trained are [K, T]."""
    ids, trained = ids.to(model.device), trained.to(model.device)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    rows = hidden[:, :-1][trained[:, 1:]]
    head, targets = model.get_output_embeddings(), ids[trained]
    losses = [
        F.cross_entropy(head(some).float(), ids_of_some, reduction="sum")
        for some, ids_of_some in zip(*(torch.split(values, HEAD_CHUNK_ROWS) for values in (rows, targets)), strict=True)
    ]
    return torch.stack(losses).sum()
