"""Inspects compiled kernels: their buffers, and how wide asynchronous copies are."""

import re


def num_buffers(ttgir: str) -> list[int]:
    """Buffers in shared memory of each tensor that a loop loads ahead.

    Example: `ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, ...` is one tensor with 2.
    """
    return [int(count) for count in re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)]


def copy_bytes(ptx: str) -> list[int]:
    """Distinct widths of the asynchronous copies to shared memory."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", ptx)
    return sorted({int(width, 0) for width in copies})
