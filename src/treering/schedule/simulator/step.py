"""State of the workers in one simulated step: running rollouts, queues and pending events.

All running rollouts of a worker gain a token in the same decode step, so each worker has a clock that counts tokens: a
rollout that starts at token c ends at token c + length, and n running rollouts take `token_s[n]` a token. A rollout
that waits runs nowhere: it comes back to its worker, where it queues for a slot before those that have not started.

    W workers, S slots a worker, R rollouts of the step
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.compiling.once import compiled_once
from treering.schedule.simulator.heaps import push
from treering.schedule.simulator.migration import MAX_MOVES, OFF

EVENTS, QUEUED, STOLEN, MOVED = 0, 1, 2, 3
"""Indices of `StepState.totals`: pending events, queued rollouts, stolen ones, moves."""


class StepRollouts(NamedTuple):
    """A step's rollouts and their queues."""

    offsets: Int64Array
    """int64 [W + 1]: worker w has the queue `queued[offsets[w]:offsets[w + 1]]`; if empty, w never starts."""
    queued: Int64Array
    """int64 [R]: rollouts."""
    lengths: Int64Array
    """int64 [R]."""
    predicted: Float64Array
    """float64 [R]: predicted lengths, used to find the longest queue and outliers."""
    num_prompt_tokens: Int64Array
    """int64 [R]: tokens to prefill; a worker decodes nothing meanwhile."""
    part_starts: Int64Array
    """int64 [R + 1]: rollout r has the parts `part_starts[r]` to `part_starts[r + 1]`; see `turns.Parts`."""
    part_tokens: Int64Array
    """int64 [parts]."""
    part_waits: Float64Array
    """float64 [parts]: seconds of waiting after each."""


class Rules(NamedTuple):
    """Times, stealing and moving."""

    token_s: Float64Array
    """float64 [S + 1]: seconds a token by running rollouts."""
    prefill_s: float
    """Per prefilled token."""
    max_tokens: float
    """No rollout is longer."""
    stealing: bool
    """Whether a worker with an empty queue takes from the longest one."""
    moving: int
    """`migration.OFF`, `DRAIN` or `CONSOLIDATE`."""


class Outcome(NamedTuple):
    """Result of a step."""

    ends: Float64Array
    """float64 [W]: when a worker ended its last rollout; its start if it had none."""
    counts: Int64Array
    """int64 [W]: rollouts that ended there."""
    finished: Float64Array
    """float64 [R]: when each one ended."""
    num_stolen: int
    """Rollouts that started on another worker than queued."""
    num_moved: int
    """Moves of running ones."""


class StepState(NamedTuple):
    """Mutable state of a step."""

    now: Float64Array
    """float64 [W]: time that a worker has reached."""
    clock: Float64Array
    """float64 [W]: tokens of a rollout running there from the start."""
    running: Int64Array
    """int64 [W]: running rollouts."""
    heads: Int64Array
    """int64 [W]: index of the next rollout in `StepRollouts.queued`."""
    left: Float64Array
    """float64 [W]: predicted tokens of the queue."""
    reach: Float64Array
    """float64 [W]: longest predicted length of the share."""
    keys: Float64Array
    """float64 [W S]: a heap for each worker: clocks at which its rollouts end."""
    numbers: Int64Array
    """int64 [W S]: these rollouts."""
    counts: Int64Array
    """int64 [W]: rollouts that have ended."""
    finished: Float64Array
    """float64 [R]: when each one ended."""
    due: Float64Array
    """float64 [W]: time of a worker's next event; infinite if it has none."""
    checked: Float64Array
    """float64 [W]: clock at which it last looked for outliers."""
    moves: Int64Array
    """int64 [R]: moves of each rollout."""
    part: Int64Array
    """int64 [R]: the part that a rollout samples, or samples next."""
    home: Int64Array
    """int64 [R]: the worker that it runs on."""
    back: Int64Array
    """int64 [W]: the first rollout that is back from waiting and queues for a slot; -1 if none does."""
    back_last: Int64Array
    """int64 [W]: the last one."""
    back_next: Int64Array
    """int64 [R]: the one after it; -1 if none is."""
    event_keys: Float64Array
    """float64: a heap of events: their times."""
    event_workers: Int64Array
    """int64: their workers, or W plus the rollout that comes back from waiting."""
    totals: Int64Array
    """int64 [4]: see `EVENTS`."""


@compiled_once()
def begin(starts: Float64Array, work: StepRollouts, rules: Rules) -> StepState:
    """The initial state: worker w has its queue and, if that is not empty, an event at `starts[w]`."""
    num_workers, num_rollouts = starts.size, work.lengths.size
    num_entries = num_workers * (rules.token_s.size - 1)
    # Each return is an event, and may make that of its worker stale.
    num_returns = work.part_tokens.size - num_rollouts
    num_events = num_workers + 2 * num_returns + (MAX_MOVES * num_rollouts if rules.moving != OFF else 0)
    state = StepState(
        now=starts.copy(),
        clock=np.zeros(num_workers),
        running=np.zeros(num_workers, np.int64),
        heads=work.offsets[:-1].copy(),
        left=np.zeros(num_workers),
        reach=np.zeros(num_workers),
        keys=np.empty(num_entries),
        numbers=np.empty(num_entries, np.int64),
        counts=np.zeros(num_workers, np.int64),
        finished=np.zeros(num_rollouts),
        due=np.full(num_workers, np.inf),
        checked=np.zeros(num_workers),
        moves=np.zeros(num_rollouts, np.int64),
        part=work.part_starts[:-1].copy(),
        home=np.zeros(num_rollouts, np.int64),
        back=np.full(num_workers, -1),
        back_last=np.full(num_workers, -1),
        back_next=np.full(num_rollouts, -1),
        event_keys=np.empty(num_events),
        event_workers=np.empty(num_events, np.int64),
        totals=np.zeros(4, np.int64),
    )
    state.totals[QUEUED] = work.queued.size
    for worker in range(num_workers):
        for at in range(work.offsets[worker], work.offsets[worker + 1]):
            predicted = work.predicted[work.queued[at]]
            state.left[worker] += predicted
            state.reach[worker] = max(state.reach[worker], predicted)
        if work.offsets[worker + 1] > work.offsets[worker]:
            expect(state, worker, state.now[worker])
    return state


@compiled_once()
def expect(state: StepState, worker: int, time: float) -> None:
    """Queues a worker's next event; an earlier one of this worker becomes stale."""
    state.due[worker] = time
    note_event(state, time, worker)


@compiled_once()
def note_event(state: StepState, time: float, number: int) -> None:
    """Queues an event: of a worker, or of a rollout that comes back."""
    push(state.event_keys, state.event_workers, 0, state.totals[EVENTS], time, number)
    state.totals[EVENTS] += 1


@compiled_once()
def announce(state: StepState, rules: Rules, worker: int) -> None:
    """Queues the end of the worker's next rollout as an event."""
    num_running = state.running[worker]
    if num_running == 0:
        state.due[worker] = np.inf
        return
    tokens = state.keys[worker * (rules.token_s.size - 1)] - state.clock[worker]
    expect(state, worker, state.now[worker] + rules.token_s[num_running] * tokens)


@compiled_once()
def add(state: StepState, rules: Rules, worker: int, rollout: int, num_left: float) -> None:
    """Starts a rollout with `num_left` tokens to go."""
    base = worker * (rules.token_s.size - 1)
    push(state.keys, state.numbers, base, state.running[worker], state.clock[worker] + num_left, rollout)
    state.running[worker] += 1


@compiled_once()
def advance(state: StepState, rules: Rules, worker: int, time: float) -> None:
    """Advances a worker to a time; one that prefills is already ahead and stays there."""
    if time <= state.now[worker]:
        return
    if state.running[worker] > 0:
        state.clock[worker] += (time - state.now[worker]) / rules.token_s[state.running[worker]]
    state.now[worker] = time
