"""The kernels compile for their target GPU, which accepts less than the interpreter."""

from typing import Any

import pytest

from tests.compiling import SHARED_BYTES, compiled_by


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compiled_by("tests.attention.compiled_kernels")


@pytest.mark.slow
def test_every_kernel_compiles_and_fits_into_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == 3 * 3 + 2
    assert all(0 <= kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.slow
def test_products_run_on_matrix_units_and_tiles_are_loaded_ahead(compiled: list[dict[str, Any]]) -> None:
    products = [kernel for kernel in compiled if kernel["kernel"] not in ("delta", "add_slots")]
    assert all(kernel["has_matrix_units"] and kernel["has_async_copies"] for kernel in products)
