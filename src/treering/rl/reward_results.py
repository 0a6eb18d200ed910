"""Rewards finished rollouts, one by one or a group at a time; what a task raises leaves a rollout without a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import InputError
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
