"""What a worker has been sent of the history, and what it is sent next."""

from collections.abc import Iterable

from treering.history.store.prompt_index import PromptIndex
from treering.history.store.snapshot import SnapshotSource
from treering.types import PromptId

MAX_OTHER_ENTRIES = 1 << 18
"""Entries of other prompts that a worker keeps: as many as a `Drafter` searches by default, 2 MiB."""


class SentHistory:
    """The indexes that one worker holds: those of its step's prompts, and of earlier ones to draft other prompts from.

    Indexes never change, and published states share those of prompts that do not: another object is another history.

    Example: a second `changes(["q"])` is empty, as the worker has the index of "q", unless a newer one is published.
    """

    def __init__(self, source: SnapshotSource, *, keeps_others: bool = True) -> None:
        """A new process, which has nothing.

        Args:
            source: the published history.
            keeps_others: whether the worker drafts from other prompts; else it keeps none of earlier steps.
        """
        self._source = source
        self._max_other_entries = MAX_OTHER_ENTRIES if keeps_others else 0
        self._indexes: dict[PromptId, PromptIndex] = {}
        self._needed: dict[PromptId, None] = {}
        self._outdated: list[PromptId] = []

    def begin(self) -> None:
        """Starts a step: the prompts of earlier ones are others from here on, and are brought up to date once."""
        # Also those that had no history then: it is the reason why rollouts of new prompts draft from others.
        self._outdated = list(dict.fromkeys([*self._indexes, *self._needed]))
        self._needed = {}

    def changes(self, prompt_ids: Iterable[PromptId]) -> dict[PromptId, PromptIndex | None]:
        """What to send so that the worker has the published indexes of prompts; it counts as sent.

        None drops a prompt: one whose history is gone, or one of an earlier step, the first sent first, while the texts
        of those exceed the limit.
        """
        named, snapshot = list(prompt_ids), self._source.snapshot
        self._needed |= dict.fromkeys(named)
        outdated, self._outdated = self._outdated, []
        before = self._indexes.copy()
        for prompt_id in [*outdated, *named]:
            index = snapshot.get(prompt_id)
            if index is self._indexes.get(prompt_id):
                continue
            self._indexes.pop(prompt_id, None)
            if index is not None:
                # Last in the order, as the one sent last.
                self._indexes[prompt_id] = index
        self._drop()
        after = self._indexes
        return {each: after.get(each) for each in before | after if after.get(each) is not before.get(each)}

    def _drop(self) -> None:
        """Forgets prompts of earlier steps that are too many."""
        sizes = {each: index.text.size for each, index in self._indexes.items() if each not in self._needed}
        num_entries = sum(sizes.values())
        for prompt_id, size in sizes.items():
            if num_entries <= self._max_other_entries:
                return
            num_entries -= size
            del self._indexes[prompt_id]
