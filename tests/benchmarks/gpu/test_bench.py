"""The device benchmark: it runs without a device, both sides do the same work, and wrong results are not timed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import bench as gpu
from benchmarks.gpu.attention import check as attention_check
from benchmarks.gpu.attention.bench import measure_case
from benchmarks.gpu.attention.cases import TINY as TINY_HEADS
from benchmarks.gpu.attention.cases import AttentionCase, tiny_cases
from benchmarks.gpu.attention.check import WrongResultError, check_backend, draw_inputs
from benchmarks.gpu.budget import PartReport
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.loop import measure_sums
from benchmarks.gpu.workloads import chain, generated_workload, star

from tests.benchmarks.loop.loops import TINY, random_start
from treering.attention import TreeLayout

CASE = AttentionCase(name="star", forest=star(prompt=150, response=9, group=3), heads=TINY_HEADS)


def test_the_driver_runs_all_parts_in_order_and_writes_a_file_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.gpu_attention, "measured_backends", lambda: ["segments"])
    # The policy of the sums would take a minute to train.
    start = random_start(tmp_path / "start")
    monkeypatch.setattr("benchmarks.gpu.loop.measure_sums", lambda size, device: measure_sums(TINY, device, start))
    reports = gpu.run(gpu.Settings(device="cpu", size="tiny", data=tmp_path, out=tmp_path))
    assert [*reports] == ["engine", "attention", "loop", "images", "model"]
    for name, report in reports.items():
        assert json.loads((tmp_path / f"gpu-{name}.json").read_text()) == json.loads(json.dumps(report))
        assert report["cases"]
        assert (report["errors"], report["skipped"]) == ([], [])
        assert report["environment"]["sets"] == ["generated"]
    rollouts = next(case for case in reports["engine"]["cases"] if case["kind"] == "rollouts")
    # Five tokens: first three, then two, because no token follows the last one.
    found = [(way["accepted"], way["tokens_per_step"]) for way in rollouts["by_acceptance"]]
    assert found == [(0.0, 1.0), (1.0, 2.5)]
    sums, recorded = reports["loop"]["cases"]
    assert [*sums["variants"]] == ["plain", "trees", "trees and drafts"]
    assert recorded["num_differing"] == 0
    assert recorded["unique_tokens"] < recorded["flat_tokens"] == generated_workload(gpu.TINY_SPEC).num_flat_tokens


@pytest.mark.parametrize("case", [CASE, *tiny_cases([])], ids=lambda case: case.name)
def test_the_check_agrees_with_the_reference(case: AttentionCase) -> None:
    layout = TreeLayout(case.forest, torch.device("cpu"))
    assert max(check_backend(case, layout, draw_inputs(case, "cpu"), "reference").values()) < 1e-6


@pytest.mark.parametrize("wrong", ["mask", "gradient", "nan"])
def test_a_wrong_backend_is_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if wrong == "mask":
            options["layout"] = TreeLayout(chain(CASE.forest.num_tokens), torch.device("cpu"))
        if wrong == "gradient":
            key = key.detach() + 0.0 * key
        out = original(query, key, value, **options)
        return out * torch.nan if wrong == "nan" else out

    original = attention_check.attend
    monkeypatch.setattr(attention_check, "attend", broken)
    layout, found = TreeLayout(CASE.forest, torch.device("cpu")), PartReport("attention", 1e9, environment={})
    with pytest.raises(WrongResultError, match="segments is off by"):
        check_backend(CASE, layout, draw_inputs(CASE, "cpu"), "segments")
    once = Stopwatch(device="cpu", min_runs=1, max_runs=1)
    case = measure_case(CASE, [], once, ["segments", "reference"], found)
    assert case["ways"]["segments"]["seconds"] == {}
    assert [error["case"] for error in found.errors] == ["tiny star, segments", "tiny star, reference"]


def test_parts_are_imported_when_they_run_so_without_pydantic_only_the_engine_and_the_loop_are_skipped() -> None:
    blocked = "import sys; sys.modules['pydantic'] = None; from benchmarks.gpu import bench; "
    missing = "[part for part in bench.PARTS if find_spec_fails(part)]"
    code = f"""{blocked}
print([part for part in ("engine", "loop", "images") if f"benchmarks.gpu.{{part}}" in sys.modules])
def find_spec_fails(part):
    try:
        bench._module(part)
    except ModuleNotFoundError as error:
        return error.name == "pydantic"
print({missing}, bench.run(bench.Settings(device="cpu", size="tiny", parts=["engine", "loop"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == [
        "[]",
        "",
        "engine: skipped, pydantic is not installed",
        "",
        "loop: skipped, pydantic is not installed",
        "['engine', 'loop'] {}",
        "",
    ], done.stderr
