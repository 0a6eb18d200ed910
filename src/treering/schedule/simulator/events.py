"""The event loop of one simulated step: rollouts end, and queued ones start in their slots.

W workers, S slots a worker, R rollouts of the step
"""

from treering.arrays import Float64Array
from treering.compiling.once import compiled_once
from treering.schedule.simulator.heaps import pop
from treering.schedule.simulator.migration import CONSOLIDATE, DRAIN
from treering.schedule.simulator.moves import is_check_due, move_outliers, move_tail
from treering.schedule.simulator.step import (
    EVENTS,
    MOVED,
    QUEUED,
    STOLEN,
    Outcome,
    Rules,
    StepRollouts,
    StepState,
    add,
    advance,
    announce,
    begin,
    note_event,
)


@compiled_once()
def run_step(starts: Float64Array, work: StepRollouts, rules: Rules) -> Outcome:
    """Simulates a step's rollouts to their ends; worker w can start at `starts[w]`, float64 [W].

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
    return Outcome(state.now, state.counts, state.finished, state.totals[STOLEN], state.totals[MOVED])


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
    """Ends a part of a rollout, which waits for its next one or is finished."""
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
    """Starts a rollout's present part; one without tokens is over at once."""
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
    """The worker whose queue has the most predicted tokens; at least one has a queue."""
    found = -1
    for worker in range(state.heads.size):
        has_queue = state.heads[worker] < work.offsets[worker + 1]
        if has_queue and (found < 0 or state.left[worker] > state.left[found]):
            found = worker
    return found
