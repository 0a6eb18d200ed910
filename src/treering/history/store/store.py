"""Store of earlier rollouts by prompt and version, within a byte budget, published as immutable snapshots.

History is only a hint (law 7): lost data costs speed, and reading returns exactly what was added.
"""

import heapq
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from treering.arrays import Int32Array
from treering.closing import Closing
from treering.errors import ConfigError, InputError, StateError
from treering.files.lock import FileLock
from treering.files.writing import clear_unfinished
from treering.history.store.files import StoredIndex, list_files, path_of, read_file, replay, write_file
from treering.history.store.history_reader import Snapshot, Stored
from treering.history.store.prompt_index import PromptIndex, as_text, with_newest, with_rollouts
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds, is_count

VersionKey: TypeAlias = tuple[PromptId, int]
"""(prompt_id, version)."""

MAX_EPOCHS = 2
"""Default number of policy versions that are kept of a prompt."""
_MAX_VERSION = int(np.iinfo(np.int32).max)
_SLACK_BYTES = 1 << 20
"""Unused bytes that a folder may hold however small the history is."""


class HistoryStore(Closing):
    """Rollouts of earlier epochs; takes 8 bytes per token, index included.

    `publish` makes added rollouts visible in a new `snapshot`; older snapshots do not change. One thread adds and
    publishes; any thread may read snapshots, and other processes read them with `HistoryReader`.

    Args:
        path: folder of the history, read if it exists; one store at a time writes it. None keeps history in memory.
        max_bytes: limit of the published indexes, >= 1; beyond it the oldest versions of all prompts are dropped.
        max_epochs: versions kept per prompt, >= 1.

    Raises:
        ConfigError: a limit is below 1.
        StateError: the path is not a folder or cannot be read or created, or another store writes there.

    Example:
        >>> import numpy as np
        >>> store = HistoryStore(max_epochs=1)
        >>> store.add("q", [np.array([5, 6], np.int32)], version=3)
        >>> store.publish()
        >>> store.snapshot["q"].text.tolist(), store.num_tokens
        ([-1, 5, 6], 2)
        >>> store.add("q", [np.array([5, 7, 8], np.int32)], version=4)
        >>> store.publish()
        >>> store.snapshot["q"].text.tolist()
        [-1, 5, 7, 8]
    """

    def __init__(self, path: Path | None = None, *, max_bytes: int = 1 << 30, max_epochs: int = MAX_EPOCHS) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_epochs", max_epochs)):
            if not is_count(value, least=1):
                raise ConfigError(
                    f"{name} of a history must be an integer of at least 1, got {value!r}; correct it, or turn "
                    "history off"
                )
        self._max_bytes, self._max_epochs = int(max_bytes), int(max_epochs)
        self._snapshot = Snapshot({})
        self._num_bytes = 0
        self._is_closed = False
        self._pending: dict[VersionKey, list[Int32Array]] = {}
        self._folder: _Folder | None = None
        if path is not None:
            self._folder = _Folder(Path(path))
            self._open(self._folder.read())

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The published indexes by prompt. A snapshot never changes; unchanged prompts share their arrays."""
        return self._snapshot

    @property
    def num_bytes(self) -> int:
        """Bytes of the published indexes; at most `max_bytes`."""
        return self._num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the published rollouts."""
        snapshot = self._snapshot
        return sum(snapshot.stored(prompt_id).num_tokens for prompt_id in snapshot)

    def add(self, prompt_id: PromptId, rollouts: Sequence[TokenIds], version: int) -> None:
        """Add rollouts of a prompt for the next `publish`, after earlier ones of the same prompt and version.

        Args:
            prompt_id: a string or an integer.
            rollouts: integers in [0, 2**31), one-dimensional each and without the prompt, or an engine's `Rollout`
                records. They are copied; empty ones are skipped.
            version: version of the policy that sampled them, >= 0.

        Raises:
            InputError: an argument breaks these rules; nothing is added.
            StateError: the store is closed.
        """
        self._check_open()
        key = _key_of(prompt_id, version)
        text = _checked_text(prompt_id, rollouts)
        if text.size:
            self._pending.setdefault(key, []).append(text)

    def publish(self) -> None:
        """Make added rollouts visible, drop the oldest beyond the budget, and write the changes to the folder.

        If the folder cannot be written, this warns once and keeps the changes; the next publish writes them.

        Raises:
            StateError: the store is closed, or this process was forked from the one that opened it.
        """
        self._check_open()
        if self._folder is not None:
            self._folder.check()
        added: dict[PromptId, dict[int, Int32Array]] = {prompt_id: {} for prompt_id, _ in self._pending}
        for (prompt_id, version), parts in self._pending.items():
            added[prompt_id][version] = np.concatenate(parts)
        self._install(
            {
                prompt_id: with_rollouts(self._snapshot.get(prompt_id), new, self._max_epochs)
                for prompt_id, new in added.items()
            }
        )

    def close(self) -> None:
        """Release the folder for another store. Pending rollouts are lost.

        Snapshots stay valid. Leaving a `with` block closes the store.
        """
        self._is_closed = True
        if self._folder is not None:
            self._folder.close()

    def save(self, file: Path, snapshot: Mapping[PromptId, PromptIndex] | None = None) -> None:
        """Write the published rollouts, or one of the store's earlier snapshots, as one file.

        Raises:
            StateError: the file cannot be written; an existing file of that name stays unchanged.
        """
        try:
            write_file(Path(file), (self._snapshot if snapshot is None else snapshot).items(), is_whole=True)
        except OSError as error:
            raise StateError(
                f"a history could not be saved to {file} ({error.strerror}); create its folder, free disk space or "
                "choose a writable folder, and save again"
            ) from error

    @classmethod
    def load(cls, file: Path, *, max_bytes: int = 1 << 30, max_epochs: int = MAX_EPOCHS) -> "HistoryStore":
        """Return a store in memory with the contents of a saved file: the same limits give the same snapshot.

        A missing or damaged file gives an empty store, and a damaged prompt is dropped, with one warning each (law 7).
        """
        store = cls(max_bytes=max_bytes, max_epochs=max_epochs)
        store._open(read_saved(Path(file)))
        return store

    def _open(self, found: Mapping[PromptId, Stored]) -> None:
        """Publish the contents of files, within the limits."""
        self._snapshot = Snapshot(found)
        self._num_bytes = self._snapshot.num_bytes_of(found)
        deep = [prompt_id for prompt_id, stored in found.items() if len(stored.versions) > self._max_epochs]
        self._install({prompt_id: with_newest(self._snapshot[prompt_id], self._max_epochs) for prompt_id in deep})

    def _install(self, changes: Mapping[PromptId, PromptIndex | None]) -> None:
        """Publish a snapshot with changes, within the budget, and write it."""
        before = self._snapshot
        grown = before.changed(changes)
        num_bytes = self._num_bytes + grown.num_bytes_of(changes) - before.num_bytes_of(changes)
        left = _evict(grown, num_bytes - self._max_bytes)
        self._snapshot = grown.changed(left)
        self._num_bytes = num_bytes + self._snapshot.num_bytes_of(left) - grown.num_bytes_of(left)
        # Nothing after this line has to be retried: the folder handles disk errors.
        self._pending = {}
        if self._folder is not None:
            self._folder.commit({*changes, *left}, self._snapshot, self._num_bytes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this history is closed; open it again, or close it later")


def read_saved(file: Path) -> dict[PromptId, PromptIndex]:
    """Return the indexes of a file of `HistoryStore.save`, as copies.

    A missing or damaged file gives an empty result, and a damaged prompt is dropped, with one warning each.

    Example: a history of prompt "q" gives {"q": index}.
    """
    if not file.exists():
        warnings.warn(f"{file} is missing: its rollouts are lost, which costs speed only", stacklevel=3)
    found = read_file(file)
    indexes = {} if found is None else {prompt_id: stored.index for prompt_id, stored in found.prompts.items()}
    return {prompt_id: index.copy() for prompt_id, index in indexes.items() if index.text.size}


def _evict(snapshot: Snapshot, num_bytes: int) -> dict[PromptId, PromptIndex | None]:
    """Free at least `num_bytes`: the oldest version of all prompts goes first, ties in the order of the prompts.

    Returns:
        The remaining index of each affected prompt, None if nothing remains.

    Example: prompts a with versions 1 and 4 and b with 2 and 3 lose a's 1 first, then b's 2 and 3, then a's 4.
    """
    left: dict[PromptId, PromptIndex | None] = {}
    if num_bytes <= 0:
        return left
    queue = [(int(snapshot.stored(prompt_id).versions[-1]), i, prompt_id) for i, prompt_id in enumerate(snapshot)]
    heapq.heapify(queue)
    while num_bytes > 0:
        _, i, prompt_id = heapq.heappop(queue)
        stored = left.get(prompt_id) or snapshot.stored(prompt_id)
        rest = None
        if len(stored.versions) > 1:
            # Only an index that stays in part is read from its file.
            index = stored.index if isinstance(stored, StoredIndex) else stored
            rest = index.without_oldest()
        num_bytes -= stored.num_bytes
        left[prompt_id] = rest
        if rest is not None:
            num_bytes += rest.num_bytes
            heapq.heappush(queue, (int(rest.versions[-1]), i, prompt_id))
    return left


class _Folder:
    """The files of one folder, which one store writes and any number of readers map.

    Each publish writes one file and merges the newest files into it, as long as they are no larger than what it writes
    anyway. So there are few files, and none is rewritten often. If less than half of all bytes are in use, one file
    replaces all.
    """

    def __init__(self, path: Path) -> None:
        """Create the folder if it is missing, and lock it.

        Raises:
            StateError: the path is not a folder, cannot be read or created, or is already open for writing.
        """
        self._path, self._process = path, os.getpid()
        self._files: dict[int, _Written] = {}  # by number
        self._next_number = 0
        self._unwritten: set[PromptId] = set()
        self._removed: set[PromptId] = set()  # including those that came back since
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(
                path / ".lock",
                lambda holder: (
                    f"only one HistoryStore at a time may write a folder, and {path} is open in another ({holder}); "
                    "close that, choose another path, or only read it, with HistoryReader"
                ),
            )
            clear_unfinished(path)
        except OSError as error:
            raise StateError(
                f"history needs a folder that can be read and written, and {path} is not one ({error.strerror}); "
                "choose another path, or None to keep it in memory"
            ) from error

    def read(self) -> dict[PromptId, StoredIndex]:
        """Return every published prompt; a damaged file costs one warning and stays on disk."""
        files = []
        for listed in list_files(self._path):
            self._next_number = listed.number + 1
            file = read_file(listed.path)
            if file is not None:
                files.append(file)
                self._files[listed.number] = _Written(set(file.prompts), set(file.removed), listed.num_bytes)
        return replay(files)

    def check(self) -> None:
        """Check that this process may write.

        Raises:
            StateError: another process opened the folder.
        """
        if os.getpid() != self._process:
            raise StateError(
                f"the history in {self._path} is written by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; publish there, and read here with HistoryReader"
            )

    def commit(self, touched: set[PromptId], snapshot: Snapshot, num_bytes: int) -> None:
        """Write the prompts that changed or were removed; `num_bytes` is the size of the whole snapshot.

        If the folder cannot be written, this warns once, and the next commit tries again.
        """
        self._unwritten |= touched
        self._removed.update(prompt_id for prompt_id in touched if prompt_id not in snapshot)
        if not self._unwritten:
            return
        try:
            self._write(snapshot, num_bytes)
        except OSError as error:
            warnings.warn(
                f"history could not be written to {self._path} ({error.strerror}); it is kept in memory, and the "
                "next publish tries again",
                stacklevel=3,
            )

    def close(self) -> None:
        self._lock.release()

    def _write(self, snapshot: Snapshot, num_bytes: int) -> None:
        touched, removed, size = set(self._unwritten), set(self._removed), snapshot.num_bytes_of(self._unwritten)
        is_mostly_alive = sum(file.num_bytes for file in self._files.values()) + size <= 2 * num_bytes + _SLACK_BYTES
        merged = []
        for number, file in sorted(self._files.items(), reverse=True):
            if is_mostly_alive and file.num_bytes > max(size, _SLACK_BYTES):
                break
            merged.append(number)
            touched |= file.prompts
            removed |= file.removed
            size += file.num_bytes
        is_whole = len(merged) == len(self._files)
        kept = {prompt_id for prompt_id in snapshot if is_whole or prompt_id in touched}
        removed = set() if is_whole else removed
        self._path.mkdir(parents=True, exist_ok=True)
        num_bytes = write_file(
            path_of(self._path, self._next_number),
            ((prompt_id, snapshot[prompt_id]) for prompt_id in snapshot if prompt_id in kept),
            removed=removed,
            is_whole=is_whole,
        )
        self._files[self._next_number] = _Written(kept, removed, num_bytes)
        self._next_number += 1
        self._unwritten, self._removed = set(), set()
        for number in merged:
            del self._files[number]
            # A file that cannot be removed is obsolete, and is merged when the folder is opened again.
            with suppress(OSError):
                path_of(self._path, number).unlink(missing_ok=True)


class _Written(NamedTuple):
    """Contents of a file that the store wrote or read."""

    prompts: set[PromptId]
    removed: set[PromptId]
    num_bytes: int


def _checked_text(prompt_id: PromptId, rollouts: object) -> Int32Array:
    """Check rollouts and copy them into one text: for each a marker (-1) and its tokens; skip those without tokens.

    Raises:
        InputError: a rollout breaks a rule of `HistoryStore.add`.

    Example: [5, 6], [] and [7] give [-1, 5, 6, -1, 7].
    """
    if not isinstance(rollouts, Iterable) or isinstance(rollouts, str | bytes):
        raise InputError(
            f"rollouts of {prompt_id!r} must be a list of token id lists, got {rollouts!r}; write [tokens] for one"
        )
    checked = [_as_token_ids(prompt_id, i, rollout) for i, rollout in enumerate(rollouts)]
    return as_text(tokens for tokens in checked if tokens.size)


def _key_of(prompt_id: object, version: object) -> VersionKey:
    if isinstance(prompt_id, np.integer):
        prompt_id = int(prompt_id)
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
        raise InputError(f"a prompt_id must be a string or an integer, got {prompt_id!r}; convert it")
    if not is_count(version, least=0) or version > _MAX_VERSION:
        raise InputError(f"a policy version must be an integer in [0, {_MAX_VERSION}], got {version!r}; correct it")
    return str(prompt_id) if isinstance(prompt_id, str) else prompt_id, int(version)


def _as_token_ids(prompt_id: PromptId, i: int, rollout: object) -> Int32Array:
    try:
        # An engine's rollouts have other fields besides their token ids.
        tokens = np.asarray(getattr(rollout, "tokens", rollout))
    except ValueError as error:
        raise InputError(
            f"rollout {i} of {prompt_id!r} is ragged ({error}); pass a flat list of token ids for each rollout"
        ) from error
    if tokens.ndim == 1 and tokens.size == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"a rollout must be one dimension of integer token ids, got {tokens.dtype} of shape {tokens.shape} as "
            f"rollout {i} of {prompt_id!r}; pass only its token ids"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID:
        raise InputError(
            f"token ids must be in [0, {MAX_TOKEN_ID}], got {tokens.min()}..{tokens.max()} in rollout {i} of "
            f"{prompt_id!r}; remove padding"
        )
    return tokens.astype(np.int32, copy=False)
