"""What a run refuses: prompts that do not fit its model, and rewards that all fail."""

from dataclasses import replace

from torch import nn

from treering.engine.admission import check_context
from treering.engine.request import Sampling
from treering.errors import InputError, StateError
from treering.model.positions import max_positions
from treering.rl.collect import Collected
from treering.rl.tasks.task import Task
from treering.types import PromptId


def with_stops(sampling: Sampling, task: Task) -> Sampling:
    """Adds the task's stop tokens and strings to the sampling parameters.

    Example: a sampling without stops and a task with stop token 0 give `stop_tokens` (0,).
    """
    return replace(
        sampling,
        stop_tokens=tuple(dict.fromkeys([*sampling.stop_tokens, *task.stop_tokens])),
        stop_strings=tuple(dict.fromkeys([*sampling.stop_strings, *task.stop_strings])),
    )


def check_contexts(task: Task, max_tokens: int, model: nn.Module) -> None:
    """Refuses, before anything is sampled, a prompt that an engine would refuse in its step.

    Raises:
        InputError: a rollout of `max_tokens` tokens could go beyond the positions that the model reads.

    Example: with 32 positions, a prompt of 20 tokens and max_tokens=16 are refused.
    """
    limit = max_positions(model)
    for prompt in task.prompts:
        try:
            check_context(prompt.tokens, max_tokens, limit)
        except InputError as error:
            raise InputError(f"prompt {prompt.prompt_id!r}: {error}") from error


def check_prompts(task: Task) -> None:
    """Refuses a task without prompts or with duplicate prompt ids.

    Raises:
        InputError: no prompt, or two prompts of one id.

    Example: prompts "a" and "b" are fine; "a" and "a" are refused.
    """
    if not task.prompts:
        raise InputError("training needs at least one prompt, and the task has none; add some")
    seen: set[PromptId] = set()
    for prompt in task.prompts:
        if prompt.prompt_id in seen:
            raise InputError(f"a prompt id names one prompt, and {prompt.prompt_id!r} names two; rename or drop one")
        seen.add(prompt.prompt_id)


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
