"""Compile kernels for a GPU that the machine may lack, in a process without triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on compute capability 9.0."""


def compiled_by(module: str) -> list[dict[str, Any]]:
    """Return what `python -m module` prints about its kernels; skip where triton cannot compile for NVIDIA."""
    backends = pytest.importorskip("triton.backends").backends
    if "nvidia" not in backends:
        pytest.skip(f"this triton compiles for {', '.join(backends) or 'no device'}, not for NVIDIA's")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compile_for_hopper(
    kernel: Any, type_of: Callable[[str], str], constants: dict[str, Any], options: dict[str, int]
) -> Any:
    """Compile a kernel for Hopper, with arguments as its launcher specializes them.

    Pointers and the strides between heads and rows are multiples of 16; row counts and the vocabulary size are not.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" or name.endswith("_stride")
    }
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
