"""Held-out loss equals that of flat sequences, is computed at the right steps, and does not affect training."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.models import build, build_float64
from tests.train.loop.runs import assert_bitwise_equal, store, tensors_of, tiny_loop, tiny_tasks
from treering.config.steps import ComputeOptions
from treering.metrics import METRICS_FILE, JsonlSink, Metrics
from treering.train.loop.batches import TrainingTask
from treering.train.loop.held_out import Evaluation, HeldOutLoss, best_step
from treering.train.loop.saved_run import knows_first, open_run, run_steps

HELD_OUT = tiny_tasks(9)[5:]


def flat_loss(model: torch.nn.Module, tasks: list[TrainingTask]) -> tuple[float, int]:
    """Return the mean over trained tokens of each sequence run separately by the stock model, and their count."""
    total, count = 0.0, 0
    for task in tasks:
        for sequence, mask in zip(task.sequences, task.loss_masks, strict=True):
            with torch.no_grad():
                logits = model(torch.from_numpy(sequence).long()[None]).logits[0, :-1]
            own = torch.nn.functional.cross_entropy(
                logits.double(), torch.from_numpy(sequence[1:]).long(), reduction="none"
            )
            total += float(own[torch.from_numpy(mask[1:])].sum())
            count += int(mask[1:].sum())
    return total / count, count


@pytest.mark.parametrize(("max_tokens", "layout"), [("auto", "tree"), (50, "tree"), (200, "packed")])
def test_the_held_out_loss_is_the_mean_over_the_trained_tokens_of_flat_sequences(
    max_tokens: int | str, layout: str
) -> None:
    model = build_float64()
    measure = HeldOutLoss(model, HELD_OUT, compute=ComputeOptions(max_batch_tokens=max_tokens), layout=layout)  # type: ignore[arg-type]
    values = measure()
    loss, count = flat_loss(model, HELD_OUT)
    assert values["eval/loss"] == pytest.approx(loss, rel=1e-10)
    assert values["eval/num_tokens"] == count


def train(folder: Path, *, evaluates: bool, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    """Train five steps and save every second one, or stop early; return every tensor that training depends on."""
    loop, checkpoints = tiny_loop(), store(folder / "checkpoints")
    opened = open_run(folder, loop, checkpoints)
    evaluation = None
    if evaluates:
        measure = HeldOutLoss(loop.model, HELD_OUT, compute=ComputeOptions(max_batch_tokens=200))
        evaluation = Evaluation(measure=measure, every=2, knows_first=knows_first(folder))
    with Metrics([JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
        steps = run_steps(
            loop, num_steps=5, save_every=2, checkpoints=checkpoints, metrics=metrics, evaluation=evaluation
        )
        for report in steps:
            if report.step == stop_after:
                break
    return tensors_of(loop)


def evaluated(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}


def test_evaluation_changes_no_bit_of_what_is_trained_nor_does_a_resume_change_what_it_measures(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", evaluates=False)
    assert_bitwise_equal(train(tmp_path / "whole", evaluates=True), plain)
    assert list(evaluated(tmp_path / "whole")) == [0, 2, 4, 5]
    train(tmp_path / "stopped", evaluates=True, stop_after=3)
    assert_bitwise_equal(train(tmp_path / "stopped", evaluates=True), plain)
    assert evaluated(tmp_path / "stopped") == evaluated(tmp_path / "whole")


def test_a_run_that_starts_again_before_its_first_checkpoint_does_not_measure_its_first_weights_twice(
    tmp_path: Path,
) -> None:
    train(tmp_path, evaluates=True, stop_after=1)
    train(tmp_path, evaluates=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5]


def test_an_evaluation_leaves_the_mode_of_the_model_and_torchs_random_state(tmp_path: Path) -> None:
    model = build()

    def measure(_: object) -> dict[str, float]:
        torch.rand(3)
        return HeldOutLoss(model, HELD_OUT, compute=ComputeOptions())()

    before, heard = torch.get_rng_state(), []
    evaluation = Evaluation(measure=measure, on_measured=lambda step, values: heard.append((step, values)))
    values = evaluation.at(0, 5, None)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert heard == [(0, values)]
    assert evaluation.at(3, 5, None) == {}


def test_evaluations_are_due_once_at_the_first_last_and_every_nth_step() -> None:
    def due(num_steps: int, every: int | None, *, knows_first: bool = False) -> list[int]:
        evaluation = Evaluation(measure=lambda _: {"eval/loss": 1.0}, every=every, knows_first=knows_first)
        return [step for step in range(num_steps + 1) if evaluation.at(step, num_steps, None)]

    assert due(10, 4) == [0, 4, 8, 10]
    assert due(8, 4) == [0, 4, 8]
    assert due(5, None) == [0, 5]
    assert due(5, 5, knows_first=True) == [5]


@pytest.mark.parametrize(("metric", "sign"), [("eval/loss", 1), ("eval/reward", -1)])
@pytest.mark.parametrize("stops", [[], [1, 2, 3, 4], [3]])
def test_the_checkpoint_of_the_best_evaluation_stays_also_over_resumes(
    tmp_path: Path, metric: str, sign: int, stops: list[int]
) -> None:
    # The initial value is better still but does not count, and of the equal steps 2 and 4 the first counts.
    values = [1.0, 5.0, 2.0, 4.0, 2.0, 3.0]
    for stop in [*stops, 5]:
        loop = tiny_loop()
        checkpoints = store(tmp_path / "checkpoints", keep=1, best=partial(best_step, tmp_path / METRICS_FILE))
        opened = open_run(tmp_path, loop, checkpoints)
        measure = Evaluation(
            measure=lambda _: {metric: sign * values[loop.num_steps_done]},  # noqa: B023
            every=1,
            knows_first=knows_first(tmp_path),
        )
        with Metrics([JsonlSink(tmp_path / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
            run = run_steps(
                loop, num_steps=5, save_every=None, checkpoints=checkpoints, metrics=metrics, evaluation=measure
            )
            assert any(report.step == stop for report in run)
            run.close()
        link = tmp_path / "checkpoints" / "best"
        assert link.resolve().name == f"step-{1 if stop == 1 else 2:06d}"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best", "step-000002", "step-000005"}
