"""Converts groups to trajectory records, for `treering inspect`, benchmarks and other trainers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treering.data.episode import CallSpan, EpisodePart
from treering.data.trajectory import Trajectory
from treering.engine.rollout import Rollout
from treering.errors import InputError
from treering.rl.collect import Group, Runs
from treering.rl.run_advantages import BranchAdvantages
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
    the distribution sampled from, 0.0 on the prompt and on what an environment wrote.

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
    return [
        replace(
            _trajectory(group.prompt, rollout, epoch, step, None if advantages is None else advantages[i][j]),
            episode=None if group.runs is None else _episode(group.runs, j),
        )
        for i, group in enumerate(groups)
        for j, rollout in enumerate(group.rollouts)
    ]


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
