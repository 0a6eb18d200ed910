"""Compile the kernels for a Hopper GPU without a GPU; print one JSON object per kernel and kind of head.

Runs in its own process, since the tests' process has the kernels in triton's interpreter:
python -m tests.attention.compiled_kernels
"""

import json
from typing import Any

import torch
import triton.language as tl

from tests.compiling import compile_for_hopper
from treering.attention import ScoreOptions
from treering.attention import triton_launch as launch
from treering.attention.triton_kernels import (
    add_slots_kernel,
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from treering.attention.triton_tables import choose_tiles, launches, padded_size

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS = {"forward": forward_kernel, "query_gradient": query_gradient_kernel, "key_gradient": key_gradient_kernel}
INDEXES = ("first_ptr", "stop_ptr", "limit_ptr", "position_ptr", "items_ptr", "visits_ptr", "splits_ptr")
WIDE = ("lse_ptr", "delta_ptr", "sinks_ptr", "slots_ptr")
HEADS = ((80, torch.float16), (256, torch.bfloat16), (128, torch.float32))
"""Heads of each choice of tiles; those of 128 in 16 bits have the tiles of 80."""
EVERYTHING = ScoreOptions(scale=0.1, window=100, softcap=50.0)


def compile_kernel(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], options: dict[str, int]) -> Any:
    def type_of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32"
        return "*i32" if name in INDEXES else "*fp32" if name in WIDE else f"*{NAMES[dtype]}"

    return compile_for_hopper(kernel, type_of, constants, options)


def main() -> None:
    for head_size, dtype in HEADS:
        sizes = {"HEAD_SIZE": head_size, "PADDED": padded_size(head_size), "WIDE": tl.float32}
        shared = {**sizes, "GROUPS": 2, "HAS_WINDOW": True, **launch._scores(EVERYTHING)}
        for name, kernel in KERNELS.items():
            queries, keys = getattr(choose_tiles(head_size, dtype), name)
            own = {"HAS_SINKS": True} if name == "forward" else {"SCALE": EVERYTHING.scale}
            constants = {**shared, **own, "QUERY_TILE": queries, "KEY_TILE": keys}
            options = launches(name, head_size, dtype)[0]._asdict()
            report(name, head_size, dtype, compile_kernel(kernel, dtype, constants, options))
    sizes = {"HEAD_SIZE": 80, "PADDED": 128, "WIDE": tl.float32}
    rows = launch.DELTA_ROWS
    report("delta", 80, torch.bfloat16, compile_kernel(delta_kernel, torch.bfloat16, {**sizes, "QUERY_TILE": rows}, {}))
    tile = {"ROWS": launch.SLOT_ROWS, "KEY_TILE": 128}
    report("add_slots", 80, torch.bfloat16, compile_kernel(add_slots_kernel, torch.bfloat16, {**sizes, **tile}, {}))


def report(name: str, head_size: int, dtype: torch.dtype, compiled: Any) -> None:
    ptx = compiled.asm["ptx"]
    found = {"kernel": name, "head_size": head_size, "dtype": NAMES[dtype], "shared_bytes": compiled.metadata.shared}
    found |= {"has_matrix_units": "wgmma" in ptx or "mma.sync" in ptx, "has_async_copies": "cp.async" in ptx}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
