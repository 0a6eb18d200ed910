"""Rows of a generation batch regrouped: rollouts of one prompt stand together in micro-batches.

TRL shuffles a generation batch before it splits it, so a prompt's rollouts fall into different micro-batches. Here
groups stand in the order in which the shuffle shows them first, and rows of a group in the shuffle's order, so the
order is that of TRL's own seed and no further random number is drawn.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

MicroBatch = dict[str, Any]
"""Tensors [rows, ...], lists of one entry per row, and values of the whole batch."""


def regroup(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of one generation batch, their rows regrouped by prompt.

    Args:
        batches: equally large, in order; rows with equal `prompt_ids`, `prompt_mask` and pictures are one group.

    Returns:
        As many micro-batches, of the same sizes.

    Example: prompts [[a, b], [b, a]] become [[a, a], [b, b]].
    """
    if len(batches) < 2:
        return batches
    # TRL holds the pictures of all rows one after another; here each row has its own.
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    joined = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = torch.cat([joined["prompt_mask"], joined["prompt_ids"]], dim=1).cpu().numpy()
    order = group_order(np.concatenate([prompts, _picture_keys(joined.get("pixel_values"), len(prompts))], axis=1))
    num_rows = len(order) // len(batches)
    regrouped = (
        {name: _taken(value, order[start : start + num_rows], len(order)) for name, value in joined.items()}
        for start in range(0, len(order), num_rows)
    )
    return [unsplit_pixel_values_by_grid(batch) for batch in regrouped]


def group_order(prompts: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of rows, equal rows together: groups by their first row, rows of a group in order.

    Args:
        prompts: [rows, columns].

    Example: rows a, b, a give [0, 2, 1].
    """
    _, first, group = np.unique(prompts, axis=0, return_index=True, return_inverse=True)
    return np.argsort(first[group.reshape(-1)], kind="stable")


def _picture_keys(pixels: list[Tensor] | None, num_rows: int) -> NDArray[np.int64]:
    """int64 [rows, 2], equal for rows with equal pictures; [rows, 0] without pictures."""
    if pixels is None:
        return np.empty((num_rows, 0), np.int64)
    digests = (blake2b(one.float().cpu().numpy().tobytes(), digest_size=16).digest() for one in pixels)
    return np.stack([np.frombuffer(digest, np.int64) for digest in digests])


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
