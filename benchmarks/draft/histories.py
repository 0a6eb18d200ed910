"""What a drafter may see of the other rollouts while one is replayed: siblings, earlier ones, or those of a wrong task.

Knows tasks and generations (epochs, else steps), and in which waves rollouts run. Knows nothing of tokens and drafters.

    R rollouts of the recording   K replayed ones   W waves
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.draft.drafters.waves import NUM_ROWS, generations_later, in_waves
from benchmarks.draft.recording import Recording
from treering.arrays import BoolArray, Int64Array

HistoryName = Literal["none", "siblings", "earlier", "wrong_task"]
Siblings = Literal["before", "others"]
"""before: the samples of the task that ran in earlier waves, as history grows in a run. others: all other samples of
the task, as its last one sees them."""

SEED = 0
NUM_AGED = 3
"""Earlier generations that the control of ages has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Which rollouts are replayed, in order, and what is history for each.

    Attributes:
        history: its name.
        order: int64 [K], rollouts.
        prompts: int64 [K], what each is a rollout of to a store of history.
        waves: int64 [K], ascending: rollouts of one wave run side by side.
        pools: W arrays int64, the rollouts that are stored while a wave runs, in file order.
        versions: W arrays int64, the generation that each of them is said to be of.
        owners: int64 [R], the prompt that each rollout is stored under; None where each replayed rollout has a pool of
            its own, which is another's neither by prompt nor as a whole.
        control: what was falsified, None where nothing was.
    """

    history: HistoryName
    order: Int64Array
    prompts: Int64Array
    waves: Int64Array
    pools: tuple[Int64Array, ...]
    versions: tuple[Int64Array, ...]
    owners: Int64Array | None
    control: str | None = None

    def sources(self, number: int) -> Int64Array:
        """The stored rollouts of the same prompt as the replayed rollout of this number, in file order."""
        pool = self.pools[self.waves[number]]
        if self.owners is None:
            return pool
        is_own: BoolArray = self.owners[pool] == self.prompts[number]
        return pool[is_own]


def plans(recording: Recording, *, siblings: Siblings = "before", num_rows: int = NUM_ROWS) -> dict[HistoryName, Plan]:
    """Every history that the recording can give; all have `none`.

    `siblings` are of the same task and generation, `earlier` those of the task's previous generation, for rollouts that
    have one. In `wrong_task` each task's rollouts (else its earlier ones) are stored as those of another, tasks moved
    on by a seeded number.

    Args:
        recording: what was sampled.
        siblings: which of them a sample sees.
        num_rows: rollouts of a wave at most.

    Example: tasks a, a, b of one generation run in the waves [0, 2] and [1]; the second has the siblings [0], and with
    `others` the three have [1], [0] and [].
    """
    everything = np.arange(recording.num_rollouts)
    order, waves = in_waves(recording, everything, num_rows)
    pools = _finished(recording, order, waves)
    found: dict[HistoryName, Plan] = {"none": _plan(recording, "none", order, waves, [pool[:0] for pool in pools])}
    if siblings == "before":
        _put(found, _plan(recording, "siblings", order, waves, pools))
    else:
        _put(
            found, _own_plan(recording, "siblings", everything, [_others(recording, i) for i in range(everything.size)])
        )
    _put(found, _earlier(recording, 1, num_rows))
    given = found.get("siblings") or found.get("earlier")
    if given is not None and np.unique(recording.tasks[given.order]).size > 1:
        _put(found, _of_another_task(recording, given))
    return found


def aged_plans(recording: Recording, *, num_rows: int = NUM_ROWS) -> tuple[Plan, ...]:
    """The last few generations as history, once with their true ages and once shuffled; none without two of them."""
    true = _earlier(recording, NUM_AGED, num_rows)
    has_ages = np.array([_num_ages(recording, true, k) > 1 for k in range(true.order.size)], np.bool_)
    if not has_ages.any():
        return ()
    true = replace(
        true,
        order=true.order[has_ages],
        prompts=true.prompts[has_ages],
        waves=true.waves[has_ages],
        control="true_age",
    )
    generator = np.random.default_rng(SEED)
    shuffled = tuple(
        _shuffled(generator, versions, recording.tasks[pool])
        for pool, versions in zip(true.pools, true.versions, strict=True)
    )
    return true, replace(true, versions=shuffled, control="shuffled_age")


def _put(found: dict[HistoryName, Plan], plan: Plan) -> None:
    if any(plan.sources(number).size for number in range(plan.order.size)):
        found[plan.history] = plan


def _plan(
    recording: Recording, history: HistoryName, order: Int64Array, waves: Int64Array, pools: Sequence[Int64Array]
) -> Plan:
    """One in which the rollouts of a wave share what is stored."""
    return Plan(
        history=history,
        order=order,
        prompts=recording.tasks[order],
        waves=waves,
        pools=tuple(pools),
        versions=tuple(recording.generations[pool] for pool in pools),
        owners=recording.tasks,
    )


def _own_plan(recording: Recording, history: HistoryName, order: Int64Array, sources: Sequence[Int64Array]) -> Plan:
    """One in which each rollout is a prompt of its own."""
    numbers = np.arange(order.size)
    shared = _plan(recording, history, order, numbers, sources)
    return replace(shared, prompts=numbers, owners=None)


def _finished(recording: Recording, order: Int64Array, waves: Int64Array) -> list[Int64Array]:
    """Before each wave, the rollouts of the same generation that ran in waves before."""
    starts = np.flatnonzero(np.diff(waves, prepend=-1))
    generations = recording.generations[order]
    firsts = np.searchsorted(generations, generations[starts])
    return [np.sort(order[first:start]) for first, start in zip(firsts, starts, strict=True)]


def _others(recording: Recording, rollout: int) -> Int64Array:
    same = (recording.tasks == recording.tasks[rollout]) & (recording.generations == recording.generations[rollout])
    same[rollout] = False
    return np.flatnonzero(same)


def _earlier(recording: Recording, num_generations: int, num_rows: int) -> Plan:
    """Each wave sees the last generations that every task had before; rollouts whose task had none are left out."""
    generations = recording.generations
    last_use = generations_later(recording, num_generations)
    firsts = np.full(int(recording.tasks.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(firsts, recording.tasks, generations)
    order, waves = in_waves(recording, np.flatnonzero(generations > firsts[recording.tasks]), num_rows)
    of_waves = generations[order[np.flatnonzero(np.diff(waves, prepend=-1))]]
    pools = {now: np.flatnonzero((generations < now) & (last_use >= now)) for now in np.unique(of_waves).tolist()}
    return _plan(recording, "earlier", order, waves, [pools[now] for now in of_waves.tolist()])


def _of_another_task(recording: Recording, plan: Plan) -> Plan:
    """Tasks moved on; where each rollout has a pool of its own, it gets that of one of equal rank."""
    tasks = recording.tasks[plan.order]
    names = np.unique(tasks)
    shift = 1 + int(np.random.default_rng(SEED).integers(names.size - 1))
    others = dict(zip(names.tolist(), np.roll(names, -shift).tolist(), strict=True))
    if plan.owners is not None:
        owners = np.array([others.get(task, task) for task in plan.owners.tolist()], np.int64)
        return replace(plan, history="wrong_task", owners=owners)
    by_task = {task: np.flatnonzero(tasks == task) for task in names.tolist()}
    ranks = {number: rank for numbers in by_task.values() for rank, number in enumerate(numbers.tolist())}
    counterparts = [by_task[others[task]] for task in tasks.tolist()]
    sources = [plan.pools[own[ranks[i] % own.size]] for i, own in enumerate(counterparts)]
    return _own_plan(recording, "wrong_task", plan.order, sources)


def _num_ages(recording: Recording, plan: Plan, number: int) -> int:
    return int(np.unique(recording.generations[plan.sources(number)]).size)


def _shuffled(generator: np.random.Generator, versions: Int64Array, tasks: Int64Array) -> Int64Array:
    """The same versions in each task, at other rollouts."""
    shuffled = versions.copy()
    for task in np.unique(tasks):
        at = np.flatnonzero(tasks == task)
        shuffled[at] = generator.permutation(versions[at])
    return shuffled
