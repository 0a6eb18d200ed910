"""The kernels compile for the GPU that they target; the interpreter, which is Python, accepts much more."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
"""What a program may use on compute capability 9.0."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.attention.compiled_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_compiles_and_fits_into_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == 3 * 4 + 2
    assert all(0 <= kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.slow
def test_products_run_on_matrix_units_and_tiles_are_loaded_ahead(compiled: list[dict[str, Any]]) -> None:
    products = [kernel for kernel in compiled if kernel["kernel"] not in ("delta", "add_slots")]
    assert all(kernel["has_matrix_units"] and kernel["has_async_copies"] for kernel in products)
