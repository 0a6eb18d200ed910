"""Published states of a history, and readers of a store's folder on mapped memory, in any number of processes.

Readers write no file and take no lock. History is only a hint (law 7): data that cannot be read costs a warning and
speed.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeAlias

from treering.closing import Closing
from treering.errors import ConfigError, StateError
from treering.history.store.files import HistoryFile, ListedFile, StoredIndex, list_files, read_file, replay
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

Stored: TypeAlias = PromptIndex | StoredIndex
"""An index in memory, or one in a file that may not have been read; both have versions and sizes."""


class SnapshotSource(Protocol):
    """Source that a drafter reads: a `HistoryStore`, or a `HistoryReader` of another process's store."""

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The published indexes; see `HistoryStore.snapshot`."""


class Snapshot(Mapping[PromptId, PromptIndex]):
    """An immutable mapping of prompts to indexes, in the order in which they were added.

    An index in a file is read on first use; membership tests read nothing. Snapshots share unchanged indexes.

    Example: `Snapshot({}).changed({"q": index})` holds one prompt, `.changed({"q": None})` of that holds none.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[PromptId, Stored]) -> None:
        """Keep the mapping, which must not change."""
        self._entries = entries

    def __getitem__(self, prompt_id: PromptId) -> PromptIndex:
        stored = self._entries[prompt_id]
        return stored.index if isinstance(stored, StoredIndex) else stored

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._entries

    def __iter__(self) -> Iterator[PromptId]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, prompt_id: PromptId) -> Stored:
        """Return a prompt's index, or its place in a file; reads no file.

        Raises:
            KeyError: the prompt is not included.
        """
        return self._entries[prompt_id]

    def num_bytes_of(self, prompt_ids: Iterable[PromptId]) -> int:
        """Return the bytes of the indexes of the prompts that are included."""
        return sum(self._entries[prompt_id].num_bytes for prompt_id in prompt_ids if prompt_id in self._entries)

    def changed(self, indexes: Mapping[PromptId, PromptIndex | None]) -> Self:
        """Return a snapshot with other indexes of some prompts; None removes a prompt.

        A new prompt comes last, even if an earlier snapshot had it.
        """
        if not indexes:
            return self
        entries = dict(self._entries)
        for prompt_id, index in indexes.items():
            if index is None:
                entries.pop(prompt_id, None)
            else:
                entries[prompt_id] = index
        return type(self)(entries)


def newest_first(snapshot: Mapping[PromptId, PromptIndex]) -> list[PromptId]:
    """Return prompts with the newest versions first, ties in reverse order of the snapshot; reads no file.

    Example: prompts a with version 4, b with 3 and c with 4 and 2 give c, a, b.
    """
    stored = snapshot.stored if isinstance(snapshot, Snapshot) else snapshot.__getitem__
    newest = {}
    for prompt_id in snapshot:
        versions = stored(prompt_id).versions
        newest[prompt_id] = int(versions[0]) if len(versions) else -1
    return sorted(newest, key=newest.__getitem__)[::-1]


_NUM_TRIES = 16


class HistoryReader:
    """Reads what a `HistoryStore` of another process publishes: rollout workers read what a trainer writes.

    Nothing is copied or built: indexes are in the page cache, once for all processes of a machine, and each is checked
    on first use. A reader neither waits for the writer nor disturbs it, and sees only whole publishes. Its snapshots
    stay valid when the writer removes files or dies.

    Args:
        path: the folder; it may be created later.

    Raises:
        StateError: the path is a file.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from treering.history.store.store import HistoryStore
        >>> folder = tempfile.mkdtemp()
        >>> store, reader = HistoryStore(folder), HistoryReader(folder)
        >>> store.add("q", [np.array([5, 6], np.int32)], version=3)
        >>> store.publish()
        >>> list(reader.snapshot), reader.refresh(), reader.snapshot["q"].text.tolist()
        ([], True, [-1, 5, 6])
        >>> store.close()
    """

    def __init__(self, path: Path) -> None:
        self._folder = Path(path)
        if self._folder.exists() and not self._folder.is_dir():
            raise StateError(f"a history must be a folder, but {path} is a file; give the folder of its store")
        self._snapshot = Snapshot({})
        self._files: dict[ListedFile, HistoryFile | None] = {}
        self.refresh()

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The indexes by prompt as published at the last `refresh`; a snapshot never changes."""
        return self._snapshot

    def refresh(self) -> bool:
        """Read a newer publish into `snapshot`; return whether there was one.

        It takes a tenth of a millisecond if nothing is new, otherwise time in proportion to the number of prompts. A
        file that cannot be read costs one warning.
        """
        # If a listing changed while its files were opened, they may be of two publishes.
        for _ in range(_NUM_TRIES):
            listed = list_files(self._folder)
            if not listed or listed == list(self._files):
                return False
            files = {each: self._files[each] if each in self._files else read_file(each.path) for each in listed}
            if list_files(self._folder) == listed:
                self._files = files
                self._snapshot = Snapshot(replay(file for file in files.values() if file is not None))
                return True
        return False


class BackgroundReader(Closing):
    """A `HistoryReader` whose snapshot a thread keeps new: after 20,000 changed prompts a refresh takes 0.3 s.

    A drafter that reads it sees a new snapshot between two steps. If decisions must not depend on time, call `refresh`
    yourself instead of `start`.

    Args:
        reader: belongs to this object.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with BackgroundReader(HistoryReader(Path(tempfile.mkdtemp()))) as background:
        ...     background.start(interval_s=0.5)
        ...     len(background.snapshot)
        0
    """

    def __init__(self, reader: HistoryReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The newest snapshot that was read; a snapshot never changes."""
        return self._reader.snapshot

    def refresh(self) -> bool:
        """Read a newer publish now, in the caller's thread; return whether there was one."""
        with self._lock:
            return self._reader.refresh()

    def start(self, interval_s: float) -> None:
        """Refresh at this interval from now on, in a thread that ends with the process; a second call does nothing.

        Raises:
            ConfigError: the interval is 0 or less.
        """
        if not interval_s > 0:
            raise ConfigError(f"the refresh interval of a history must be above 0 s, got {interval_s!r}; correct it")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(interval_s,), name="treering-refresh", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. The snapshot stays valid."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._ends.wait(interval_s):
            self.refresh()
