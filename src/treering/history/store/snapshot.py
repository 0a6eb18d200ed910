"""A published state of a history: an immutable mapping of prompts to indexes; states share what does not change."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeAlias

from treering.history.store.blocks import Block
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

_NUM_SHARDS = 1024

Stored: TypeAlias = PromptIndex | Block
"""An index in memory, or one in a file that has perhaps not been looked at; both say their versions and sizes."""


class SnapshotSource(Protocol):
    """What a drafter reads: a `HistoryStore`, or a `HistoryReader` of another process's store."""

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """What is published at present; see `HistoryStore.snapshot`."""


def newest_first(snapshot: Mapping[PromptId, PromptIndex]) -> list[PromptId]:
    """Prompts by their newest versions, of equal ones the last in the snapshot's order first; no file is read.

    Example: prompts a with version 4, b with 3 and c with 4 and 2 come as c, a, b.
    """
    stored = snapshot.stored if isinstance(snapshot, Snapshot) else snapshot.__getitem__
    newest = {}
    for prompt_id in snapshot:
        versions = stored(prompt_id).versions
        newest[prompt_id] = int(versions[0]) if len(versions) else -1
    return sorted(newest, key=newest.__getitem__)[::-1]


class Snapshot(Mapping[PromptId, PromptIndex]):
    """An immutable mapping whose prompts stand in the order in which they came.

    A change copies the shards that it falls into, a thousandth of the prompts each: 50,000 prompts cost some 0.01 ms
    where a copy of all would cost 5. An index in a file is read when it is asked for; whether a prompt is here is said
    without reading.

    Example: `Snapshot().changed({"q": index})` holds one prompt, `.changed({"q": None})` of that holds none.
    """

    __slots__ = ("_num_places", "_num_prompts", "_shards")

    def __init__(self) -> None:
        """No prompt."""
        # By hash: each prompt's place in the order, and its index.
        self._shards: tuple[dict[PromptId, tuple[int, Stored]], ...] = ({},) * _NUM_SHARDS
        self._num_prompts = 0
        self._num_places = 0

    def __getitem__(self, prompt_id: PromptId) -> PromptIndex:
        stored = self.stored(prompt_id)
        return stored.index if isinstance(stored, Block) else stored

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._shards[hash(prompt_id) % _NUM_SHARDS]

    def __reduce__(self) -> tuple[Any, ...]:
        # Shards go by Python's hash, and that of a string is another one in another process.
        return _of_entries, ({prompt_id: (self.place(prompt_id), self[prompt_id]) for prompt_id in self},)

    def __iter__(self) -> Iterator[PromptId]:
        places = {prompt_id: place for shard in self._shards for prompt_id, (place, _) in shard.items()}
        return iter(sorted(places, key=places.__getitem__))

    def __len__(self) -> int:
        return self._num_prompts

    def stored(self, prompt_id: PromptId) -> Stored:
        """What stands there for a prompt; nothing is read from a file.

        Raises:
            KeyError: the prompt is not here.
        """
        return self._shards[hash(prompt_id) % _NUM_SHARDS][prompt_id][1]

    def num_bytes_of(self, prompt_ids: Iterable[PromptId]) -> int:
        """Bytes of the indexes of those prompts that are here."""
        return sum(self.stored(prompt_id).num_bytes for prompt_id in prompt_ids if prompt_id in self)

    def place(self, prompt_id: PromptId) -> int:
        """Where a prompt that is here stands in the order; a later one's is larger."""
        return self._shards[hash(prompt_id) % _NUM_SHARDS][prompt_id][0]

    def changed(self, indexes: Mapping[PromptId, PromptIndex | None]) -> Self:
        """The state with other indexes of some prompts; None takes out one that is here.

        A new prompt stands last, also where it was here at an earlier time.
        """
        entries: dict[PromptId, tuple[int, Stored] | None] = {}
        num_places = self._num_places
        for prompt_id, index in indexes.items():
            if index is None:
                entries[prompt_id] = None
            elif prompt_id in self:
                entries[prompt_id] = self.place(prompt_id), index
            else:
                entries[prompt_id] = num_places, index
                num_places += 1
        return self.placed(entries)

    def placed(self, entries: Mapping[PromptId, tuple[int, Stored] | None]) -> Self:
        """The state with other indexes of some prompts, at given places; None takes out one that is here."""
        if not entries:
            return self
        following = type(self)()
        following._num_prompts, following._num_places = self._num_prompts, self._num_places
        shards = list(self._shards)
        for number in {hash(prompt_id) % _NUM_SHARDS for prompt_id in entries}:
            shards[number] = shards[number].copy()
        for prompt_id, entry in entries.items():
            shard = shards[hash(prompt_id) % _NUM_SHARDS]
            following._num_prompts -= prompt_id in shard
            if entry is None:
                del shard[prompt_id]
                continue
            shard[prompt_id] = entry
            following._num_prompts += 1
            following._num_places = max(following._num_places, entry[0] + 1)
        following._shards = tuple(shards)
        return following


def _of_entries(entries: Mapping[PromptId, tuple[int, Stored]]) -> Snapshot:
    return Snapshot().placed(entries)
