"""Writes a store's folder: data files, and the manifest that lists which of their blocks are alive.

Data files never change. Small files and files that are mostly dead are merged into the next one, so the folder stays
below twice the size of its live data, has few files, and no publish rewrites the whole history.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from treering.errors import InputError, StateError
from treering.files.atomic import clear_unfinished
from treering.files.lock import FileLock
from treering.history.store import blocks, manifest
from treering.history.store.blocks import Block, Contents, map_file, warn_of_file
from treering.history.store.files import flush_folder, write_whole
from treering.history.store.manifest import Ledger, Listed, Manifest, all_alive, data_file
from treering.history.store.snapshot import Snapshot
from treering.types import PromptId

_LOCK = ".lock"
_NAME = re.compile(r"history-(\d{8,})\.bin")


class WriterLock(FileLock):
    """Holds the lock until `release`, or until it is garbage-collected.

    Example: while `WriterLock(folder)` is held, another `WriterLock(folder)` is refused in this and any other process.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            StateError: it is already held.
            OSError: the folder is missing or cannot be written.
        """
        self._folder = folder
        self._process = os.getpid()
        super().__init__(
            folder / _LOCK,
            lambda holder: (
                f"one HistoryStore at a time writes a folder, and {folder} is open in one already ({holder}); close "
                "it, give another path, or read it with HistoryReader, of which there may be any number"
            ),
        )

    def check(self) -> None:
        """Checks that this process holds the lock.

        Raises:
            StateError: it was released, or this process was forked from the one that took it.
        """
        if os.getpid() != self._process:
            raise StateError(
                f"the history in {self._folder} is written by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; publish there, and read here with HistoryReader"
            )
        if not self.is_held:
            raise StateError(f"the history in {self._folder} is closed; open it again with HistoryStore")


class Journal:
    """The files of one folder, which one process writes and any number read.

    Example: publishes that write q1 and q2, then a larger q1, leave `history-00000000.bin`, in which q2 is alive, and
    `history-00000001.bin`; dropping q2 as well removes the first.
    """

    def __init__(self, folder: Path, *, file_bytes: int) -> None:
        """Creates the folder if it is missing, and locks it.

        Args:
            folder: to write in.
            file_bytes: approximate size of a data file.

        Raises:
            StateError: the path is no folder, cannot be read or created, or is already open for writing.
        """
        self._folder = folder
        self._file_bytes = file_bytes
        self._ledger = Ledger()
        self._unwritten: dict[PromptId, None] = {}
        self._is_behind = False  # whether the manifest is out of date
        self._next_number = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder)
            clear_unfinished(folder)
        except OSError as error:
            raise StateError(
                f"history is kept in a folder that can be read and written, and {folder} is not one "
                f"({error.strerror}); give another path, or None to keep it in memory"
            ) from error

    def read(self) -> dict[PromptId, tuple[int, Block]]:
        """Place and block of every published prompt, by place.

        A damaged, missing or foreign file costs one warning. If the manifest is missing or damaged, every whole file
        counts, and later ones replace earlier ones.
        """
        numbers = self._find()
        listed = self._read_manifest(is_expected=bool(numbers))
        files = [Listed(number=number, digest="", alive=b"") for number in numbers] if listed is None else listed.files
        # A damaged file keeps its number, so that no later file takes its name.
        self._next_number = max([0 if listed is None else listed.next_number, *(number + 1 for number in numbers)])
        # A new folder gets an empty manifest at once, so a writer that is killed later never leaves files without one.
        self._is_behind = listed is None
        found: dict[PromptId, Block] = {}
        for file in files:
            contents = self._map(file.number, file.digest or None)
            if contents is None:
                continue
            sizes = [(block.prompt_id, block.num_bytes) for block in contents.blocks]
            self._ledger.take_in(file.number, contents.digest, sizes, file.alive or None)
            alive = set(self._ledger.prompts([file.number]))
            found.update((block.prompt_id, block) for block in contents.blocks if block.prompt_id in alive)
        self._clear(set(numbers) - {file.number for file in files})
        by_place = sorted(found, key=lambda prompt_id: found[prompt_id].place)
        places = [found[prompt_id].place for prompt_id in by_place]
        # Without a manifest, two prompts may have the same place.
        renumbered = range(len(places)) if len(set(places)) < len(places) else places
        return {prompt_id: (place, found[prompt_id]) for prompt_id, place in zip(by_place, renumbered, strict=True)}

    def commit(self, changed: Iterable[PromptId], dropped: Iterable[PromptId], snapshot: Snapshot) -> None:
        """Makes a snapshot the published state: writes what changed, and removes files that are no longer needed.

        A folder that cannot be written costs one warning, and the next commit tries again.

        Args:
            changed: prompts whose indexes differ from the written ones.
            dropped: prompts that were removed.
            snapshot: with the present index of every prompt.
        """
        for prompt_id in dropped:
            self._unwritten.pop(prompt_id, None)
            self._is_behind |= self._ledger.forget(prompt_id)
        for prompt_id in changed:
            self._ledger.forget(prompt_id)
            self._unwritten[prompt_id] = None
        if not self._is_behind and not self._unwritten:
            return
        self._is_behind = True
        try:
            self._write(snapshot)
        except OSError as error:
            warnings.warn(
                f"history could not be written to {self._folder} ({error.strerror}); it is kept in memory, and the "
                "next publish tries again",
                stacklevel=3,
            )

    def check(self) -> None:
        """Checks that this process may write.

        Raises:
            StateError: the journal is closed, or another process opened it.
        """
        self._lock.check()

    def close(self) -> None:
        """Releases the folder."""
        self._lock.release()

    def _write(self, snapshot: Snapshot) -> None:
        num_bytes = sum(snapshot.stored(prompt_id).num_bytes for prompt_id in self._unwritten)
        folded = self._ledger.foldable(num_bytes, self._file_bytes)
        prompt_ids = [*self._ledger.prompts(folded), *self._unwritten]
        written: list[Listed] = []
        lots: list[list[PromptId]] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for lot in self._lots(prompt_ids, snapshot):
                lots.append(lot)
                written.append(self._write_lot(self._next_number + len(written), lot, snapshot))
            state = Manifest(
                next_number=self._next_number + len(written), files=[*self._ledger.listed(folded), *written]
            )
            write_whole(self._folder / manifest.NAME, [manifest.encode(state)])
        except OSError:
            self._unlink(self._next_number + i for i in range(len(written)))
            raise
        self._next_number = state.next_number
        self._is_behind = False
        self._unwritten.clear()
        for listed, lot in zip(written, lots, strict=True):
            sizes = [(prompt_id, snapshot.stored(prompt_id).num_bytes) for prompt_id in lot]
            self._ledger.take_in(listed.number, listed.digest, sizes, None)
        self._ledger.remove(folded)
        flush_folder(self._folder)
        self._unlink(folded)

    def _write_lot(self, number: int, lot: list[PromptId], snapshot: Snapshot) -> Listed:
        indexes = ((prompt_id, snapshot.place(prompt_id), snapshot[prompt_id]) for prompt_id in lot)
        parts, digest = blocks.encode(number, indexes)
        write_whole(data_file(self._folder, number), parts)
        return Listed(number=number, digest=digest, alive=all_alive(len(lot)))

    def _lots(self, prompt_ids: Iterable[PromptId], snapshot: Snapshot) -> Iterator[list[PromptId]]:
        """Splits prompts into lots of about a file each; prompts with damaged blocks are left out."""
        lot: list[PromptId] = []
        num_bytes = 0
        for prompt_id in prompt_ids:
            if snapshot[prompt_id].text.size == 0:
                continue
            lot.append(prompt_id)
            num_bytes += snapshot.stored(prompt_id).num_bytes
            if num_bytes >= self._file_bytes:
                yield lot
                lot, num_bytes = [], 0
        if lot:
            yield lot

    def _find(self) -> list[int]:
        """Numbers of the data files in the folder, ascending."""
        numbers = []
        for file in sorted(self._folder.glob("[!.]*")):
            name = _NAME.fullmatch(file.name)
            if name is not None and data_file(self._folder, int(name[1])) == file:
                numbers.append(int(name[1]))
            elif file.name != manifest.NAME:
                warnings.warn(f"{file} is no file of this history and is left alone; move it elsewhere", stacklevel=4)
        return sorted(numbers)

    def _read_manifest(self, *, is_expected: bool) -> Manifest | None:
        file = self._folder / manifest.NAME
        try:
            return manifest.read(file)
        except (OSError, InputError) as error:
            if is_expected or not isinstance(error, FileNotFoundError):
                manifest.warn(file, error, "every history file in the folder is used instead")
            return None

    def _map(self, number: int, digest: str | None) -> Contents | None:
        file = data_file(self._folder, number)
        try:
            return map_file(file, number, digest)
        except (OSError, InputError) as error:
            warn_of_file(file, error)
            return None

    def _clear(self, numbers: Iterable[int]) -> None:
        """Removes unpublished data files; damaged ones are kept for inspection."""
        self._unlink(number for number in sorted(numbers) if self._map(number, None) is not None)

    def _unlink(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            # A file that stays is removed when the folder is opened again.
            with suppress(OSError):
                data_file(self._folder, number).unlink(missing_ok=True)
