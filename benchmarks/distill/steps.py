"""Ways to compute one distillation batch's gradient: the tree step and the flat baselines that it must beat.

Every way leaves the gradient of the mean JSD over all trained tokens. Baselines are tuned: both heads run only on rows
with loss, in chunks whose logits are recomputed in the backward, and batches keep the budget of the tree step.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from benchmarks.common.timing import Step
from benchmarks.tree.steps import HEAD_CHUNK_ROWS, PADDED_TOKENS, Trainable, padded_inputs, padded_micro_batches
from treering.objectives import distill
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.types import TokenIds

BETA = 0.5

SummedDivergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(student rows, student head, teacher rows, teacher head) -> the JSD summed over rows."""


def build_steps(
    student: PreTrainedModel, teacher: PreTrainedModel, batch: Trainable, max_tokens: int
) -> dict[str, Step]:
    """All ways by name, `one_by_one`, which defines the gradient, first and `tree` last; TRL's if it is installed."""
    branches = [sequence for group in batch.groups for sequence in group]
    padded = padded_micro_batches([branch.size for branch in branches], min(max_tokens, PADDED_TOKENS))
    lone = [[number] for number in range(len(branches))]
    steps = {
        "one_by_one": _flat(student, teacher, batch, lone, checkpointed),
        "padded_batch": _flat(student, teacher, batch, padded, checkpointed),
    }
    by_trl = find_trl()
    if by_trl is not None:
        steps["padded_batch, TRL's kernel"] = _flat(student, teacher, batch, padded, by_trl)
    chains = [[branch] for branch in branches]
    steps["packed_chains"] = _forests(student, teacher, batch, chains, max_tokens)
    steps["tree"] = _forests(student, teacher, batch, batch.groups, max_tokens)
    return steps


def find_trl() -> SummedDivergence | None:
    """The chunked divergence of TRL's DistillationTrainer, from 1.16 on; None where it is not installed."""
    try:
        kernel = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    except ImportError:
        return None

    def summed(rows: Tensor, head: Tensor, teacher_rows: Tensor, teacher_head: Tensor) -> Tensor:
        total: Tensor = kernel.apply(rows, head, None, teacher_rows, teacher_head, None, BETA)[0].sum()
        return total

    return summed


def checkpointed(rows: Tensor, head: Tensor, teacher_rows: Tensor, teacher_head: Tensor) -> Tensor:
    """Chunks of rows, each recomputed in the backward."""
    pieces = [
        checkpoint(_jsd, own, head, given, teacher_head, use_reentrant=False)
        for own, given in zip(rows.split(HEAD_CHUNK_ROWS), teacher_rows.split(HEAD_CHUNK_ROWS), strict=True)  # type: ignore[no-untyped-call]
    ]
    return torch.stack(pieces).sum()


def _jsd(rows: Tensor, head: Tensor, teacher_rows: Tensor, teacher_head: Tensor) -> Tensor:
    q = (rows @ head.T).float().log_softmax(-1)
    with torch.no_grad():
        p = (teacher_rows @ teacher_head.T).float().log_softmax(-1)
    m = torch.logaddexp(q + np.log(1 - BETA), p + np.log(BETA))
    return BETA * (p.exp() * (p - m)).sum() + (1 - BETA) * (q.exp() * (q - m)).sum()


def _flat(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Trainable,
    micro_batches: Sequence[Sequence[int]],
    divergence: SummedDivergence,
) -> Step:
    """Stock Hugging Face with SDPA: both models on each micro-batch, padded on the right."""

    def step() -> None:
        student.zero_grad()
        for ids, trained in padded_inputs(batch, micro_batches):
            with torch.no_grad():
                given = _rows(teacher, ids, trained)
            heads = [model.get_output_embeddings().weight for model in (student, teacher)]
            loss = divergence(_rows(student, ids, trained), heads[0], given, heads[1]) / batch.num_trained_tokens
            loss.backward()  # type: ignore[no-untyped-call]

    return step


def _rows(model: PreTrainedModel, ids: Tensor, trained: Tensor) -> Tensor:
    """Hidden states before the trained tokens."""
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][trained[:, 1:]]


def _forests(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Trainable,
    groups: Sequence[Sequence[TokenIds]],
    max_tokens: int,
) -> Step:
    """Both models on forests of these groups of branches."""
    masks = batch.loss_masks()

    def step() -> None:
        student.zero_grad()
        forests = [Forest.from_sequences(group) for group in groups]
        backward(student, forests, distill(teacher, "jsd", beta=BETA, loss_masks=masks), max_tokens)

    return step
