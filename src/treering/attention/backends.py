"""The names of the backends, and the function that each of them calls."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from treering.attention.flash import flash_attention_on_forest
from treering.attention.flex import flex_attention_on_forest
from treering.attention.reference import reference_attention
from treering.attention.segments import segment_attention
from treering.attention.triton import triton_attention

Backend = Literal["segments", "reference", "flex", "triton", "flash"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def implementation(backend: Backend) -> Callable[..., Tensor]:
    """The function of a backend; all have one signature, that of `reference_attention`.

    Example: `implementation("reference")` is `reference_attention`.
    """
    return {
        "segments": segment_attention,
        "reference": reference_attention,
        "flex": flex_attention_on_forest,
        "triton": triton_attention,
        "flash": flash_attention_on_forest,
    }[backend]
