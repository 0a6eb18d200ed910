"""A fused output head on distinct pairs: each token's state is scored once with each label that follows it.

The head is the trainer's own, such as TRL's; only what it is given and where its results go is of a forest.

    B rows   T columns   E distinct pairs of a token and its label   L labels of the batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.attention.to_device import to_device
from treering.errors import InputError, UnsupportedError

MAX_CPU_LOGITS = 2**23
"""Most logits of one call of the head on CPU: 32 MiB in float32. Larger temporaries come from fresh pages each time:
TRL's head of 768 pairs and 32,000 tokens took 1.65 s with them, and 0.95 s without (one thread)."""


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
        rows=to_device(keys[0], device),
        labels=to_device(keys[1], device),
        inverse=to_device(inverse.reshape(-1), device),
    )


def parts_of(pairs: LabelPairs, vocab_size: int) -> list[slice]:
    """Ranges of pairs, each of which the head scores in one call: on CPU at most `MAX_CPU_LOGITS` logits each.

    Example: 1,000 pairs and a vocabulary of 32,000 are 262 pairs a call, so 4 calls.
    """
    num_pairs = pairs.rows.numel()
    size = max(1, MAX_CPU_LOGITS // vocab_size) if pairs.rows.device.type == "cpu" else num_pairs
    return [slice(start, start + size) for start in range(0, num_pairs, size)]


def as_batch(outputs: Sequence[Any], pairs: LabelPairs, mask: Tensor, num_items: Any) -> Any:
    """A fused head's outputs of E pairs as that of the batch: fields per label spread, the loss over all labels.

    Args:
        outputs: records with `loss`, `log_probs` [1, pairs of the part] and others, in order.
        pairs: that were scored.
        mask: bool [B, T - 1], as for `label_pairs`.
        num_items: what the head divided its losses by.

    Raises:
        UnsupportedError: an output is no such record.
    """
    output = outputs[0]
    names = [field.name for field in fields(output)] if is_dataclass(output) else []
    if not {"loss", "log_probs"}.issubset(names):
        raise UnsupportedError(f"a fused head returns a record, as TRL's does, got {type(output).__name__}; update trl")
    if len(outputs) > 1:
        output = _joined(outputs, names)
    spread: dict[str, Any] = {}
    for name in names:
        value = getattr(output, name)
        if isinstance(value, Tensor) and value.shape == (1, pairs.rows.numel()):
            each = value[0].index_select(0, pairs.inverse)
            spread[name] = value.new_zeros(mask.shape).masked_scatter(mask, each)
    # What the loss has beside the log-probs, such as a router's, is over the whole batch already.
    rest = output.loss + output.log_probs.sum() / num_items
    return replace(output, **spread | {"label_mask": mask, "loss": rest - spread["log_probs"].sum() / num_items})


def _joined(outputs: Sequence[Any], names: list[str]) -> Any:
    """One record of consecutive ones: values per pair one after another, the sum of the losses, the first's others."""
    first = outputs[0]
    per_pair = [name for name in names if isinstance(value := getattr(first, name), Tensor) and value.ndim == 2]
    joined = {name: torch.cat([getattr(output, name) for output in outputs], dim=1) for name in per_pair}
    losses: list[Tensor] = [output.loss for output in outputs]
    return replace(first, **joined | {"loss": torch.stack(losses).sum()})
