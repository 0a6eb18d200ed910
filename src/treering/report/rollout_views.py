"""Newest rollouts of a run for its page: which are read, and which prompts are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treering.data import Trajectory, read_trajectories
from treering.errors import InputError
from treering.types import PromptId

ROLLOUTS_FOLDER = "rollouts"
SAMPLES_FILE = "samples.jsonl"
"""Tasks from a supervised run's data, as trajectories."""
MAX_READ_BYTES = 200_000_000
"""Most bytes of rollout files to read, newest first; this also skips a newest file that is larger."""
MAX_DRAWN_TOKENS = 40_000
"""Most tokens of all rollouts on a page; at least one prompt is drawn."""
MAX_DRAWN_PROMPTS = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Rollouts of the newest epochs.

    Attributes:
        epochs: rollouts by epoch, ascending, in the order of their steps; all have tokens.
        notes: sentences on missing data.
    """

    epochs: dict[int, list[Trajectory]]
    notes: tuple[str, ...]

    @property
    def newest(self) -> dict[PromptId, list[Trajectory]]:
        """The newest epoch's rollouts by prompt, in order; empty without rollouts."""
        return groups_of(self.epochs[max(self.epochs)]) if self.epochs else {}


def read_newest(folder: Path, num_epochs: int) -> Rollouts:
    """Read the rollout files of the last `num_epochs` epochs of a run's folder, up to `MAX_READ_BYTES`.

    Example: for a run with files of epochs 0 to 7, `read_newest(folder, 3)` reads epochs 5, 6 and 7.
    """
    # File names get longer from epoch 1000 on.
    found = sorted((folder / ROLLOUTS_FOLDER).glob("epoch-*.jsonl"), key=lambda file: (len(file.name), file.name))
    files = found[-num_epochs:]
    notes = [] if files else ["There are no rollouts: none is logged yet, or run.rollouts is off."]
    return _read(files, notes)


def read_samples(folder: Path) -> Rollouts:
    """Read the sampled tasks of a supervised run as rollouts of epoch 0 without rewards."""
    file = folder / SAMPLES_FILE
    return _read([file], []) if file.is_file() else _read([], ["The run has kept no samples of its data."])


def _read(files: Sequence[Path], notes: list[str]) -> Rollouts:
    found: dict[int, list[Trajectory]] = {}
    num_bytes = 0
    for file in reversed(files):
        num_bytes += file.stat().st_size
        if num_bytes > MAX_READ_BYTES:
            notes.append(
                f"{file.name} and earlier rollouts are not read: they have more than {MAX_READ_BYTES:,} bytes."
            )
            break
        try:
            for each in read_trajectories(file, may_be_torn=True):
                if each.tokens is not None and each.epoch is not None:
                    found.setdefault(each.epoch, []).append(each)
        except (InputError, OSError) as error:
            notes.append(f"{file.name} cannot be read: {error}")
    for rollouts in found.values():
        rollouts.sort(key=lambda each: each.step or 0)
    return Rollouts(epochs={epoch: found[epoch] for epoch in sorted(found)}, notes=tuple(notes))


def groups_of(trajectories: Sequence[Trajectory]) -> dict[PromptId, list[Trajectory]]:
    """Return rollouts by prompt, prompts and rollouts in order."""
    groups: dict[PromptId, list[Trajectory]] = {}
    for each in trajectories:
        groups.setdefault(each.task_id, []).append(each)
    return groups


def choose_prompts(groups: dict[PromptId, list[Trajectory]]) -> list[PromptId]:
    """Choose the prompts to draw: at least one, up to `MAX_DRAWN_PROMPTS` and `MAX_DRAWN_TOKENS`.

    Prompts with different rewards come first, and among these the prompts with the most different rollouts.

    Example: of 3 prompts with 30,000 tokens each, one is drawn.
    """

    def variety(prompt: PromptId) -> tuple[bool, int]:
        group = groups[prompt]
        return len({each.reward for each in group}) > 1, len({tokens_of(each).tobytes() for each in group})

    order = sorted(groups, key=variety, reverse=True)
    sizes = np.cumsum([sum(tokens_of(each).size for each in groups[prompt]) for prompt in order])
    num_fitting = int((sizes <= MAX_DRAWN_TOKENS).sum())
    return order[: min(MAX_DRAWN_PROMPTS, max(1, num_fitting))]


def tokens_of(trajectory: Trajectory) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the tokens of a trajectory, int32 [T]."""
    assert trajectory.tokens is not None, "rollouts are read with tokens"
    return trajectory.tokens
