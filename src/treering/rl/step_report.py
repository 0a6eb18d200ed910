"""The metrics of one RL step, with the names under which they are logged. A run never reads them back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treering import metrics
from treering.engine.protocol import EngineStats
from treering.rl.advantages import scaled
from treering.rl.collect import Collected, RolloutCounts
from treering.train.loop.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport(RolloutCounts):
    """The rollouts of a step. Averages leave out empty rollouts and those without a reward."""

    num_rollouts: int
    """Rollouts with a reward."""
    num_tokens: int
    """Their tokens; of an environment those of all branches, contexts included."""
    reward_mean: float | None
    """None if there is no rollout."""
    reward_std: float | None
    """Population standard deviation over all of them; None if there is no rollout."""
    num_groups: int
    """Prompts."""
    num_zero_variance: int
    """Groups with equal rewards, which are not trained."""
    num_empty_groups: int
    """Groups without any rollout."""
    number_means: Mapping[str, float] = field(default_factory=dict)
    """Means of the numbers that the task gave beside its rewards, by name."""

    def values(self) -> dict[str, float]:
        """The metrics, by the names of `treering.metrics`."""
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
    """Wall seconds of a step."""

    rollout_s: float
    """Sampling and rewards."""
    train_s: float
    """Advantages, forests, gradients and the optimiser."""
    update_s: float
    """Updating the engine's weights and the history."""
    step_s: float
    """The whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpan:
    """When a process worked on a step, in seconds of `time.time`; gaps between spans are idle."""

    worker: int | None
    """Number of the rollout worker; None for the trainer."""
    started_s: float
    ended_s: float
    busy_s: float
    """Seconds of it with work."""
    num_rollouts: int
    """Turns that ended there; of the trainer, 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Overlap of sampling and training, in a run with several processes."""

    trainer_wait_s: float
    """Idle time of the trainer since its previous update."""
    bubble: float
    """Idle fraction of the workers' time in this step; 0 is best."""
    staleness: int
    """Steps between the weights that sampled the step and those that it trained."""
    num_stolen: int
    """Rollouts that started on another worker than planned, because the planned one was busy."""
    num_moved: int
    """Migrations of a running rollout to another worker."""
    num_resampled: int
    """Rollouts restarted because their worker died."""
    spans: tuple[WorkerSpan, ...] = ()
    """Of the workers that had a share of the step, and of the trainer."""

    def values(self) -> dict[str, float]:
        """The metrics, by the names of `treering.metrics`."""
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
    """The report of one step.

    Attributes:
        step: its number, from 1.
        epoch: passes over the prompts before it.
        version: policy version that sampled it.
        rollouts: the sampled rollouts.
        engine: the engine's counts in this step.
        update: the update; None if every group had equal rewards, and the weights stayed.
        phases: the time of each phase; overlapping phases add up to more than the step.
        overlap: metrics of a run with several processes; None in a single process.
    """

    step: int
    epoch: int
    version: int
    rollouts: RolloutReport
    engine: EngineStats
    update: Update | None
    phases: Phases
    overlap: Overlap | None = None

    @property
    def sampled_per_s(self) -> float:
        """Sampled tokens per second of the rollout phase."""
        return self.engine.num_sampled / self.phases.rollout_s

    def values(self) -> dict[str, float]:
        """The metrics, by the names of `treering.metrics`; those of an update only if there was one."""
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
        optional = (part.values() for part in (self.update, self.overlap) if part is not None)
        return own | self.rollouts.values() | {name: value for part in optional for name, value in part.items()}


def rollout_report(collected: Collected, *, num_zero_variance: int, num_empty_groups: int) -> RolloutReport:
    """Summarises the collected groups.

    Example: groups with rewards [1, 0] and [1, 1] have a mean of 0.75 and a standard deviation of 0.433.
    """
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
    """Of numbers whose sum may be too large for float64."""
    values, exponent = scaled(np.array(numbers, np.float64))
    return float(np.ldexp(values.mean(), exponent))


def total_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """The sum of several counts.

    Example: 240 tokens in 80 rows and 60 in 20 rows are 300 in 100: 3.0 tokens per forward.
    """
    found = list(parts)
    return EngineStats(**{name: sum(getattr(part, name) for part in found) for name in EngineStats.__slots__})
