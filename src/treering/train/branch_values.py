"""Turn per-branch arguments (masks, advantages, old log-probabilities) into arrays per entry.

Accepts lists, arrays and tensors; errors name the wrong branch and token.

    K branches, forests in order, then sequences   F flat entries: their tokens, branches one after another
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import InputError

Number = bool | int | float
BranchValue = Number | Sequence[Number] | NDArray[Any] | Tensor
"""The value of one branch: a number, or one number per token."""

BranchValues = Sequence[BranchValue] | NDArray[Any] | Tensor
"""One item per branch: forests in order, then sequences."""


def as_masks(masks: BranchValues, branch_length: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    """K masks of 0 and 1 as booleans.

    Raises:
        InputError: the number of masks, the length of one, or an entry is wrong.

    Example: masks [[0, 1], [1]] of branches of 2 and 1 tokens are [False, True] and [True].
    """
    _check_count("loss_masks", masks, branch_length)
    return [_as_mask(i, mask, int(branch_length[i])) for i, mask in enumerate(masks)]


def flatten(
    name: str,
    items: BranchValues,
    branch_length: NDArray[np.int64],
    *,
    trained: NDArray[np.bool_],
    numbers: Literal["spread", "refuse"] = "spread",
) -> NDArray[np.float64]:
    """Spreads one item per branch, a number or one number per token, to entries: float64 [F].

    Args:
        name: what errors call the list.
        items: K items.
        branch_length: int64 [K].
        trained: bool [F]; values elsewhere may be anything, including NaN.
        numbers: "spread" repeats an item that is one number over its branch, "refuse" raises.

    Raises:
        InputError: a list or an item of the wrong length, or a trained value that is not finite.

    Example: items 2.0 and [7.0, 8.0] of branches of 3 and 2 tokens are 2, 2, 2, 7, 8.
    """
    _check_count(name, items, branch_length)
    parts = [np.zeros(0)]
    for branch, item in enumerate(items):
        array = _as_array(f"{name}[{branch}]", item).astype(np.float64, copy=False)
        length = int(branch_length[branch])
        if numbers == "refuse" and array.ndim == 0:
            raise InputError(
                f"{name}[{branch}] needs a list with one number per token ({length}), got the number {array}"
            )
        if array.shape not in ((), (length,)):
            raise InputError(f"{name}[{branch}] needs one number, or one per token ({length}), got shape {array.shape}")
        parts.append(array if array.ndim else np.full(length, array))
    flat = np.concatenate(parts)
    _check_finite(name, flat, trained, branch_length)
    return flat


def split_totals(name: str, items: BranchValues) -> tuple[list[BranchValue], list[BranchValue]]:
    """Splits items, each a total of its branch or one number per token, into (per-token items, totals).

    An item is 0 in the other list.

    Raises:
        InputError: not a list, or a total that is not finite.

    Example: items -3.0 and [-1.0, -2.0] are the per-token items [0.0, [-1.0, -2.0]] and the totals [-3.0, 0.0].
    """
    _check_list(name, items)
    arrays = [_as_array(f"{name}[{branch}]", item) for branch, item in enumerate(items)]
    for branch, array in enumerate(arrays):
        if array.ndim == 0 and not np.isfinite(array):
            raise InputError(f"{name}[{branch}] must be finite, got {array}")
    per_token: list[BranchValue] = [array if array.ndim else 0.0 for array in arrays]
    totals: list[BranchValue] = [0.0 if array.ndim else float(array) for array in arrays]
    return per_token, totals


def _as_mask(branch: int, mask: BranchValue, length: int) -> NDArray[np.bool_]:
    array = _as_array(f"loss mask {branch}", mask)
    if array.shape != (length,):
        raise InputError(f"loss mask {branch} needs one entry per token ({length}), got shape {array.shape}")
    is_binary = (array == 0) | (array == 1)
    if not is_binary.all():
        raise InputError(f"loss mask {branch} must hold 0 and 1 only, got {array[~is_binary][0]}")
    return array.astype(bool)


def _as_array(name: str, value: BranchValue) -> NDArray[Any]:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{name} must be a number or a flat list of numbers; it is ragged ({error})") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} must be a number or a flat list of numbers, got {array.dtype}")
    return array


def _check_list(name: str, items: object) -> int:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"{name} must be a list with one item per branch, got {type(items).__name__}") from error


def _check_count(name: str, items: object, branch_length: NDArray[np.int64]) -> None:
    count = _check_list(name, items)
    if count != branch_length.size:
        raise InputError(
            f"{name} needs one item per branch, forests in order, then sequences: "
            f"got {count} for {branch_length.size} branches"
        )


def _check_finite(
    name: str, values: NDArray[np.float64], trained: NDArray[np.bool_], branch_length: NDArray[np.int64]
) -> None:
    bad = np.flatnonzero(trained & ~np.isfinite(values))
    if bad.size:
        ends = np.cumsum(branch_length)
        branch = int(np.searchsorted(ends, bad[0], side="right"))
        at = int(bad[0] - ends[branch] + branch_length[branch])
        raise InputError(
            f"{name}[{branch}] must be finite where a token is trained, got {values[bad[0]]} at token {at}"
        )
