"""The engine's kernels compile for the GPU that they were cut for; the interpreter accepts much more."""

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
    command = [sys.executable, "-m", "tests.engine.compiled_cuda_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_compiles_and_two_programs_share_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == 3 * 8 + 1
    halves = [kernel for kernel in compiled if kernel["dtype"] != "fp32"]
    assert all(2 * kernel["shared_bytes"] <= SHARED_BYTES for kernel in halves)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.slow
def test_attention_runs_on_matrix_units_and_loads_ahead(compiled: list[dict[str, Any]]) -> None:
    attention = [kernel for kernel in compiled if kernel["kernel"].startswith("attend")]
    assert len(attention) == 6
    assert all(kernel["has_matrix_units"] and kernel["has_async_copies"] for kernel in attention)
