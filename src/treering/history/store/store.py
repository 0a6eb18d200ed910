"""The store: earlier rollouts by prompt and version, within a byte budget, published as immutable snapshots.

History is only a hint (law 7): lost data costs speed, and reading returns exactly what was added.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from treering.arrays import Int32Array
from treering.closing import Closing
from treering.errors import ConfigError, StateError
from treering.history.store.eviction import Eviction
from treering.history.store.journal import Journal
from treering.history.store.prompt_index import PromptIndex, with_newest, with_rollouts
from treering.history.store.rollouts import RolloutKey, checked_text, key_of
from treering.history.store.snapshot import Snapshot, Stored, read_saved, write_saved
from treering.types import PromptId, TokenIds, is_count

_MIN_FILE_BYTES = 1 << 20
_MAX_FILES = 64
"""Approximate; sets the size of data files, so that a publish writes a small part of a large history."""


class HistoryStore(Closing):
    """Rollouts of earlier epochs; takes 8 bytes a token, index included.

    `publish` makes added rollouts visible in a new `snapshot`; older snapshots do not change. One thread adds and
    publishes; any thread may read snapshots, and other processes read them with `HistoryReader`.

    Args:
        path: folder of the history, read if it exists; one store at a time writes it. None keeps history in memory.
        max_bytes: limit of the published indexes, >= 1; beyond it the oldest versions of all prompts are dropped.
        max_epochs: versions kept per prompt, >= 1.

    Raises:
        ConfigError: a limit below 1.
        StateError: the path is no folder, cannot be read or created, or another store writes there.

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

    def __init__(self, path: Path | None = None, *, max_bytes: int = 1 << 30, max_epochs: int = 2) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_epochs", max_epochs)):
            if not is_count(value, least=1):
                raise ConfigError(
                    f"{name} of a history is a whole number, at least 1, got {value!r}; correct it, or use no history "
                    "at all"
                )
        self._max_bytes, self._max_epochs = int(max_bytes), int(max_epochs)
        self._snapshot = Snapshot()
        self._eviction = Eviction()
        self._num_bytes = 0
        self._is_closed = False
        self._pending: dict[RolloutKey, list[Int32Array]] = {}
        self._journal: Journal | None = None
        if path is not None:
            self._journal = Journal(Path(path), file_bytes=max(_MIN_FILE_BYTES, max_bytes // _MAX_FILES))
            self._open(self._journal.read())

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
        """Adds rollouts of a prompt for the next `publish`, after earlier ones of the same prompt and version.

        Args:
            prompt_id: a string or an integer.
            rollouts: one-dimensional integers in [0, 2**31) each, without the prompt, or an engine's `Rollout`
                records; they are copied, and those without tokens are left out.
            version: of the policy that sampled them, >= 0.

        Raises:
            InputError: an argument breaks these rules; nothing is added.
            StateError: the store is closed.
        """
        self._check_open()
        key = key_of(prompt_id, version)
        text = checked_text(prompt_id, rollouts)
        if text.size:
            self._pending.setdefault(key, []).append(text)

    def publish(self) -> None:
        """Makes added rollouts visible, drops the oldest beyond the budget, and writes the changes to the folder.

        A folder that cannot be written costs one warning; the next publish tries again.

        Raises:
            StateError: the store is closed, or this process was forked from the one that opened it.
        """
        self._check_open()
        if self._journal is not None:
            self._journal.check()
        added: dict[PromptId, dict[int, Int32Array]] = {prompt_id: {} for prompt_id, _ in self._pending}
        for (prompt_id, version), parts in self._pending.items():
            added[prompt_id][version] = np.concatenate(parts)
        changes = {
            prompt_id: with_rollouts(self._snapshot.get(prompt_id), new, self._max_epochs)
            for prompt_id, new in added.items()
        }
        self._install(self._snapshot, changes)

    def close(self) -> None:
        """Releases the folder for another store. Pending rollouts are lost.

        Snapshots stay valid. Leaving a `with` block closes the store.
        """
        self._is_closed = True
        if self._journal is not None:
            self._journal.close()

    def save(self, file: Path, snapshot: Mapping[PromptId, PromptIndex] | None = None) -> None:
        """Writes what is published, or one of the store's earlier snapshots, as one checksummed file.

        Raises:
            StateError: the file cannot be written; an older one of that name is unchanged.
        """
        saved = self._snapshot if snapshot is None else snapshot
        assert isinstance(saved, Snapshot), "a store saves its own snapshots"
        write_saved(Path(file), saved)

    @classmethod
    def load(cls, file: Path, *, max_bytes: int = 1 << 30, max_epochs: int = 2) -> "HistoryStore":
        """A store in memory with the contents of a saved file: the same limits give the same snapshot.

        A missing or damaged file costs one warning and gives an empty store; a damaged prompt costs one and is left
        out (law 7).
        """
        store = cls(max_bytes=max_bytes, max_epochs=max_epochs)
        store._open(read_saved(Path(file)))
        return store

    def _open(self, found: Mapping[PromptId, tuple[int, Stored]]) -> None:
        """Publishes the contents of files, within the limits."""
        snapshot = Snapshot().placed(found)
        self._num_bytes = snapshot.num_bytes_of(found)
        self._eviction.note(found, snapshot)
        deep = [prompt_id for prompt_id, (_, stored) in found.items() if len(stored.versions) > self._max_epochs]
        self._install(snapshot, {prompt_id: with_newest(snapshot[prompt_id], self._max_epochs) for prompt_id in deep})

    def _install(self, before: Snapshot, changes: Mapping[PromptId, PromptIndex | None]) -> None:
        """Publishes a snapshot with changes, within the budget, and writes it."""
        grown = before.changed(changes)
        self._eviction.note((prompt_id for prompt_id in changes if prompt_id in grown), grown)
        num_bytes = self._num_bytes + grown.num_bytes_of(changes) - before.num_bytes_of(changes)
        left = self._eviction.evict(grown, num_bytes - self._max_bytes)
        snapshot = grown.changed(left)
        self._num_bytes = num_bytes + snapshot.num_bytes_of(left) - grown.num_bytes_of(left)
        self._snapshot = snapshot
        # From here on nothing has to be retried: the journal handles disk errors.
        self._pending = {}
        if self._journal is not None:
            touched = {*changes, *left}
            changed = [prompt_id for prompt_id in touched if prompt_id in snapshot]
            self._journal.commit(changed, touched.difference(changed), snapshot)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this history is closed; open it again, or close it later")
