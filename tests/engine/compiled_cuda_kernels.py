"""Compiles the engine's kernels for a Hopper GPU, which needs none: prints one JSON object per kernel and dtype.

Run as a process of its own, since the tests' process has the kernels in triton's interpreter:
python -m tests.engine.compiled_cuda_kernels
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treering.engine.cuda.attend import LOG2_E, add_parts_kernel, attend_kernel
from treering.engine.cuda.layers import gate_kernel, norm_kernel, rotate_kernel
from treering.engine.cuda.race import finish_kernel, race_kernel
from treering.engine.cuda.verify import walk_kernel
from treering.engine.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP

HOPPER = GPUTarget("cuda", 90, 32)
LONG = ("tokens_ptr", "tiles_ptr", "keys_ptr", "positions_ptr", "rows_ptr")
WHOLE = ("table_ptr", "winners_ptr", "drafts_ptr", "parents_ptr")
SINGLE = ("parts_ptr", "lse_ptr")
DOUBLE = ("temperature_ptr", "peaks_ptr", "totals_ptr", "bests_ptr", "logprobs_ptr", "policy_ptr", "packed_ptr")

ATTEND = {"GROUPS": 4, "KEY_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 128, "PAGE": 16, "WIDE": False}
ROTATE = {"HEADS": 32, "KEY_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 64, "HAS_NORM": True, "PAGE": 16}
RACE = {
    "VOCABULARY": 151_936, "TILE": 1024, "POSITION": POSITION_STEP, "TOKEN": TOKEN_STEP, "FIRST": MIX_FACTORS[0],
    "SECOND": MIX_FACTORS[1], "S0": MIX_SHIFTS[0], "S1": MIX_SHIFTS[1], "S2": MIX_SHIFTS[2],
    "DROPPED": NUM_DROPPED_BITS,
}  # fmt: skip


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, **other: str) -> Any:
    types = {name: _type_of(name, dtype, constants, other) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name.endswith("_ptr")
    }
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": 2})


def _type_of(name: str, dtype: str, constants: dict[str, Any], other: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in other:
        return other[name]
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    kinds = ((LONG, "i64"), (WHOLE, "i32"), (SINGLE, "fp32"), (DOUBLE, "fp64"))
    return "*" + next((kind for names, kind in kinds if name in names), dtype)


def main() -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        for rows in (16, 64):
            constants = {**ATTEND, "ROWS": rows, "KEY_TILE": 32 if dtype == "fp32" else 64, "FACTOR": LOG2_E / 11.3}
            cache = {"keys_ptr": f"*{dtype}"}
            report(f"attend {rows}", dtype, compile_kernel(attend_kernel, dtype, constants, 4, **cache))
        added = {"HEADS": 32, "HEAD_SIZE": 128, "PADDED": 128, "PARTS": 16}
        report("add_parts", dtype, compile_kernel(add_parts_kernel, dtype, added, 1))
        cache = {"keys_ptr": f"*{dtype}"}
        report("rotate", dtype, compile_kernel(rotate_kernel, dtype, ROTATE, 1, **cache))
        norm = {"SIZE": 4096, "PADDED": 4096, "ADD": True}
        report("norm", dtype, compile_kernel(norm_kernel, dtype, norm, 8))
        report("gate", dtype, compile_kernel(gate_kernel, dtype, {"SIZE": 12288, "TILE": 1024}, 4))
        report("race", dtype, compile_kernel(race_kernel, dtype, RACE, 4))
        drawn = {"tokens_ptr": "*i32"}
        finish = {"VOCABULARY": 151_936, "PADDED": 256}
        report("finish", dtype, compile_kernel(finish_kernel, dtype, finish, 1, **drawn))
    report("walk", "fp64", compile_kernel(walk_kernel, "fp64", {"MOST": 64}, 1, tokens_ptr="*i32"))


def report(name: str, dtype: str, compiled: Any) -> None:
    print(
        json.dumps(
            {
                "kernel": name,
                "dtype": dtype,
                "shared_bytes": compiled.metadata.shared,
                "has_matrix_units": "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"],
                "has_async_copies": "cp.async" in compiled.asm["ptx"],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
