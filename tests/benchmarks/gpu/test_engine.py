"""The engine on a device: bytes counted by hand, drafts whose acceptance is as set, and every case run small."""

import pytest
from benchmarks.gpu.budget import PartReport
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.engine import bench as gpu_engine
from benchmarks.gpu.engine.cases import build, tiny_plans

from treering.engine.backends import make_backend
from treering.engine.decoder.weights import read_weights
from treering.model.families import find_parts

ONCE = Stopwatch(device="cpu", min_runs=1, max_runs=1)
PLAN = tiny_plans()[0]


def report() -> PartReport:
    return PartReport("engine", 1e9, environment={"device": "here"}, goals=dict(gpu_engine.GOALS))


def test_a_pass_for_timing_is_one_that_an_engine_makes() -> None:
    weights = read_weights(find_parts(build(PLAN, "cpu")), num_positions=40)
    backend = make_backend(weights, 100, "plain")
    batch = gpu_engine.rows_of_tokens(2, 10, 3)
    assert batch.positions.tolist() == [10, 11, 12] * 2
    assert batch.num_own.tolist() == [11, 12, 13] * 2
    assert (batch.slots - batch.own_start).tolist() == [10, 11, 12] * 2
    assert {*batch.own_start.tolist()} == {0, 13}
    assert backend.decoder.run(batch).shape == (6, PLAN.shape.vocab_size)


def test_every_case_is_measured_and_acceptance_is_what_it_is_set_to() -> None:
    found = report()
    gpu_engine.measure_engine(found, [PLAN], "cpu", ONCE)
    assert not found.errors
    cases = {case["kind"]: case for case in found.cases}
    assert [*cases] == ["memory", "verify", "rollouts", "generate"]
    assert set(cases["verify"]["seconds"]) == {"1", "2"}
    assert cases["verify"]["relative"]["1"] == 1.0
    floor = PLAN.floor_bytes(2, PLAN.num_prompt) / cases["memory"]["bytes_per_s"]
    assert cases["verify"]["floor_s"] == pytest.approx(floor)
    wrong, right = cases["rollouts"]["by_acceptance"]
    assert (wrong["accepted"], wrong["tokens_per_step"]) == (0.0, 1.0)
    # Five tokens: three at one time, then two, since the last one has no room behind it.
    assert (right["accepted"], right["tokens_per_step"]) == (1.0, 2.5)
    assert min(right["speedup"], right["step_s"], cases["generate"]["step_s"]) > 0
    gpu_engine.print_table(found.as_json())
