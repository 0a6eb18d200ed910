"""Loops on several ranks: the model sharded by layers, each step's trees shared by cost, one report of all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from treering.model.families import find_parts
from treering.ranks.group import RankGroup
from treering.ranks.setup import prepare
from treering.train.loop.batches import StepBatch
from treering.tree.plan.costs import CostModel
from treering.tree.plan.ranks import share_among_ranks


def shard_model(model: nn.Module) -> RankGroup:
    """Shards a model over all processes: a unit for each layer, and one around the rest; sums its gradients.

    Raises:
        UnsupportedError: a model that would not be exact.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in find_parts(model).layers:
        fully_shard(layer)
    fully_shard(model)
    return prepare(model)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """This rank's part of a step.

    Attributes:
        batch: its forests and their masks; `num_tasks` is that of the whole step.
        branches: int64, the numbers of its branches in the whole step.
    """

    batch: StepBatch
    branches: NDArray[np.int64]


def share_batch(batch: StepBatch, group: RankGroup, costs: CostModel | None) -> Share:
    """This rank's share of a step by cost; every rank computes all shares by itself.

    Example: of forests with 5, 4, 3 and 3 tokens, the first of two ranks trains those of 5 and 3.
    """
    if group.size == 1:
        return Share(batch=batch, branches=np.arange(len(batch.loss_masks)))
    own = share_among_ranks(batch.forests, group.size, costs)[group.rank].forests
    first = np.cumsum([0, *(forest.num_branches for forest in batch.forests)])
    branches = np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i + 1]) for i in own)])
    return Share(
        batch=replace(
            batch,
            forests=[batch.forests[i] for i in own],
            loss_masks=[batch.loss_masks[branch] for branch in branches],
        ),
        branches=branches,
    )


def sum_over_ranks(values: Mapping[str, float], group: RankGroup) -> dict[str, float]:
    """The sum of each value over the ranks, in the order of the names."""
    names = list(values)
    totals = group.sum(np.array([float(values[name]) for name in names]))
    return dict(zip(names, totals.tolist(), strict=True))


def mean_over_ranks(averages: Mapping[str, float], weight: float, group: RankGroup) -> dict[str, float]:
    """The averages over the ranks' entries, of which this one has `weight`; a rank without any may know no names."""
    if group.size == 1:
        return dict(averages)
    facts = group.gather((weight, dict(averages)))
    total = max(sum(own for own, _ in facts), 1e-300)
    names = sorted({name for _, known in facts for name in known})
    return {name: sum(own * known.get(name, 0.0) for own, known in facts) / total for name in names}
