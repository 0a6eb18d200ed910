"""Which versions to drop from a history that exceeds its budget: the oldest ones, whichever prompts they belong to."""

import heapq
from collections.abc import Iterable

from treering.history.store.blocks import Block
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.snapshot import Snapshot, Stored
from treering.types import PromptId


class Eviction:
    """A queue of every prompt's oldest version, oldest first; equally old ones in the order of their prompts.

    Outdated entries stay in the queue and are skipped when popped, so the cost of a change does not grow with the
    history.

    Example: prompts a with versions 1 and 4 and b with 2 and 3 lose a's 1 first, then b's 2 and 3, then a's 4.
    """

    def __init__(self) -> None:
        """The queue of an empty history."""
        self._queue: list[tuple[int, int, PromptId]] = []  # oldest version, place of the prompt, prompt

    def note(self, prompt_ids: Iterable[PromptId], snapshot: Snapshot) -> None:
        """Adds prompts of a snapshot that are new or whose versions have changed."""
        if len(self._queue) > 64 + 2 * len(snapshot):
            self._queue, prompt_ids = [], snapshot
        for prompt_id in prompt_ids:
            entry = (int(snapshot.stored(prompt_id).versions[-1]), snapshot.place(prompt_id), prompt_id)
            heapq.heappush(self._queue, entry)

    def evict(self, snapshot: Snapshot, num_bytes: int) -> dict[PromptId, PromptIndex | None]:
        """Frees at least `num_bytes`. Returns the remaining index of each affected prompt, None if nothing remains."""
        left: dict[PromptId, PromptIndex | None] = {}
        while num_bytes > 0:
            version, place, prompt_id = heapq.heappop(self._queue)
            if prompt_id not in snapshot or snapshot.place(prompt_id) != place:
                continue
            stored = left[prompt_id] if prompt_id in left else snapshot.stored(prompt_id)
            if stored is None or int(stored.versions[-1]) != version:
                continue
            rest = left[prompt_id] = _without_oldest(stored)
            num_bytes -= stored.num_bytes
            if rest is not None:
                num_bytes += rest.num_bytes
                heapq.heappush(self._queue, (int(rest.versions[-1]), place, prompt_id))
        return left


def _without_oldest(stored: Stored) -> PromptIndex | None:
    if len(stored.versions) == 1:
        # A prompt that is dropped is not read from its file.
        return None
    return (stored.index if isinstance(stored, Block) else stored).without_oldest()
