"""`GroupedWorker`: verl's worker of an actor, with mini-batches of whole groups.

verl's workers name the class of their actor, and the plugin puts this one there where
`TREERING_VERL_GROUPS=whole_mini_batches`. Imported by the plugin and by nobody else, because it needs verl.
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
    """Updates as verl's worker does, but cuts a batch between groups.

    verl cuts the rows of each rank in their order, which takes the rows of a prompt to several mini-batches.
    Mini-batches stay as many and as large. Which rows are in one changes, and with it the course of the training.
    """

    def train_mini_batch(self, data: Any) -> Any:
        """Verl's contract: the rows of this rank in, metrics out.

        Raises:
            UnsupportedError: rows are shuffled, which would take groups apart again.
            InputError: mini-batches cannot get equally many rows of each rank.
        """
        if tu.get_non_tensor_data(data, key="dataloader_kwargs", default={}).get("shuffle"):
            raise UnsupportedError(
                "actor_rollout_ref.actor.shuffle=True mixes rows, and mini-batches of whole groups do not: write "
                "False, or TREERING_VERL_GROUPS=whole"
            )
        return super().train_mini_batch(_in_whole_groups(data, self.engine.get_data_parallel_group()))


def _in_whole_groups(data: Any, group: dist.ProcessGroup) -> Any:
    """The rows that this rank computes, one mini-batch after another, from those that it has."""
    num_ranks, own_rank = dist.get_world_size(group), dist.get_rank(group)
    size, number = (tu.get_non_tensor_data(data, key, default=None) for key in ("mini_batch_size", "num_mini_batch"))
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, prompts_of(data), group=group)
    prompts = [prompt for own in gathered for prompt in own]
    rows = order_rows(prompts, num_ranks, number if size is None else len(prompts) // size)
    rank_of_row = np.empty(len(prompts), np.int64)
    rank_of_row[rows] = np.arange(num_ranks)[:, None]
    received = RowExchange(rank_of_row, group, get_device_id()).there(data)
    # Rows arrive in the order of their numbers.
    places = np.searchsorted(np.sort(rows[own_rank]), rows[own_rank])
    return tu.index_select_tensor_dict(received, places.tolist())
