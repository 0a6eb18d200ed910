"""The device benchmark: its code runs without a device, keeps to its budget, and calls no CPU figure a measurement."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import bench as gpu
from benchmarks.gpu.exactness import measure_case
from benchmarks.tree.cases import star

SMALL = star(prompt=9, response=4, group=3)


def test_the_driver_runs_all_parts_in_order_and_writes_a_file_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.gpu_attention, "measured_backends", lambda: ["segments"])
    # The policy of its sums takes a minute to train; `test_loop` runs its cases.
    monkeypatch.setitem(gpu.TABLES, "loop", lambda report: None)
    monkeypatch.setitem(
        gpu.MEASURE, "loop", lambda report, settings, sets: report.run("case", lambda: {"kind": "sums"})
    )
    settings = gpu.Settings(device="cpu", size="tiny", data=tmp_path, out=tmp_path)
    reports = gpu.run(settings)
    assert [*reports] == ["exactness", "engine", "attention", "loop", "pictures", "model"]
    for name, report in reports.items():
        assert json.loads((tmp_path / gpu.FILES[name]).read_text()) == json.loads(json.dumps(report))
        assert report["cases"]
        assert not report["errors"]
        assert not report["skipped"]
        assert report["environment"]["sets"] == ["generated"]
        assert report["environment"]["clock"] == "wall time"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_tells_how_much_memory_each_way_takes() -> None:
    result = measure_case(SMALL, torch.float32, "cuda", 1)
    assert result.peak_bytes is not None
    assert all(peak > 0 for peak in result.peak_bytes.values())
    assert max(result.grad_errors.values()) < 1e-5
