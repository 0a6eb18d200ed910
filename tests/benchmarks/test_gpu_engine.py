"""The engine on a device: bytes counted by hand, drafts whose acceptance is as set, and every case run small."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks import gpu_engine
from benchmarks.gpu_budget import PartReport
from benchmarks.gpu_clock import Stopwatch
from benchmarks.gpu_engine_cases import build, full_plans, requests_of, tiny_plans
from benchmarks.gpu_engine_drafts import ReplayDrafter

from treering.engine.backends import make_machinery
from treering.engine.torch_engine import TorchEngine
from treering.engine.weights import read_weights
from treering.history.records import DraftRows
from treering.model.families import find_parts

ONCE = Stopwatch(device="cpu", min_runs=1, max_runs=1)
PLAN = tiny_plans()[0]


def report() -> PartReport:
    return PartReport("engine", 1e9, environment={"device": "here"}, goals=dict(gpu_engine.GOALS))


def rows_of(tokens: list[int], num_prompt: int, max_drafts: int) -> DraftRows:
    return DraftRows(
        prompt_ids=["q"],
        groups=np.zeros(1, np.int64),
        tokens=np.array([tokens], np.int32),
        num_tokens=np.array([len(tokens)]),
        num_prompt_tokens=np.array([num_prompt]),
        max_drafts=np.array([max_drafts]),
    )


def test_the_floor_is_weights_keys_and_values_read_once() -> None:
    large, small = full_plans()
    assert large.weight_bytes == 2 * 7_568_097_280
    # Keys and values of 36 layers with 8 heads of 128.
    assert large.slot_bytes == 2 * 36 * 8 * 128 * 2
    assert large.floor_bytes(16, 512) == large.weight_bytes + 16 * 512 * large.slot_bytes
    assert small.slot_bytes == 2 * 28 * 8 * 128 * 2


def test_the_full_plans_measure_what_the_goals_are_about() -> None:
    for plan in full_plans():
        assert plan.shape.name in gpu_engine.GOALS["over_floor"]
        assert {1, 16, 128} <= {*plan.verify_batches} == {*plan.rollout_batches}
        assert {1, 16} <= {*plan.generate_batches}
        # Captured passes hold 1,024 tokens, and drafts of the largest batch fill them.
        assert max(plan.rollout_batches) * (1 + plan.num_drafted) <= 1024


def test_replayed_drafts_are_the_recording_where_the_rollout_stands() -> None:
    drafter = ReplayDrafter({"q": np.arange(5, 12)}, num_drafted=3, vocab_size=50)
    drafts = drafter.propose(rows_of([1, 2, 5, 6], 2, 9))
    assert drafts.tokens.tolist() == [7, 8, 9]
    assert (drafts.parents.tolist(), drafts.offsets.tolist()) == ([-1, 0, 1], [0, 3])
    assert drafter.propose(rows_of([1, 2, 5, 6], 2, 1)).tokens.tolist() == [7]
    assert drafter.propose(rows_of([1, *range(5, 12)], 1, 9)).tokens.size == 0


def test_as_many_replayed_tokens_are_wrong_as_is_set_and_all_of_them_are_the_models() -> None:
    recording = np.arange(20_000) % 50
    drafter = ReplayDrafter({"q": recording}, num_drafted=20_000, vocab_size=50)
    drafter.set_acceptance(0.8)
    drafted = drafter.propose(rows_of([1], 1, 20_000)).tokens
    assert abs((drafted == recording).mean() - 0.8) < 0.02
    assert drafted.max() == 49
    assert drafted.min() == 0


def test_a_pass_for_timing_is_one_that_an_engine_makes() -> None:
    weights = read_weights(find_parts(build(PLAN, "cpu")), num_positions=40)
    machinery = make_machinery(weights, 100, "plain")
    free = machinery.arena.num_free
    batch = gpu_engine.rows_of_tokens(machinery, 2, 10, 3)
    assert batch.positions.tolist() == [10, 11, 12] * 2
    assert batch.num_own.tolist() == [11, 12, 13] * 2
    assert (batch.slots - batch.own_start).tolist() == [10, 11, 12] * 2
    assert {*batch.own_start.tolist()} == {0, 13}
    assert machinery.arena.num_free == free
    assert machinery.decoder.run(batch).shape == (6, PLAN.shape.vocab_size)


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


def test_a_model_that_does_not_fit_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report()
    monkeypatch.setattr(gpu_engine, "free_bytes", lambda device: PLAN.needed_bytes - 1)
    gpu_engine.measure_engine(found, [PLAN], "cpu", ONCE)
    assert [case["kind"] for case in found.cases] == ["memory"]
    assert [skipped["case"] for skipped in found.skipped] == ["tiny"]


def test_without_the_rate_of_memory_there_is_no_floor() -> None:
    plan = replace(PLAN, tokens_per_row=(1,))
    case = gpu_engine.measure_verify(build(plan, "cpu"), plan, 2, ONCE, None)
    assert (case["floor_s"], case["over_floor"]) == (None, None)


def test_only_steps_without_prompts_are_timed() -> None:
    engine = TorchEngine(build(PLAN, "cpu"), max_batch=2, max_tokens=200, max_prefill=3)
    seconds, step_s, rollouts = gpu_engine.timed_rollouts(engine, requests_of(PLAN, 2))
    assert {name: tokens.size for name, tokens in rollouts.items()} == {"r0": 5, "r1": 5}
    assert 0 < step_s < seconds


def test_generate_is_compared_with_our_plain_step_of_the_same_rows() -> None:
    cases: list[dict[str, Any]] = [
        {"kind": "rollouts", "model": "m", "batch": 1, "plain_step_s": 0.004},
        {"kind": "generate", "model": "m", "batch": 1, "step_s": 0.005},
        {"kind": "generate", "model": "m", "batch": 16, "step_s": 0.005},
        {"kind": "memory"},
    ]
    assert gpu_engine.compared_with_generate(cases) == {"m 1": pytest.approx(0.8)}
