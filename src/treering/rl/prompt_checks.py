"""What a loop takes from a task before it samples: its stops, and prompts that are distinct and have room."""

from dataclasses import replace

from torch import nn

from treering.engine.admission import check_context
from treering.engine.request import Sampling
from treering.errors import InputError
from treering.model.positions import max_positions
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
