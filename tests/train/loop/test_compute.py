"""Context managers around a step restore what they change."""

import pytest
import torch

from tests.models import build
from treering.errors import InputError
from treering.train.loop.compute import fitting_threads, num_threads, precision


@pytest.mark.parametrize(("count", "inside"), [(1, 1), (None, 2)])
def test_a_number_of_threads_holds_inside_its_block_only(count: int | None, inside: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with num_threads(count):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
        with pytest.raises(InputError), num_threads(count):
            raise InputError("in the middle of a step")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "fitting"), [(64, 1), (4096, None)])
def test_a_small_model_gets_one_thread_and_a_large_one_torchs_default(width: int, fitting: int | None) -> None:
    # The models have 4,096 and 16.8 M weights. Only the size decides, so that a resumed run rounds the same way.
    model = torch.nn.Linear(width, width, bias=False)
    assert fitting_threads(model) == fitting
    assert fitting_threads(model.to("meta")) is None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with num_threads(None, model.to_empty(device="cpu")):
            assert torch.get_num_threads() == (fitting or 2)
        with num_threads(2, model):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("autocast", "dtype"), [("none", torch.float32), ("bfloat16", torch.bfloat16)])
def test_autocast_decides_what_products_are_computed_in(autocast: str, dtype: torch.dtype) -> None:
    model = build()
    with precision(model, autocast):  # type: ignore[arg-type]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
