"""Log-probs of branches without gradients: one by one of another model, as a reference needs them, and their mean.

Each distinct token is computed once.

K branches   N tokens of a unit   T tokens of a branch
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

from treering.arrays import BoolArray, Float64Array
from treering.model.checks import check_no_hooks, check_whole
from treering.model.context import is_active, tree_attention
from treering.model.families import find_parts
from treering.model.forward import check_forest, without_gradients
from treering.ranks.group import RankGroup
from treering.train.gradient.backward import plan_step
from treering.train.gradient.flat_batch import flatten_batch, read_entries
from treering.train.gradient.partitioned import score_unit
from treering.train.gradient.pass_order import Unit, num_forwards
from treering.train.gradient.run import StepRun
from treering.train.gradient.scoring import Scorer
from treering.train.objectives import sft
from treering.train.progress import OnProgress
from treering.tree.forest import Forest
from treering.tree.plan.plan import plan_batch
from treering.types import LossMask


def branch_logprobs(
    model: nn.Module,
    forests: Sequence[Forest],
    loss_masks: Sequence[BoolArray],
    *,
    max_tokens: int | None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> list[Float64Array]:
    """The log-probs of the masked tokens of every branch, in partitions of the trees that exceed `max_tokens`.

    Args:
        model: a whole model (not sharded), outside `tree_attention`.
        forests: K branches, forests in order.
        loss_masks: K masks, bool [T] each.
        max_tokens: computed at one time; None sets no limit.
        temperature: divides the logits.
        backend: of the attention.

    Returns:
        K arrays, float64 [T] each; 0 at tokens that are not masked and at first tokens.

    Raises:
        InputError: a token outside the model's vocabulary.
        UnsupportedError: a model that would not be exact.

    Example: branches [5, 6, 7] and [5, 6, 8] with masks [0, 0, 1] are scored in one pass over 4 tokens.
    """
    parts = find_parts(model)
    check_whole(parts, "a reference")
    for forest in forests:
        check_forest(forest, parts)
    scorer = Scorer(
        parts=without_gradients(parts, forests), temperature=temperature, entropy_of="none", value_head=None
    )
    plan = plan_batch(forests, max_tokens)
    found = [np.zeros(mask.size) for mask in loss_masks]
    units: tuple[Unit, ...] = (*plan.micro_batches, *plan.partitioned)
    with tree_attention(model, backend), torch.no_grad():
        for unit in units:
            _score_into(found, unit, loss_masks, scorer)
    return found


def _score_into(found: list[Float64Array], unit: Unit, loss_masks: Sequence[BoolArray], scorer: Scorer) -> None:
    paths = [unit.forest.path(i) for i in range(unit.branches.size)]
    wanted = np.zeros(unit.forest.num_tokens, bool)
    for branch, path in zip(unit.branches, paths, strict=True):
        wanted[path[1:][loss_masks[branch][1:]]] = True
    if not wanted.any():
        return
    logprobs = score_unit(unit, wanted, scorer).logprobs.double().cpu().numpy()
    for branch, path in zip(unit.branches, paths, strict=True):
        found[branch] = np.where(loss_masks[branch], logprobs[path], 0.0)


def mean_loss(
    model: nn.Module,
    forests: Sequence[Forest],
    loss_masks: Sequence[LossMask],
    max_tokens: int | None = None,
    *,
    group: RankGroup | None = None,
    backend: str = "auto",
    on_progress: OnProgress | None = None,
) -> tuple[float, int]:
    """The mean negative log-probability of all masked tokens, and how many there are.

    A token that branches share counts once per branch, as in flat sequences. The temperature is 1.

    Args:
        model: see `backward`; its mode is left as it is.
        forests: of this rank.
        loss_masks: one per branch, bool [T], in the order of forests, then sequences.
        max_tokens: distinct tokens per forward; a larger tree is computed in partitions.
        group: ranks of a prepared model; mean and count are those of all of them.
        backend: of the attention.
        on_progress: hears of tokens that are scored.

    Raises:
        InputError, UnsupportedError: see `backward`.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> mean_loss(model, [forest], [np.array([0, 1, 1], bool)] * 2)       # doctest: +SKIP
        (3.47, 4)
    """
    group = RankGroup() if group is None else group
    parts = find_parts(model)
    check_no_hooks(model)
    for forest in forests:
        check_forest(forest, parts)
    objective = sft(loss_masks, "token_mean")
    plan = plan_step(forests, objective, max_tokens, device=parts.device)
    units: list[Unit] = [*plan.micro_batches, *plan.partitioned]
    batch = flatten_batch(read_entries(forests, objective), objective, group.sum)
    with nullcontext() if is_active(parts) else tree_attention(model, backend):
        run = StepRun(
            plan,
            objective,
            batch,
            Scorer(parts=without_gradients(parts, forests), temperature=1.0, entropy_of="none", value_head=None),
            parents="keep",
            max_bytes=None,
            min_micro_batches=max(group.gather(sum(map(num_forwards, units)))),
            in_step=group.size > 1,
            on_progress=on_progress,
        )
        run.evaluate()
        if parts.shards is not None:
            # A checkpoint reads what is sharded.
            parts.shards.release()
    own = [run.totals.loss, batch.num_trained]
    loss, num_tokens = (sum(values) for values in zip(*group.gather(own), strict=True))
    return loss, round(num_tokens)
