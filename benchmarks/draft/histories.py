"""The other rollouts that a drafter may see while one is replayed: siblings, earlier ones, or those of a wrong task.

R rollouts of the recording   K replayed ones   W waves
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.draft.drafters.waves import generations_later, in_waves
from treering.analysis.recording import Recorded
from treering.analysis.replay import NUM_ROWS
from treering.arrays import BoolArray, Int64Array

HistoryName = Literal["none", "siblings", "earlier", "recent", "wrong_task"]

SEED = 0
NUM_RECENT = 3
"""Generations that `recent` holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The rollouts that are replayed, in order, and the history of each.

    Attributes:
        history: its name.
        order: int64 [K], rollouts.
        prompts: int64 [K], the prompt that each is a rollout of.
        waves: int64 [K], ascending: rollouts of one wave run side by side.
        pools: W arrays int64, the rollouts that are stored while a wave runs, in file order.
        owners: int64 [R], the prompt that each rollout is stored under.
    """

    history: HistoryName
    order: Int64Array
    prompts: Int64Array
    waves: Int64Array
    pools: tuple[Int64Array, ...]
    owners: Int64Array

    def sources(self, number: int) -> Int64Array:
        """The stored rollouts of the same prompt as the replayed rollout of this number, in file order."""
        pool = self.pools[self.waves[number]]
        is_own: BoolArray = self.owners[pool] == self.prompts[number]
        return pool[is_own]


def plans(recorded: Recorded, *, num_rows: int = NUM_ROWS) -> dict[HistoryName, Plan]:
    """Every history that the recording can give; all can give `none`.

    `siblings` are rollouts of the same task and generation that ran in earlier waves. `earlier` are those of the task's
    previous generation, `recent` those of its last three where some task has as many as two; rollouts whose task has no
    earlier generation are left out. `wrong_task` has the siblings (else the earlier ones), each task's stored as those
    of another: tasks moved on by a seeded number.

    Example: tasks a, a, b of one generation run in the waves [0, 2] and [1]; the second has the siblings [0].
    """
    order, waves = in_waves(recorded, np.arange(recorded.num_rollouts), num_rows)
    pools = _finished(recorded, order, waves)
    found: dict[HistoryName, Plan] = {"none": _plan(recorded, "none", order, waves, [pool[:0] for pool in pools])}
    siblings = _plan(recorded, "siblings", order, waves, pools)
    earlier, recent = _earlier(recorded, "earlier", 1, num_rows), _earlier(recorded, "recent", NUM_RECENT, num_rows)
    found |= {plan.history: plan for plan in (siblings, earlier) if _has_sources(plan)}
    if any(np.unique(recorded.epochs[recent.sources(number)]).size > 1 for number in range(recent.order.size)):
        found["recent"] = recent
    given = found.get("siblings") or found.get("earlier")
    if given is not None and np.unique(given.prompts).size > 1:
        of_another = replace(given, history="wrong_task", owners=_moved_on(given))
        found |= {"wrong_task": of_another} if _has_sources(of_another) else {}
    return found


def _has_sources(plan: Plan) -> bool:
    return any(plan.sources(number).size for number in range(plan.order.size))


def _plan(
    recorded: Recorded, history: HistoryName, order: Int64Array, waves: Int64Array, pools: Sequence[Int64Array]
) -> Plan:
    prompts = recorded.prompts
    return Plan(history=history, order=order, prompts=prompts[order], waves=waves, pools=tuple(pools), owners=prompts)


def _finished(recorded: Recorded, order: Int64Array, waves: Int64Array) -> list[Int64Array]:
    """Before each wave, the rollouts of the same generation that ran in waves before."""
    starts = np.flatnonzero(np.diff(waves, prepend=-1))
    generations = recorded.epochs[order]
    firsts = np.searchsorted(generations, generations[starts])
    return [np.sort(order[first:start]) for first, start in zip(firsts, starts, strict=True)]


def _earlier(recorded: Recorded, history: HistoryName, num_generations: int, num_rows: int) -> Plan:
    """Each wave sees the last generations that every task had before; rollouts whose task had none are left out."""
    generations = recorded.epochs
    last_use = generations_later(recorded, num_generations)
    firsts = np.full(len(recorded.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(firsts, recorded.prompts, generations)
    order, waves = in_waves(recorded, np.flatnonzero(generations > firsts[recorded.prompts]), num_rows)
    of_waves = generations[order[np.flatnonzero(np.diff(waves, prepend=-1))]]
    pools = {now: np.flatnonzero((generations < now) & (last_use >= now)) for now in np.unique(of_waves).tolist()}
    return _plan(recorded, history, order, waves, [pools[now] for now in of_waves.tolist()])


def _moved_on(plan: Plan) -> Int64Array:
    """int64 [R]: `owners`, tasks moved on by a seeded number."""
    names = np.unique(plan.prompts)
    shift = 1 + int(np.random.default_rng(SEED).integers(names.size - 1))
    others = dict(zip(names.tolist(), np.roll(names, -shift).tolist(), strict=True))
    return np.array([others.get(task, task) for task in plan.owners.tolist()], np.int64)
