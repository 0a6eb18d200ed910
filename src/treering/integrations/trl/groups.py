"""Rows of a generation batch regrouped: rollouts of one prompt stand together in micro-batches.

TRL shuffles a generation batch before it splits it, so a prompt's rollouts fall into different micro-batches. Here
groups stand in the order in which the shuffle shows them first, and rows of a group in the shuffle's order, so the
order is that of TRL's own seed and no further random number is drawn.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MicroBatch = dict[str, Any]
"""Tensors [rows, ...], lists of one entry per row, and values of the whole batch."""


def regroup(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of one generation batch, their rows regrouped by prompt.

    Args:
        batches: equally large, in order; rows with equal `prompt_ids` and `prompt_mask` are one group.

    Returns:
        As many micro-batches, of the same sizes.

    Example: prompts [[a, b], [b, a]] become [[a, a], [b, b]].
    """
    if len(batches) < 2:
        return batches
    rows = torch.cat([torch.cat([batch["prompt_mask"], batch["prompt_ids"]], dim=1) for batch in batches])
    order = group_order(rows.cpu().numpy())
    num_rows = len(order) // len(batches)
    joined = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    starts = range(0, len(order), num_rows)
    return [
        {name: _taken(value, order[start : start + num_rows], len(order)) for name, value in joined.items()}
        for start in starts
    ]


def group_order(prompts: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of rows, equal rows together: groups by their first row, rows of a group in order.

    Args:
        prompts: [rows, columns].

    Example: rows a, b, a give [0, 2, 1].
    """
    _, first, group = np.unique(prompts, axis=0, return_index=True, return_inverse=True)
    return np.argsort(first[group.reshape(-1)], kind="stable")


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(values)
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    return first


def _taken(value: Any, rows: NDArray[np.intp], num_rows: int) -> Any:
    if isinstance(value, Tensor) and value.ndim > 0:
        return value[torch.from_numpy(rows).to(value.device)]
    if isinstance(value, list) and len(value) == num_rows:
        return [value[row] for row in rows]
    return value
