"""The head's kernels compile for their target GPU, which accepts less than the interpreter."""

import pytest

from tests.compiling import SHARED_BYTES, compiled_by


@pytest.mark.slow
def test_every_kernel_of_a_head_compiles_and_keeps_nan() -> None:
    compiled = compiled_by("tests.model.head.compiled_kernels")
    assert len(compiled) == 3 * (3 + 1)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES and not kernel["has_local_memory"] for kernel in compiled)
    # By default a GPU's maximum drops NaN, unlike the interpreter's.
    assert all(kernel["keeps_nan"] for kernel in compiled)
