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
    """Attention of every token over its own path: softmax(scale q k^T over visible keys) v, by autograd.

    Computed in float32 or wider and rounded once, at the end.
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (heads.to(wide).repeat_interleave(groups, 1) for heads in (key, value))
    scores = query.to(wide) @ keys.mT * scale
    weights = scores.masked_fill(~layout.visible(), float("-inf")).softmax(-1)
    return (weights @ values).to(query.dtype)
