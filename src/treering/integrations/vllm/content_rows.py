"""Requests found by their tokens: vLLM's documented contract names no request, and moves rows between steps."""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array
from treering.history.draft.request_drafter import RequestDrafter
from treering.integrations.vllm.prompt_table import PromptTable
from treering.types import PromptId

_NUM_NEWEST, _NUM_SPREAD = 32, 64

_Print = tuple[int, bytes, bytes]


class ContentRows:
    """Gives each row the name that it had in the step before, wherever it was then.

    A row goes on with an earlier one if it has its tokens: as many, the same newest ones, and the same ones at equal
    distances. Rows with the same tokens are interchangeable.
    """

    def __init__(self, requests: RequestDrafter, prompts: PromptTable) -> None:
        """Adds rows to `requests` and removes them when they leave."""
        self._requests, self._prompts = requests, prompts
        self._names: list[str] = []
        self._prints: list[_Print] = []
        self._num_named = 0

    def names(
        self,
        sampled: Sequence[Sequence[int]],
        tokens: Int32Array,
        num_tokens: NDArray[np.integer[Any]],
        history: Container[PromptId],
    ) -> list[str]:
        """Names of the B rows of a step.

        Args:
            sampled: B lists of the tokens that each row gained, [] while its prompt is being prefilled.
            tokens: int32 [>= B, L], prompt and rollout so far of each.
            num_tokens: [>= B], of each, the sampled ones included.
            history: ids of prompts that are known.
        """
        sizes = num_tokens[: len(sampled)].tolist()
        before = [size - len(new) for size, new in zip(sizes, sampled, strict=True)]
        names = self._continued([_print_of(tokens[b], size) for b, size in enumerate(before)])
        self._requests.remove(set(self._names).difference(names))
        found = [name or self._add(tokens[b, : before[b]], history) for b, name in enumerate(names)]
        self._names, self._prints = found, [_print_of(tokens[b], size) for b, size in enumerate(sizes)]
        return found

    def _continued(self, prints: Sequence[_Print]) -> list[str]:
        """The name of each row that was in the step before, else an empty one."""
        names = [""] * len(prints)
        for b, (old, new) in enumerate(zip(self._prints, prints, strict=False)):
            if old == new:
                names[b] = self._names[b]
        if "" not in names or not self._names:
            return names
        kept, moved = set(names), dict[_Print, list[str]]()
        for name, old in zip(self._names, self._prints, strict=True):
            if name not in kept:
                moved.setdefault(old, []).append(name)
        return [name or (moved[new].pop() if moved.get(new) else "") for name, new in zip(names, prints, strict=True)]

    def _add(self, context: Int32Array, history: Container[PromptId]) -> str:
        """A new row's name. Its context is its prompt, or begins with it where a rollout was preempted."""
        name = str(self._num_named)
        self._num_named += 1
        prompt_id, size = self._prompts.find(context, history) if context.size else ("", 0)
        self._requests.add(name, prompt_id=prompt_id, group=prompt_id, num_prompt_tokens=size)
        return name


def _print_of(line: Int32Array, size: int) -> _Print:
    """What tells the first `size` tokens of a line from others."""
    newest, spread = line[max(0, size - _NUM_NEWEST) : size], line[: size : size // _NUM_SPREAD + 1]
    return size, newest.tobytes(), spread.tobytes()
