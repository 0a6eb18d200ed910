"""Treering's drafter through its public names: rollouts side by side, as an engine's rows, over published history."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.draft.histories import Plan
from benchmarks.draft.replay import OnDone, Row, Tally
from treering import Drafter, DraftRows, HistoryStore
from treering.analysis.recording import Recorded
from treering.analysis.replay import ReplayRows
from treering.arrays import Int64Array
from treering.history.draft.acceptance import ReliabilityBin
from treering.history.draft_types import Drafts

OURS: dict[str, dict[str, Any]] = {
    "treering": {"shape": "tree"},
    "treering_chain": {"shape": "chain"},
}
"""Names in a report, each with the drafter's own settings."""

MakeDrafter = Callable[[HistoryStore], Drafter]


def make_drafter(name: str, plan: Plan, store: HistoryStore, *, min_acceptance: float | None = None) -> Drafter:
    """A drafter as shipped, but for the least acceptance where it is given.

    Other prompts are a source only where the store holds what a run would have stored.
    """
    settings = dict(OURS[name])
    if min_acceptance is not None:
        settings["min_acceptance"] = min_acceptance
    if plan.history == "none":
        settings["sources"] = ("own",)
    elif plan.history == "wrong_task":
        settings["sources"] = ("history", "siblings", "own")
    return Drafter(store, **settings)


def replay_rows(recorded: Recorded, plan: Plan, make_drafter: MakeDrafter, on_done: OnDone) -> Row:
    """Replays wave after wave; what is stored changes between waves only, and what was learnt goes on to the end.

    Returns:
        The rates of `Tally.row`, and the drafter's `learnt_bytes`, `calibration_error` and bins of `reliability` in the
        end.
    """
    tally, shelf = Tally(), _Shelf(recorded, make_drafter)
    numbers = np.arange(len(recorded.prompt_ids))
    # Each rollout runs by itself: those of its task are stored, or later.
    alone = np.arange(recorded.num_rollouts)
    total = int(recorded.lengths[plan.order].sum())
    for wave in _waves(plan):
        drafter = shelf.holding(plan.pools[plan.waves[wave.start]], plan.owners)
        rows = ReplayRows(recorded, plan.order[wave.start : wave.stop], numbers, alone)
        rows.run(_Timed(drafter, tally), tally.drafted, lambda _: on_done(tally.drafted.num_tokens / total))
    return tally.row(shelf.bytes_per_token()) | shelf.learnt()


class _Timed:
    """A drafter whose calls of `propose` are timed."""

    def __init__(self, drafter: Drafter, tally: Tally) -> None:
        self._drafter, self._tally = drafter, tally

    def propose(self, rows: DraftRows) -> Drafts:
        since = time.thread_time_ns()
        drafts = self._drafter.propose(rows)
        self._tally.add_time((time.thread_time_ns() - since) / 1e3, len(rows.prompt_ids))
        return drafts

    def observe(self, rows: DraftRows, accepted: Int64Array, leaves: Int64Array) -> None:
        self._drafter.observe(rows, accepted, leaves=leaves)


class _Shelf:
    """A store and its drafter, made again when the store would have to forget something."""

    def __init__(self, recorded: Recorded, make_drafter: MakeDrafter) -> None:
        self._recorded, self._make_drafter = recorded, make_drafter
        self._held: set[int] = set()
        self._num_bytes = self._num_tokens = 0
        self._store = _endless_store()
        self._drafter = make_drafter(self._store)

    def holding(self, pool: Int64Array, owners: Int64Array) -> Drafter:
        """The drafter over a store that holds these rollouts, each under its owner's prompt, and no others."""
        wanted = set(pool.tolist())
        if not self._held <= wanted:
            self._weigh()
            self._store, self._held = _endless_store(), set()
            learnt = self._drafter.state()
            self._drafter = self._make_drafter(self._store)
            self._drafter.load_state(learnt)
        self._add(sorted(wanted - self._held), owners)
        self._held = wanted
        return self._drafter

    def learnt(self) -> Row:
        """What the drafter knows by now."""
        bins = self._drafter.reliability()
        return {
            "learnt_bytes": sum(values.nbytes for values in self._drafter.state().values()),
            "calibration_error": calibration_error(bins),
            "reliability": [asdict(one) for one in bins],
        }

    def bytes_per_token(self) -> float:
        """Sum over stores and drafters, each when it was last used; 0 where nothing was stored."""
        self._weigh()
        return self._num_bytes / self._num_tokens if self._num_tokens else 0.0

    def _weigh(self) -> None:
        if self._held:
            self._num_bytes += self._store.num_bytes + self._drafter.num_bytes
            self._num_tokens += self._store.num_tokens

    def _add(self, new: Sequence[int], owners: Int64Array) -> None:
        together: dict[tuple[int, int], list[int]] = {}
        for rollout in new:
            together.setdefault((int(owners[rollout]), int(self._recorded.epochs[rollout])), []).append(rollout)
        for (prompt, version), rollouts in together.items():
            self._store.add(prompt, [self._recorded.response(rollout) for rollout in rollouts], version)
        if new:
            self._store.publish()


def _endless_store() -> HistoryStore:
    return HistoryStore(max_bytes=1 << 62, max_epochs=1 << 30)


def _waves(plan: Plan) -> Iterator[range]:
    """The numbers of each wave's rollouts."""
    starts = [*np.flatnonzero(np.diff(plan.waves, prepend=-1)).tolist(), plan.waves.size]
    return (range(start, end) for start, end in pairwise(starts))


def calibration_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Mean distance of estimate and share over all tried tokens (expected calibration error); 0 where there are none.

    Example: 100 tokens at 0.5 of which 60 were accepted, and 300 at 0.9 of which 270 were: (100 * 0.1 + 0) / 400.
    """
    num_tried = sum(item.num_drafted for item in bins)
    if num_tried == 0:
        return 0.0
    return sum(item.num_drafted * abs(item.estimate - item.accepted) for item in bins) / num_tried
