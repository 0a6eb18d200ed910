"""Compile the engine's kernels for a Hopper GPU without a GPU; print one JSON object per kernel and dtype.

Runs in its own process, since the tests' process runs the kernels in triton's interpreter:
python -m tests.engine.decoder.compiled_cuda_kernels
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.engine.decoder.compiled_code import copies_wait_for_loads, copy_bytes, num_buffers
from treering.engine.decoder.cuda.layer_kernels import (
    LOG2_E,
    add_parts_kernel,
    attend_kernel,
    gate_kernel,
    norm_kernel,
    num_stages,
    rotate_kernel,
)
from treering.engine.decoder.cuda.verify import gumbel_max_kernel, reduce_tiles_kernel, walk_kernel
from treering.engine.sampling.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP

HOPPER = GPUTarget("cuda", 90, 32)
LONG = ("tokens_ptr", "tiles_ptr", "keys_ptr", "positions_ptr", "rows_ptr")
WHOLE = ("table_ptr", "winners_ptr", "drafts_ptr", "parents_ptr")
SINGLE = ("parts_ptr", "lse_ptr")
DOUBLE = ("temperature_ptr", "peaks_ptr", "totals_ptr", "bests_ptr", "logprobs_ptr", "policy_ptr", "packed_ptr")

ATTEND = {"GROUPS": 4, "KEY_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 128, "PAGE": 16, "WIDE": False}
ROTATE = {"HEADS": 32, "KEY_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 64, "HAS_NORM": True, "PAGE": 16}
GUMBEL_MAX = {
    "VOCABULARY": 151_936, "TILE": 1024, "POSITION": POSITION_STEP, "TOKEN": TOKEN_STEP, "FIRST": MIX_FACTORS[0],
    "SECOND": MIX_FACTORS[1], "S0": MIX_SHIFTS[0], "S1": MIX_SHIFTS[1], "S2": MIX_SHIFTS[2],
    "DROPPED": NUM_DROPPED_BITS,
}  # fmt: skip


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""float16 is left out: its kernels differ from those of bfloat16 only in the type."""


def compile_kernel(
    kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, stages: int = 2, **other: str
) -> Any:
    types = {name: _type_of(name, dtype, constants, other) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or name == "num_slots"
    }
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": stages})


def _type_of(name: str, dtype: str, constants: dict[str, Any], other: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in other:
        return other[name]
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    kinds = ((LONG, "i64"), (WHOLE, "i32"), (SINGLE, "fp32"), (DOUBLE, "fp64"))
    return "*" + next((kind for names, kind in kinds if name in names), dtype)


def compile_attention(dtype: str) -> None:
    for rows in (16, 64):
        tile = {"ROWS": rows, "KEY_TILE": 32 if dtype == "fp32" else 64}
        stages, cache = num_stages(rows, DTYPES[dtype]), {"keys_ptr": f"*{dtype}"}
        for whole in (False, True):
            constants = {**ATTEND, **tile, "FACTOR": LOG2_E / 11.3, "WHOLE": whole}
            report("attend", dtype, compile_kernel(attend_kernel, dtype, constants, 4, stages, **cache))
    added = {"HEADS": 32, "HEAD_SIZE": 128, "PADDED": 128, "PARTS": 16}
    report("add_parts", dtype, compile_kernel(add_parts_kernel, dtype, added, 1))


def main() -> None:
    for dtype in DTYPES:
        compile_attention(dtype)
        cache = {"keys_ptr": f"*{dtype}"}
        report("rotate", dtype, compile_kernel(rotate_kernel, dtype, ROTATE, 1, **cache))
        norm = {"SIZE": 4096, "PADDED": 4096, "ADD": True}
        report("norm", dtype, compile_kernel(norm_kernel, dtype, norm, 8))
        report("gate", dtype, compile_kernel(gate_kernel, dtype, {"SIZE": 12288, "TILE": 1024}, 4))
        report("gumbel_max", dtype, compile_kernel(gumbel_max_kernel, dtype, GUMBEL_MAX, 4))
        drawn = {"tokens_ptr": "*i32"}
        finish = {"VOCABULARY": 151_936, "PADDED": 256}
        report("reduce_tiles", dtype, compile_kernel(reduce_tiles_kernel, dtype, finish, 1, **drawn))
    report("walk", "fp64", compile_kernel(walk_kernel, "fp64", {"MOST": 64}, 1, tokens_ptr="*i32"))


def report(name: str, dtype: str, compiled: Any) -> None:
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    found = {
        "kernel": name,
        "dtype": dtype,
        "shared_bytes": compiled.metadata.shared,
        "has_matrix_units": "wgmma" in ptx or "mma.sync" in ptx,
        "num_buffers": num_buffers(ttgir),
        "copies_wait_for_loads": copies_wait_for_loads(ttgir),
        "copy_bytes": copy_bytes(ptx),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
