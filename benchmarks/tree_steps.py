"""Ways to compute one optimizer batch's gradient: the tree step and the baselines that it must beat.

Each is a closure that clears `.grad`, computes, and leaves the same gradient: that of the mean negative log-probability
over all trained tokens. Every baseline is tuned as its user would tune it: the head runs on rows that carry loss only.
Knows nothing of clocks.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.timing import Step
from benchmarks.tree_cases import Case
from treering.train.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest

BASELINES = ("one_by_one", "padded_batch", "packed_chains")


def build_steps(model: PreTrainedModel, case: Case) -> dict[str, Step]:
    """The tree step and all baselines by name, `one_by_one` (which defines the gradient) first."""
    return {
        "one_by_one": one_by_one(model, case),
        "padded_batch": padded_batch(model, case),
        "packed_chains": packed_chains(model, case),
        "tree": tree(model, case),
    }


def one_by_one(model: PreTrainedModel, case: Case) -> Step:
    """Stock Hugging Face with SDPA: a forward and a backward per branch."""

    def step() -> None:
        model.zero_grad()
        for sequence in case.sequences:
            ids = torch.from_numpy(sequence.astype(np.int64))[None].to(model.device)
            loss = _scored_loss(model, ids, _trained_rows(case, [sequence.size]), case)
            loss.backward()  # type: ignore[no-untyped-call]

    return step


def padded_batch(model: PreTrainedModel, case: Case) -> Step:
    """Stock Hugging Face with SDPA: all branches in one batch, padded on the right to the longest.

    No padding mask is passed: causal attention never looks right, so padding reaches no row that carries loss, and SDPA
    keeps its fast path.
    """
    lengths = [sequence.size for sequence in case.sequences]

    def step() -> None:
        model.zero_grad()
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        for row, sequence in zip(ids, case.sequences, strict=True):
            row[: sequence.size] = sequence
        loss = _scored_loss(model, torch.from_numpy(ids).to(model.device), _trained_rows(case, lengths), case)
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def packed_chains(model: PreTrainedModel, case: Case) -> Step:
    """Treering without sharing: every branch a chain of its own, all packed in one row without padding."""
    masks = case.loss_masks()

    def step() -> None:
        model.zero_grad()
        backward(model, [Forest.from_sequences([sequence]) for sequence in case.sequences], sft(masks))

    return step


def tree(model: PreTrainedModel, case: Case) -> Step:
    """Treering: branches merged, every distinct token computed once. Merging is part of the step."""
    masks = case.loss_masks()

    def step() -> None:
        model.zero_grad()
        backward(model, Forest.from_sequences(case.sequences), sft(masks))

    return step


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


def _scored_loss(model: PreTrainedModel, ids: Tensor, rows: Tensor, case: Case) -> Tensor:
    """Summed negative log-probability of the tokens after `rows` (int64 [K, R]), over the case's trained tokens."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    branch = torch.arange(len(ids), device=ids.device)[:, None]
    rows = rows.to(ids.device)
    logits = model.get_output_embeddings()(hidden[branch, rows])
    nll = F.cross_entropy(logits.flatten(0, 1).float(), ids[branch, rows + 1].flatten(), reduction="sum")
    return nll / case.num_trained_tokens


def _trained_rows(case: Case, lengths: list[int]) -> Tensor:
    """Positions whose next token is trained: int64 [K, R]."""
    return torch.tensor(lengths)[:, None] - case.num_trained - 1 + torch.arange(case.num_trained)
