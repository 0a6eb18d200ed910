"""The specification of tree attention: a dense mask and a softmax. O(N^2) memory; for tests and small forests.

N tokens   H query heads   G key heads   D head size
"""

import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.layout import TreeLayout


def reference_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    scale: float,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path: softmax(scale q k^T over visible keys) v, by autograd."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT) * scale
    weights = scores.masked_fill(~layout.visible(), float("-inf")).softmax(-1, dtype=_wide(query))
    return weights.to(value.dtype) @ value


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
