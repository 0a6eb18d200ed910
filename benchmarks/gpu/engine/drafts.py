"""Drafts with a set acceptance: recorded rollouts, replayed with a chosen share of their tokens made wrong."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.store.store import HistoryStore
from treering.types import PromptId, TokenIds


class ReplayDrafter(Drafter):
    """Proposes the next tokens of the same prompt's recorded rollout.

    The wrong tokens are drawn once, so that a wrong one is wrong again after a rejection.

    Example: with recordings {"q": [5, 6, 7]}, num_drafted 2 and nothing wrong, a rollout "q" of one token so far gets
    the draft [6, 7].
    """

    def __init__(self, recordings: Mapping[PromptId, TokenIds], *, num_drafted: int, vocab_size: int) -> None:
        """Drafts of `num_drafted` tokens, all of them right until `set_acceptance` says otherwise."""
        super().__init__(HistoryStore())
        self._recordings, self._num_drafted, self._vocab_size = recordings, num_drafted, vocab_size
        self.set_acceptance(1.0)

    def set_acceptance(self, acceptance: float) -> None:
        """Draws which tokens are wrong, each with probability 1 - acceptance."""
        rng = np.random.default_rng(0)
        self._tokens = {
            prompt_id: np.where(rng.random(tokens.size) < acceptance, tokens, (tokens + 1) % self._vocab_size)
            for prompt_id, tokens in self._recordings.items()
        }

    def propose(self, rows: DraftRows, *, is_last: bool = False) -> Drafts:
        """Propose the next tokens of each row."""
        drafts = [self._draft_of(rows, row) for row in range(len(rows.prompt_ids))]
        lengths = [draft.size for draft in drafts]
        tokens = np.concatenate([*drafts, np.zeros(0, np.int32)]).astype(np.int32)
        columns: dict[str, Any] = {
            "tokens": tokens,
            "offsets": np.cumsum([0, *lengths]),
            "parents": np.concatenate([np.arange(-1, size - 1) for size in [*lengths, 0]]).astype(np.int32),
            "acceptance": np.ones(tokens.size, np.float32),
            "cells": np.zeros(tokens.size, np.int32),
        }
        return Drafts(**{field.name: columns[field.name] for field in fields(Drafts)})

    @property
    def costs(self) -> VerifyCosts:
        """The same for every pass, so that no engine measures them."""
        return VerifyCosts(num_tokens=np.ones(1, np.int64), seconds=np.ones(1))

    def is_backing_off(self) -> bool:
        """Never: every step drafts."""
        return False

    def observe(self, rows: DraftRows, accepted: Any, ended: Any = None, leaves: Any = None) -> None:
        """Learns nothing."""

    def _draft_of(self, rows: DraftRows, row: int) -> TokenIds:
        so_far = int(rows.num_tokens[row] - rows.num_prompt_tokens[row])
        size = min(self._num_drafted, int(rows.max_drafts[row]))
        return self._tokens[rows.prompt_ids[row]][so_far : so_far + size]
