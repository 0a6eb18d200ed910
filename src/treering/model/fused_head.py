"""A fused output head on distinct pairs: each token's state is scored once with each label that follows it.

The head is the trainer's own, such as TRL's; only what it is given and where its results go is of a forest.

    B rows   T columns   E distinct pairs of a token and its label   L labels of the batch
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import InputError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelPairs:
    """Distinct pairs of a token and its label."""

    rows: Tensor
    """int64 [E], packed indices of the tokens whose states are scored."""
    labels: Tensor
    """int64 [E], the labels."""
    inverse: Tensor
    """int64 [L], the pair of each label of the batch, row-major."""


def label_pairs(places: NDArray[np.int64], labels: Tensor, mask: Tensor) -> LabelPairs:
    """The distinct pairs of a batch.

    Args:
        places: int64 [B, T], packed index of each token, -1 at padding.
        labels: int64 [B, T], not shifted.
        mask: bool [B, T - 1], which labels from the second column on count.

    Raises:
        InputError: a label that no token stands before.

    Example: two equal rows have the pairs of one of them.
    """
    wanted = mask.cpu().numpy()
    rows = places[:, :-1][wanted]
    if (rows < 0).any():
        raise InputError("a label needs a token before it, and one stands after padding; set labels there to -100")
    targets = labels[:, 1:].cpu().numpy()[wanted].astype(np.int64)
    keys, inverse = np.unique(np.stack([rows, targets]), axis=1, return_inverse=True)
    device = labels.device
    return LabelPairs(
        rows=torch.from_numpy(keys[0].copy()).to(device),
        labels=torch.from_numpy(keys[1].copy()).to(device),
        inverse=torch.from_numpy(inverse.reshape(-1)).to(device),
    )


def as_batch(output: Any, pairs: LabelPairs, mask: Tensor, num_items: Any) -> Any:
    """A fused head's output of E pairs as that of the batch: fields per label spread, the loss over all labels.

    Args:
        output: a record with `loss`, `log_probs` [1, E] and others.
        pairs: that were scored.
        mask: bool [B, T - 1], as for `label_pairs`.
        num_items: what the head divided its loss by; None for the number of labels.

    Raises:
        UnsupportedError: the output is no such record.
    """
    names = [field.name for field in fields(output)] if is_dataclass(output) else []
    if not {"loss", "log_probs"}.issubset(names):
        raise UnsupportedError(f"a fused head returns a record, as TRL's does, got {type(output).__name__}; update trl")
    spread: dict[str, Any] = {}
    for name in names:
        value = getattr(output, name)
        if isinstance(value, Tensor) and value.shape == (1, pairs.rows.numel()):
            each = value[0].index_select(0, pairs.inverse)
            spread[name] = value.new_zeros(mask.shape).masked_scatter(mask, each)
    scored, batched = output.log_probs.sum(), spread["log_probs"].sum()
    if num_items is None:
        scored, batched = scored / pairs.rows.numel(), batched / mask.sum()
    else:
        scored, batched = scored / num_items, batched / num_items
    # What the loss has beside the log-probs, such as a router's, is over the whole batch already.
    return replace(output, **spread | {"label_mask": mask, "loss": output.loss + scored - batched})
