"""Count what happened to every scheduled rollout, so that none is lost or trained twice."""

from dataclasses import dataclass, fields

from treering.errors import StateError


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts of rollouts, of one step or of all finished steps; deaths are counted over the whole run.

    Example: 64 scheduled rollouts are 40 trained, 2 without a reward and 22 in groups with equal rewards. With only 39
    trained, one would be lost.
    """

    scheduled: int = 0
    """Rollouts or episodes that the steps requested."""
    sampled: int = 0
    """Rollouts that workers have finished."""
    sampled_again: int = 0
    """Restarts of a rollout because its worker died."""
    stolen: int = 0
    """Rollouts that started on another worker than assigned."""
    moved: int = 0
    """Migrations of a running rollout to another worker."""
    evaluated: int = 0
    """Rollouts with a final reward result."""
    evaluated_again: int = 0
    """Reward requests sent again because the reward worker died."""
    reward_errors: int = 0
    """Dropped rollouts whose reward or episode raised, timed out or killed the reward worker."""
    unscored: int = 0
    """Dropped rollouts that no reward scored."""
    empty: int = 0
    """Dropped rollouts without tokens."""
    without_variance: int = 0
    """Dropped rollouts of groups with equal rewards, whose advantages are zero."""
    trained: int = 0
    """Rollouts used by an update."""
    steps_trained_again: int = 0
    """Steps replayed by a new trainer to restore the weights of the one that died."""
    worker_deaths: int = 0
    """Rollout workers that died."""
    reward_worker_deaths: int = 0
    """Reward workers that died on their own."""
    reward_workers_stopped: int = 0
    """Reward workers that were killed because a reward timed out."""
    trainer_deaths: int = 0
    """Trainers that died."""

    def add(self, other: "Account") -> None:
        """Add another account's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int]:
        """Return the counts, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, step: int) -> None:
        """Check that every rollout of a finished step was trained once, or dropped for a counted reason.

        Raises:
            StateError: if the counts do not add up, which is a bug in Treering.
        """
        left_out = self.reward_errors + self.unscored + self.empty + self.without_variance
        if self.scheduled == self.sampled == self.evaluated == self.trained + left_out:
            return
        raise StateError(
            f"every rollout of a step must be trained once or dropped for a reason, but step {step} scheduled "
            f"{self.scheduled}, sampled {self.sampled}, evaluated {self.evaluated}, trained {self.trained} and dropped "
            f"{left_out}; please report this, and start again from the last checkpoint"
        )
