"""The history of a run's rollouts and the drafter that reads it, saved and restored together."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.engine.rollout import Rollout
from treering.errors import InputError
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft.settings import Policy, Shape
from treering.history.features import SOURCES, Source
from treering.history.store.prompt_index import MARKER
from treering.history.store.snapshot import SnapshotSource
from treering.history.store.store import HistoryStore
from treering.types import PromptId

_SIZES, _SECONDS, _PRICES = _COSTS = ("costs.num_tokens", "costs.seconds", "costs.prices")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What is remembered, and how drafts are made from it; see `HistoryStore` and `Drafter`."""

    max_bytes: int = 1 << 30
    max_epochs: int = 2
    max_draft: int = 64
    min_acceptance: float = 0.4
    policy: Policy = "calibrated"
    shape: Shape = "tree"
    sources: tuple[Source, ...] = SOURCES
    publish_new_after: int = 4
    """Finished rollouts of prompts without history until their siblings, running or waiting, can draft from them; then
    again whenever their number has doubled."""


class Drafting:
    """Owns a history store and its drafter. Losing either costs speed, never a token.

    Example: after `drafting.add(rollout)` and `drafting.publish()` an engine with `drafting.drafter` drafts from it.
    """

    def __init__(self, options: DraftOptions | None = None, folder: Path | None = None) -> None:
        """`folder`: where other processes read what is published; a history that is there is dropped. None: nowhere.

        Raises:
            StateError: another process writes there, or it is no folder.
        """
        self.options = options or DraftOptions()
        self.folder = folder
        self._new: set[PromptId] = set()
        self._num_unpublished = self._num_published = 0
        self.store = self._open_store()
        self.drafter = make_drafter(self.store, self.options)

    def add(self, rollout: Rollout) -> None:
        """Remembers a rollout that is finished; where its prompt had no history, its siblings soon draft from it."""
        version = int(rollout.versions.max(initial=0))
        rewards = None if rollout.reward is None else [rollout.reward]
        self.store.add(rollout.prompt_id, [rollout.tokens], version, rewards)
        # An index that earlier steps have filled gains too little from a few siblings to be built again for them.
        if rollout.prompt_id in self._new or not self.knows(rollout.prompt_id):
            self._new.add(rollout.prompt_id)
            self._num_unpublished += 1
        # Doubling, so that all these indexes together cost about twice the last one.
        if self._num_unpublished >= max(self.options.publish_new_after, self._num_published):
            self.store.publish()
            self._num_published += self._num_unpublished
            self._num_unpublished = 0

    def knows(self, prompt_id: PromptId) -> bool:
        """Whether rollouts of a prompt can be drafted from its history."""
        return prompt_id in self.store.snapshot

    def publish(self) -> None:
        """Ends a step: the next drafts see all that was added, and whether they pay is found out anew.

        Of the rows that ran nothing is left, so a run that begins here, from `state` and the saved history, drafts as
        one that goes on.
        """
        self.store.publish()
        self.drafter.load_state(self.drafter.state())
        self._new.clear()
        self._num_unpublished = self._num_published = 0

    def save(self, file: Path) -> None:
        """Writes the history to a file that appears whole or not at all."""
        self.store.save(file)

    def load(self, file: Path) -> None:
        """Takes the history of a file; a missing or damaged one is a warning and an empty history.

        The drafter is a new one, with the state of the old: engines that hold the old are to be made again.
        """
        options, state = self.options, self.state()
        saved = HistoryStore.load(file, max_bytes=options.max_bytes, max_epochs=options.max_epochs)
        if self.folder is not None:
            self.store.close()
            saved = _copied(saved, self._open_store())
        self.store = saved
        self.drafter = make_drafter(self.store, options)
        self.load_state(state)

    def close(self) -> None:
        """Gives the folder free; what is published stays readable here."""
        self.store.close()

    def state(self) -> dict[str, Tensor]:
        """What the drafter has learnt about its drafts, and what passes and drafts cost its engine, as tensors."""
        costs = self.drafter.costs
        arrays = {**self.drafter.state(), **({} if costs is None else _columns_of(costs))}
        return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a `state`; one of another version of Treering is a warning, and the drafter learns anew."""
        arrays = {name: values.numpy().copy() for name, values in state.items()}
        costs = {name: arrays.pop(name) for name in _COSTS if name in arrays}
        try:
            known = _costs_of(costs)
            self.drafter.load_state(arrays)
        except InputError as error:
            warnings.warn(f"the drafter learns anew, because its saved state is of another kind: {error}", stacklevel=2)
            return
        self.drafter.use_costs(known)

    def _open_store(self) -> HistoryStore:
        if self.folder is not None:
            # What an earlier run of the folder has left there is not this run's history.
            HistoryStore(self.folder, max_bytes=1).close()
        return HistoryStore(self.folder, max_bytes=self.options.max_bytes, max_epochs=self.options.max_epochs)


def make_drafter(store: SnapshotSource, options: DraftOptions) -> Drafter:
    """A drafter that reads a store, or the folder of another process's store.

    Example: two engines take two drafters of one store; each learns from its own rows.
    """
    return Drafter(
        store,
        max_draft=options.max_draft,
        min_acceptance=options.min_acceptance,
        policy=options.policy,
        shape=options.shape,
        sources=options.sources,
    )


def _columns_of(costs: VerifyCosts) -> dict[str, NDArray[Any]]:
    return {_SIZES: costs.num_tokens, _SECONDS: costs.seconds, _PRICES: costs.prices.to_array()}


def _costs_of(columns: Mapping[str, NDArray[Any]]) -> VerifyCosts | None:
    """The record of saved columns, None where there is none; one without prices gets those that stand for unmeasured.

    Raises:
        InputError: columns that are no costs.
    """
    if not {_SIZES, _SECONDS} <= columns.keys():
        return None
    prices = DraftPrices.from_array(columns[_PRICES]) if _PRICES in columns else DraftPrices()
    return VerifyCosts(num_tokens=columns[_SIZES], seconds=columns[_SECONDS], prices=prices)


def _copied(source: HistoryStore, target: HistoryStore) -> HistoryStore:
    """The target with all that a store holds, published."""
    source.publish()
    for prompt_id, index in source.snapshot.items():
        rewards = index.rewards_by_version()
        for version, text in sorted(index.texts().items()):
            rollouts = np.split(text, np.flatnonzero(text == MARKER)[1:])
            for rollout, reward in zip(rollouts, rewards[version].tolist(), strict=True):
                target.add(prompt_id, [rollout[1:]], version, None if np.isnan(reward) else [reward])
    target.publish()
    return target
