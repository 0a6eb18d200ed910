"""The `flash` backend: FlashAttention-4 on Hopper and Blackwell, with our own block lists and mask.

`flash_kernel` imports its package and is imported on first use. Eager layers call a plain autograd function. Compiled
layers call a custom operation, which costs the host 0.5 ms more per layer and step, but does not break the graph.

N query rows   K keys   H query heads   G key heads   D head size
"""

import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from packaging.version import Version
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.arrays import Int64Array
from treering.attention.blocks import find_block_pairs
from treering.attention.gateway import KeysValues
from treering.attention.layout import ScoreOptions, TreeLayout, join_differentiably, to_device
from treering.data.cache.folder import cache_folder
from treering.errors import UnsupportedError
from treering.extras import install_hint


class FlashTables(NamedTuple):
    """Tables that the kernels read of a layout under a window, in lists, as custom operations and compilers take them.

    Attributes:
        ranges: int32 arrays that the mask function reads: `first` and `stop` of each key; under a window also `limit`
            of each key and `position` of each row. They are padded, because kernels read them up to the end of the last
            block; no row sees a key of the padding.
        by_query: for the forward, the key blocks of each query block: see `BlockPairs.lists`. The mask function is not
            called in full ones.
        by_key: for the backward, the query blocks of each key block.
        block_size: rows and keys of a block.
    """

    ranges: list[Tensor]
    by_query: list[Tensor]
    by_key: list[Tensor]
    block_size: list[int]

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> "FlashTables":
        """Build the tables of a layout once per window and block size, in O(N + K + pairs of blocks) on the host.

        Example: a prompt of 128 tokens and two responses of 128 in blocks of 128 have the full pairs (1, 0) and (2, 0),
        and three masked ones on the diagonal.
        """
        window = layout.effective_window(window)
        return layout.once(f"flash tables, window {window}, {block_size}", lambda: _make(layout, window, block_size))


def _make(layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> FlashTables:
    ranges, position, device = layout.joined_ranges(), layout.ranges.position, layout.device
    pairs = find_block_pairs(ranges, position, query_size=block_size[0], key_size=block_size[1], window=window)
    arrays = [(ranges.first, block_size[1]), (ranges.stop, block_size[1])]
    if window is not None:
        arrays += [(ranges.position + window, block_size[1]), (position, block_size[0])]
    return FlashTables(
        ranges=[to_device(_padded(array, size), device) for array, size in arrays],
        by_query=pairs.lists(device),
        by_key=pairs.lists(device, is_by_key=True),
        block_size=list(block_size),
    )


def _padded(array: Int64Array, size: int) -> np.ndarray:
    """Return the array as int32, padded with zeros to a multiple of `size`."""
    return np.pad(array.astype(np.int32), (0, -array.size % size))


_OPTIONS = "Tensor[] ranges, Tensor[] by_query, Tensor[] by_key, int[] block_size, float scale, float softcap"


def attend_in_rows(*inputs: Any) -> Tensor:
    """Return the output of `flash_forward`, by the cheaper way in eager or compiled code."""
    run: Any = flash_forward if torch.compiler.is_compiling() else _Flash.apply
    out: Tensor = run(*inputs)[0]
    return out


def _kernel() -> ModuleType:
    name = "treering.attention.flash_kernel"
    if name not in sys.modules:
        _keep_kernels_on_disk()
    return import_module(name)


def _keep_kernels_on_disk() -> None:
    """Set a private folder for the package's compiled kernels, unless the user has set one; it is read at import.

    The package's default is in /tmp, where other users can put code that it would load.
    """
    folder = cache_folder().with_name("flash")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = _kernel().run_forward(*inputs)
    return out, lse


def _backward(*inputs: Any) -> list[Tensor]:
    # Compiled code relies on the strides that the fake announces, but the package returns those of the inputs.
    return [gradient.contiguous() for gradient in _kernel().run_backward(*inputs)]


flash_forward = torch.library.custom_op(
    "treering::flash_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)",
)
"""Output [1, N, H, D] and log-sum-exp [1, H, N] of queries [1, N, H, D], keys and values [1, K, G, D] and sinks [H].

Differentiable in these four. `ranges`, the lists and the block size are those of `FlashTables`; a softcap of 0 is none.
"""

flash_backward = torch.library.custom_op(
    "treering::flash_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? sinks, "
    f"{_OPTIONS}) -> Tensor[]",
)
"""Gradients of the queries, keys, values and sinks (if given) of `flash_forward`."""


@flash_forward.register_fake
def _fake_forward(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(batch, heads, rows, dtype=torch.float32)


@flash_backward.register_fake
def _fake_backward(grad_out: Tensor, *inputs: Any) -> list[Tensor]:
    query, key, value, _, _, sinks, *_ = inputs
    likes = [query, key, value] if sinks is None else [query, key, value, sinks]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in likes]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, ranges, by_query, by_key, *ctx.numbers = inputs
    ctx.counts = (len(ranges), len(by_query), len(by_key))
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, sinks, *ranges, *by_query, *by_key)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of all inputs; the registration of the operation wants a None for each tensor of a list."""
    gradients = flash_backward(*_saved(ctx, grad_out))
    nothing = [[None] * count for count in ctx.counts]
    return (*gradients[:3], gradients[3] if len(gradients) > 3 else None, *nothing, None, None, None)


def _saved(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    *tensors, sinks = ctx.saved_tensors[:6]
    rest, lists = list(ctx.saved_tensors[6:]), []
    for count in ctx.counts:
        lists.append(rest[:count])
        rest = rest[count:]
    return (grad_out.contiguous(), *tensors, sinks, *lists, *ctx.numbers)


flash_forward.register_autograd(_differentiate, setup_context=_save)


class _Flash(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = _kernel().run_backward(*_saved(ctx, grad_out))
        return (*gradients, *[None] * (10 - len(gradients)))


HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities of the first two generations; 11 is also Blackwell, 12 has other kernels."""

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZES = {HOPPER: 256, BLACKWELL: 128, 11: 128}
"""Largest head size whose backward takes block lists, by generation."""

HEAD_MULTIPLES = {HOPPER: 32, BLACKWELL: 8, 11: 8}
"""On an H200, 4.0.0b36 leaked gradients between branches with heads of 80, and was right with 64, 96, 128 and 256."""

MIN_VERSION = Version("4.0.0b26")
"""In earlier versions, the backward with block lists read values on Hopper before they were written, in 0.1 to 1 %
of launches (Dao-AILab/flash-attention issue 2756)."""

MIN_VERSION_ABOVE_128 = Version("4.0.0b33")
"""For heads above 128: in earlier versions, the forward ignores the lists' block size there."""


def flash_attention_on_forest(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token over its own path; differentiable, with sums of gradients in no fixed order.

    Raises:
        UnsupportedError: see `check_flash`.
    """
    keys = join_differentiably(KeysValues(key, value), layout, layer)
    tables = _tables(layout, options.window, query.dtype, query.shape[3])
    return attend_by_tables(query, *keys, sinks, tables, scale=options.scale, softcap=options.softcap)


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
    """Compute attention [1, H, N, D] of queries [1, H, N, D] to keys and values [1, G, K, D]; compilers trace it."""
    rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return attend_in_rows(*rows, sinks, *tables, scale, softcap or 0.0).transpose(1, 2)


def prepare_flash(layout: TreeLayout, window: int | None, dtype: torch.dtype, head_size: int) -> None:
    """Build the tables of a window before layers run, so that compiled ones need not leave their graph for them.

    It does nothing for partitions, whose layers exchange keys with others.

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
    """Return the rows and keys of a block: keys as in a tile of the backward, rows twice a tile on Blackwell.

    Example: heads of 128 on Hopper have blocks of 128 by 128, heads of 256 of 128 by 64.
    """
    keys = 128 if head_size <= 128 else 96 if head_size <= 192 else 64
    return (128 if generation == HOPPER else 256), keys


@cache
def flash_version() -> str | None:
    """Return the version of flash-attn-4, None where it is not installed; read once in a process, without an import."""
    try:
        return metadata.version("flash-attn-4") if find_spec("flash_attn.cute") is not None else None
    except (ImportError, metadata.PackageNotFoundError):
        return None


def check_flash(capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int) -> None:
    """Refuse what the kernels do not support.

    Args:
        capability: compute capability of the tensors' device; None where it is not a CUDA device.
        dtype: dtype of the tensors.
        head_size: head size of queries and keys.

    Raises:
        UnsupportedError: the package is missing or too old, or the kernels do not support the device, dtype, head size
            or deterministic mode; the message names the backend to choose instead.

    Example: (9, 0), bfloat16 and 128 pass where flash-attn-4 is installed; (8, 0), an A100, is refused.
    """
    generation = None if capability is None else capability[0]
    if generation not in MAX_HEAD_SIZES:
        where = "no CUDA device" if capability is None else f"a device of capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(f"the flash backend runs on Hopper and Blackwell, got tensors on {where}: choose auto")
    if dtype not in DTYPES:
        raise UnsupportedError(f"the flash backend computes in bfloat16 and float16, not in {dtype}: choose triton")
    largest, multiple = MAX_HEAD_SIZES[generation], HEAD_MULTIPLES[generation]
    if head_size > largest or head_size % multiple:
        raise UnsupportedError(
            f"the flash backend takes heads of at most {largest} on this device, in multiples of {multiple}, got "
            f"{head_size}: choose triton or flex"
        )
    if torch.are_deterministic_algorithms_enabled():
        name = "Hopper" if generation == HOPPER else "Blackwell"
        raise UnsupportedError(
            f"the flash backend sums gradients in no fixed order on {name}, and torch.use_deterministic_algorithms is "
            "on: choose triton, or turn it off"
        )
    _check_version(flash_version(), head_size)


@cache
def _check_version(version: str | None, head_size: int) -> None:
    if version is None:
        raise UnsupportedError(
            f"the flash backend needs flash-attn-4, which is not installed: {install_hint('flash')}, or choose auto"
        )
    if Version(version) < MIN_VERSION:
        raise UnsupportedError(
            f"the flash backend needs flash-attn-4 4.0.0b26 or newer, got {version}, whose backward reads values "
            "before they are written in 0.1 to 1 % of launches: pip install --pre -U flash-attn-4, or choose auto"
        )
    if head_size > 128 and Version(version) < MIN_VERSION_ABOVE_128:
        raise UnsupportedError(
            f"the flash backend needs flash-attn-4 4.0.0b33 or newer for heads above 128, got {version} and heads of "
            f"{head_size}: pip install --pre -U flash-attn-4, or choose triton"
        )
