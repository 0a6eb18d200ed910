"""Attention on a device: work counted by hand, results checked before they are timed, backends that refuse or fail."""

from typing import Any

import pytest
import torch
from benchmarks.gpu.attention import bench as gpu_attention
from benchmarks.gpu.attention import check as gpu_attention_check
from benchmarks.gpu.attention.bench import measure_attention, measure_case
from benchmarks.gpu.attention.cases import (
    TINY,
    TINY_LENGTHS,
    AttentionCase,
    tiny_cases,
)
from benchmarks.gpu.attention.check import WrongResultError, check_backend, draw_inputs
from benchmarks.gpu.budget import PartReport
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.workloads import chain, star

from treering.attention import TreeLayout

ONCE = Stopwatch(device="cpu", min_runs=1, max_runs=1)
CASE = AttentionCase(name="star", forest=star(prompt=150, response=9, group=3), heads=TINY)


def report() -> PartReport:
    return PartReport("attention", 1e9, environment={"device": "here"}, goals=dict(gpu_attention.GOALS))


def test_every_case_is_checked_timed_and_rated() -> None:
    found = report()
    measure_attention(found, tiny_cases([]), TINY_LENGTHS, ONCE, ["segments"])
    assert not found.errors
    dense = {case["length"]: case for case in found.cases if case["kind"] == "dense"}
    assert set(dense) == set(TINY_LENGTHS)
    trees = [case for case in found.cases if case["kind"] == "tree"]
    assert [case["forest"] for case in trees] == ["chain", "star", "deep, window", "deep, softcap"]
    for case in trees:
        seconds, rates = case["ways"]["segments"]["seconds"], case["tflops"]["segments"]
        assert set(seconds) == set(rates) == {"forward", "backward", "both"}
        flops = 14 * case["num_visible_pairs"] * TINY.num_heads * TINY.head_size
        assert rates["both"] == pytest.approx(flops / seconds["both"] / 1e12)
        rate = dense[case["dense_length"]]["rates"]["both"]
        assert case["share_of_dense"]["segments"]["both"] == pytest.approx(rates["both"] / rate)
        assert case["speedup_over_flex"] == {}
        assert max(case["ways"]["segments"]["errors"].values()) < 1e-5
    gpu_attention.print_table(found.as_json())


@pytest.mark.parametrize("case", [CASE, *tiny_cases([])], ids=lambda case: case.name)
def test_the_check_agrees_with_the_reference(case: AttentionCase) -> None:
    layout = TreeLayout(case.forest, torch.device("cpu"))
    errors = check_backend(case, layout, draw_inputs(case, "cpu"), "reference")
    assert set(errors) == {"out", "grad_query", "grad_key", "grad_value"}
    assert max(errors.values()) < 1e-6


@pytest.mark.parametrize("wrong", ["mask", "gradient", "nan"])
def test_a_wrong_backend_is_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if wrong == "mask":
            options["layout"] = TreeLayout(chain(CASE.forest.num_tokens), torch.device("cpu"))
        if wrong == "gradient":
            key = key.detach() + 0.0 * key
        out = original(query, key, value, **options)
        return out * torch.nan if wrong == "nan" else out

    original = gpu_attention_check.attend
    monkeypatch.setattr(gpu_attention_check, "attend", broken)
    layout, found = TreeLayout(CASE.forest, torch.device("cpu")), report()
    with pytest.raises(WrongResultError, match="segments is off by"):
        check_backend(CASE, layout, draw_inputs(CASE, "cpu"), "segments")
    case = measure_case(CASE, [], ONCE, ["segments", "reference"], found)
    assert case["ways"]["segments"]["seconds"] == {}
    assert [error["case"] for error in found.errors] == ["tiny star, segments", "tiny star, reference"]
