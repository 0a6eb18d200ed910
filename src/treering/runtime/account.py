"""Counts what happened to every scheduled rollout, so that none is lost or trained twice."""

from dataclasses import dataclass, fields

from treering.errors import StateError


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts of rollouts, of one step or of a run's finished steps; deaths are those of the whole run so far.

    Example: 64 scheduled rollouts of which 40 were trained, 2 had no reward and 22 were of groups with one reward are
    all accounted for; with 39 trained, one is lost.
    """

    scheduled: int = 0
    """Rollouts that steps asked for."""
    sampled: int = 0
    """Rollouts that workers have sampled to their end; each counts once, turns between do not."""
    sampled_again: int = 0
    """Times that a rollout was started again because its worker had died."""
    stolen: int = 0
    """Rollouts that started on another worker than planned."""
    moved: int = 0
    """Times that a running rollout went on at another worker."""
    judged: int = 0
    """Rollouts with a final verdict."""
    judged_again: int = 0
    """Times that a verdict was asked for again because the judge had died."""
    reward_errors: int = 0
    """Rollouts left out: their reward or observation raised, took too long, or killed the judge."""
    empty: int = 0
    """Rollouts left out: no tokens."""
    without_variance: int = 0
    """Rollouts left out: all rewards of their group are equal, so they teach nothing."""
    trained: int = 0
    """Rollouts that an update saw, once each."""
    steps_trained_again: int = 0
    """Steps that a new trainer did once more to get to the weights of the one that died."""
    worker_deaths: int = 0
    """Rollout workers that died."""
    judge_deaths: int = 0
    """Judges that died of themselves."""
    judges_stopped: int = 0
    """Judges that were ended because a reward took too long."""
    trainer_deaths: int = 0
    """Trainers that died."""

    def add(self, other: "Account") -> None:
        """Adds another account's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, step: int) -> None:
        """Sees that every rollout of a finished step is trained once, or left out for a counted reason.

        Raises:
            StateError: they do not add up, which is a bug of ours.
        """
        left_out = self.reward_errors + self.empty + self.without_variance
        if self.scheduled == self.sampled == self.judged == self.trained + left_out:
            return
        raise StateError(
            f"every rollout of a step is trained once or left out for a reason, and step {step} scheduled "
            f"{self.scheduled}, sampled {self.sampled}, judged {self.judged}, trained {self.trained} and left out "
            f"{left_out}; please report this, and start again from the last checkpoint"
        )
