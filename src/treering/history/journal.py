"""The folder of a store: one immutable file per publish, and the cleaning that keeps it small.

Knows which file holds the rollouts of a prompt and version. Knows nothing of indexes and budgets. A later file replaces
what earlier ones hold of the same prompt and version. A file that is less than half alive is folded into the next one,
so the folder stays below twice what is alive, and every rollout is rewritten rarely.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from treering.errors import InputError, StateError
from treering.history.files import BlockKey, Contents, clear_unfinished, decode, encode, write_whole
from treering.history.index import Int32Array

_NAME = re.compile(r"history-(\d{8,})\.bin")


class Journal:
    """The history files of one folder, which belongs to one process.

    Example: publishes that write q1 and q2, then q1 of a later version with q1's first one dropped, leave
    `history-00000000.bin` (half alive) and `history-00000001.bin`; dropping q2 too folds nothing and removes the first.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the folder where it is missing.

        Raises:
            StateError: the path is no folder, or cannot be read or made.
        """
        self._folder = folder
        self._alive: dict[int, dict[BlockKey, int]] = {}  # file number -> what of it is alive, with its entries
        self._num_entries: dict[int, int] = {}  # file number -> entries when it was written
        self._num_alive: dict[int, int] = {}  # file number -> entries of what is alive
        self._thin: set[int] = set()  # numbers of files that are less than half alive
        self._home: dict[BlockKey, int] = {}
        self._unwritten: dict[BlockKey, None] = {}
        self._next_number = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clear_unfinished(folder)
        except OSError as error:
            raise StateError(
                f"history is kept in a folder that can be read and written, and {folder} is not one "
                f"({error.strerror}); give another path, or None to keep it in memory"
            ) from error

    def read(self) -> dict[BlockKey, Int32Array]:
        """What the files hold, in the order in which it was written; a damaged or foreign file costs one warning."""
        found: dict[BlockKey, Int32Array] = {}
        for file in sorted(self._folder.glob("[!.]*"), key=lambda file: (len(file.name), file.name)):
            name = _NAME.fullmatch(file.name)
            if name is None:
                warnings.warn(f"{file} is no file of this history and is left alone; move it elsewhere", stacklevel=3)
                continue
            # A damaged file keeps its number, so that no later file takes its name.
            self._next_number = int(name[1]) + 1
            blocks = read_or_warn(file).published
            self._settle(int(name[1]), {key: text.size for key, text in blocks.items()})
            found.update(blocks)
        return found

    def commit(
        self, changed: Iterable[BlockKey], dropped: Iterable[BlockKey], text_of: Callable[[BlockKey], Int32Array]
    ) -> None:
        """Writes what changed into one new file and removes files that nothing needs.

        A folder that cannot be written costs one warning, and the next commit tries again.

        Args:
            changed: new, or with other rollouts than were written.
            dropped: no longer wanted.
            text_of: the present rollouts of anything that is alive.
        """
        for key in dropped:
            self._forget(key)
        for key in changed:
            self._forget(key)
            self._unwritten[key] = None
        thin = sorted(self._thin)
        blocks = {key: text_of(key) for number in thin for key in self._alive[number]}
        blocks.update((key, text_of(key)) for key in self._unwritten)
        try:
            self._write(blocks)
            self._remove(thin)
        except OSError as error:
            warnings.warn(
                f"history could not be written to {self._folder} ({error.strerror}); it is kept in memory, and the "
                "next publish tries again",
                stacklevel=3,
            )

    def _write(self, blocks: dict[BlockKey, Int32Array]) -> None:
        if not blocks:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._next_number
        file = self._folder / f"history-{number:08d}.bin"
        write_whole(file, encode(Contents(published=blocks, pending={})))
        self._next_number += 1
        self._unwritten.clear()
        self._settle(number, {key: text.size for key, text in blocks.items()})

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            (self._folder / f"history-{number:08d}.bin").unlink(missing_ok=True)
            del self._alive[number], self._num_entries[number], self._num_alive[number]
            self._thin.remove(number)

    def _settle(self, number: int, sizes: dict[BlockKey, int]) -> None:
        """Notes that a file is now the home of its blocks."""
        for key in sizes:
            self._forget(key)
            self._home[key] = number
        self._alive[number] = sizes
        self._num_entries[number] = self._num_alive[number] = sum(sizes.values())

    def _forget(self, key: BlockKey) -> None:
        self._unwritten.pop(key, None)
        number = self._home.pop(key, None)
        if number is None:
            return
        self._num_alive[number] -= self._alive[number].pop(key)
        if 2 * self._num_alive[number] < self._num_entries[number]:
            self._thin.add(number)


def read_or_warn(file: Path) -> Contents:
    """What a file holds; nothing, and one warning that names it, where that cannot be read (law 7)."""
    num_bytes = 0
    try:
        data = file.read_bytes()
        num_bytes = len(data)
        return decode(data)
    except (OSError, InputError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        warnings.warn(
            f"{file} is left out: {reason}; the rollouts in its {num_bytes:,} bytes are lost, which costs speed only; "
            "remove it to end this warning",
            stacklevel=4,
        )
        return Contents(published={}, pending={})
