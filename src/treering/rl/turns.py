"""Evaluates a rollout after its turn: either it continues after an observation, or it ends with a reward."""

from dataclasses import dataclass, replace

from treering.engine.rollout import Rollout
from treering.rl.tasks.task import Prompt, Task, checked_observation, checked_reward
from treering.rl.user_code import contained

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


def evaluate_turn(task: Task, prompt: Prompt, rollout: Rollout, *, is_last_turn: bool, max_tokens: int) -> RewardResult:
    """Gets the task's observation or reward for a rollout whose turn has ended.

    Args:
        task: observations and rewards.
        prompt: the prompt of the rollout.
        rollout: as the engine returned it.
        is_last_turn: whether it ends here, without an observation.
        max_tokens: of a whole rollout; without room for another token, it ends before the observation.

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
            return RewardResult(rollout=_rewarded(task, prompt, rollout))
    except Exception as error:
        return without_reward(rollout, error)


def without_reward(rollout: Rollout, error: Exception) -> RewardResult:
    """The result of a rollout that has no reward because of an error.

    Example: a message of 500 characters is cut to 300, ending with "...".
    """
    text = f"prompt {rollout.prompt_id!r}, sample {rollout.sample}: {type(error).__name__}: {_text_of(error)}"
    short = text if len(text) <= _MESSAGE_LENGTH else f"{text[: _MESSAGE_LENGTH - 3]}..."
    return RewardResult(rollout=rollout, error=short)


def _observed(task: Task, prompt: Prompt, rollout: Rollout) -> Rollout | None:
    """The rollout with the task's observation appended, or None if it has ended."""
    if rollout.finish_reason != "stop" or rollout.num_tokens == 0:
        return None
    answer = task.observe(prompt, rollout)
    return None if answer is None else rollout.observe(checked_observation(answer, task.vocab_size))


def _rewarded(task: Task, prompt: Prompt, rollout: Rollout) -> Rollout:
    if rollout.num_tokens == 0:
        return rollout
    return replace(rollout, reward=checked_reward(task.reward(prompt, rollout)))


def _text_of(error: Exception) -> str:
    """The error's text; a user's exception may fail to give one."""
    try:
        return str(error)
    except Exception as other:
        return f"its text raises {type(other).__name__}"
