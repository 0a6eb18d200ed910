"""Keeps some tasks of the training data in the folder of a run, whose page shows their trees and texts."""

from collections.abc import Sequence
from pathlib import Path

from treering.data import Trajectory, write_trajectories
from treering.report.rollouts import MAX_DRAWN_PROMPTS, MAX_DRAWN_TOKENS, SAMPLES_FILE
from treering.train.loop.batches import TrainingTask


def write_samples(folder: Path, tasks: Sequence[TrainingTask]) -> None:
    """Writes the first tasks without pictures as `samples.jsonl`, as many as a page draws, at least one.

    Without such a task there is no file.

    Raises:
        InputError: the disk is full.

    Example: of tasks with 30,000 tokens each, it is the first one.
    """
    num_tokens, chosen = 0, list[Trajectory]()
    # A file of tokens has no form for pictures; `treering inspect --html` shows them.
    for task in [task for task in tasks if not task.pictures][:MAX_DRAWN_PROMPTS]:
        num_tokens += sum(sequence.size for sequence in task.sequences)
        if chosen and num_tokens > MAX_DRAWN_TOKENS:
            break
        chosen += [
            Trajectory(task_id=task.task_id, tokens=tokens, loss_mask=mask, epoch=0)
            for tokens, mask in zip(task.sequences, task.loss_masks, strict=True)
        ]
    if chosen:
        write_trajectories(folder / SAMPLES_FILE, chosen)
