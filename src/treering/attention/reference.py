"""The specification of tree attention: a dense mask and a softmax. O(N^2) memory; for tests and small forests.

N tokens   H query heads   G key heads   D head size
"""

import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.form import Form
from treering.attention.gateway import KeysValues
from treering.attention.joined import join_differentiably
from treering.attention.layout import TreeLayout


def reference_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    form: Form,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path: softmax(scores of visible keys) v, by autograd.

    Computed in float32 or wider and rounded once, at the end.
    """
    key, value = join_differentiably(KeysValues(key, value), layout, layer)
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (heads.to(wide).repeat_interleave(groups, 1) for heads in (key, value))
    scores = query.to(wide) @ keys.mT * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(~layout.visible(form.window), float("-inf"))
    if sinks is not None:
        per_row = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, per_row], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype)
