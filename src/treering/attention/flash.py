"""The `flash` backend: FlashAttention-4 on Hopper and Blackwell, through FlexAttention's option `BACKEND`.

It reads the same ranges and blocks as `flex`. Torch from 2.13 compiles the mask into the kernel, and flash-attn-4 holds
the kernel. On head size 64 releases of flash-attn-4 before June 2026 return wrong gradients on Hopper
(Dao-AILab/flash-attention issue 2623), which the self-check refuses.

    N tokens   H query heads   G key heads   D head size
"""

from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.flex import BLOCK_SIZE, flex_attention_on_forest
from treering.attention.form import Form
from treering.attention.layout import TreeLayout
from treering.errors import UnsupportedError

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""First compute capabilities of the two generations."""

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 128
"""Above it the kernels' tiles do not divide blocks of 128 keys (Dao-AILab/flash-attention issues 2429 and 2903)."""

MIN_TORCH = (2, 13)


def flash_attention_on_forest(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    form: Form,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path; differentiable, with sums of gradients in no fixed order.

    Raises:
        UnsupportedError: see `check_flash`.
    """
    device = query.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_flash(capability, query.dtype, query.shape[3])
    # Blackwell's kernel works on two tiles of 128 queries at a time.
    is_blackwell = capability is not None and capability >= BLACKWELL
    return flex_attention_on_forest(
        query, key, value, layout=layout, form=form, sinks=sinks, layer=layer,
        kernel="FLASH", query_block=(2 if is_blackwell else 1) * BLOCK_SIZE,
    )  # fmt: skip


def has_flash() -> bool:
    """Whether flash-attn-4 is installed; does not import it."""
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def check_flash(capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int) -> None:
    """Refuses what the kernels do not support.

    Args:
        capability: compute capability of the tensors' device; None where it is no CUDA device.
        dtype: of the tensors.
        head_size: of queries and keys.

    Raises:
        UnsupportedError: a missing package, or a device, dtype, head size or deterministic mode that the kernels do not
            support; names the backend to choose instead.

    Example: (9, 0), bfloat16 and 128 pass where flash-attn-4 is installed; (8, 0), an A100, is refused.
    """
    if capability is None or capability < HOPPER:
        where = "no CUDA device" if capability is None else f"a device of capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(f"the flash backend runs on Hopper and Blackwell, got tensors on {where}: choose auto")
    if dtype not in DTYPES:
        raise UnsupportedError(f"the flash backend computes in bfloat16 and float16, not in {dtype}: choose triton")
    if head_size > MAX_HEAD_SIZE:
        raise UnsupportedError(
            f"the flash backend takes heads of at most {MAX_HEAD_SIZE}, got {head_size}: choose triton or flex"
        )
    if torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "the flash backend sums gradients in no fixed order, and torch.use_deterministic_algorithms is on: choose "
            "triton, or turn it off"
        )
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MIN_TORCH or not has_flash():
        raise UnsupportedError(
            f"the flash backend needs torch 2.13 or newer, got {torch.__version__}, and flash-attn-4, which is "
            f"{'' if has_flash() else 'not '}installed: pip install --pre flash-attn-4, or choose auto"
        )
