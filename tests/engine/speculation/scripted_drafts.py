"""Drafter that proposes scripted chains or trees, right or wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.store.store import HistoryStore

Tree = tuple[Sequence[int], Sequence[int]]
"""Tokens and their parents."""

Script = Callable[[str, list[int], int], Tree]
"""Maps a prompt id, the rollout so far and the maximum number of drafted tokens to a tree."""


def make_drafts(trees: Sequence[Tree]) -> Drafts:
    """Return `Drafts` with one tree per row."""
    tokens = np.array([token for tree in trees for token in tree[0]], np.int32)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "offsets": np.cumsum([0, *(len(tree[0]) for tree in trees)]),
        "parents": np.array([parent for tree in trees for parent in tree[1]], np.int32),
        "acceptance": np.full(tokens.size, 0.5, np.float32),
        "cells": np.zeros(tokens.size, np.int32),
    }
    return Drafts(**{field.name: columns[field.name] for field in fields(Drafts) if field.name in columns})


def chain(tokens: Sequence[int]) -> Tree:
    return tokens, range(-1, len(tokens) - 1)


class ScriptedDrafter(Drafter):
    """Drafter that calls a script for each row that may have drafts and records the feedback."""

    def __init__(self, script: Script) -> None:
        super().__init__(HistoryStore())
        self._script = script
        self.seen: list[Mapping[str, Any]] = []

    def propose(self, rows: DraftRows, *, is_last: bool = False) -> Drafts:
        drafts = make_drafts([self._tree_of(rows, row) for row in range(len(rows.prompt_ids))])
        self.seen.append({"rows": rows, "drafts": drafts})
        return drafts

    def _tree_of(self, rows: DraftRows, row: int) -> Tree:
        if rows.max_drafts[row] == 0:
            return [], []
        rollout = rows.tokens[row, rows.num_prompt_tokens[row] : rows.num_tokens[row]].tolist()
        return self._script(rows.prompt_ids[row], rollout, int(rows.max_drafts[row]))

    def observe(self, rows: DraftRows, accepted: Any, ended: Any = None, leaves: Any = None) -> None:
        assert rows is self.seen[-1]["rows"]
        feedback = {
            "accepted": accepted.copy(),
            "ended": ended,
            "leaves": leaves.copy(),
            "leaders": rows.leaders.copy(),
        }
        self.seen[-1] = {**self.seen[-1], **feedback}
