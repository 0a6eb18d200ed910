"""The event loop of one simulated step: rollouts end, and queued ones start in their slots.

W workers, S slots a worker, R rollouts of the step
"""

from treering.arrays import Float64Array
from treering.compile_once import compiled_once
from treering.schedule.simulator.destinations import CONSOLIDATE, OFF
from treering.schedule.simulator.heaps import pop
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
    announce,
    begin,
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
        if time != state.due[worker]:
            # Stale: the worker gained or lost a rollout since, and has another event.
            continue
        _end_rollouts(state, rules, worker, time)
        _start_rollouts(state, work, rules, worker)
        if rules.moving == CONSOLIDATE:
            move_tail(state, work, rules, worker, time)
        elif rules.moving != OFF and is_check_due(state, rules, worker):
            move_outliers(state, work, rules, worker, time)
            _start_rollouts(state, work, rules, worker)
        announce(state, rules, worker)
    return Outcome(state.now, state.counts, state.finished, state.totals[STOLEN], state.totals[MOVED])


@compiled_once()
def _end_rollouts(state: StepState, rules: Rules, worker: int, time: float) -> None:
    base = worker * (rules.token_s.size - 1)
    if state.running[worker] == 0:
        return
    state.clock[worker], state.now[worker] = state.keys[base], time
    while state.running[worker] > 0 and state.keys[base] <= state.clock[worker]:
        state.finished[state.numbers[base]] = time
        pop(state.keys, state.numbers, base, state.running[worker])
        state.running[worker] -= 1
        state.counts[worker] += 1


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
        add(state, rules, worker, rollout, work.lengths[rollout])


@compiled_once()
def _longest_queue(state: StepState, work: StepRollouts) -> int:
    """The worker whose queue has the most predicted tokens; at least one has a queue."""
    found = -1
    for worker in range(state.heads.size):
        has_queue = state.heads[worker] < work.offsets[worker + 1]
        if has_queue and (found < 0 or state.left[worker] > state.left[found]):
            found = worker
    return found
