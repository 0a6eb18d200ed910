"""`GroupedWorker`: verl's actor worker with mini-batches of whole groups.

verl's workers name the class of their actor; the plugin sets this class if `TREERING_VERL_GROUPS=whole_mini_batches`.
Only the plugin imports this file, because it needs verl.
"""

from typing import Any

import numpy as np
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import TrainingWorker

from treering.errors import UnsupportedError
from treering.integrations.verl.row_groups import order_rows
from treering.integrations.verl.verl_engine import RowExchange, prompts_of


class GroupedWorker(TrainingWorker):  # type: ignore[misc]
    """verl's actor worker, except that it cuts a batch into mini-batches between groups.

    verl cuts each rank's rows in order, which spreads a prompt's rows over several mini-batches. The number and size of
    mini-batches stay the same, but their rows change, and with them the course of training.
    """

    def train_mini_batch(self, data: Any) -> Any:
        """Train on this rank's rows and return metrics, by verl's contract.

        Raises:
            UnsupportedError: rows are shuffled, which would separate groups again.
            InputError: mini-batches cannot get the same number of rows from each rank.
        """
        if tu.get_non_tensor_data(data, key="dataloader_kwargs", default={}).get("shuffle"):
            raise UnsupportedError(
                "actor_rollout_ref.actor.shuffle=True separates groups, but mini-batches are to hold whole ones: set "
                "False, or TREERING_VERL_GROUPS=whole"
            )
        return super().train_mini_batch(_in_whole_groups(data, self.engine.get_data_parallel_group()))


def _in_whole_groups(data: Any, group: dist.ProcessGroup) -> Any:
    """Return the rows that this rank computes, one mini-batch after another, in exchange for its own rows."""
    num_ranks, own_rank = dist.get_world_size(group), dist.get_rank(group)
    size, number = (tu.get_non_tensor_data(data, key, default=None) for key in ("mini_batch_size", "num_mini_batch"))
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, prompts_of(data), group=group)
    prompts = [prompt for own in gathered for prompt in own]
    rows = order_rows(prompts, num_ranks, number if size is None else len(prompts) // size)
    rank_of_row = np.empty(len(prompts), np.int64)
    rank_of_row[rows] = np.arange(num_ranks)[:, None]
    received = RowExchange(rank_of_row, group, get_device_id()).there(data)
    # Received rows are sorted by their numbers.
    order = np.searchsorted(np.sort(rows[own_rank]), rows[own_rank])
    return tu.index_select_tensor_dict(received, order.tolist())
