"""A drafter that is watched at its replay: every context and every draft is checked against the recording."""

from typing import Any

import numpy as np
from benchmarks.draft.drafters.ours import replay_rows
from benchmarks.draft.histories import Plan
from benchmarks.draft.replay import Row
from numpy.typing import NDArray

from tests.benchmarks.draft.recordings import recording
from treering import Drafter, HistoryStore
from treering.analysis.recording import Recorded
from treering.history.types import DraftRows, Drafts


def random_recording(num_rollouts: int, *, given: bool = True) -> Recorded:
    generator = np.random.default_rng(0)
    rollouts = []
    for i in range(num_rollouts):
        size = int(generator.integers(5, 30))
        mask = "0" + "".join(generator.choice(["0", "1"], size=size - 2, p=[0.3, 0.7] if given else [0, 1])) + "1"
        rollouts.append((f"task {i % 3}", generator.integers(0, 4, size).tolist(), mask))
    return recording(rollouts, rewards=generator.random(num_rollouts).tolist())


class Watcher(Drafter):
    """A drafter that notes each call: rows as (number, context, prompt tokens), drafts, and what came of them."""

    def __init__(self, store: HistoryStore, log: list[Any]) -> None:
        super().__init__(store, min_acceptance=0.05, sources=("history", "siblings", "own"))
        self._log = log

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = super().propose(rows)
        sizes = rows.num_tokens.tolist()
        contexts = [rows.tokens[b, :size].tolist() for b, size in enumerate(sizes)]
        assert rows.row_ids is not None
        # It stays so where nothing was drafted, and so nothing observed.
        self._log.append([rows.row_ids.tolist(), contexts, rows.num_prompt_tokens.tolist(), drafts])
        self._log[-1] += [[0] * len(sizes), [-1] * len(sizes)]
        return drafts

    def observe(
        self,
        rows: DraftRows,
        accepted: NDArray[np.integer[Any]],
        ended: NDArray[np.bool_] | None = None,
        leaves: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        assert ended is None  # no limit cut a run off
        assert leaves is not None
        self._log[-1][-2:] = [accepted.tolist(), leaves.tolist()]
        super().observe(rows, accepted, ended=ended, leaves=leaves)


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], tokens, parents), tokens[node]]


def watch(found: Recorded, plan: Plan, num_rows: int) -> tuple[dict[int, list[tuple[int, int]]], Row]:
    """For every rollout its steps as (context tokens, accepted), and the row of the report."""
    log: list[Any] = []
    row = replay_rows(found, plan, lambda store: Watcher(store, log), lambda done: None)
    steps: dict[int, list[tuple[int, int]]] = {}
    for rollouts, contexts, starts, drafts, accepted, leaves in log:
        assert len(rollouts) <= num_rows
        for b, rollout in enumerate(rollouts):
            tokens = found.tokens[found.offsets[rollout] : found.offsets[rollout + 1]].tolist()
            size = len(contexts[b])
            assert contexts[b] == tokens[:size]
            assert starts[b] == found.starts[rollout] - found.offsets[rollout]
            own = slice(int(drafts.offsets[b]), int(drafts.offsets[b + 1]))
            path = path_to(leaves[b], drafts.tokens[own].tolist(), drafts.parents[own].tolist())
            assert path == tokens[size : size + accepted[b]]
            assert size + accepted[b] <= found.run_ends[found.offsets[rollout] + size] - found.offsets[rollout]
            steps.setdefault(rollout, []).append((size, accepted[b]))
    return steps, row
