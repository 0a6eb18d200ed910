"""Moves of running rollouts within one simulated step: outliers, and tails that free a worker.

Knows workers and what is likely. Knows nothing of policies; `Moving` says which of it happens.

    W workers, S slots a worker
"""

from numba import njit

from treering.schedule.heaps import remove
from treering.schedule.migration import FEW, HYSTERESIS, LATE, MAX_MOVES, saved_s
from treering.schedule.step_state import FREEING, MOVED, QUEUED, Rules, StepState, Work, add, announce

_NUM_CHECKS = 32
"""How many times a worker looks for outliers while a rollout of the greatest length runs."""


@njit(cache=True)
def is_check_due(state: StepState, rules: Rules, worker: int) -> bool:
    """Whether a worker has come far enough to look for outliers again; it counts as having done so."""
    if state.running[worker] == 0 or state.clock[worker] < state.checked[worker] + rules.max_tokens / _NUM_CHECKS:
        return False
    state.checked[worker] = state.clock[worker]
    return True


@njit(cache=True)
def move_outliers(state: StepState, work: Work, rules: Rules, worker: int, time: float) -> None:
    """Moves what has outgrown its worker's share to workers of longer ones, as far as that pays."""
    base = worker * (rules.token_s.size - 1)
    at = 0
    while at < state.running[worker]:
        rollout = state.numbers[base + at]
        num_left = state.keys[base + at] - state.clock[worker]
        generated = work.lengths[rollout] - num_left
        other = -1
        if state.moves[rollout] < MAX_MOVES and generated >= LATE * state.reach[worker]:
            other = _destination(state, work, rules, worker, generated, generated + work.num_prompt_tokens[rollout])
        if other < 0:
            at += 1
            continue
        _move(state, work, rules, worker, at, other, time)
        announce(state, rules, other)
        # Another entry has taken a place that was seen already.
        at = 0


@njit(cache=True)
def give_tail(state: StepState, work: Work, rules: Rules, worker: int, time: float) -> None:
    """Moves all that a worker has left, once that is little, to the worker that runs the most of what is left."""
    num_running, share = state.running[worker], work.offsets[worker + 1] - work.offsets[worker]
    has_queue = state.heads[worker] < work.offsets[worker + 1] or (rules.stealing and state.totals[QUEUED] > 0)
    if num_running == 0 or has_queue or num_running > max(1.0, FEW * share):
        return
    other = _fullest_tail(state, work, rules, worker)
    if other < 0 or not _pays_to_give(state, work, rules, worker, other):
        return
    for _ in range(num_running):
        _move(state, work, rules, worker, 0, other, time)
    announce(state, rules, other)


@njit(cache=True)
def _fullest_tail(state: StepState, work: Work, rules: Rules, worker: int) -> int:
    """The other worker without a queue that runs the most rollouts, no fewer, and has slots for these; -1 for none."""
    num_running, num_slots, found = state.running[worker], rules.token_s.size - 1, -1
    for other in range(state.running.size):
        has_queue = state.heads[other] < work.offsets[other + 1]
        fits = num_running <= state.running[other] <= num_slots - num_running
        if other != worker and fits and not has_queue and (found < 0 or state.running[other] > state.running[found]):
            found = other
    return found


@njit(cache=True)
def _pays_to_give(state: StepState, work: Work, rules: Rules, worker: int, other: int) -> bool:
    """Whether the time that a worker gets free is worth prefill and slower steps where its rollouts go."""
    base, num_running = worker * (rules.token_s.size - 1), state.running[worker]
    num_context, longest = 0.0, 0.0
    for at in range(num_running):
        rollout = state.numbers[base + at]
        if state.moves[rollout] == MAX_MOVES:
            return False
        generated = work.lengths[rollout] - (state.keys[base + at] - state.clock[worker])
        likely = min(max(work.beliefs[rollout] - generated, 0.25 * generated), rules.max_tokens - generated)
        num_context += generated + work.num_prompt_tokens[rollout]
        longest = max(longest, likely)
    rows = state.running[other]
    slower_s = longest * (rules.token_s[rows + num_running] - rules.token_s[rows])
    return bool(longest * rules.token_s[num_running] > HYSTERESIS * (rules.prefill_s * num_context + slower_s))


@njit(cache=True)
def _move(state: StepState, work: Work, rules: Rules, worker: int, at: int, other: int, time: float) -> None:
    """Moves the rollout at a place of a worker's heap; the other worker's next event is the caller's to announce."""
    base = worker * (rules.token_s.size - 1)
    rollout, num_left = state.numbers[base + at], state.keys[base + at] - state.clock[worker]
    remove(state.keys, state.numbers, base, state.running[worker], at)
    state.running[worker] -= 1
    state.moves[rollout] += 1
    state.totals[MOVED] += 1
    _advance(state, rules, other, time)
    generated = work.lengths[rollout] - num_left
    state.now[other] += rules.prefill_s * (generated + work.num_prompt_tokens[rollout])
    add(state, rules, other, rollout, num_left)


@njit(cache=True)
def _advance(state: StepState, rules: Rules, worker: int, time: float) -> None:
    """Lets a worker gain tokens until now; one that prefills is ahead of the time, and stays there."""
    if time > state.now[worker]:
        state.clock[worker] += (time - state.now[worker]) / rules.token_s[state.running[worker]]
        state.now[worker] = time


@njit(cache=True)
def _destination(state: StepState, work: Work, rules: Rules, worker: int, generated: float, num_context: float) -> int:
    """Where an outlier should go; -1 where it should stay."""
    running, num_slots = state.running, rules.token_s.size - 1
    emptiest: int = _other(state, worker, num_slots, -1)
    if emptiest < 0:
        return -1
    saved = saved_s(
        generated,
        state.reach[worker],
        rules.max_tokens,
        running[worker],
        running[emptiest],
        rules.token_s,
        rules.prefill_s,
        num_context,
    )
    if saved > 0:
        return emptiest
    share = work.offsets[worker + 1] - work.offsets[worker]
    is_last = state.heads[worker] == work.offsets[worker + 1] and running[worker] <= max(1.0, FEW * share)
    if rules.moving != FREEING or not is_last:
        return -1
    likely_s = min(0.25 * generated, rules.max_tokens - generated) * rules.token_s[1]
    if likely_s <= HYSTERESIS * rules.prefill_s * num_context:
        return -1
    fullest: int = _other(state, worker, num_slots, 1)
    return fullest


@njit(cache=True)
def _other(state: StepState, worker: int, num_slots: int, sign: int) -> int:
    """The worker of a longer share with a slot that runs the most rollouts (sign 1) or the fewest (-1); -1 for none."""
    found = -1
    for other in range(state.running.size):
        has_room = state.reach[other] > state.reach[worker] and 0 < state.running[other] < num_slots
        if has_room and (found < 0 or sign * state.running[other] > sign * state.running[found]):
            found = other
    return found
