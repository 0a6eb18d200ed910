"""The engine on a device: bytes counted by hand, drafts whose acceptance is as set, and every case run small."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.gpu.budget import PartReport
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.engine import bench as gpu_engine
from benchmarks.gpu.engine.cases import build, full_plans, requests_of, tiny_plans
from benchmarks.gpu.engine.drafts import ReplayDrafter

from treering.engine.backends import make_backend
from treering.engine.decoder.weights import read_weights
from treering.engine.torch_engine import TorchEngine
from treering.history.types import DraftRows
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
    large, small, *_ = full_plans()
    assert large.weight_bytes == 2 * 7_568_097_280
    # Keys and values of 36 layers with 8 heads of 128.
    assert large.slot_bytes == 2 * 36 * 8 * 128 * 2
    assert large.floor_bytes(16, 512) == large.weight_bytes + 16 * 512 * large.slot_bytes
    assert small.slot_bytes == 2 * 28 * 8 * 128 * 2


def test_room_is_what_the_passes_of_an_engine_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    buffers = pytest.importorskip("treering.engine.decoder.cuda.buffers")
    monkeypatch.setattr(buffers, "num_processors", lambda device: 132)
    weights = read_weights(find_parts(build(PLAN, "cpu")), num_positions=40)
    for num_tokens in (1, 16, 64):
        room = buffers.Buffers(weights, num_tokens=num_tokens)
        held = [*room._tensors, room._parts, room._lse]
        sizes = {"num_tokens": num_tokens, "num_processors": 132}
        assert buffers.buffer_bytes(PLAN.shape, PLAN.dtype, **sizes) == sum(tensor.nbytes for tensor in held)
        assert buffers.buffer_bytes(weights.sizes, PLAN.dtype, **sizes) == sum(tensor.nbytes for tensor in held)


def test_a_plan_needs_model_snapshot_keys_values_activations_and_logits() -> None:
    pytest.importorskip("triton")
    large = full_plans()[0]
    # Twice the model with its embedding, and rows of 512 + 64 + 32 tokens.
    held = 2 * (large.weight_bytes + 2 * 4096 * 151_936) + 16 * 608 * large.slot_bytes
    # One number less than twice as many tokens as the largest pass, each of 29 widths of 2,048.
    activations = (2 * 4096 - 1) * 29 * 2048 * 2
    logits = 2 * 16 * 16 * 151_936 * 2
    assert held + activations + logits < large.needed_bytes < held + activations + logits + 1e9
    tied = full_plans()[1]
    assert tied.needed_bytes + 2 * 2048 * 151_936 == replace(tied, is_tied=False).needed_bytes


def test_passes_with_prompts_have_as_many_tokens_as_there_is_room_for() -> None:
    for plan in full_plans():
        for batch in plan.batches:
            assert plan.max_prefill(batch) + batch * (1 + plan.num_drafted) == 4096


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
    backend = make_backend(weights, 100, "plain")
    free = backend.allocator.num_free
    batch = gpu_engine.rows_of_tokens(backend, 2, 10, 3)
    assert batch.positions.tolist() == [10, 11, 12] * 2
    assert batch.num_own.tolist() == [11, 12, 13] * 2
    assert (batch.slots - batch.own_start).tolist() == [10, 11, 12] * 2
    assert {*batch.own_start.tolist()} == {0, 13}
    assert backend.allocator.num_free == free
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


def test_only_steps_without_prompts_are_timed() -> None:
    engine = TorchEngine(build(PLAN, "cpu"), max_batch=2, max_tokens=200, max_prefill=3)
    seconds, step_s, rollouts = gpu_engine.timed_rollouts(engine, requests_of(PLAN, 2))
    assert {name: tokens.size for name, tokens in rollouts.items()} == {"r0": 5, "r1": 5}
    assert 0 < step_s < seconds
