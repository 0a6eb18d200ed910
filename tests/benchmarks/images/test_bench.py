"""The benchmark of images compares two ways that compute the same gradient."""

import pytest
from benchmarks.images import bench
from benchmarks.images.cases import DEFAULT, Case, small


def test_both_ways_have_the_same_gradient_and_memory_is_of_both_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def completions_of(case: Case) -> dict[str, int]:
        return {"tree": case.num_completions}

    monkeypatch.setattr(bench, "peak_bytes", completions_of)
    report = bench.measure(num_runs=1, case=small(DEFAULT))
    assert report["gradient_difference"] < 1e-5
    assert report["num_tokens"] < report["num_branch_tokens"]
    assert (report["peak_bytes"], report["peak_bytes_without_sharing"]) == ({"tree": 2}, {"tree": 1})
