"""Simulate one step on all workers, event by event: heaps, rollouts, moves."""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.compiling.once import compiled_once
from treering.schedule.migration import (
    CONSOLIDATE,
    DRAIN,
    LATE,
    MAX_MOVES,
    OFF,
    Loads,
    Prices,
    freed_s,
    fullest_tail,
    has_tail,
    likely_left,
    target_of_outlier,
)


@compiled_once()
def push(keys: Float64Array, numbers: Int64Array, base: int, size: int, key: float, number: int) -> None:
    """Add an entry to the heap of `size` entries that starts at `base`; the new size is `size + 1`."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not _is_before(key, number, keys[base + above], numbers[base + above]):
            break
        keys[base + at] = keys[base + above]
        numbers[base + at] = numbers[base + above]
        at = above
    keys[base + at] = key
    numbers[base + at] = number


@compiled_once()
def pop(keys: Float64Array, numbers: Int64Array, base: int, size: int) -> None:
    """Remove the first entry, at `base`, from a heap of `size` >= 1; the new size is `size - 1`."""
    keys[base], numbers[base] = keys[base + size - 1], numbers[base + size - 1]
    sink(keys, numbers, base, size - 1, 0)


@compiled_once()
def remove(keys: Float64Array, numbers: Int64Array, base: int, size: int, index: int) -> None:
    """Remove the entry at `base + index` from a heap of `size`; the new size is `size - 1`."""
    key, number = keys[base + size - 1], numbers[base + size - 1]
    if index == size - 1:
        return
    if _is_before(key, number, keys[base + index], numbers[base + index]):
        push(keys, numbers, base, index, key, number)
        return
    keys[base + index], numbers[base + index] = key, number
    sink(keys, numbers, base, size - 1, index)


@compiled_once()
def sink(keys: Float64Array, numbers: Int64Array, base: int, size: int, index: int) -> None:
    """Move the entry at `base + index` down until its children come after it."""
    if index >= size:
        return
    key, number = keys[base + index], numbers[base + index]
    at = index
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and _comes_first(keys, numbers, base + below + 1, base + below):
            below += 1
        if not _is_before(keys[base + below], numbers[base + below], key, number):
            break
        keys[base + at], numbers[base + at] = keys[base + below], numbers[base + below]
        at = below
    keys[base + at], numbers[base + at] = key, number


@compiled_once()
def _comes_first(keys: Float64Array, numbers: Int64Array, one: int, other: int) -> bool:
    return bool(_is_before(keys[one], numbers[one], keys[other], numbers[other]))


@compiled_once()
def _is_before(key: float, number: int, other_key: float, other_number: int) -> bool:
    return bool(key < other_key or (key == other_key and number < other_number))


EVENTS, QUEUED, STOLEN, MOVED = 0, 1, 2, 3
"""Indices of `StepState.totals`: pending events, queued rollouts, stolen rollouts, moves."""


class StepRollouts(NamedTuple):
    """A step's rollouts and their queues."""

    offsets: Int64Array
    """int64 [W + 1]: worker w has the queue `queued[offsets[w]:offsets[w + 1]]`; if it is empty, w never starts."""
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
    """float64 [S + 1]: seconds per token by number of running rollouts."""
    prefill_s: float
    """Seconds per prefilled token."""
    max_tokens: float
    """Most tokens of a rollout."""
    stealing: bool
    """Whether a worker with an empty queue takes from the longest one."""
    moving: int
    """`migration.OFF`, `DRAIN` or `CONSOLIDATE`."""


class StepOutcome(NamedTuple):
    """Result of a step."""

    ends: Float64Array
    """float64 [W]: when a worker ended its last rollout; its start if it had none."""
    counts: Int64Array
    """int64 [W]: rollouts that ended there."""
    finished: Float64Array
    """float64 [R]: when each rollout ended."""
    num_stolen: int
    """Rollouts that started on another worker than queued."""
    num_moved: int
    """Moves of running rollouts."""


class StepState(NamedTuple):
    """Mutable state of a step."""

    now: Float64Array
    """float64 [W]: time that a worker has reached."""
    clock: Float64Array
    """float64 [W]: tokens of a rollout that has been running there from the start."""
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
    """int64 [W S]: the rollouts of `keys`."""
    counts: Int64Array
    """int64 [W]: rollouts that have ended."""
    finished: Float64Array
    """float64 [R]: when each rollout ended."""
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
    """int64 [W]: the first rollout that is back from waiting and queues for a slot; -1 for none."""
    back_last: Int64Array
    """int64 [W]: the last such rollout."""
    back_next: Int64Array
    """int64 [R]: the next such rollout after each; -1 for none."""
    event_keys: Float64Array
    """float64: times of a heap of events."""
    event_workers: Int64Array
    """int64: their workers, or W plus the rollout that comes back from waiting."""
    totals: Int64Array
    """int64 [4]: counts, see `EVENTS`."""


@compiled_once()
def begin(starts: Float64Array, work: StepRollouts, rules: Rules) -> StepState:
    """Return the initial state: worker w has its queue and, if that is not empty, an event at `starts[w]`."""
    num_workers, num_rollouts = starts.size, work.lengths.size
    num_entries = num_workers * (rules.token_s.size - 1)
    # Each return is an event, and may make an event of its worker stale.
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
    """Queue a worker's next event; its earlier event becomes stale."""
    state.due[worker] = time
    note_event(state, time, worker)


@compiled_once()
def note_event(state: StepState, time: float, number: int) -> None:
    """Queue an event of a worker, or of a rollout that comes back."""
    push(state.event_keys, state.event_workers, 0, state.totals[EVENTS], time, number)
    state.totals[EVENTS] += 1


@compiled_once()
def announce(state: StepState, rules: Rules, worker: int) -> None:
    """Queue the end of the worker's next rollout as an event."""
    num_running = state.running[worker]
    if num_running == 0:
        state.due[worker] = np.inf
        return
    tokens = state.keys[worker * (rules.token_s.size - 1)] - state.clock[worker]
    expect(state, worker, state.now[worker] + rules.token_s[num_running] * tokens)


@compiled_once()
def add(state: StepState, rules: Rules, worker: int, rollout: int, num_left: float) -> None:
    """Start a rollout with `num_left` tokens to go."""
    base = worker * (rules.token_s.size - 1)
    push(state.keys, state.numbers, base, state.running[worker], state.clock[worker] + num_left, rollout)
    state.running[worker] += 1


@compiled_once()
def advance(state: StepState, rules: Rules, worker: int, time: float) -> None:
    """Advance a worker to a time; a worker that prefills may be ahead already, and stays there."""
    if time <= state.now[worker]:
        return
    if state.running[worker] > 0:
        state.clock[worker] += (time - state.now[worker]) / rules.token_s[state.running[worker]]
    state.now[worker] = time


_NUM_CHECKS = 32
"""Checks for outliers per `max_tokens` decoded."""


@compiled_once()
def is_check_due(state: StepState, rules: Rules, worker: int) -> bool:
    """Return whether a worker should check for outliers again; record the check."""
    if state.running[worker] == 0 or state.clock[worker] < state.checked[worker] + rules.max_tokens / _NUM_CHECKS:
        return False
    state.checked[worker] = state.clock[worker]
    return True


@compiled_once()
def move_outliers(state: StepState, work: StepRollouts, rules: Rules, worker: int, time: float) -> None:
    """Move outliers to workers with longer shares, if that pays."""
    base = worker * (rules.token_s.size - 1)
    at = 0
    while at < state.running[worker]:
        rollout = state.numbers[base + at]
        num_left = state.keys[base + at] - state.clock[worker]
        generated = work.lengths[rollout] - num_left
        other = -1
        if state.moves[rollout] < MAX_MOVES and generated >= LATE * state.reach[worker]:
            context = generated + work.num_prompt_tokens[rollout]
            other = target_of_outlier(_loads(state, work), _prices(rules), worker, generated, context)
        if other < 0:
            at += 1
            continue
        _move(state, work, rules, worker, at, other, time)
        announce(state, rules, other)
        # Removing an entry reorders the heap, so start again.
        at = 0


@compiled_once()
def move_tail(state: StepState, work: StepRollouts, rules: Rules, worker: int, time: float) -> None:
    """Move a worker's tail to the other worker that runs the most rollouts, if that pays."""
    can_steal = rules.stealing and state.totals[QUEUED] > 0
    if can_steal or not has_tail(_loads(state, work), worker):
        return
    other = fullest_tail(_loads(state, work), worker, rules.token_s.size - 1)
    if other < 0 or not _pays_to_move_tail(state, work, rules, worker, other):
        return
    for _ in range(state.running[worker]):
        _move(state, work, rules, worker, 0, other, time)
    announce(state, rules, other)


@compiled_once()
def _loads(state: StepState, work: StepRollouts) -> Loads:
    return Loads(state.running, state.reach, work.offsets[:-1], state.heads, work.offsets[1:])


@compiled_once()
def _prices(rules: Rules) -> Prices:
    return Prices(rules.token_s, rules.prefill_s, rules.max_tokens)


@compiled_once()
def _pays_to_move_tail(state: StepState, work: StepRollouts, rules: Rules, worker: int, other: int) -> bool:
    """Return whether the freed time exceeds the prefill and the slower steps at the new worker."""
    base, num_running = worker * (rules.token_s.size - 1), state.running[worker]
    num_context, longest = 0.0, 0.0
    for at in range(num_running):
        rollout = state.numbers[base + at]
        if state.moves[rollout] == MAX_MOVES:
            return False
        generated = work.lengths[rollout] - (state.keys[base + at] - state.clock[worker])
        num_context += generated + work.num_prompt_tokens[rollout]
        longest = max(longest, likely_left(generated, work.predicted[rollout], rules.max_tokens))
    rows_there = state.running[other]
    return bool(freed_s(longest, num_running, rows_there, rules.token_s, rules.prefill_s, num_context) > 0)


@compiled_once()
def _move(state: StepState, work: StepRollouts, rules: Rules, worker: int, at: int, other: int, time: float) -> None:
    """Move the rollout at a heap position of a worker; the caller announces the other worker's next event."""
    base = worker * (rules.token_s.size - 1)
    rollout, num_left = state.numbers[base + at], state.keys[base + at] - state.clock[worker]
    remove(state.keys, state.numbers, base, state.running[worker], at)
    state.running[worker] -= 1
    state.moves[rollout] += 1
    state.totals[MOVED] += 1
    advance(state, rules, other, time)
    generated = work.lengths[rollout] - num_left
    state.now[other] += rules.prefill_s * (generated + work.num_prompt_tokens[rollout])
    add(state, rules, other, rollout, num_left)


@compiled_once()
def run_step(starts: Float64Array, work: StepRollouts, rules: Rules) -> StepOutcome:
    """Simulate a step's rollouts to their ends; worker w can start at `starts[w]`, float64 [W].

    Example: lengths [4, 2] in the queue of one worker with two slots, 1.0 s a token alone and 1.5 s for two: the second
    ends after 3.0 s, the first after 5.0 s.
    """
    state = begin(starts, work, rules)
    while state.totals[EVENTS] > 0:
        time, worker = state.event_keys[0], state.event_workers[0]
        pop(state.event_keys, state.event_workers, 0, state.totals[EVENTS])
        state.totals[EVENTS] -= 1
        if worker >= starts.size:
            rollout = worker - starts.size
            worker = state.home[rollout]
            advance(state, rules, worker, time)
            _queue_again(state, worker, rollout)
        elif time != state.due[worker]:
            # Stale: the worker gained or lost a rollout since, and has another event.
            continue
        else:
            _end_turns(state, work, rules, worker, time)
        _resume_rollouts(state, work, rules, worker)
        _start_rollouts(state, work, rules, worker)
        if rules.moving == CONSOLIDATE:
            move_tail(state, work, rules, worker, time)
        elif rules.moving == DRAIN and is_check_due(state, rules, worker):
            move_outliers(state, work, rules, worker, time)
            _start_rollouts(state, work, rules, worker)
        announce(state, rules, worker)
    return StepOutcome(state.now, state.counts, state.finished, state.totals[STOLEN], state.totals[MOVED])


@compiled_once()
def _end_turns(state: StepState, work: StepRollouts, rules: Rules, worker: int, time: float) -> None:
    base = worker * (rules.token_s.size - 1)
    if state.running[worker] == 0:
        return
    state.clock[worker], state.now[worker] = state.keys[base], time
    while state.running[worker] > 0 and state.keys[base] <= state.clock[worker]:
        rollout = state.numbers[base]
        pop(state.keys, state.numbers, base, state.running[worker])
        state.running[worker] -= 1
        _leave(state, work, worker, rollout, time)


@compiled_once()
def _leave(state: StepState, work: StepRollouts, worker: int, rollout: int, time: float) -> None:
    """End a part of a rollout, which waits for its next one or is finished."""
    part = state.part[rollout]
    back_s = time + work.part_waits[part]
    if part + 1 == work.part_starts[rollout + 1]:
        state.finished[rollout] = back_s
        state.counts[worker] += 1
        return
    state.part[rollout], state.home[rollout] = part + 1, worker
    note_event(state, back_s, state.now.size + rollout)


@compiled_once()
def _queue_again(state: StepState, worker: int, rollout: int) -> None:
    if state.back[worker] < 0:
        state.back[worker] = rollout
    else:
        state.back_next[state.back_last[worker]] = rollout
    state.back_last[worker], state.back_next[rollout] = rollout, -1


@compiled_once()
def _resume_rollouts(state: StepState, work: StepRollouts, rules: Rules, worker: int) -> None:
    while state.back[worker] >= 0 and state.running[worker] < rules.token_s.size - 1:
        rollout = state.back[worker]
        state.back[worker] = state.back_next[rollout]
        _enter(state, work, rules, worker, rollout)


@compiled_once()
def _enter(state: StepState, work: StepRollouts, rules: Rules, worker: int, rollout: int) -> None:
    """Start the present part of a rollout; a part without tokens ends at once."""
    num_tokens = work.part_tokens[state.part[rollout]]
    if num_tokens == 0:
        _leave(state, work, worker, rollout, state.now[worker])
        return
    add(state, rules, worker, rollout, num_tokens)


@compiled_once()
def _start_rollouts(state: StepState, work: StepRollouts, rules: Rules, worker: int) -> None:
    while state.totals[QUEUED] > 0 and state.running[worker] < rules.token_s.size - 1:
        victim = worker
        if state.heads[worker] == work.offsets[worker + 1]:
            if not rules.stealing:
                return
            victim = _longest_queue(state, work)
            state.totals[STOLEN] += 1
        rollout = work.queued[state.heads[victim]]
        state.heads[victim] += 1
        state.left[victim] -= work.predicted[rollout]
        state.totals[QUEUED] -= 1
        state.now[worker] += rules.prefill_s * work.num_prompt_tokens[rollout]
        _enter(state, work, rules, worker, rollout)


@compiled_once()
def _longest_queue(state: StepState, work: StepRollouts) -> int:
    """Return the worker whose queue has the most predicted tokens; at least one worker has a queue."""
    found = -1
    for worker in range(state.heads.size):
        has_queue = state.heads[worker] < work.offsets[worker + 1]
        if has_queue and (found < 0 or state.left[worker] > state.left[found]):
            found = worker
    return found
