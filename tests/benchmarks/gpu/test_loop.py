"""The loop's benchmark on a device: its cases run small, and both sides of a case do the same work."""

from pathlib import Path

import pytest
from benchmarks.gpu import loop as gpu_loop
from benchmarks.gpu.bench import TINY_SPEC
from benchmarks.gpu.budget import PartReport
from benchmarks.gpu.engine.cases import tiny_plans
from benchmarks.gpu.loop import measure_loop, measure_recorded, measure_sums, requests_of_groups
from benchmarks.gpu.workloads import generated_workload

from tests.benchmarks.loop.loops import TINY, random_start


def test_drafts_and_trees_do_the_work_of_plain_sampling_and_flat_training() -> None:
    recorded = generated_workload(TINY_SPEC)
    found = measure_recorded(tiny_plans()[0], recorded, "cpu")
    assert found["num_differing"] == 0
    requests = [request for group in requests_of_groups(recorded) for request in group]
    assert found["num_sampled"] == sum(request.sampling.max_tokens for request in requests)
    assert found["flat_tokens"] == recorded.num_flat_tokens
    assert found["unique_tokens"] < found["flat_tokens"]


def test_every_variant_of_the_sums_loop_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = random_start(tmp_path / "start")
    found = measure_sums(TINY, "cpu", start)
    assert [*found["variants"]] == ["plain", "trees", "trees and drafts"]
    assert all(len(row["rewards"]) == TINY.num_steps for row in found["variants"].values())
    report = PartReport("loop", 1e9, environment={"device": "here"})
    monkeypatch.setattr(gpu_loop, "measure_sums", lambda size, device: found)
    measure_loop(report, TINY, tiny_plans()[0], generated_workload(TINY_SPEC), "cpu")
    assert not report.errors
    assert [case["kind"] for case in report.cases] == ["sums", "recorded"]
    gpu_loop.print_table(report.as_json())
