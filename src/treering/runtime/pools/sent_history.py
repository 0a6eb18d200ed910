"""What a worker has been sent of the history, and what it is sent next."""

from collections.abc import Iterable, Mapping

from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

MAX_OTHER_ENTRIES = 1 << 18
"""Entries of other prompts that a worker keeps: as many as a `Drafter` searches by default, 2 MiB."""


class SentHistory:
    """The indexes that one worker holds: those of its step's prompts, and some of earlier ones to draft others from.

    Indexes never change, and published states share those of prompts that do not: another object is another history.

    Example: a second `changes(["q"], snapshot)` in a step is empty, as the worker has the index of "q".
    """

    def __init__(self) -> None:
        """A new process, which has nothing."""
        self._current: dict[PromptId, PromptIndex] = {}
        # Sizes alone: each worker's old indexes would add up in the controller.
        self._earlier: dict[PromptId, int] = {}

    def begin(self) -> None:
        """Starts a step: the prompts of earlier ones are others from here on."""
        self._earlier |= {prompt_id: index.text.size for prompt_id, index in self._current.items()}
        self._current = {}

    def changes(
        self, prompt_ids: Iterable[PromptId], snapshot: Mapping[PromptId, PromptIndex]
    ) -> dict[PromptId, PromptIndex | None]:
        """What to send so that the worker has the published indexes of prompts; it counts as sent.

        None drops a prompt: one whose history is gone, or one of an earlier step, the first sent first, while the texts
        of those exceed `MAX_OTHER_ENTRIES`.
        """
        found: dict[PromptId, PromptIndex | None] = {}
        for prompt_id in prompt_ids:
            index, before = snapshot.get(prompt_id), self._current.pop(prompt_id, None)
            was_earlier = self._earlier.pop(prompt_id, None) is not None
            if index is not None:
                self._current[prompt_id] = index
            if index is not before or was_earlier:
                found[prompt_id] = index
        return found | dict.fromkeys(self._dropped())

    def _dropped(self) -> list[PromptId]:
        """Forgets prompts of earlier steps that are too many, and returns them."""
        num_entries, dropped = sum(self._earlier.values()), []
        for prompt_id, size in self._earlier.items():
            if num_entries <= MAX_OTHER_ENTRIES:
                break
            num_entries -= size
            dropped.append(prompt_id)
        for prompt_id in dropped:
            del self._earlier[prompt_id]
        return dropped
