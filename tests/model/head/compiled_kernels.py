"""Compiles the kernels of a head for a Hopper GPU, which needs none: prints one JSON object per kernel and dtype.

Run as a process of its own, since the tests' process has the kernels in triton's interpreter:
python -m tests.model.head.compiled_kernels
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treering.model.head import kernels

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = {
    "statistics": kernels._statistics_kernel,
    "gradient": kernels._gradient_kernel,
    "target": kernels._target_kernel,
}
NUMBERS = {"stride": "i32", "num_tokens": "i32", "scale": "fp32"}
INDEXES = ("targets", "target_row", "first")


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, Any]) -> Any:
    types = {name: _type_of(name, dtype, constants) for name in kernel.arg_names}
    # As the launcher finds them: pointers are multiples of 16, a vocabulary need not be.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name][0] == "*"}
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": kernels._WARPS if "BLOCK" in constants else 4})


def _type_of(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return NUMBERS[name]
    return f"*{dtype}" if name == "logits" else "*i64" if name in INDEXES else "*fp32"


def report(name: str, dtype: str, *, with_entropy: bool) -> None:
    kernel = KERNELS[name]
    block = {"BLOCK": kernels.BLOCK} if "BLOCK" in kernel.arg_names else {}
    compiled = compile_kernel(kernel, dtype, {"WITH_ENTROPY": with_entropy, **block})
    ptx = compiled.asm["ptx"]
    found = {
        "kernel": name,
        "dtype": dtype,
        "shared_bytes": compiled.metadata.shared,
        "has_local_memory": ".local" in ptx,
        "keeps_nan": "max.NaN.f32" in ptx,
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    for name in KERNELS:
        for dtype in ("bf16", "fp16", "fp32"):
            report(name, dtype, with_entropy=True)
        report(name, "bf16", with_entropy=False)


if __name__ == "__main__":
    main()
