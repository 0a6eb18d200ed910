"""The device benchmark: its code runs without a device, and it refuses to call that a measurement."""

import json

import pytest
import torch
from benchmarks import gpu
from benchmarks.tree_cases import star
from benchmarks.tree_steps import BASELINES

from treering.errors import UnsupportedError


def test_the_device_benchmark_compares_both_dtypes_with_float32() -> None:
    report = json.loads(
        json.dumps(gpu.measure([star(prompt=9, response=4, group=3)], device="cpu", num_runs=1), allow_nan=False)
    )
    single, half = report["cases"]
    assert (single["dtype"], half["dtype"]) == ("float32", "bfloat16")
    for result in (single, half):
        assert set(result["seconds"]) == {"tree", *BASELINES}
        assert result["speedup"] == pytest.approx(result["seconds"][result["baseline"]] / result["seconds"]["tree"])
        assert result["peak_bytes"] is None
    assert max(single["grad_errors"].values()) < 1e-5
    # In bfloat16 no way to train is exact: every one of them is about as far from float32 as rounding goes.
    assert all(1e-4 < error < 0.1 for error in half["grad_errors_to_float32"].values())


def test_the_device_benchmark_refuses_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds none"):
        gpu.measure([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_benchmark_counts_memory() -> None:
    (result, _) = gpu.measure([star(prompt=9, response=4, group=3)], num_runs=1)["cases"]
    assert all(peak > 0 for peak in result["peak_bytes"].values())
    assert max(result["grad_errors"].values()) < 1e-5
