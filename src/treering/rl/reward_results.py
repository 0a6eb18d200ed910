"""Rewards finished rollouts, one by one or a group at a time; what a task raises leaves a rollout without a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import InputError, StateError
from treering.rl.collect import Collected
from treering.rl.tasks.score import as_score
from treering.rl.tasks.task import Prompt, Task
from treering.rl.user_code import contained, in_words

_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardResult:
    """The result of a finished rollout.

    Example: a reward that raises ValueError("no number") leaves a rollout without one, and `error` says so.
    """

    rollout: Rollout
    """With its reward."""
    error: str | None = None
    """Why there is no reward, if the task raised."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the task gave beside the reward, by name."""
    awaits_group: bool = False
    """Whether its reward is that of its group: `evaluate_group`."""


def evaluate_rollout(task: Task, prompt: Prompt, rollout: Rollout) -> RewardResult:
    """Gets the task's reward for a finished rollout.

    A task that rewards groups gives none here: the result awaits its group.

    Whatever the task raises, also `SystemExit`, leaves the rollout without a reward; see `contained`.

    Raises:
        KeyboardInterrupt, Interrupted: the user or the system interrupts the run.

    Example: a reward that raises ValueError("no number") gives the error "prompt 'q', sample 0: ValueError: no number".
    """
    try:
        with contained():
            if task.rewards_groups or rollout.num_tokens == 0:
                return RewardResult(rollout=rollout, awaits_group=rollout.num_tokens > 0)
            return _rewarded(rollout, task.reward(prompt, rollout))
    except Exception as error:
        return without_reward(rollout, error)


def evaluate_group(task: Task, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[RewardResult]:
    """Gets the rewards of the finished rollouts of a group, for a task that rewards groups; errors as of one rollout.

    Example: rewards [1.0, None] give one rollout the reward 1.0 and the other none, without an error.
    """
    try:
        with contained():
            values = list(task.reward_group(prompt, rollouts))
        if len(values) != len(rollouts):
            raise InputError(
                f"a group's rewards are one for each of its {len(rollouts)} rollouts, got {len(values)}; return None "
                "for one to leave out"
            )
    except Exception as error:
        return [without_reward(rollout, error) for rollout in rollouts]
    return [_in_group(rollout, value) for rollout, value in zip(rollouts, values, strict=True)]


def without_reward(rollout: Rollout, error: Exception) -> RewardResult:
    """The result of a rollout that has no reward because of an error.

    Example: a message of 500 characters is cut to 300, ending with "...".
    """
    text = f"{whose(rollout.key)}{in_words(error)}"
    short = text if len(text) <= _MESSAGE_LENGTH else f"{text[: _MESSAGE_LENGTH - 3]}..."
    return RewardResult(rollout=rollout, error=short)


def whose(key: RolloutKey) -> str:
    """How the error of a rollout begins.

    Example: "prompt 'q', sample 0: ".
    """
    prompt_id, _, sample = key[:3]
    return f"prompt {prompt_id!r}, sample {sample}: "


def _rewarded(rollout: Rollout, value: object) -> RewardResult:
    score = as_score(value)
    return RewardResult(rollout=replace(rollout, reward=score.reward), numbers=score.numbers)


def _in_group(rollout: Rollout, value: object) -> RewardResult:
    try:
        if isinstance(value, Exception):
            raise value
        return _rewarded(rollout, value)
    except Exception as error:
        return without_reward(rollout, error)


MAX_FAILED_STEPS = 3
"""Steps in a row without any reward that end a run; before its first reward it is one."""


class FailedSteps:
    """Counts the steps in a row in which every reward failed.

    A run has its first reward in step 1, so a resumed one has had it.

    Example: with steps of 8 rollouts, 7, 8, 8, 7, 8, 8 and 8 failures end the run at the seventh step; 8 end it at the
    first.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name`: see `Task.reward_name`."""
        self._reward_name = reward_name
        self._count = 0

    def note(self, step: int, collected: Collected) -> None:
        """Notes a sampled step; call it in order.

        Raises:
            StateError: every reward of the last `MAX_FAILED_STEPS` steps failed, or of step 1.
        """
        has_failed = collected.num_rollouts == 0 and collected.num_reward_errors > 0
        self._count = self._count + 1 if has_failed else 0
        if self._count < (1 if step == 1 else MAX_FAILED_STEPS):
            return
        steps = "step 1," if step == 1 else f"{MAX_FAILED_STEPS} steps in a row, in step {step}"
        error, count = max(collected.error_counts.items(), key=lambda item: item[1])
        raise StateError(
            f"a run learns from rewards, and {self._reward_name} failed for every rollout of {steps} for "
            f"{collected.num_reward_errors}; {count} times with {error}; one of them is "
            f"{collected.reward_errors[0]}; correct it"
        )
