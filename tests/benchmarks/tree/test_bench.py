"""The tree benchmark runs to its end, and an unknown name is refused with the nearest one."""

import json

import pytest
from benchmarks.tree.bench import measure
from benchmarks.tree.cases import star

from treering.errors import InputError


def test_a_case_is_measured_against_every_baseline() -> None:
    report = measure([star(prompt=9, response=4, group=3)], only=["star"], num_runs=1)
    (case,) = json.loads(json.dumps(report))["cases"]
    assert (case["flat_tokens"], case["unique_tokens"]) == (39, 21)
    assert max(case["grad_error"], *case["baseline_grad_errors"].values()) < 1e-5
    assert case["speedup"] == min(case["baselines"].values()) / case["tree_s"]
    with pytest.raises(InputError, match="nearest names: toolbench"):
        measure(only=["tolbench"])
