"""A run reports why it is short, that it is complete, how to continue it, and that a budget is far too small."""

from pathlib import Path

import pytest

from treering.cli.session import RunLength
from treering.cli.sft_command import with_step_size
from treering.config import SftConfig


def length(num_tasks: int, per_step: int, *, steps: int | None = None, epochs: int | None = 1, schedule="constant"):
    train = {"trees_per_step": per_step, "num_steps": steps, "num_epochs": epochs}
    sections = {"data": {"source": "generated"}, "train": train, "optim": {"schedule": schedule}}
    return RunLength(config=SftConfig.model_validate(sections), num_tasks=num_tasks)


@pytest.mark.parametrize(
    ("num_tasks", "per_step", "steps", "epochs", "total"), [(5, 2, None, 2, 6), (5, 2, 4, 2, 4), (30, 8, 7, None, 7)]
)
def test_the_earlier_of_steps_and_epochs_ends_a_run(num_tasks, per_step, steps, epochs, total):
    assert length(num_tasks, per_step, steps=steps, epochs=epochs).total == total


def test_a_short_run_reports_why_and_how_to_get_more_steps():
    assert length(6, 8).short_note() == (
        "this run is short, 1 step: an epoch is 6 tasks, 8 a step; raise train.num_epochs (now 1), or lower "
        "train.trees_per_step"
    )
    assert length(1, 1).short_note().endswith("raise train.num_epochs (now 1)")
    assert length(160, 8).short_note() is None
    assert length(6, 8, steps=1).short_note() is None, "one step was asked for"


def test_a_complete_run_reports_how_to_continue_it():
    whole = length(6, 2, epochs=2)
    assert whole.resume_note(Path("r"), 5) == "resuming the run in r after step 5"
    done = "the run in r is complete after step 6; raise train.num_epochs (now 2) to continue"
    assert whole.resume_note(Path("r"), 6) == done
    assert "raise train.num_steps (now 4)" in length(6, 2, steps=4, epochs=9).resume_note(Path("r"), 4)
    assert "continue in another run.dir" in length(6, 2, schedule="cosine").resume_note(Path("r"), 3)


@pytest.mark.parametrize(
    ("num_tasks", "num_ranks", "size"), [(1, 1, 1), (30, 1, 1), (64, 1, 4), (999, 1, 8), (30, 4, 4)]
)
def test_an_epoch_has_sixteen_steps_where_there_are_tasks_for_them(num_tasks, num_ranks, size):
    config = SftConfig.model_validate({"data": {"source": "generated"}, "train": {"num_epochs": 1}})
    sized = with_step_size(config, num_tasks, num_ranks).train.trees_per_step
    assert sized == size
    assert num_tasks < 16 or num_ranks > 1 or -(-num_tasks // sized) >= 16
    kept = config.model_copy(update={"train": config.train.model_copy(update={"trees_per_step": 5})})
    assert with_step_size(kept, num_tasks, num_ranks) is kept
