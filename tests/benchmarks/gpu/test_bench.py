"""The device benchmark: its code runs without a device, keeps to its budget, and calls no CPU figure a measurement."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import bench as gpu
from benchmarks.gpu.budget import Budget, PartReport
from benchmarks.gpu.exactness import measure_case
from benchmarks.tree.cases import star
from benchmarks.tree.steps import BASELINES

from tests.benchmarks.gpu.clocks import Clock

SMALL = star(prompt=9, response=4, group=3)


def part(budget_s: float, clock: Clock, file: Path | None = None) -> PartReport:
    return PartReport("part", budget_s, environment={}, file=file, clock=clock)


def test_small_trees_are_compared_in_both_dtypes_with_float32() -> None:
    single, half = (measure_case(SMALL, dtype, "cpu", 1) for dtype in (torch.float32, torch.bfloat16))
    assert (single.dtype, half.dtype) == ("float32", "bfloat16")
    for result in (single, half):
        assert set(result.seconds) == {"tree", *BASELINES}
        assert result.speedup == pytest.approx(result.seconds[result.baseline] / result.seconds["tree"])
        assert result.peak_bytes is None
    assert max(single.grad_errors.values()) < 1e-5
    # In bfloat16 no way to train is exact: every one of them is about as far from float32 as rounding goes.
    assert all(1e-4 < error < 0.1 for error in half.grad_errors_to_float32.values())


def test_a_case_that_would_not_fit_is_skipped_by_name_and_a_shorter_wait_would_not_do() -> None:
    clock = Clock()
    report = part(10, clock)
    for name in ("a", "b", "c"):
        report.run(name, clock.taking(4))
    # After two cases of 4 seconds 2 are left, and the third would take 4.
    assert [case["case"] for case in report.cases] == ["a", "b"]
    (skipped,) = report.skipped
    assert skipped == {"case": "c", "reason": "2 s left of 10 s, a case takes about 4 s"}


def test_every_case_is_on_file_at_once_and_an_error_loses_none(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "part.json"

    def fails() -> dict[str, Any]:
        on_file = json.loads(file.read_text())
        assert [case["case"] for case in on_file["cases"]] == ["a"]
        raise RuntimeError("out\n  of luck")

    report = part(100, clock, file)
    report.run("a", clock.taking(1))
    assert report.run("b", fails) is None
    report.run("c", clock.taking(2))
    on_file = json.loads(file.read_text())
    assert [(case["case"], case["took"], case["case_s"]) for case in on_file["cases"]] == [("a", 1, 1), ("c", 2, 2)]
    assert on_file["errors"] == [{"case": "b", "error": "RuntimeError: out of luck"}]
    assert [*tmp_path.iterdir()] == [file]


def test_on_a_device_every_part_has_a_process_and_what_ends_one_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = Clock(), []
    start = clock.now

    def played(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        part_name, seconds = command[-3], float(command[-1])
        seen.append((part_name, command[3:-4], seconds))
        clock.now += seconds
        if part_name == "engine":
            clock.now += gpu.GRACE_S
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, -6 if part_name == "attention" else 0)

    monkeypatch.setattr(subprocess, "run", played)
    statuses = gpu.run_apart(("exactness", "engine", "attention", "model"), Budget(300, clock), ["--size", "full"])
    assert statuses == {"exactness": 0, "engine": 1, "attention": -6, "model": 0}
    assert [part_name for part_name, *_ in seen] == [*statuses]
    assert all(arguments == ["--size", "full"] for _, arguments, _ in seen)
    # What the hanging one took beyond its share the others do without.
    assert clock.now - start == pytest.approx(300, abs=1)


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
