"""The store: earlier rollouts by prompt and version, within a byte budget, published as immutable snapshots.

Knows which rollouts are kept. Knows nothing of how they are matched. History is only a hint (law 7): whatever is lost
costs speed, and what is read back is what was added.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from treering.errors import ConfigError, InputError, StateError
from treering.history.eviction import Eviction
from treering.history.files import BlockKey, Contents, encode, write_whole
from treering.history.index import Int32Array, PromptIndex, as_text
from treering.history.journal import Journal, read_or_warn
from treering.history.snapshot import Snapshot
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds

_MAX_VERSION = int(np.iinfo(np.int32).max)


class HistoryStore:
    """Rollouts of earlier epochs, 8 bytes a token with their index.

    What is added becomes visible with `publish`, in a new `snapshot`; whoever holds an older one keeps it as it was.
    One thread adds and publishes; any thread may read snapshots.

    Args:
        path: folder to keep it in, read if there is something; it belongs to one process. None keeps it in memory.
        max_bytes: of the published indexes, >= 1; beyond it the oldest versions go, whichever prompts they belong to.
        max_epochs: versions of a prompt that are kept, >= 1.

    Raises:
        ConfigError: a limit below 1.
        StateError: the path is no folder, or cannot be read or made.

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
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} of a history is a whole number, at least 1, got {value!r}; correct it, or use no history "
                    "at all"
                )
        self._max_bytes = max_bytes
        self._max_epochs = max_epochs
        self._snapshot = Snapshot()
        self._eviction = Eviction()
        self._num_bytes = 0
        self._pending: dict[BlockKey, Int32Array] = {}
        self._journal: Journal | None = None
        if path is None:
            return
        journal = Journal(Path(path))
        found = journal.read()
        self._pending = found
        self.publish()
        # From here on, so that what was just read is not written again; what did not fit any more is cleaned up.
        self._journal = journal
        journal.commit(changed=(), dropped=found.keys() - _keys(self._snapshot, self._snapshot), text_of=self._text_of)

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """What is published, by prompt; never changes, and prompts that did not change share their arrays."""
        return self._snapshot

    @property
    def num_bytes(self) -> int:
        """Bytes of the published indexes; at most `max_bytes`."""
        return self._num_bytes

    @property
    def num_prompts(self) -> int:
        """Prompts with published rollouts."""
        return len(self._snapshot)

    @property
    def num_tokens(self) -> int:
        """Tokens of the published rollouts."""
        return sum(index.num_tokens for index in self._snapshot.values())

    def add(self, prompt_id: PromptId, rollouts: Sequence[TokenIds], version: int) -> None:
        """Notes rollouts of a prompt for the next `publish`, behind others of the same prompt and version.

        Args:
            prompt_id: a string or an integer.
            rollouts: one-dimensional integers in [0, 2**31) each, without the prompt; they are copied, and those
                without tokens are left out.
            version: of the policy that sampled them, >= 0.

        Raises:
            InputError: any of these rules is broken; nothing is added then.
        """
        if type(prompt_id) not in (str, int):
            raise InputError(f"a prompt_id is a string or an integer, got {prompt_id!r}; convert it")
        is_integer = isinstance(version, int | np.integer) and not isinstance(version, bool)
        if not is_integer or not 0 <= version <= _MAX_VERSION:
            raise InputError(f"a policy version is an integer in [0, {_MAX_VERSION}], got {version!r}; correct it")
        checked = [_as_token_ids(prompt_id, i, rollout) for i, rollout in enumerate(rollouts)]
        text = as_text(tokens for tokens in checked if tokens.size)
        if text.size:
            self._append((prompt_id, int(version)), text)

    def publish(self) -> None:
        """Makes what was added visible, lets the oldest go, and writes what changed to the folder.

        A folder that cannot be written costs one warning; the next publish tries again.
        """
        if not self._pending:
            return
        pending, before = self._pending, self._snapshot
        built = {prompt_id: self._build(texts) for prompt_id, texts in self._merged().items()}
        grown = before.changed(built)
        self._eviction.note(built, grown)
        num_bytes = self._num_bytes + _num_bytes(grown, built) - _num_bytes(before, built)
        left = self._eviction.evict(grown, num_bytes - self._max_bytes)
        self._snapshot = grown.changed(left)
        self._num_bytes = num_bytes + _num_bytes(self._snapshot, left) - _num_bytes(grown, left)
        self._pending = {}
        if self._journal is None:
            return
        touched = built.keys() | left.keys()
        alive = _keys(self._snapshot, touched)
        changed = [key for key in pending if key in alive]
        self._journal.commit(changed=changed, dropped=_keys(before, touched) - alive, text_of=self._text_of)

    def save(self, file: Path) -> None:
        """Writes the whole store, what is not yet published included, as one checksummed file.

        Raises:
            StateError: the file cannot be written; an older one of that name is as it was.
        """
        published = {
            (prompt_id, version): text
            for prompt_id, index in self._snapshot.items()
            for version, text in index.texts().items()
        }
        try:
            write_whole(Path(file), encode(Contents(published=published, pending=self._pending)))
        except OSError as error:
            raise StateError(
                f"a history is saved into a folder that can be written, and {file} failed ({error.strerror}); "
                "make its folder or free space, and save again"
            ) from error

    @classmethod
    def load(cls, file: Path, *, max_bytes: int = 1 << 30, max_epochs: int = 2) -> "HistoryStore":
        """A store in memory with what `save` wrote: with the same limits the same snapshot, array for array.

        A missing or damaged file costs one warning and gives an empty store (law 7).
        """
        store = cls(max_bytes=max_bytes, max_epochs=max_epochs)
        contents = read_or_warn(Path(file))
        store._pending = dict(contents.published)
        store.publish()
        store._pending = dict(contents.pending)
        return store

    def _append(self, key: BlockKey, text: Int32Array) -> None:
        earlier = self._pending.get(key)
        self._pending[key] = text if earlier is None else np.concatenate([earlier, text])

    def _merged(self) -> dict[PromptId, dict[int, Int32Array]]:
        """Published and pending texts of every prompt that has pending ones."""
        merged: dict[PromptId, dict[int, Int32Array]] = {}
        for (prompt_id, version), text in self._pending.items():
            if prompt_id not in merged:
                index = self._snapshot.get(prompt_id)
                merged[prompt_id] = index.texts() if index is not None else {}
            earlier = merged[prompt_id].get(version)
            merged[prompt_id][version] = text if earlier is None else np.concatenate([earlier, text])
        return merged

    def _build(self, texts: Mapping[int, Int32Array]) -> PromptIndex:
        newest = sorted(texts, reverse=True)[: self._max_epochs]
        return PromptIndex.build({version: texts[version] for version in newest})

    def _text_of(self, key: BlockKey) -> Int32Array:
        prompt_id, version = key
        return self._snapshot[prompt_id].texts()[version]


def _keys(snapshot: Mapping[PromptId, PromptIndex], prompt_ids: Iterable[PromptId]) -> set[BlockKey]:
    """What a snapshot holds of some prompts."""
    held = (prompt_id for prompt_id in prompt_ids if prompt_id in snapshot)
    return {(prompt_id, version) for prompt_id in held for version in snapshot[prompt_id].versions.tolist()}


def _num_bytes(snapshot: Snapshot, prompt_ids: Iterable[PromptId]) -> int:
    """Bytes that a snapshot holds of some prompts."""
    return sum(snapshot[prompt_id].num_bytes for prompt_id in prompt_ids if prompt_id in snapshot)


def _as_token_ids(prompt_id: PromptId, i: int, rollout: TokenIds) -> Int32Array:
    try:
        tokens = np.asarray(rollout)
    except ValueError as error:
        raise InputError(
            f"rollout {i} of {prompt_id!r} is ragged ({error}); give one list of token ids each"
        ) from error
    if tokens.ndim == 1 and tokens.size == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"a rollout is one dimension of integer token ids, got {tokens.dtype} of shape {tokens.shape} as rollout "
            f"{i} of {prompt_id!r}; pass its token ids alone"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID:
        raise InputError(
            f"token ids lie in [0, {MAX_TOKEN_ID}], got {tokens.min()}..{tokens.max()} in rollout {i} of "
            f"{prompt_id!r}; take padding out"
        )
    return tokens.astype(np.int32, copy=False)
