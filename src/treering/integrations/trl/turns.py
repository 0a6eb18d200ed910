"""Which rollout a context of a later turn continues: a trainer gives tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.arrays import Int32Array
from treering.engine.request import Request
from treering.engine.rollout import Rollout
from treering.integrations.vllm.prompt_table import PromptTable
from treering.types import PromptId

NamedRollout = tuple[PromptId, Int32Array]
"""A rollout's tokens int32 [R], and the id of its prompt."""


class Turns:
    """Joins the turns of a trainer's vLLM to rollouts.

    Prompts have the ids by which the drafter inside vLLM knows them: hashes of their tokens.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A rollout with the tokens that its environment wrote after it."""

    first: Request
    """The request of its last turn."""
    so_far: Rollout

    def request(self, max_new: int) -> Request:
        """The request that continues it by at most `max_new` tokens."""
        limit = self.so_far.num_tokens + max_new
        return replace(self.first, sampling=replace(self.first.sampling, max_tokens=limit), so_far=self.so_far)


class OpenTurns:
    """The rollouts of the embedded engine's latest calls that a context may continue.

    Example: after the rollout 7 8 of the prompt 5 6, the context 5 6 7 8 9 is that rollout with the observed token 9.
    """

    def __init__(self) -> None:
        """Starts without rollouts."""
        self._open: list[tuple[Int32Array, Request, Rollout]] = []

    def take(self, contexts: Sequence[Sequence[int]]) -> list[Turn | None]:
        """The rollout that each context continues, each at most once; None for a context that begins a rollout."""
        return [self._take_one(np.asarray(context, np.int32)) for context in contexts]

    def put(self, requests: Sequence[Request], rollouts: Sequence[Rollout]) -> None:
        """Takes the rollouts of a call; if all of them are first turns, they replace all earlier ones."""
        if all(request.so_far is None for request in requests):
            self._open.clear()
        for request, rollout in zip(requests, rollouts, strict=True):
            self._open.append((np.concatenate([request.prompt, rollout.tokens]), request, rollout))

    def _take_one(self, context: Int32Array) -> Turn | None:
        fitting = [
            at
            for at, (tokens, _, _) in enumerate(self._open)
            if tokens.size < context.size and np.array_equal(context[: tokens.size], tokens)
        ]
        if not fitting:
            return None
        # The longest is the newest turn of its rollout.
        tokens, request, rollout = self._open.pop(max(fitting, key=lambda at: self._open[at][0].size))
        return Turn(first=request, so_far=rollout.observe(context[tokens.size :]))
