"""Rollouts of one batch from a trainer's calls of its vLLM, which samples a turn at a time and gets tokens alone."""

from collections.abc import Sequence

import numpy as np

from treering.arrays import Int32Array
from treering.integrations.vllm.prompt_table import PromptTable
from treering.types import PromptId

NamedRollout = tuple[PromptId, Int32Array]
"""A rollout's tokens int32 [R], and the id of its prompt."""


class Turns:
    """Joins turns to rollouts, under the ids by which the drafter inside vLLM knows prompts: hashes of their tokens.

    Example: after `add([[5, 6]], [[7]])` and `add([[5, 6, 7, 8]], [[9]])`, `take()` is one rollout of the prompt 5 6,
    with the tokens 7 8 9.
    """

    def __init__(self) -> None:
        """Knows no prompts."""
        self._prompts = PromptTable()
        self._rollouts: dict[PromptId, list[Int32Array]] = {}

    def add(self, contexts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Takes the completion of each context; a context that continues a rollout of the batch is its next turn."""
        for context, completion in zip(contexts, completions, strict=True):
            tokens = np.asarray(context, np.int32)
            prompt_id, size = self._prompts.find(tokens, ())
            rollouts, so_far = self._rollouts.setdefault(prompt_id, []), tokens[size:]
            at = next((at for at, rollout in enumerate(rollouts) if _continues(so_far, rollout)), None)
            if at is not None:
                rollouts.pop(at)
            rollouts.append(np.concatenate([so_far, np.asarray(completion, np.int32)]))

    def take(self) -> list[NamedRollout]:
        """The rollouts since the last call."""
        taken = [(prompt_id, rollout) for prompt_id, rollouts in self._rollouts.items() for rollout in rollouts]
        self._rollouts = {}
        return taken


def _continues(so_far: Int32Array, rollout: Int32Array) -> bool:
    return rollout.size < so_far.size and np.array_equal(so_far[: rollout.size], rollout)
