"""The log of rollouts: groups as trajectory records, one file per epoch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treering import metrics
from treering.data import Trajectory, append_trajectories
from treering.data.episode import CallSpan, EpisodePart
from treering.engine.rollout import Rollout
from treering.errors import InputError, StateError
from treering.files.step_lines import reopen
from treering.files.writing import writing
from treering.rl.advantages import BranchAdvantages
from treering.rl.collect import Group, Runs
from treering.rl.tasks.task import Prompt


def as_trajectories(
    groups: Sequence[Group],
    *,
    epoch: int,
    step: int,
    advantages: Sequence[BranchAdvantages] | None = None,
) -> list[Trajectory]:
    """One trajectory per rollout, groups in order and rollouts within them.

    Of pictures they hold the placeholders alone.

    `task_id` is the prompt's id, `trial` the sample number, `version` that of the last token. `logprobs` are those of
    the distribution sampled from, 0.0 on the prompt and on what an environment wrote. `reward` is a run's with those of
    its calls.

    Args:
        groups: of one step.
        epoch: pass over the prompts.
        step: optimizer step that they were sampled for.
        advantages: of the branches of each group, which may have one per token; None leaves them out.

    Raises:
        InputError: the advantages do not match the groups.

    Example: a prompt of 2 tokens with rollouts of 3 and 1 tokens gives trajectories of 5 and 3 tokens, whose masks
    start with two zeros.
    """
    if advantages is not None and [len(values) for values in advantages] != [len(g.rollouts) for g in groups]:
        raise InputError(
            f"advantages have one number per rollout: groups of {[len(g.rollouts) for g in groups]}, advantages of "
            f"{[len(values) for values in advantages]}; align them"
        )
    found = []
    for i, group in enumerate(groups):
        for j, rollout in enumerate(group.rollouts):
            one = _trajectory(group.prompt, rollout, epoch, step, None if advantages is None else advantages[i][j])
            found.append(one if group.runs is None else _of_run(one, group, group.runs, j))
    return found


def _of_run(trajectory: Trajectory, group: Group, runs: Runs, rollout: int) -> Trajectory:
    """A branch with what its episode has earned, and what it is a part of."""
    return replace(trajectory, reward=float(group.returns[runs.of[rollout]]), episode=_episode(runs, rollout))


def _episode(runs: Runs, rollout: int) -> EpisodePart:
    """What a branch of an episode is a part of."""
    turns, run = runs.turns[rollout], runs.of[rollout]
    edges = np.flatnonzero(np.diff(turns, prepend=-1, append=-1))
    spans = [
        (int(turns[start]), int(start), int(stop)) for start, stop in pairwise(edges.tolist()) if turns[start] >= 0
    ]
    is_first = run not in runs.of[:rollout]
    return EpisodePart(
        agent=runs.agent,
        calls=tuple(CallSpan(*span) for span in spans),
        turns=runs.episodes[run] if is_first and runs.episodes else (),
    )


def _trajectory(
    prompt: Prompt, rollout: Rollout, epoch: int, step: int, advantage: float | NDArray[np.float64] | None
) -> Trajectory:
    num_prompt = prompt.tokens.size
    is_of_tokens = isinstance(advantage, np.ndarray)
    return Trajectory(
        task_id=prompt.prompt_id,
        tokens=np.concatenate([prompt.tokens, rollout.tokens]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(num_prompt, bool), rollout.loss_mask]),
        logprobs=np.concatenate([np.zeros(num_prompt), rollout.logprobs]),
        trial=rollout.sample,
        reward=rollout.reward,
        advantage=None if advantage is None or is_of_tokens else float(advantage),
        advantages=np.concatenate([np.zeros(num_prompt), advantage]) if is_of_tokens else None,
        step=step,
        epoch=epoch,
        version=int(rollout.versions[-1]),
    )


_NAME = re.compile(r"epoch-\d{3,}\.jsonl")


class RolloutLog:
    """Files `epoch-000.jsonl` etc. in one folder, one trajectory per line, steps in order.

    Example: after steps 1 to 3, with two steps per epoch, `epoch-000.jsonl` has the lines of steps 1 and 2, and
    `epoch-001.jsonl` those of step 3. Reopened with `resume_step=1`, the first has step 1 and the second is deleted.
    """

    def __init__(
        self, folder: Path, *, resume_step: int | None = None, expected: Mapping[int, int | None] | None = None
    ) -> None:
        """Damage to earlier steps is a warning (`treering.files.step_lines.reopen`).

        Args:
            folder: created with the first step.
            resume_step: the last step to keep; later lines are cut off. None means a new run.
            expected: lines by step, as `treering.metrics.num_logged` gives them; a step that it lacks should have some.

        Raises:
            StateError: a new run finds existing files, or a file cannot be read or written.
        """
        self._folder = folder
        files = [file for file in sorted(folder.glob("epoch-*.jsonl")) if _NAME.fullmatch(file.name)]
        if resume_step is None and files:
            raise StateError(
                f"a new run starts without rollouts, and {files[0]} is there; choose another run folder, or remove it"
            )
        steps = range(1, (resume_step or 0) + 1)
        reopen(files, len(steps), {step: (expected or {}).get(step) for step in steps}, log=folder)

    def write(self, epoch: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Appends the trajectories of one step; each has its step number.

        Returns:
            Their number, as a metric of the step.

        Raises:
            StateError: the disk is full, or the folder cannot be written.
        """
        file = self._folder / f"epoch-{epoch:03d}.jsonl"
        with writing(file):
            try:
                append_trajectories(file, trajectories)
            except InputError as error:
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise
        return {metrics.NUM_LOGGED: len(trajectories)}
