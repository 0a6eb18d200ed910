"""Compile the head's kernels for a Hopper GPU without a GPU; print one JSON object per kernel and dtype.

Runs in its own process, since the tests' process has the kernels in triton's interpreter:
python -m tests.model.head.compiled_kernels
"""

import json

from tests.compiling import compile_for_hopper
from treering.model import head_kernels as kernels

KERNELS = {
    "statistics": kernels._statistics_kernel,
    "gradient": kernels._gradient_kernel,
    "target": kernels._target_kernel,
}
NUMBERS = {"stride": "i32", "num_tokens": "i32", "scale": "fp32"}
INDEXES = ("targets", "target_row", "first")


def report(name: str, dtype: str, *, with_entropy: bool) -> None:
    def type_of(argument: str) -> str:
        if argument in NUMBERS:
            return NUMBERS[argument]
        return f"*{dtype}" if argument == "logits" else "*i64" if argument in INDEXES else "*fp32"

    kernel = KERNELS[name]
    is_blocked = "BLOCK" in kernel.arg_names
    constants = {"WITH_ENTROPY": with_entropy, **({"BLOCK": kernels.BLOCK} if is_blocked else {})}
    compiled = compile_for_hopper(kernel, type_of, constants, {"num_warps": kernels._WARPS if is_blocked else 4})
    ptx = compiled.asm["ptx"]
    found = {"kernel": name, "dtype": dtype, "shared_bytes": compiled.metadata.shared}
    found |= {"has_local_memory": ".local" in ptx, "keeps_nan": "max.NaN.f32" in ptx}
    print(json.dumps(found), flush=True)


def main() -> None:
    for name in KERNELS:
        for dtype in ("bf16", "fp16", "fp32"):
            report(name, dtype, with_entropy=True)
        report(name, "bf16", with_entropy=False)


if __name__ == "__main__":
    main()
