"""The engine's kernels compile for their target GPU; the interpreter accepts much more."""

from typing import Any

import pytest

from tests.compiling import SHARED_BYTES, compiled_by


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compiled_by("tests.engine.decoder.compiled_cuda_kernels")


@pytest.mark.slow
def test_every_kernel_compiles_and_two_programs_share_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    # Attention and 6 others in two dtypes, products in one, and the walk.
    assert len(compiled) == 2 * (4 + 6) + (8 + 1) + 1
    attention = [kernel for kernel in compiled if kernel["kernel"] == "attend" and kernel["dtype"] != "fp32"]
    assert all(2 * kernel["shared_bytes"] <= SHARED_BYTES for kernel in attention)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.slow
def test_attention_runs_on_matrix_units_and_loads_ahead(compiled: list[dict[str, Any]]) -> None:
    attention = [kernel for kernel in compiled if kernel["kernel"] == "attend"]
    assert len(attention) == 8
    assert all(kernel["has_matrix_units"] for kernel in attention)
    # Keys and values of a tile are copied, 16 bytes at a time, into one of two buffers while the other one is read.
    assert all(kernel["num_buffers"] == [2, 2] and kernel["copy_bytes"] == [16] for kernel in attention)


@pytest.mark.slow
def test_products_run_on_matrix_units_with_at_least_two_steps_in_flight(compiled: list[dict[str, Any]]) -> None:
    products = [kernel for kernel in compiled if kernel["kernel"] == "linear"]
    assert len(products) == 8
    assert all(kernel["has_matrix_units"] and not kernel["has_local_memory"] for kernel in products)
    # Of the matrix and of the rows.
    assert all(len(kernel["num_buffers"]) == 2 and min(kernel["num_buffers"]) >= 3 for kernel in products)
    assert all(kernel["copy_bytes"] == [16] for kernel in products)
