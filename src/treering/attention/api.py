"""One function, several backends: validates, dispatches, and says which backend `auto` chose and why.

N tokens   H query heads   G key heads   D head size
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.layout import TreeLayout
from treering.attention.reference import reference_attention
from treering.attention.segments import segment_attention
from treering.errors import ConfigError, InputError

Backend = Literal["segments", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Choice(NamedTuple):
    """A backend and the reason for it, in words for a log."""

    backend: Backend
    reason: str


def choose_backend(requested: str) -> Choice:
    """The backend that runs for `requested` ("auto" or a name) and why.

    Raises:
        ConfigError: no such backend.
    """
    if requested == "auto":
        return Choice("segments", "auto: exact on every device with O(N) memory")
    for backend in BACKENDS:
        if backend == requested:
            return Choice(backend, "as requested")
    raise ConfigError(f"unknown attention backend {requested!r}: choose auto, {', '.join(BACKENDS)}")


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    scale: float,
    backend: Backend = "segments",
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token of a forest over its own root-to-token path.

    A layout with ancestors or a gateway reads and leaves keys, values and their gradients there, as layer `layer`.

    Args:
        query: [1, H, N, D] with positions already applied (RoPE by depth, not by packed index).
        key: [1, G, N, D]; H must be a multiple of G.
        value: [1, G, N, D].
        layout: of the forest whose tokens the N rows are.
        scale: factor on the scores, usually D ** -0.5.
        backend: which implementation computes it.
        layer: number of the layer, by which gateways keep layers apart.

    Returns:
        [1, H, N, D] in the dtype of `query`; differentiable.

    Raises:
        InputError: shapes that do not belong together.
    """
    if query.shape[2] != layout.forest.num_tokens:
        raise InputError(f"attention got {query.shape[2]} rows for a forest of {layout.forest.num_tokens} tokens")
    if query.shape[1] % key.shape[1]:
        raise InputError(f"query heads must be a multiple of key heads, got {query.shape[1]} and {key.shape[1]}")
    if query.shape[2] == 0:
        return query
    # Autocast would round the scores and the running softmax, which backends keep wide on purpose.
    with torch.autocast(query.device.type, enabled=False):
        if backend == "reference":
            return reference_attention(query, key, value, layout=layout, scale=scale, layer=layer)
        return segment_attention(query, key, value, layout=layout, scale=scale, layer=layer)
