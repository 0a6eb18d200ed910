"""The gradient of a head's weight is summed over chunks of rows, in float32 even if the factors have 16 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treering.model import logits as linear

# Dtype of the total, dtype of the factors, and the tolerated rounding of the product before it is added.
DTYPES = [
    (torch.float32, torch.float32, 1e-6),
    (torch.float64, torch.float64, 1e-15),
    (torch.float32, torch.bfloat16, 2**-8),
    (torch.float32, torch.float16, 2**-11),
]


def factors(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(40, 9, generator=generator), torch.randn(40, 5, generator=generator)
    return left.to(device, dtype).mT, right.to(device, dtype)


@pytest.mark.parametrize(("wide", "narrow", "rounding"), DTYPES)
def test_a_product_is_added_in_the_dtype_of_the_total(wide: torch.dtype, narrow: torch.dtype, rounding: float) -> None:
    left, right = factors(narrow)
    total = torch.full((9, 5), 3.0, dtype=wide)
    address = total.data_ptr()
    linear.add_product(total, left, right)
    product = left.double() @ right.double()
    assert total.data_ptr() == address
    assert (total - 3.0 - product).norm() <= rounding * product.norm()


class Calls(TorchDispatchMode):
    """Record the operations that torch runs and the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append((func, result))
        return result


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch adds no 16-bit product to a float32 total")
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_on_a_device_that_can_one_operation_adds_16_bit_factors_to_a_float32_total(
    narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear.WIDE_SUMS_ON == "cuda"
    # Without a device, torch's shape functions check the call that CUDA would get.
    monkeypatch.setattr(linear, "WIDE_SUMS_ON", "meta")
    left, right = factors(narrow, "meta")
    total = torch.zeros(9, 5, device="meta")
    with Calls() as calls:
        linear.add_product(total, left, right)
    assert [func for func, _ in calls.found] == [torch.ops.aten.addmm.dtype_out]
    assert calls.found[0][1] is total
    assert total.dtype == torch.float32
    assert total.shape == (9, 5)
