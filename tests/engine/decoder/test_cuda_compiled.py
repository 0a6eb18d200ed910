"""The engine's kernels compile for their target GPU, which accepts less than the interpreter."""

from typing import Any

import pytest

from tests.compiling import SHARED_BYTES, compiled_by
from tests.engine.decoder.compiled_code import copies_wait_for_loads


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compiled_by("tests.engine.decoder.compiled_cuda_kernels")


@pytest.mark.slow
def test_every_kernel_compiles_and_two_programs_share_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    # Four attention kernels and six others in two dtypes, and the tree walk.
    assert len(compiled) == 2 * (4 + 6) + 1
    attention = [kernel for kernel in compiled if kernel["kernel"] == "attend" and kernel["dtype"] != "fp32"]
    assert all(2 * kernel["shared_bytes"] <= SHARED_BYTES for kernel in attention)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.slow
def test_attention_runs_on_matrix_units_and_loads_ahead(compiled: list[dict[str, Any]]) -> None:
    attention = [kernel for kernel in compiled if kernel["kernel"] == "attend"]
    assert len(attention) == 8
    assert all(kernel["has_matrix_units"] for kernel in attention)
    # Each tile's keys and values are copied 16 bytes at a time into one of two buffers while the other is read. The
    # addresses are known before the iteration starts.
    assert all(kernel["num_buffers"] == [2, 2] and kernel["copy_bytes"] == [16] for kernel in attention)
    assert not any(kernel["copies_wait_for_loads"] for kernel in attention)


LOOP = """
    %out:3 = scf.for %at = %a to %b step %c iter_args(%page = %p, %next = %q, %sum = %s) -> (i32) {
      %line = arith.muli %page, %c64 : i32 loc(#loc1)
      %fresh = tt.load %table, %mask : tensor<64x!tt.ptr<i32>> loc(#loc2)
      %copy = ttg.async_copy_global_to_local %LINE, %buffer : tensor<64x!tt.ptr<bf16>> loc(#loc3)
      scf.yield %fresh, %next, %sum : i32
    }
"""


def test_a_copy_whose_address_is_loaded_in_the_same_iteration_is_detected() -> None:
    assert not copies_wait_for_loads(LOOP.replace("%LINE", "%line"))
    assert copies_wait_for_loads(LOOP.replace("%LINE", "%fresh"))
    through = LOOP.replace("%line = arith.muli %page", "%other = arith.muli %page")
    moved = through.replace("      %copy", "      %line = arith.muli %fresh, %c64 : i32\n      %copy")
    assert copies_wait_for_loads(moved.replace("%LINE", "%line"))
