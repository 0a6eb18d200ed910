"""Inspect compiled kernels: shared-memory buffers, and the dependencies and widths of asynchronous copies."""

import re

_NAME = re.compile(r"%[A-Za-z_0-9]+")


def num_buffers(ttgir: str) -> list[int]:
    """Return the number of shared-memory buffers of each tensor that a loop prefetches.

    Example: `ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, ...` is one tensor with 2.
    """
    return [int(count) for count in re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)]


def copies_wait_for_loads(ttgir: str) -> bool:
    """Return whether an asynchronous copy in a loop takes its address from a load of the same iteration."""
    loop = [line.strip() for line in ttgir.split("scf.for", 1)[-1].splitlines()[1:]] if "scf.for" in ttgir else []
    sources: dict[str, list[str]] = {}
    loaded: set[str] = set()
    for line in loop:
        if line.startswith("scf.yield"):
            break
        names = _NAME.findall(line.split("loc(")[0])
        if "async_copy_global_to_local" in line and _reaches(names[1:], sources, loaded):
            return True
        if line.startswith("%"):
            sources[names[0]] = names[1:]
            loaded |= {names[0]} if "tt.load" in line else set()
    return False


def _reaches(names: list[str], sources: dict[str, list[str]], wanted: set[str]) -> bool:
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in wanted:
            return True
        names += [] if name in seen else sources.get(name, [])
        seen.add(name)
    return False


def copy_bytes(ptx: str) -> list[int]:
    """Return the distinct widths of asynchronous copies to shared memory."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", ptx)
    return sorted({int(width, 0) for width in copies})
