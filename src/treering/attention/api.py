"""`attend`: validate the arguments and dispatch to a backend.

N tokens   H query heads   G key heads   D head size
"""

import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.backends import Backend, implementation
from treering.attention.form import Form
from treering.attention.layout import TreeLayout
from treering.attention.self_check import AttentionShape, verify
from treering.errors import InputError


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    form: Form,
    sinks: Float[Tensor, " H"] | None = None,
    backend: Backend = "segments",
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token of a forest over its own root-to-token path.

    The first call with a shape in a process checks the backend against the reference (`self_check.verify`). If the
    layout has ancestors or a gateway, keys, values and their gradients are exchanged there as layer `layer`.

    Args:
        query: [1, H, N, D] with positions already applied (RoPE by depth, not by packed index).
        key: [1, G, N, D]; H must be a multiple of G.
        value: [1, G, N, D].
        layout: of the forest; row i is its token i.
        form: scale, sliding window and softcap.
        sinks: [H] score of a key without a value that every query of a head sees (gpt-oss); None without sinks.
        backend: implementation to use.
        layer: number of the layer, the key in gateways.

    Returns:
        [1, H, N, D] in the dtype of `query`; differentiable.

    Raises:
        InputError: shapes that do not match.
        UnsupportedError: a device, dtype, head size or gradient that the backend does not support, or the backend is
            wrong there.
    """
    if query.shape[2] != layout.forest.num_tokens:
        raise InputError(f"attention got {query.shape[2]} rows for a forest of {layout.forest.num_tokens} tokens")
    if query.shape[1] % key.shape[1]:
        raise InputError(f"query heads must be a multiple of key heads, got {query.shape[1]} and {key.shape[1]}")
    if query.shape[2] == 0:
        return query
    # Autocast would round the scores and the running softmax, which backends keep in float32 or wider.
    with torch.autocast(query.device.type, enabled=False):
        verify(backend, _shape(query, key, form, sinks))
        run = implementation(backend)
        return run(query, key, value, layout=layout, form=form, sinks=sinks, layer=layer)


def _shape(query: Tensor, key: Tensor, form: Form, sinks: Tensor | None) -> AttentionShape:
    return AttentionShape(
        num_heads=query.shape[1],
        num_key_heads=key.shape[1],
        head_size=query.shape[3],
        dtype=query.dtype,
        device=query.device,
        has_window=form.window is not None,
        softcap=form.softcap,
        has_sinks=sinks is not None,
    )
