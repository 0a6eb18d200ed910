"""On a device a linear head runs on kernels and gives the scores and gradients of a float64 softmax."""

import numpy as np
import pytest
import torch
from torch import nn

from treering.model.edges import score_rows
from treering.model.logits import add_product
from treering.model.three_pass import has_kernels

pytestmark = pytest.mark.gpu
# A weight's relative error is its logit's absolute error. In 16 bits weights, rows and gradients are rounded too.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_rows", [97, 10_000], ids=["chunks", "whole"])
def test_a_head_on_a_device_is_that_of_float64(
    dtype: torch.dtype, temperature: float, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_kernels(torch.device("cuda"))
    monkeypatch.setattr("treering.model.edges.rows_at_once", lambda *_: max_rows)
    torch.manual_seed(0)
    num_rows, size, vocab = 300, 64, 20_001
    row_of = np.sort(np.random.default_rng(0).integers(0, num_rows, 350))
    targets = torch.randint(0, vocab, (350,))
    head = nn.Linear(size, vocab, bias=False).to(dtype)
    rows = torch.randn(num_rows, size).to(dtype)
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        own = nn.Linear(size, vocab, bias=False).to(device, kind)
        own.load_state_dict(head.state_dict())
        leaf = rows.to(device, kind).requires_grad_()
        options = {"temperature": temperature, "entropy_of": "all", "vocab_size": vocab}
        found = score_rows(leaf, own, targets.to(device), row_of, **options)  # type: ignore[arg-type]
        (found.logprobs.sum() + 0.3 * found.entropy.sum()).backward()
        results.append(
            [tensor.detach().cpu().double() for tensor in (found.logprobs, found.entropy, leaf.grad, own.weight.grad)]
        )
    for wanted, got in zip(*results, strict=True):
        assert (got - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch rounds the product to 16 bits before it is added")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bit_factors_is_not_rounded_before_it_is_added(dtype: torch.dtype) -> None:
    left, right = (torch.randn(300, size, device="cuda").to(dtype) for size in (64, 48))
    total = torch.ones(64, 48, device="cuda")
    add_product(total, left.mT, right)
    product = left.double().mT @ right.double()
    assert (total - 1.0 - product).norm() <= 1e-6 * product.norm()
