"""The pipe benchmark: passes are timed as they are, a machine is fitted to them, the simulator predicts from it."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.loop.runs import Variant, configuration
from benchmarks.pipe import bench as pipe
from benchmarks.pipe.machine import Machine, Observed, fit_machine, mean_busy, merged, num_beside
from benchmarks.pipe.passes import LOAD, PASS, TimedEngine, read_passes
from benchmarks.pipe.prediction import MeasuredLatencyPolicy, beside_each_other, cluster_of, predict, trace_of
from numpy.typing import NDArray

from tests.benchmarks.loop.loops import TINY, random_start
from treering.cli.demo.policy import demo_task
from treering.cli.models import build_model
from treering.config import RlConfig
from treering.config.model import ModelConfig
from treering.engine.request import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.schedule.latency import Latency, linear_latency
from treering.schedule.policy import Assignment, PlanRequest, Policy
from treering.schedule.simulator.run import simulate
from treering.schedule.simulator.timeline import Timeline


def config_of(folder: Path, schedule: str = "fifo", staleness: int = 0) -> RlConfig:
    variant = Variant(name="v", workers=2, schedule=schedule, staleness=staleness)
    return configuration(random_start(folder / "start"), TINY, variant, seed=0, run_dir=folder / "run")


def records(*rows: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array(rows, np.float64).reshape(-1, 7)


def observed(rows: NDArray[np.float64], trained: list[tuple[float, float]], gap_s: float = 0.0) -> Observed:
    return Observed(records=rows, trained=np.array(trained), gap_s=gap_s, num_rollouts=10, read_s=0.25)


def test_a_timed_engine_samples_the_same_and_writes_each_pass_down(tmp_path: Path) -> None:
    task = demo_task(2, 0)
    model = build_model(ModelConfig(hidden_size=16, num_layers=1), num_ids=task.vocab_size, seed=0, folder=None)
    sampling = Sampling(max_tokens=5)
    requests = [Request(prompt_id=p.prompt_id, prompt=p.tokens, sampling=sampling) for p in task.prompts]

    def engine() -> TorchEngine:
        return TorchEngine(model, max_batch=2, max_tokens=200)

    timed = TimedEngine(engine(), tmp_path)
    expected = {rollout.key: rollout.tokens.tolist() for rollout in engine().generate(requests)}
    assert {rollout.key: rollout.tokens.tolist() for rollout in timed.generate(requests)} == expected
    timed.update_weights(1)
    assert timed.version == 1
    assert not list(timed.generate([]))
    list(timed.generate(requests[:1]))
    found = read_passes(tmp_path)
    passes, loads = found[found[:, 0] == PASS], found[found[:, 0] == LOAD]
    assert len(loads) == 1
    assert passes[:, 3].sum() == timed.stats.num_rows == passes[:, 5].sum() == 15
    assert passes[:, 4].sum() == timed.stats.num_prefilled
    assert (passes[:, 2] > 0).all()
    assert (np.diff(passes[:, 1]) > 0).all()
    assert len(read_passes(tmp_path, since_s=float(loads[0, 1]))) == len(found) - 5
    assert read_passes(tmp_path / "absent").shape == (0, 7)


def test_processes_beside_each_record_are_counted_in_its_middle() -> None:
    rows = records((PASS, 0.0, 2.0, 1, 0, 1, 0), (PASS, 3.0, 2.0, 1, 0, 1, 0), (PASS, 0.5, 1.0, 1, 0, 1, 1))
    run = observed(rows, [(3.5, 4.5), (8.0, 9.0)])
    assert num_beside(run).tolist() == [1, 1, 1]
    assert num_beside(observed(rows, [(0.9, 1.1)])).tolist() == [2, 0, 2]
    # One worker for all of the first update's second, nobody for the other.
    assert mean_busy(run) == pytest.approx(0.5)


def seconds_of(rows: int, prefilled: int, beside: int) -> float:
    return (0.01 + 0.002 * rows + 0.001 * prefilled) * (1.0, 1.25, 2.0)[beside]


def synthetic() -> list[Observed]:
    """Two workers by turns and together, later beside a trainer, each pass taking what `seconds_of` says."""
    random, runs = np.random.default_rng(0), []
    for with_trainer in (False, True):
        found, clock = [], 0.0
        for _ in range(400):
            num_workers = int(random.integers(1, 3))
            beside = num_workers - 1 + with_trainer
            rows, prefilled = int(random.integers(1, 9)), int(random.integers(0, 3))
            seconds = seconds_of(rows, prefilled, beside)
            for worker in range(num_workers):
                found.append((PASS, clock, seconds, rows, prefilled, 2 * rows, worker))
            clock += seconds + 0.001
        found.append((LOAD, clock, 0.5, 0, 0, 0, 0))
        trained = [(0.0, clock)] if with_trainer else [(clock + 1.0, clock + 5.0)]
        runs.append(observed(records(*found), trained, gap_s=0.0 if with_trainer else 0.75))
    return runs


def test_a_machine_is_found_from_what_passes_took_on_it() -> None:
    quiet, busy = synthetic()
    machine = fit_machine(busy, [quiet, busy])
    alone = machine.alone
    assert machine.factors == pytest.approx([1.0, 1.25, 2.0])
    assert alone.token_s(8)[1:] == pytest.approx([0.01 + 0.002 * rows for rows in range(1, 9)])
    prefilled = busy.records[:, 4].sum()
    assert alone.prefill_s == pytest.approx(0.001 * prefilled / 10)
    assert (alone.load_s, alone.tokens_per_step) == (pytest.approx(0.75), None)
    assert alone.training_s == pytest.approx(4.0 + 0.75)
    length = busy.trained[0, 1]
    assert machine.update_s == pytest.approx((length - 4.0) / mean_busy(busy))
    # By its own passes alone, which are never by themselves; each gives two tokens a row.
    drafted = fit_machine(busy, [quiet, busy], drafts=True)
    assert drafted.factors == pytest.approx([1.0, 1.0, 1.6])
    assert drafted.alone.token_s(8) == pytest.approx(1.25 * alone.token_s(8) / 2)


def test_full_batches_that_are_hardly_ever_alone_are_told_from_small_ones_that_hardly_ever_are_not() -> None:
    found, clock, random = [], 0.0, np.random.default_rng(1)
    for number in range(2000):
        # Both workers run full batches and one runs the rest; every hundredth time one runs a full one.
        num_workers = 1 + number % 2 if number % 100 else 1
        rows = 8 if num_workers == 2 or number % 100 == 0 else int(random.integers(1, 8))
        prefilled = int(random.integers(0, 3))
        seconds = seconds_of(rows, prefilled, num_workers - 1)
        for worker in range(num_workers):
            found.append((PASS, clock, seconds, rows, prefilled, rows, worker))
        clock += seconds + 0.001
    run = observed(records(*found), [(clock + 1.0, clock + 5.0)])
    machine = fit_machine(run, [run, run])
    assert machine.factors[1] == pytest.approx(1.25, rel=1e-3)
    assert machine.alone.token_s(8)[1:] == pytest.approx([0.01 + 0.002 * rows for rows in range(1, 9)], rel=1e-3)


def test_of_two_runs_as_one_each_record_has_the_processes_of_its_own_beside_it() -> None:
    early = observed(records((PASS, 0.0, 2.0, 1, 0, 1, 0), (PASS, 0.5, 1.0, 2, 0, 2, 1)), [(3.0, 4.0)], gap_s=1.0)
    late = observed(records((PASS, 10.0, 2.0, 1, 0, 1, 0), (PASS, 11.25, 2.0, 4, 0, 4, 1)), [(11.5, 13.0)])
    both = merged([late, early])
    assert num_beside(both).tolist() == [*num_beside(early), *num_beside(late)] == [1, 1, 0, 1]
    assert both.trained.tolist() == [[3.0, 4.0], [11.5, 13.0]]
    assert (both.gap_s, both.num_rollouts, both.read_s) == (0.5, 20, 0.25)


def test_a_run_is_predicted_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []

    def fit(curve: Observed, others: list[Observed], *, drafts: bool) -> str:
        seen.append([curve.gap_s, *(each.gap_s for each in others)])
        return "drafts" if drafts else "none"

    groups = pipe.variants(("a", "b", "c"))
    names = [variant.name for group in groups for variant in group]
    assert names == ["a-0-off", "b-0-off", "c-0-off", "a-1-off", "b-1-off", "c-1-off", "a-1-on", "c-1-on"]
    monkeypatch.setattr(pipe, "fit_machine", fit)
    runs = {
        name: SimpleNamespace(observed=observed(records(), [(float(at), at + 1.0)], gap_s=2.0**at))
        for at, name in enumerate([*names, pipe.ALONE.name])
    }
    assert pipe._machine_without(groups[0][1], groups[0], groups, runs) == "none"
    assert pipe._machine_without(groups[2][0], groups[2], groups, runs) == "drafts"
    assert pipe._machine_without(groups[1][0], groups[1][:1], [groups[0], groups[1][:1]], runs) == "none"
    # 1, 2 and 4 are the gaps at staleness 0, 8, 16 and 32 at 1, then 64 and 128, and 256 of the single worker.
    assert seen == [[261 / 3, 261 / 3, 56 / 3], [128, 263 / 4, 56 / 3], [264 / 2, 263 / 4, 8]]


def test_time_spent_at_half_the_speed_counts_by_the_clock() -> None:
    alone = linear_latency(step_s=1.0, row_s=0.5, prefill_s=2.0, training_s=3.0)
    machine = Machine(alone=alone, factors=np.array([1.0, 1.5, 2.0]), update_s=0.25)
    latency = machine.latency(np.array([0.5, 0.0, 0.5]), 1.5)
    assert latency.token_s(2)[1:] == pytest.approx(np.array([1.5, 2.0]) / 0.75)
    assert latency.prefill_s == pytest.approx(2.0 / 0.75)
    assert latency.training_s == pytest.approx(3.375)


def timeline(spans: list[tuple[int, float, float]], sampled: list[float], trained: list[float]) -> Timeline:
    return Timeline(
        policy="hand",
        workers=np.array([worker for worker, _, _ in spans], np.int32),
        steps=np.ones(len(spans), np.int32),
        started_s=np.array([start for _, start, _ in spans]),
        ended_s=np.array([end for _, _, end in spans]),
        num_rollouts=np.ones(len(spans), np.int64),
        sampled_s=np.array(sampled),
        trained_s=np.array(trained),
        num_workers=2,
        num_tokens=1,
        bound_s=1.0,
        staleness_max=0,
        num_stolen=0,
        num_moved=0,
    )


def test_who_runs_beside_whom_is_read_off_a_timeline() -> None:
    shares, busy = beside_each_other(timeline([(0, 0.0, 4.0), (1, 0.0, 2.0)], [4.0], [5.0]), 3)
    assert shares == pytest.approx([2 / 6, 4 / 6, 0.0])
    assert busy == 0.0
    overlapped = timeline([(0, 0.0, 4.0), (1, 0.0, 2.0), (1, 2.0, 8.0)], [4.0, 8.0], [6.0, 9.0])
    shares, busy = beside_each_other(overlapped, 3)
    # Both until 4, worker 1 beside the update until 6, then alone until 8; the second update is beside nobody.
    assert shares == pytest.approx([2 / 12, 10 / 12, 0.0])
    assert busy == pytest.approx(2 / 3)


def test_forecasts_know_only_the_steps_that_the_runtime_had_told_of(tmp_path: Path) -> None:
    lengths = [np.full(6, value, np.int64) for value in (1, 2, 3, 4)]
    fresh = trace_of(config_of(tmp_path / "a"), lengths)
    stale = trace_of(config_of(tmp_path / "b", staleness=1), lengths)
    # Two steps an epoch: at staleness 0 step 3 knows what its prompts did in 1 and 2. Before anything is known, half.
    assert fresh.steps[0].forecast.lengths.tolist() == [3.0] * 6
    assert fresh.steps[1].forecast.lengths.tolist() == [1.0] * 6
    assert set(fresh.steps[2].forecast.lengths.tolist()) <= {1.0, 2.0}
    assert stale.steps[1].forecast.lengths.tolist() == [3.0] * 6
    assert stale.steps[2].forecast.lengths.mean() == pytest.approx(1.0)
    assert [step.lengths.tolist() for step in fresh.steps] == [each.tolist() for each in lengths]


def test_a_prediction_of_equal_rollouts_is_what_one_calculates(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    alone = Latency(num_rows=np.array([1, 2]), decode_s=np.array([1.0, 1.5]), prefill_s=0.0, load_s=0.5, training_s=4.0)
    machine = Machine(alone=alone, factors=np.array([1.0, 1.0, 1.0]), update_s=0.0)
    lengths = [np.full(6, 4, np.int64)] * 4
    found = predict(config, lengths, machine, first=2, measured=[None] * 5)
    # Three rollouts a worker, two at one time: 4 tokens at 1.5 s, then 4 at 1 s; loading and training besides.
    assert found.step_s == pytest.approx(6.0 + 4.0 + 0.5 + 4.0)
    assert found.bubble == pytest.approx(1.0 - 10.0 / 14.5)
    slow = Machine(alone=alone, factors=np.array([1.0, 2.0, 2.0]), update_s=1.0)
    # Both workers begin and end together, so each always runs beside the other; the trainer runs alone.
    assert predict(config, lengths, slow, first=2, measured=[None] * 5).step_s == pytest.approx(
        20.0 + 0.5 + 4.0, rel=0.01
    )


class Listening(Policy):
    """Notes the time of a decode step with one row in each request."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @property
    def name(self) -> str:
        return "listening"

    def assign(self, request: PlanRequest) -> Assignment:
        self.seen.append(float(request.cluster.latency.decode_s[0]))
        size = request.forecasts[0].num_rollouts
        return Assignment(workers=np.zeros(size, np.int32), order=np.arange(size))


@pytest.mark.parametrize(
    ("staleness", "expected"), [(0, [20.0, 20.0, 1.0, 20.0, 3.0]), (1, [20.0, 20.0, 20.0, 1.0, 20.0])]
)
def test_a_predicted_policy_is_told_what_was_measured_when_the_step_was_planned(
    staleness: int, expected: list[float], tmp_path: Path
) -> None:
    config, policy = config_of(tmp_path, staleness=staleness), Listening()
    measured = [None, linear_latency(step_s=1.0, row_s=0.0), None, linear_latency(step_s=3.0, row_s=0.0), None]
    trace = trace_of(config, [np.full(6, 4, np.int64)] * 5)
    simulate(MeasuredLatencyPolicy(policy, measured), trace, workers=cluster_of(config))
    assert policy.seen == expected


@pytest.mark.slow
def test_every_policy_samples_the_same_and_has_a_prediction(tmp_path: Path) -> None:
    said: list[str] = []
    start = random_start(tmp_path / "start")
    found = pipe.measure(
        num_runs=1, size=TINY, start=start, policies=("fifo", "work_stealing"), on_progress=said.append
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = found["policies"]
    assert [(row["policy"], row["staleness"], row["drafts"]) for row in rows] == [
        ("fifo", 0, "off"),
        ("work_stealing", 0, "off"),
        ("fifo", 1, "off"),
        ("work_stealing", 1, "off"),
        ("fifo", 1, "on"),
        ("work_stealing", 1, "on"),
    ]
    assert len(said) == 1 + 6
    for row in rows:
        assert (row["num_differing"], row["num_rollouts"]) == (0, 24)
        assert row["ratio"] == pytest.approx(row["predicted_step_s"] / row["step_s"])
        assert row["is_base"] == (row["policy"] == "fifo")
        assert 0.0 <= row["bubble"] <= 1.0
        if row["is_base"]:
            assert row["speedup"] == row["predicted_speedup"] == 1.0
    assert set(found["latency"]) == {f"{row['policy']}-{row['staleness']}-{row['drafts']}" for row in rows}
    assert found["latency"]["fifo-0-off"]["tokens_per_step"] is None
    assert any(note.startswith("predicted within 15%") for note in found["notes"])
