"""Score branches without gradients: per-token log-probs, or their mean. Each distinct token is computed once.

K branches   N tokens of a unit   T tokens of a branch
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

from treering.arrays import BoolArray, Float64Array
from treering.model.checks import check_no_hooks
from treering.model.context import is_active, tree_attention
from treering.model.forward import FILLER, check_forest, hidden_states, without_gradients
from treering.model.tree_model import TreeModel
from treering.ranks.group import RankGroup
from treering.train.entries import read_entries
from treering.train.objectives.sft import sft
from treering.train.partitioned import score_unit
from treering.train.progress import OnProgress, PhaseProgress
from treering.train.scorer import Scorer
from treering.train.step_plan import num_forwards, plan_step
from treering.tree.forest import Forest
from treering.tree.plan import Unit


def branch_logprobs(
    model: nn.Module | TreeModel,
    forests: Sequence[Forest],
    loss_masks: Sequence[BoolArray],
    *,
    max_tokens: int | None,
    temperature: float = 1.0,
    backend: str = "auto",
    rank_group: RankGroup | None = None,
    on_progress: OnProgress | None = None,
) -> list[Float64Array]:
    """Return the log-probs of the masked tokens of every branch; trees above `max_tokens` run in partitions.

    Args:
        model: see `backward`; its mode (training or eval) stays.
        forests: forests of this rank, with K branches: forests in order, then sequences.
        loss_masks: K masks, bool [T] each.
        max_tokens: distinct tokens to compute at one time; None sets no limit.
        temperature: divides the logits.
        backend: attention backend; ignored inside `tree_attention`.
        rank_group: ranks of a prepared model, all of which must call this; None for one rank, or for a whole model on
            each.
        on_progress: called with the number of tokens scored so far.

    Returns:
        K arrays, float64 [T] each; 0 at unmasked tokens and at first tokens.

    Raises:
        InputError: a token outside the model's vocabulary, or masks that do not fit the branches.
        UnsupportedError: a model whose scores would not be exact.

    Example: branches [5, 6, 7] and [5, 6, 8] with masks [0, 0, 1] are scored in one pass over 4 tokens.
    """
    bound, rank_group = TreeModel.of(model), RankGroup() if rank_group is None else rank_group
    check_no_hooks(bound)
    for forest in forests:
        check_forest(forest, bound)
    objective = sft(loss_masks)
    read_entries(forests, objective)
    scorer = Scorer(model=without_gradients(bound, forests), temperature=temperature)
    plan = plan_step(forests, objective, max_tokens, device=bound.device)
    num_passes = sum(map(num_forwards, plan.units))
    # Before the first pass, which gathers sharded weights.
    most_passes = max(rank_group.gather(num_passes))
    progress = PhaseProgress("scoring", plan.num_tokens, on_progress)
    found, num_done = [np.zeros(mask.size) for mask in loss_masks], 0
    with nullcontext() if is_active(bound) else tree_attention(bound, backend), torch.no_grad():
        for unit in plan.units:
            _score_into(found, unit, loss_masks, scorer, in_step=rank_group.size > 1, progress=progress)
            num_done += unit.forest.num_tokens
            progress.reach(num_done)
        for _ in range(num_passes, most_passes):
            scorer.zero(hidden_states(scorer.model, FILLER))
        if bound.shards is not None:
            # A checkpoint reads the sharded weights.
            bound.shards.release()
    return found


def _score_into(
    found: list[Float64Array],
    unit: Unit,
    loss_masks: Sequence[BoolArray],
    scorer: Scorer,
    *,
    in_step: bool,
    progress: PhaseProgress,
) -> None:
    paths = [unit.forest.path(i) for i in range(unit.branches.size)]
    wanted = np.zeros(unit.forest.num_tokens, bool)
    for branch, path in zip(unit.branches, paths, strict=True):
        wanted[path[1:][loss_masks[branch][1:]]] = True
    if num_forwards(unit) == 0 or not (in_step or wanted.any()):
        return
    scores = score_unit(unit, wanted, scorer, in_step=in_step, progress=progress)
    logprobs = scores.logprobs.double().cpu().numpy()
    for branch, path in zip(unit.branches, paths, strict=True):
        found[branch] = np.where(loss_masks[branch], logprobs[path], 0.0)


def mean_loss(
    model: nn.Module | TreeModel,
    forests: Sequence[Forest],
    loss_masks: Sequence[BoolArray],
    max_tokens: int | None = None,
    *,
    rank_group: RankGroup | None = None,
    backend: str = "auto",
    on_progress: OnProgress | None = None,
) -> tuple[float, int]:
    """Return the mean negative log-prob of the masked tokens of all ranks, and the number of these tokens.

    A token that branches share counts once per branch, as in flat sequences. The temperature is 1. For arguments and
    errors, see `branch_logprobs`.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> mean_loss(model, [forest], [np.array([0, 1, 1], bool)] * 2)       # doctest: +SKIP
        (3.47, 4)
    """
    rank_group = RankGroup() if rank_group is None else rank_group
    logprobs = branch_logprobs(
        model,
        forests,
        loss_masks,
        max_tokens=max_tokens,
        backend=backend,
        rank_group=rank_group,
        on_progress=on_progress,
    )
    own = [sum(float(each[1:].sum()) for each in logprobs), sum(int(mask[1:].sum()) for mask in loss_masks)]
    total, count = (sum(values) for values in zip(*rank_group.gather(own), strict=True))
    return -total / max(count, 1), int(count)
