"""Reads a store's folder on mapped memory, in any number of processes.

Writes no file and takes no lock. History is only a hint (law 7): data that cannot be read costs a warning and speed.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from treering.closing import Closing
from treering.errors import ConfigError, InputError, StateError
from treering.history.store import manifest
from treering.history.store.blocks import Block, Contents, map_file, warn_of_file
from treering.history.store.files import read_file
from treering.history.store.manifest import Listed, Manifest, data_file
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.snapshot import Snapshot
from treering.types import PromptId

_NUM_TRIES = 16

_FileKey: TypeAlias = tuple[int, str]  # number and digest, as a recreated folder reuses numbers
_Files: TypeAlias = dict[_FileKey, tuple[Contents | None, Listed]]


class HistoryReader:
    """Reads what a `HistoryStore` of another process publishes: rollout workers read what a trainer writes.

    Nothing is copied or built: indexes lie in the page cache, once for all processes of a machine, and each is checked
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
            raise StateError(f"a history is read from a folder, and {path} is a file; give the folder of its store")
        self._snapshot = Snapshot()
        self._manifest: bytes | None = None
        self._files: _Files = {}
        self._problem = ""
        self.refresh()

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The indexes by prompt as published at the last `refresh`; a snapshot never changes."""
        return self._snapshot

    def refresh(self) -> bool:
        """Reads a newer publish into `snapshot`; returns whether there was one.

        Takes microseconds if nothing is new, otherwise time in proportion to what changed. If a publish cannot be read,
        the snapshot stays as it is, with one warning.
        """
        # A file that vanishes while it is opened belongs to a publish that was replaced meanwhile.
        for _ in range(_NUM_TRIES):
            data = self._read()
            if data is None or data == self._manifest:
                return False
            listed = self._decode(data)
            if listed is None:
                return False
            files = self._open(listed, data)
            if files is not None:
                changes = _changes(self._files, files)
                self._snapshot = self._snapshot.placed(changes)
                self._files, self._manifest = files, data
                return bool(changes)
        return False

    def _read(self) -> bytes | None:
        """The present manifest; None if there is none."""
        file = self._folder / manifest.NAME
        try:
            return read_file(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, InputError) as error:
            self._warn(file, error)
            return None

    def _decode(self, data: bytes) -> Manifest | None:
        try:
            return manifest.decode(data)
        except InputError as error:
            self._warn(self._folder / manifest.NAME, error)
            return None

    def _warn(self, file: Path, error: OSError | InputError) -> None:
        """Warns once per problem."""
        if str(error) != self._problem:
            self._problem = str(error)
            manifest.warn(file, error, "what was read before is used, until the next publish")

    def _open(self, listed: Manifest, data: bytes) -> _Files | None:
        """The files of a state; None if it has been replaced meanwhile."""
        files: _Files = {}
        for each in listed.files:
            key = each.number, each.digest
            if key in self._files:
                files[key] = self._files[key][0], each
                continue
            file = data_file(self._folder, each.number)
            try:
                files[key] = map_file(file, each.number, each.digest), each
            except (OSError, InputError) as error:
                if self._read() != data:
                    return None
                warn_of_file(file, error)
                files[key] = None, each
        return files


def _changes(before: _Files, after: _Files) -> dict[PromptId, tuple[int, Block] | None]:
    """The changes from one snapshot to another: removed prompts, then added ones."""
    changes: dict[PromptId, tuple[int, Block] | None] = {}
    for key, (contents, listed) in before.items():
        for block in _blocks(contents, listed, other=after.get(key)):
            changes[block.prompt_id] = None
    for key, (contents, listed) in after.items():
        for block in _blocks(contents, listed, other=before.get(key)):
            changes[block.prompt_id] = block.place, block
    return changes


def _blocks(contents: Contents | None, listed: Listed, *, other: tuple[Contents | None, Listed] | None) -> list[Block]:
    """Blocks of a file that are alive in one state but not in the other."""
    if contents is None:
        return []
    bits = np.frombuffer(listed.alive, np.uint8)
    if other is not None:
        bits = bits & ~np.frombuffer(other[1].alive, np.uint8)
    return [contents.blocks[number] for number in np.flatnonzero(np.unpackbits(bits)).tolist()]


class BackgroundReader(Closing):
    """A `HistoryReader` whose snapshot a thread keeps new: after 20,000 changed prompts a refresh takes 0.3 s.

    A drafter that reads it sees a new snapshot between two steps. If decisions must not depend on a clock, call
    `refresh` yourself and do not `start`.

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
        """Reads a newer publish now, in the caller's thread; returns whether there was one."""
        with self._lock:
            return self._reader.refresh()

    def start(self, interval_s: float) -> None:
        """Refreshes at this interval from now on, in a thread that ends with the process; a second call does nothing.

        Raises:
            ConfigError: an interval of 0 or less.
        """
        if not interval_s > 0:
            raise ConfigError(f"a history is refreshed at an interval above 0 s, got {interval_s!r}; correct it")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(interval_s,), name="treering-refresh", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. The snapshot stays valid."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._ends.wait(interval_s):
            self.refresh()
