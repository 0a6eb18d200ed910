"""Evaluates a rollout after its turn: either it continues after an observation, or it ends with a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import InputError
from treering.rl.tasks.score import as_score
from treering.rl.tasks.task import Prompt, Task, checked_observation
from treering.rl.user_code import contained, in_words

_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardResult:
    """The result of a turn: a longer rollout that continues, or a final one.

    Example: a calculator's answer [5, 9] after the turn [7, 8] is `RewardResult(rollout=[7, 8, 5, 9], goes_on=True)`.
    """

    rollout: Rollout
    """With the observation appended if it continues, else with its reward."""
    goes_on: bool = False
    """Whether the policy takes another turn."""
    error: str | None = None
    """Why there is no reward, if the task raised."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the task gave beside the reward, by name."""
    awaits_group: bool = False
    """Whether it is finished, and its reward is that of its group: `evaluate_group`."""


def evaluate_turn(task: Task, prompt: Prompt, rollout: Rollout, *, is_last_turn: bool, max_tokens: int) -> RewardResult:
    """Gets the task's observation or reward for a rollout whose turn has ended.

    Args:
        task: observations and rewards.
        prompt: the prompt of the rollout.
        rollout: as the engine returned it.
        is_last_turn: whether it ends here, without an observation.
        max_tokens: of a whole rollout; without room for another token, it ends before the observation.

    A task that rewards groups gets none of its rewards here: the result awaits its group.

    Whatever the task raises, also `SystemExit`, leaves the rollout without a reward; see `contained`.

    Raises:
        KeyboardInterrupt, Interrupted: the user or the system interrupts the run.

    Example: a reward that raises ValueError("no number") gives the error "prompt 'q', sample 0: ValueError: no number".
    """
    try:
        with contained():
            longer = None if is_last_turn else _observed(task, prompt, rollout)
            if longer is not None and longer.num_tokens < max_tokens:
                return RewardResult(rollout=longer, goes_on=True)
            rollout = rollout if longer is None else replace(rollout, finish_reason="length")
            if task.rewards_groups or rollout.num_tokens == 0:
                return RewardResult(rollout=rollout, awaits_group=rollout.num_tokens > 0)
            return _rewarded(rollout, task.reward(prompt, rollout))
    except Exception as error:
        return without_reward(rollout, error)


def evaluate_group(task: Task, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[RewardResult]:
    """Gets the rewards of the finished rollouts of a group, for a task that rewards groups; errors as in a turn.

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


def _observed(task: Task, prompt: Prompt, rollout: Rollout) -> Rollout | None:
    """The rollout with the task's observation appended, or None if it has ended."""
    if rollout.finish_reason != "stop" or rollout.num_tokens == 0:
        return None
    answer = task.observe(prompt, rollout)
    return None if answer is None else rollout.observe(checked_observation(answer, task.vocab_size))


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
