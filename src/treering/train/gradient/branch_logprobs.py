"""Score branches with another model than the trained one, without gradients: each distinct token is computed once.

K branches   N tokens of a unit   T tokens of a branch
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from treering.arrays import BoolArray, Float64Array
from treering.model.checks import check_whole
from treering.model.context import tree_attention
from treering.model.edges import EdgeScores, edge_table
from treering.model.families import find_parts
from treering.model.forward import check_forest, hidden_states, without_gradients
from treering.train.gradient.edge_vectors import put_scores
from treering.train.gradient.partitioned import PartitionedStep
from treering.train.gradient.scoring import Scorer
from treering.train.gradient.teacher import Unit
from treering.tree.forest import Forest
from treering.tree.plan.partition import PartitionedTree
from treering.tree.plan.plan import plan_batch


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
    logprobs = _scores(unit, wanted, scorer).logprobs.double().cpu().numpy()
    for branch, path in zip(unit.branches, paths, strict=True):
        found[branch] = np.where(loss_masks[branch], logprobs[path], 0.0)


def _scores(unit: Unit, wanted: BoolArray, scorer: Scorer) -> EdgeScores:
    if isinstance(unit, PartitionedTree):
        return PartitionedStep(unit, wanted, scorer, "keep").score()
    table = edge_table(unit.forest, wanted)
    everywhere = scorer.no_scores(unit.forest.num_tokens)
    put_scores(everywhere, scorer.scores(hidden_states(scorer.parts, unit.forest), unit.forest, table), table)
    return everywhere
