"""History of a run's rollouts and the drafter that reads it, saved and restored together."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treering.config.engine import DraftOptions
from treering.engine.protocol import Rollout
from treering.errors import InputError
from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.history_reader import SnapshotSource
from treering.history.store.prompt_index import MARKER, PromptIndex
from treering.history.store.store import HistoryStore
from treering.types import PromptId, TokenIds

_SIZES, _SECONDS = _COSTS = ("costs.num_tokens", "costs.seconds")


class Drafting:
    """A history store and its drafter. Losing either costs speed and never changes a token."""

    def __init__(self, options: DraftOptions | None = None, folder: Path | None = None) -> None:
        """Open a store: in `folder`, for other processes to read (its old history is dropped), or in memory.

        Raises:
            StateError: another process writes to the folder, or the path is not a folder.
        """
        self.options = options or DraftOptions()
        self.folder = folder
        self._new: set[PromptId] = set()
        self._num_unpublished = self._num_published = 0
        self.store = self._open_store()
        self._whole = self.snapshot
        self.drafter = make_drafter(self.store, self.options)

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """Published indexes, current also after `load`; this makes a `Drafting` a `SnapshotSource`."""
        return self.store.snapshot

    def add(self, rollout: Rollout, rest: TokenIds | None = None) -> None:
        """Add a finished rollout. If its prompt had no history, its siblings soon draft from it.

        Args:
            rollout: the rollout.
            rest: its rehearsed tokens after the first change, which count as one more rollout of its prompt.
        """
        version = int(rollout.versions.max(initial=0))
        self.store.add(rollout.prompt_id, [rollout.tokens], version)
        if rest is not None and rest.size > 0:
            self.store.add(rollout.prompt_id, [rest], version)
        # A prompt that earlier steps filled gains too little from a few siblings to rebuild its index within the step.
        if rollout.prompt_id in self._new or not self.knows(rollout.prompt_id):
            self._new.add(rollout.prompt_id)
            self._num_unpublished += 1
        # Publish at every doubling, so that all index builds together cost about twice the last one.
        if self._num_unpublished >= max(self.options.publish_new_after, self._num_published):
            self.store.publish()
            self._num_published += self._num_unpublished
            self._num_unpublished = 0

    def knows(self, prompt_id: PromptId) -> bool:
        """Return whether a prompt has published history."""
        return prompt_id in self.snapshot

    def publish(self) -> None:
        """End a step: publish all added rollouts and reset the drafter's per-step measurements.

        Drop the state of the rows that ran, so that a run resumed from `state` and the saved history drafts like one
        that continues.
        """
        self.store.publish()
        self._whole = self.snapshot
        self.drafter.load_state(self.drafter.state())
        self._new.clear()
        self._num_unpublished = self._num_published = 0

    def save(self, file: Path) -> None:
        """Write the history after the last whole step to a file, atomically."""
        self.store.save(file, self._whole)

    def load(self, file: Path) -> None:
        """Load the history; a missing or damaged file gives a warning and an empty history.

        Make a new drafter with the old one's state: engines that hold the old drafter must be made again.
        """
        options, state = self.options, self.state()
        saved = HistoryStore.load(file, max_bytes=options.max_bytes)
        if self.folder is not None:
            self.store.close()
            saved = _copied(saved, self._open_store())
        self.store, self._whole = saved, saved.snapshot
        self.drafter = make_drafter(self.store, options)
        self.load_state(state)

    def close(self) -> None:
        """Release the folder; the published history stays readable here."""
        self.store.close()

    def state(self) -> dict[str, Tensor]:
        """Return the drafter's feedback and the engine's measured costs, as tensors."""
        costs = self.drafter.costs
        measured = {} if costs is None else {_SIZES: costs.num_tokens, _SECONDS: costs.seconds}
        arrays = {**self.drafter.state(), **measured}
        return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state`; one of another version of Treering gives a warning, and the drafter starts fresh."""
        arrays = {name: values.numpy().copy() for name, values in state.items()}
        costs = {name: arrays.pop(name) for name in _COSTS if name in arrays}
        try:
            known = None
            if set(_COSTS) <= costs.keys():
                known = VerifyCosts(num_tokens=costs[_SIZES], seconds=costs[_SECONDS])
            self.drafter.load_state(arrays)
        except InputError as error:
            warnings.warn(f"the drafter starts fresh, because its saved state does not fit: {error}", stacklevel=2)
            return
        self.drafter.use_costs(known)

    def _open_store(self) -> HistoryStore:
        if self.folder is not None:
            # Drop the history of an earlier run in the folder.
            HistoryStore(self.folder, max_bytes=1).close()
        return HistoryStore(self.folder, max_bytes=self.options.max_bytes)


def make_drafter(store: SnapshotSource, options: DraftOptions) -> Drafter:
    """Make a drafter that reads a store, or the folder of another process's store."""
    return Drafter(
        store,
        max_draft=options.max_draft,
        min_acceptance=options.min_acceptance,
        sources=options.sources,
    )


def _copied(source: HistoryStore, target: HistoryStore) -> HistoryStore:
    """Copy a store's rollouts into the target and publish them."""
    for prompt_id, index in source.snapshot.items():
        for version, text in sorted(index.texts().items()):
            rollouts = np.split(text, np.flatnonzero(text == MARKER)[1:])
            target.add(prompt_id, [rollout[1:] for rollout in rollouts], version)
    target.publish()
    return target
