"""A run's memory of its rollouts: the history, and the drafter that reads it, saved and restored together.

Knows what is remembered of a step. Knows nothing of how drafts are found or verified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treering.history.acceptance import SOURCES, Source
from treering.history.draft import Drafter
from treering.history.store import HistoryStore
from treering.rl.collect import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What is remembered, and how drafts are made from it; see `HistoryStore` and `Drafter`."""

    max_bytes: int = 1 << 30
    max_epochs: int = 2
    max_draft: int = 8
    min_acceptance: float = 0.4
    sources: tuple[Source, ...] = SOURCES


class Drafting:
    """Owns a history store and its drafter. Losing either costs speed, never a token.

    Example: after `drafting.add(groups, version=3)` an engine with `drafting.drafter` drafts from these rollouts.
    """

    def __init__(self, options: DraftOptions | None = None) -> None:
        self._options = options or DraftOptions()
        self.store = HistoryStore(max_bytes=self._options.max_bytes, max_epochs=self._options.max_epochs)
        self.drafter = self._make_drafter()

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Remembers the rollouts of a step that `version` sampled; the next drafts see them."""
        for group in groups:
            self.store.add(group.prompt.prompt_id, [rollout.tokens for rollout in group.rollouts], version)
        self.store.publish()

    def save(self, file: Path) -> None:
        """Writes the history to a file that appears whole or not at all."""
        self.store.save(file)

    def load(self, file: Path) -> None:
        """Takes the history of a file; a missing or damaged one is a warning and an empty history.

        The drafter is a new one, with the state of the old: engines that hold the old are to be made again.
        """
        options, state = self._options, self.state()
        self.store = HistoryStore.load(file, max_bytes=options.max_bytes, max_epochs=options.max_epochs)
        self.drafter = self._make_drafter()
        self.load_state(state)

    def state(self) -> dict[str, Tensor]:
        """What the drafter has learnt about its drafts, as tensors."""
        return {name: torch.from_numpy(np.array(values)) for name, values in self.drafter.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a `state`."""
        self.drafter.load_state({name: values.numpy().copy() for name, values in state.items()})

    def _make_drafter(self) -> Drafter:
        options = self._options
        return Drafter(
            self.store,
            max_draft=options.max_draft,
            min_acceptance=options.min_acceptance,
            sources=options.sources,
        )
