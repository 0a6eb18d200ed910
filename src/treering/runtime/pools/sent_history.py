"""What a worker has been sent of the history, and what it is sent next."""

from collections.abc import Iterable, Mapping

from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

MAX_OTHER_ENTRIES = 1 << 18
"""Entries of other prompts that a worker keeps: as many as a `Drafter` searches by default, 2 MiB."""


class SentHistory:
    """The indexes that one worker holds: those of its step's prompts, and some of earlier ones to draft others from.

    Indexes never change, and published states share those of prompts that do not: another object is another history.

    Example: a second `changes(["q"], snapshot)` is empty, as the worker has the index of "q".
    """

    def __init__(self) -> None:
        """A new process, which has nothing."""
        self._indexes: dict[PromptId, PromptIndex] = {}
        self._needed: set[PromptId] = set()
        self._num_entries = 0

    @property
    def num_entries(self) -> int:
        """Entries of the texts that the worker holds; each takes 8 bytes there."""
        return self._num_entries

    def begin(self) -> None:
        """Starts a step: prompts of earlier ones are no longer needed."""
        self._needed.clear()

    def changes(
        self, prompt_ids: Iterable[PromptId], snapshot: Mapping[PromptId, PromptIndex]
    ) -> dict[PromptId, PromptIndex | None]:
        """What to send so that the worker has the published indexes of prompts; it counts as sent.

        None drops a prompt: one without history, or one of an earlier step, the first sent first, while the texts of
        those exceed `MAX_OTHER_ENTRIES`.
        """
        found: dict[PromptId, PromptIndex | None] = {}
        for prompt_id in prompt_ids:
            self._needed.add(prompt_id)
            index = snapshot.get(prompt_id)
            if index is not self._indexes.get(prompt_id):
                found[prompt_id] = index
                self._replace(prompt_id, index)
        others = [prompt_id for prompt_id in self._indexes if prompt_id not in self._needed]
        num_others = sum(self._indexes[prompt_id].text.size for prompt_id in others)
        for prompt_id in others:
            if num_others <= MAX_OTHER_ENTRIES:
                break
            num_others -= self._indexes[prompt_id].text.size
            found[prompt_id] = None
            self._replace(prompt_id, None)
        return found

    def _replace(self, prompt_id: PromptId, index: PromptIndex | None) -> None:
        before = self._indexes.pop(prompt_id, None)
        self._num_entries -= 0 if before is None else before.text.size
        if index is not None:
            # Last in the order, as the one sent last.
            self._indexes[prompt_id] = index
            self._num_entries += index.text.size
