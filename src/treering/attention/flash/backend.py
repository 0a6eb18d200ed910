"""The `flash` backend: FlashAttention-4 on Hopper and Blackwell, with lists of blocks and a mask of our own.

N tokens   H query heads   G key heads   D head size
"""

from importlib import metadata
from importlib.util import find_spec

import torch
from jaxtyping import Float
from packaging.version import Version
from torch import Tensor

from treering.attention.flash.ops import flash_forward
from treering.attention.flash.tables import FlashTables
from treering.attention.form import Form
from treering.attention.gateway import KeysValues
from treering.attention.joined import join_differentiably
from treering.attention.layout import TreeLayout
from treering.errors import UnsupportedError

HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities of the first two generations; 11 is Blackwell's too, 12 has other kernels."""

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZES = {HOPPER: 256, BLACKWELL: 128, 11: 128}
"""Largest heads whose backward takes lists of blocks, by generation."""

MIN_VERSION = Version("4.0.0b26")
"""Before it the backward with lists of blocks read values on Hopper before they were written, in 0.1 to 1 %
of launches (Dao-AILab/flash-attention issue 2756)."""


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
    keys = join_differentiably(KeysValues(key, value), layout, layer)
    tables = _tables(layout, form.window, query.dtype, query.shape[3])
    return attend_by_tables(query, *keys, sinks, tables, scale=form.scale, softcap=form.softcap)


def attend_by_tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    tables: FlashTables,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention [1, H, N, D] of queries [1, H, N, D] to keys and values [1, G, K, D]; compilers read through it."""
    rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out: Tensor = flash_forward(*rows, sinks, *tables, scale, softcap or 0.0)[0]
    return out.transpose(1, 2)


def prepare_flash(layout: TreeLayout, window: int | None, dtype: torch.dtype, head_size: int) -> None:
    """Makes the tables of a window before layers run, so that compiled ones need not leave their graph for them.

    Does nothing for partitions, whose layers exchange keys with others.

    Raises:
        UnsupportedError: see `check_flash`.
    """
    if not layout.ancestors and layout.gateway is None:
        layout.prepared[window] = _tables(layout, window, dtype, head_size)


def _tables(layout: TreeLayout, window: int | None, dtype: torch.dtype, head_size: int) -> FlashTables:
    device = layout.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_flash(capability, dtype, head_size)
    return FlashTables.of(layout, window, blocks_of(HOPPER if capability is None else capability[0], head_size))


def blocks_of(generation: int, head_size: int) -> tuple[int, int]:
    """Rows and keys of a block. Those of keys are the tiles of the backward; Blackwell works on two tiles of rows.

    Example: heads of 128 on Hopper have blocks of 128 by 128, heads of 256 of 128 by 64.
    """
    keys = 128 if head_size <= 128 else 96 if head_size <= 192 else 64
    return (128 if generation == HOPPER else 256), keys


def flash_version() -> str | None:
    """The version of flash-attn-4, None where it is not installed; does not import it."""
    try:
        return metadata.version("flash-attn-4") if find_spec("flash_attn.cute") is not None else None
    except (ImportError, metadata.PackageNotFoundError):
        return None


def check_flash(capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int) -> None:
    """Refuses what the kernels do not support.

    Args:
        capability: compute capability of the tensors' device; None where it is no CUDA device.
        dtype: of the tensors.
        head_size: of queries and keys.

    Raises:
        UnsupportedError: a missing or too old package, or a device, dtype, head size or deterministic mode that the
            kernels do not support; names the backend to choose instead.

    Example: (9, 0), bfloat16 and 128 pass where flash-attn-4 is installed; (8, 0), an A100, is refused.
    """
    generation = None if capability is None else capability[0]
    if generation not in MAX_HEAD_SIZES:
        where = "no CUDA device" if capability is None else f"a device of capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(f"the flash backend runs on Hopper and Blackwell, got tensors on {where}: choose auto")
    if dtype not in DTYPES:
        raise UnsupportedError(f"the flash backend computes in bfloat16 and float16, not in {dtype}: choose triton")
    largest = MAX_HEAD_SIZES[generation]
    if head_size > largest or head_size % 8:
        raise UnsupportedError(
            f"the flash backend takes heads of at most {largest} on this device, in multiples of 8, got {head_size}: "
            "choose triton or flex"
        )
    if torch.are_deterministic_algorithms_enabled():
        name = "Hopper" if generation == HOPPER else "Blackwell"
        raise UnsupportedError(
            f"the flash backend sums gradients in no fixed order on {name}, and torch.use_deterministic_algorithms is "
            "on: choose triton, or turn it off"
        )
    _check_version(flash_version())


def _check_version(version: str | None) -> None:
    if version is None:
        raise UnsupportedError(
            "the flash backend needs flash-attn-4, which is not installed: pip install 'treering[flash]', or choose "
            "auto"
        )
    if Version(version) < MIN_VERSION:
        raise UnsupportedError(
            f"the flash backend needs flash-attn-4 4.0.0b26 or newer, got {version}, whose backward reads values "
            "before they are written in one of some hundred launches: pip install --pre -U flash-attn-4, or choose auto"
        )
