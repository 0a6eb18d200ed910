"""Report of a step: counts, times and means, and its rollouts as trajectories with advantages."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treering import metrics
from treering.data import Trajectory, append_trajectories
from treering.data.trajectory import CallSpan, EpisodePart
from treering.engine.protocol import EngineStats, Rollout
from treering.errors import InputError, StateError
from treering.files.step_lines import reopen
from treering.files.writing import writing
from treering.rl.advantages import BranchAdvantages, scaled
from treering.rl.collect import Collected, Group, RolloutCounts, Runs
from treering.rl.tasks.task import Prompt
from treering.train.loop.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport(RolloutCounts):
    """Rollouts of a step. Averages exclude empty rollouts and those without a reward."""

    num_rollouts: int
    """Rollouts with a reward."""
    num_tokens: int
    """Their tokens; for an environment, the tokens of all branches, contexts included."""
    reward_mean: float | None
    """None without rollouts."""
    reward_std: float | None
    """Population standard deviation over all of them; None without rollouts."""
    num_groups: int
    """Prompts of the step."""
    num_zero_variance: int
    """Groups with equal rewards, which are not trained."""
    num_empty_groups: int
    """Groups without any rollout."""
    number_means: Mapping[str, float] = field(default_factory=dict)
    """Means by name of the numbers that the task returned with its rewards."""

    def values(self) -> dict[str, float]:
        """Return the metrics by the names of `treering.metrics`."""
        found: dict[str, float] = {
            metrics.NUM_ROLLOUTS: self.num_rollouts,
            metrics.ZERO_VARIANCE_SHARE: self.num_zero_variance / self.num_groups,
            metrics.NUM_EMPTY_GROUPS: self.num_empty_groups,
            metrics.NUM_REWARD_ERRORS: self.num_reward_errors,
            metrics.NUM_UNSCORED: self.num_unscored,
            metrics.NUM_EMPTY: self.num_empty,
            metrics.NUM_OVERLONG: self.num_overlong,
            metrics.NUM_TURNS: self.num_turns,
            **{f"{metrics.REWARD_NUMBERS}{name}": mean for name, mean in self.number_means.items()},
        }
        if self.reward_mean is not None and self.reward_std is not None:
            found[metrics.REWARD_MEAN] = self.reward_mean
            found[metrics.REWARD_STD] = self.reward_std
            found[metrics.LENGTH_MEAN] = self.num_tokens / self.num_rollouts
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Wall-clock seconds of a step."""

    rollout_s: float
    """Sampling and rewards."""
    train_s: float
    """Advantages, forests, gradients and the optimiser."""
    update_s: float
    """Update of the engine's weights and the history."""
    step_s: float
    """The whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpan:
    """Time that a process worked on a step, in seconds of `time.time`; gaps between spans are idle."""

    worker: int | None
    """Number of the rollout worker; None for the trainer."""
    started_s: float
    ended_s: float
    busy_s: float
    """Seconds with work."""
    num_rollouts: int
    """Turns that ended on the worker; 0 for the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Overlap of sampling and training, in a run with several processes."""

    trainer_wait_s: float
    """Idle time of the trainer since its previous update."""
    bubble: float
    """Idle fraction of the workers' time in this step; 0 is best."""
    staleness: int
    """Steps between the weights that sampled this step and the weights it trained."""
    num_stolen: int
    """Rollouts that started on another worker because the assigned one was busy."""
    num_moved: int
    """Moves of a running rollout to another worker."""
    num_resampled: int
    """Rollouts that restarted because their worker died."""
    spans: tuple[WorkerSpan, ...] = ()
    """Spans of the trainer and of every worker with a share of the step."""

    def values(self) -> dict[str, float]:
        """Return the metrics by the names of `treering.metrics`."""
        return {
            metrics.TRAINER_WAIT_S: self.trainer_wait_s,
            metrics.BUBBLE: self.bubble,
            metrics.STALENESS: self.staleness,
            metrics.NUM_STOLEN: self.num_stolen,
            metrics.NUM_MOVED: self.num_moved,
            metrics.NUM_RESAMPLED: self.num_resampled,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStepReport:
    """Report of one step."""

    step: int
    """Its number, from 1."""
    epoch: int
    """Passes over the prompts before it."""
    version: int
    """Policy version that sampled it."""
    rollouts: RolloutReport
    engine: EngineStats
    """The engine's counts in this step."""
    update: Update | None
    """None if every group had equal rewards and the weights stayed."""
    phases: Phases
    """The time of each phase; overlapping phases add up to more than the step."""
    overlap: Overlap | None = None
    """None with one process."""

    @property
    def sampled_per_s(self) -> float:
        """Sampled tokens per second of the rollout phase."""
        return self.engine.num_sampled / self.phases.rollout_s

    def values(self) -> dict[str, float]:
        """Return the metrics by the names of `treering.metrics`; those of an update only if there was one."""
        own: dict[str, float] = {
            metrics.EPOCH: self.epoch,
            metrics.VERSION: self.version,
            metrics.NUM_SAMPLED: self.engine.num_sampled,
            metrics.TOKENS_PER_FORWARD: self.engine.tokens_per_forward,
            metrics.NUM_DRAFTED: self.engine.num_drafted,
            metrics.ACCEPTANCE: self.engine.acceptance,
            metrics.STEP_S: self.phases.step_s,
            metrics.ROLLOUT_S: self.phases.rollout_s,
            metrics.TRAIN_S: self.phases.train_s,
            metrics.UPDATE_S: self.phases.update_s,
            metrics.SAMPLED_PER_S: self.sampled_per_s,
        }
        stats = self.engine
        if stats.num_rehearsed or stats.num_verified:
            own[metrics.REHEARSED] = stats.num_rehearsed
            own[metrics.REHEARSAL_KEPT] = stats.num_kept / max(stats.num_verified, 1)
            # Assume that kept tokens cost as much as others. The others cost more, so this is a lower bound.
            own[metrics.REHEARSAL_SAVED_S] = self.phases.rollout_s * stats.num_kept / max(stats.num_sampled, 1)
        optional = (part.values() for part in (self.update, self.overlap) if part is not None)
        return own | self.rollouts.values() | {name: value for part in optional for name, value in part.items()}


def rollout_report(collected: Collected, *, num_zero_variance: int, num_empty_groups: int) -> RolloutReport:
    """Summarise the collected groups."""
    all_rewards, exponent = scaled(np.concatenate([np.zeros(0), *(group.returns for group in collected.groups)]))
    lengths: Sequence[int] = [rollout.num_tokens for group in collected.groups for rollout in group.rollouts]
    return RolloutReport(
        num_rollouts=all_rewards.size,
        num_tokens=sum(lengths),
        reward_mean=float(np.ldexp(all_rewards.mean(), exponent)) if all_rewards.size else None,
        reward_std=float(np.ldexp(all_rewards.std(), exponent)) if all_rewards.size else None,
        num_groups=len(collected.groups),
        num_zero_variance=num_zero_variance,
        num_empty_groups=num_empty_groups,
        **collected.counts(),
        number_means={name: _mean(numbers) for name, numbers in collected.numbers.items()},
    )


def _mean(numbers: Sequence[float]) -> float:
    """Return the mean of numbers whose sum may be too large for float64."""
    values, exponent = scaled(np.array(numbers, np.float64))
    return float(np.ldexp(values.mean(), exponent))


def total_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """Return the sum of several engines' counts."""
    found = list(parts)
    return EngineStats(**{name: sum(getattr(part, name) for part in found) for name in EngineStats.__slots__})


def as_trajectories(
    groups: Sequence[Group],
    *,
    epoch: int,
    step: int,
    advantages: Sequence[BranchAdvantages] | None = None,
) -> list[Trajectory]:
    """Return one trajectory per rollout, groups in order and rollouts within them.

    Images are kept as placeholders only. `task_id` is the prompt's id, `trial` the sample number, `version` that of the
    last token. `logprobs` are those of the distribution sampled from, 0.0 on the prompt and on text of an environment.
    `reward` includes the rewards of a run's calls.

    Args:
        groups: groups of one step.
        epoch: pass over the prompts.
        step: optimizer step that the rollouts were sampled for.
        advantages: advantages of each group's branches, numbers or an array per branch; None stores none.

    Raises:
        InputError: the advantages do not match the groups.

    Example: a prompt of 2 tokens with rollouts of 3 and 1 tokens gives trajectories of 5 and 3 tokens, whose masks
    start with two zeros.
    """
    if advantages is not None and [len(values) for values in advantages] != [len(g.rollouts) for g in groups]:
        raise InputError(
            f"advantages must have one entry per rollout, got groups of {[len(g.rollouts) for g in groups]} and "
            f"advantages of {[len(values) for values in advantages]}; align them"
        )
    found = []
    for i, group in enumerate(groups):
        for j, rollout in enumerate(group.rollouts):
            one = _trajectory(group.prompt, rollout, epoch, step, None if advantages is None else advantages[i][j])
            if group.runs is not None:
                total = float(group.returns[group.runs.of[j]])
                one = replace(one, reward=total, episode=_episode(group.runs, j))
            found.append(one)
    return found


def _episode(runs: Runs, rollout: int) -> EpisodePart:
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
        rehearsed=rollout.rehearsed,
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
        """Open the log; damage to earlier steps gives a warning (`treering.files.step_lines.reopen`).

        Args:
            folder: created with the first step.
            resume_step: the last step to keep; later lines are cut off. None means a new run.
            expected: lines by step from `treering.metrics.num_logged`; a step that is not listed should have some.

        Raises:
            StateError: a new run finds existing files, or a file cannot be read or written.
        """
        self._folder = folder
        files = [file for file in sorted(folder.glob("epoch-*.jsonl")) if _NAME.fullmatch(file.name)]
        if resume_step is None and files:
            raise StateError(
                f"a new run must start without rollouts, got {files[0]}; choose another run folder, or remove the file"
            )
        steps = range(1, (resume_step or 0) + 1)
        reopen(files, len(steps), {step: (expected or {}).get(step) for step in steps}, log=folder)

    def write(self, epoch: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Append the trajectories of one step; each has its step number.

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
