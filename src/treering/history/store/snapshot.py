"""A published state of a history: an immutable mapping of prompts to indexes; states share the indexes that stay.

Checkpoints save a whole one in one checksummed file.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeAlias

from treering.errors import InputError, StateError
from treering.history.store import blocks
from treering.history.store.blocks import Block, warn_of_file
from treering.history.store.files import read_file, write_whole
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

Stored: TypeAlias = PromptIndex | Block
"""An index in memory, or one in a file that may not have been read; both have versions and sizes."""


class SnapshotSource(Protocol):
    """The source that a drafter reads: a `HistoryStore`, or a `HistoryReader` of another process's store."""

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The published indexes; see `HistoryStore.snapshot`."""


def newest_first(snapshot: Mapping[PromptId, PromptIndex]) -> list[PromptId]:
    """Prompts with the newest versions first, ties in reverse order of the snapshot; reads no file.

    Example: prompts a with version 4, b with 3 and c with 4 and 2 give c, a, b.
    """
    stored = snapshot.stored if isinstance(snapshot, Snapshot) else snapshot.__getitem__
    newest = {}
    for prompt_id in snapshot:
        versions = stored(prompt_id).versions
        newest[prompt_id] = int(versions[0]) if len(versions) else -1
    return sorted(newest, key=newest.__getitem__)[::-1]


class Snapshot(Mapping[PromptId, PromptIndex]):
    """An immutable mapping of prompts to indexes, in the order in which they were added.

    An index in a file is read on first use; membership tests read nothing.

    Example: `Snapshot().changed({"q": index})` holds one prompt, `.changed({"q": None})` of that holds none.
    """

    __slots__ = ("_entries", "_num_places")

    def __init__(self) -> None:
        """An empty snapshot."""
        # Each prompt's place in the order, and its index.
        self._entries: dict[PromptId, tuple[int, Stored]] = {}
        self._num_places = 0

    def __getitem__(self, prompt_id: PromptId) -> PromptIndex:
        stored = self.stored(prompt_id)
        return stored.index if isinstance(stored, Block) else stored

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._entries

    def __iter__(self) -> Iterator[PromptId]:
        return iter(sorted(self._entries, key=self.place))

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, prompt_id: PromptId) -> Stored:
        """A prompt's index or its block; reads no file.

        Raises:
            KeyError: the prompt is not included.
        """
        return self._entries[prompt_id][1]

    def num_bytes_of(self, prompt_ids: Iterable[PromptId]) -> int:
        """Bytes of the indexes of the prompts that are included."""
        return sum(self.stored(prompt_id).num_bytes for prompt_id in prompt_ids if prompt_id in self)

    def place(self, prompt_id: PromptId) -> int:
        """The place of a prompt in the order; later prompts have greater ones."""
        return self._entries[prompt_id][0]

    def changed(self, indexes: Mapping[PromptId, PromptIndex | None]) -> Self:
        """A snapshot with other indexes of some prompts; None removes a prompt.

        A new prompt comes last, even if an earlier snapshot had it.
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
        """A snapshot with other indexes of some prompts, at given places; None removes a prompt."""
        if not entries:
            return self
        following = type(self)()
        following._entries, following._num_places = self._entries.copy(), self._num_places
        for prompt_id, entry in entries.items():
            if entry is None:
                del following._entries[prompt_id]
                continue
            following._entries[prompt_id] = entry
            following._num_places = max(following._num_places, entry[0] + 1)
        return following


def write_saved(file: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot, whole or not at all; damaged prompts are left out.

    Raises:
        StateError: the file cannot be written; an older one of that name is unchanged.
    """
    indexes = ((prompt_id, snapshot.place(prompt_id), index) for prompt_id, index in snapshot.items())
    parts, _ = blocks.encode(0, (entry for entry in indexes if entry[2].text.size))
    try:
        write_whole(file, parts)
    except OSError as error:
        raise StateError(
            f"a history is saved into a folder that can be written, and {file} failed ({error.strerror}); "
            "make its folder or free space, and save again"
        ) from error


def read_saved(file: Path) -> dict[PromptId, tuple[int, PromptIndex]]:
    """The inverse of `write_saved`, as copies: places and indexes by prompt.

    A missing or damaged file costs one warning and gives nothing; a damaged prompt costs one and is left out.

    Example: a history of prompt "q" gives {"q": (0, index)}.
    """
    try:
        contents = blocks.decode(read_file(file), file)
    except (OSError, InputError) as error:
        warn_of_file(file, error)
        return {}
    whole = (block for block in contents.blocks if block.index.text.size)
    return {block.prompt_id: (block.place, block.copied()) for block in whole}
