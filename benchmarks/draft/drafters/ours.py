"""Treering's drafter through its public names: rollouts side by side, as an engine's rows, over published history.

Knows stores and what they hold while a wave of rollouts runs. Where each rollout has history of its own, all other
samples of its task, each is a prompt of its own to the store.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.draft.drafters.lanes import Lanes
from benchmarks.draft.drafters.waves import NUM_ROWS
from benchmarks.draft.histories import Plan
from benchmarks.draft.recording import Recording
from benchmarks.draft.replay import Learnt, OnDone, Tally
from treering import Drafter, HistoryStore
from treering.history.draft.settings import Shape

BLOCK_TOKENS = 1 << 22
"""History of rollouts that have their own that is held at one time, in tokens."""

OURS: dict[str, dict[str, Any]] = {
    "treering": {"policy": "calibrated", "shape": "tree"},
    "treering_chain": {"policy": "calibrated", "shape": "chain"},
    "treering_frequency": {"policy": "frequency", "shape": "tree"},
    "treering_reward": {"policy": "reward", "shape": "tree"},
    "treering_recency": {"policy": "recency", "shape": "tree"},
}
"""Names in a report, each with the drafter's own settings; the last three are the ablation."""

SHIPPED_ACCEPTANCE: float = signature(Drafter).parameters["min_acceptance"].default
"""The least acceptance of a drafter that is given none."""

MakeDrafter = Callable[[HistoryStore], Drafter]
Stored = tuple[int, int, int]
"""A prompt, a rollout that is stored under it, and its version."""


def make_drafter(
    name: str,
    max_draft: int | None,
    plan: Plan,
    store: HistoryStore,
    *,
    min_acceptance: float | None = None,
    shape: Shape | None = None,
) -> Drafter:
    """A drafter as shipped, but for the longest draft, the least acceptance and the shape where they are given.

    It sees what the plan lets it see: other prompts are a source only where the store holds what a run would have
    stored.
    """
    settings = dict(OURS[name])
    if max_draft is not None:
        settings["max_draft"] = max_draft
    if min_acceptance is not None:
        settings["min_acceptance"] = min_acceptance
    if shape is not None:
        settings["shape"] = shape
    if plan.history == "none":
        settings["sources"] = ("own",)
    elif plan.history == "wrong_task" or plan.owners is None:
        settings["sources"] = ("history", "siblings", "own")
    return Drafter(store, **settings)


def replay_rows(
    recording: Recording, plan: Plan, make_drafter: MakeDrafter, on_done: OnDone, num_lanes: int = NUM_ROWS
) -> Tally:
    """Replays rollouts in the plan's order, `num_lanes` at one time.

    A wave's rollouts begin together, and what is stored changes between waves only; where each rollout has history of
    its own, a free row takes the next one. What was learnt goes on to the end.
    """
    tally = Tally()
    shelf = _Shelf(recording, make_drafter)
    for numbers in _blocks(recording, plan) if plan.owners is None else _waves(plan, num_lanes):
        drafter = shelf.holding(_stored(plan, numbers))
        Lanes(recording, plan, numbers, num_lanes).run(drafter, tally, on_done)
    tally.bytes_per_token, tally.learnt = shelf.bytes_per_token(), shelf.learnt()
    return tally


class _Shelf:
    """A store and its drafter, made anew when the store would have to forget something."""

    def __init__(self, recording: Recording, make_drafter: MakeDrafter) -> None:
        self._recording = recording
        self._make_drafter = make_drafter
        self._held: set[Stored] = set()
        self._num_bytes = self._num_tokens = 0
        self._open()
        self._drafter = make_drafter(self._store)

    def holding(self, wanted: Sequence[Stored]) -> Drafter:
        """The drafter over a store that holds these rollouts and no others."""
        new = [one for one in wanted if one not in self._held]
        if len(self._held) + len(new) > len(wanted):
            self._weigh()
            self._open()
            learnt = self._drafter.state()
            self._drafter = self._make_drafter(self._store)
            self._drafter.load_state(learnt)
            new = list(wanted)
        self._add(new)
        self._held = set(wanted)
        return self._drafter

    def learnt(self) -> Learnt:
        """By the drafter so far."""
        num_bytes = sum(values.nbytes for values in self._drafter.state().values())
        return Learnt(num_bytes=num_bytes, bins=self._drafter.reliability())

    def bytes_per_token(self) -> float:
        """Of all stores and drafters, each when it was last used; 0 where nothing was stored."""
        self._weigh()
        return self._num_bytes / self._num_tokens if self._num_tokens else 0.0

    def _open(self) -> None:
        self._store = HistoryStore(max_bytes=1 << 62, max_epochs=1 << 30)

    def _weigh(self) -> None:
        if self._held:
            self._num_bytes += self._store.num_bytes + self._drafter.num_bytes
            self._num_tokens += self._store.num_tokens

    def _add(self, new: Sequence[Stored]) -> None:
        together: dict[tuple[int, int], list[int]] = {}
        for prompt, rollout, version in new:
            together.setdefault((prompt, version), []).append(rollout)
        for (prompt, version), rollouts in together.items():
            rewards = self._recording.rewards[rollouts]
            self._store.add(
                prompt,
                [self._recording.response(rollout) for rollout in rollouts],
                version=version,
                rewards=None if np.isnan(rewards).any() else rewards.tolist(),
            )
        if new:
            self._store.publish()


def _stored(plan: Plan, numbers: range) -> list[Stored]:
    """What the store holds while these rollouts run."""
    found: list[Stored] = []
    for number in numbers[:1] if plan.owners is not None else numbers:
        wave = int(plan.waves[number])
        pool = plan.pools[wave].tolist()
        prompts = [int(plan.prompts[number])] * len(pool) if plan.owners is None else plan.owners[pool].tolist()
        found += zip(prompts, pool, plan.versions[wave].tolist(), strict=True)
    return found


def _waves(plan: Plan, num_lanes: int) -> Iterator[range]:
    """Each wave, in parts where there are fewer lanes."""
    starts = [*np.flatnonzero(np.diff(plan.waves, prepend=-1)).tolist(), plan.waves.size]
    for start, end in pairwise(starts):
        for first in range(start, end, num_lanes):
            yield range(first, min(first + num_lanes, end))


def _blocks(recording: Recording, plan: Plan) -> Iterator[range]:
    """Runs of rollouts whose history is held at one time."""
    lengths = recording.offsets[1:] - recording.starts
    totals = np.cumsum([int(lengths[plan.sources(k)].sum()) for k in range(plan.order.size)])
    first = 0
    while first < plan.order.size:
        before = int(totals[first - 1]) if first else 0
        behind = max(int(np.searchsorted(totals, before + BLOCK_TOKENS, side="right")), first + 1)
        yield range(first, behind)
        first = behind
