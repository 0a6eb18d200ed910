"""Law 8: a run killed at any moment and resumed ends with bitwise the weights of an uninterrupted one."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.killing import NUM_MOMENTS, reports_of
from tests.train.loop.killed_runs import NUM_STEPS
from tests.train.loop.runs import store, tiny_loop
from treering.metrics import METRICS_FILE, JsonlSink, Metrics
from treering.train.loop.checkpoint import StepReport
from treering.train.loop.saved_run import open_run, run_steps


@pytest.mark.slow
def test_a_run_killed_at_any_file_operation_ends_bitwise_as_one_that_was_not(tmp_path: Path) -> None:
    reports = reports_of("tests.train.loop.killed_runs", tmp_path)
    whole, *killed = reports
    assert len(killed) == NUM_MOMENTS + 1
    assert [report["num_kills"] for report in killed[:-1]] == [1] * NUM_MOMENTS
    assert killed[-1]["num_kills"] > 1
    assert {report["digest"] for report in killed} == {whole["digest"]}
    for report in reports:
        assert report["steps"] == list(range(1, NUM_STEPS + 1)), "metrics hold each step once"
        assert report["losses"] == whole["losses"]
    assert {tuple(report["checkpoints"]) for report in reports} == {("step-000004", "step-000005")}


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not(tmp_path: Path, stop: int) -> None:
    losses = train(tmp_path / "whole", num_steps=5)
    train(tmp_path / "stopped", num_steps=5, stop_after=stop)
    train(tmp_path / "stopped", num_steps=5)
    rows = [json.loads(line) for line in (tmp_path / "stopped" / METRICS_FILE).read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == list(enumerate(losses, start=1))


def test_a_finished_run_trains_on_with_more_steps_and_does_nothing_with_as_many(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", num_steps=4)
    assert train(tmp_path / "longer", num_steps=3) == whole[:3]
    assert train(tmp_path / "longer", num_steps=3) == []
    assert train(tmp_path / "longer", num_steps=4) == whole[3:]


def train(folder: Path, *, num_steps: int, stop_after: int | None = None) -> list[float]:
    """Return the losses of the trained steps; save every second step and optionally stop early."""
    loop, checkpoints, losses = tiny_loop(), store(folder / "checkpoints"), []
    opened = open_run(folder, loop, checkpoints)
    with Metrics([JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
        steps = run_steps(loop, num_steps=num_steps, save_every=2, checkpoints=checkpoints, metrics=metrics)
        for report in steps:
            losses.append(report.update.loss)
            if report.step == stop_after:
                break
    return losses


def test_a_step_is_logged_before_it_is_saved(tmp_path: Path) -> None:
    loop, checkpoints, seen = tiny_loop(), store(tmp_path / "checkpoints"), []
    open_run(tmp_path, loop, checkpoints)

    class Watching:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            seen.append((step, values["lines"], (tmp_path / "checkpoints" / f"step-{step:06d}").exists()))

        def close(self) -> None: ...

    def on_step(report: StepReport) -> dict[str, float]:
        seen.append((report.step, None, (tmp_path / "checkpoints" / f"step-{report.step:06d}").exists()))
        return {"lines": 7}

    with Metrics([Watching()]) as metrics:
        list(run_steps(loop, num_steps=2, save_every=1, checkpoints=checkpoints, metrics=metrics, on_step=on_step))
    assert seen == [(1, None, False), (1, 7, False), (2, None, False), (2, 7, False)]
