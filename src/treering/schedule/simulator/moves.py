"""Moves of running rollouts within one simulated step: outliers, and tails that free a worker.

W workers, S slots a worker
"""

from treering.compiling.once import compiled_once
from treering.schedule.simulator.heaps import remove
from treering.schedule.simulator.migration import (
    LATE,
    MAX_MOVES,
    Loads,
    Prices,
    freed_s,
    fullest_tail,
    has_tail,
    likely_left,
    target_of_outlier,
)
from treering.schedule.simulator.step import MOVED, QUEUED, Rules, StepRollouts, StepState, add, advance, announce

_NUM_CHECKS = 32
"""Checks for outliers per `max_tokens` decoded."""


@compiled_once()
def is_check_due(state: StepState, rules: Rules, worker: int) -> bool:
    """Whether a worker should check for outliers again; records the check."""
    if state.running[worker] == 0 or state.clock[worker] < state.checked[worker] + rules.max_tokens / _NUM_CHECKS:
        return False
    state.checked[worker] = state.clock[worker]
    return True


@compiled_once()
def move_outliers(state: StepState, work: StepRollouts, rules: Rules, worker: int, time: float) -> None:
    """Moves outliers to workers with longer shares, if that pays."""
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
    """Moves a worker's tail to the other worker that runs the most rollouts, if that pays."""
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
    """Whether the freed time exceeds the prefill and the slower steps at the new worker."""
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
    """Moves the rollout at a heap position of a worker; the caller announces the other worker's next event."""
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
