"""Simulate one step on all workers, and the rehearsals of the next one in their idle rows.

W workers   R rollouts of the step   N rollouts of the next one
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.compiling.once import compiled_once
from treering.schedule.placement import longest_first
from treering.schedule.simulated_step import StepRollouts, pop, push
from treering.schedule.traces import TraceStep


class RehearsalCosts(NamedTuple):
    """Times, and whether idle workers steal."""

    token_s: Float64Array
    """float64 [S + 1]: seconds per token by number of running rows."""
    prefill_s: float
    """Seconds per prefilled token."""
    training_s: float
    """Seconds of the update, in which workers still rehearse."""
    stealing: bool
    """Whether a worker with an empty queue takes from the longest one."""


class EarlyRollouts(NamedTuple):
    """Rollouts of the next step that may be rehearsed."""

    order: Int64Array
    """int64 [N]: rehearsed in this order."""
    lengths: Int64Array
    """int64 [N]."""
    num_prompt_tokens: Int64Array
    """int64 [N]: tokens to prefill before."""
    num_rows: int
    """Most of them on a worker that runs rollouts of the step."""


class DoneStep(NamedTuple):
    """Result of a step."""

    starts: Float64Array
    """float64 [W]: when a worker could start."""
    ends: Float64Array
    """float64 [W]: when it ended its last rollout or rehearsal."""
    counts: Int64Array
    """int64 [W]: rollouts of the step that ended there."""
    sampled: float
    """When the last rollout of the step ended."""
    rehearsed: Int64Array
    """int64 [N]: tokens of each rehearsal."""
    decoded: float
    """Decoded tokens of the step's own rollouts."""
    num_stolen: int
    """Rollouts that started on another worker than queued."""


def early_rollouts(step: TraceStep | None, num_rows: int) -> EarlyRollouts:
    """Return the rehearsals of the next step, the longest predicted first; none of no step."""
    if step is None:
        none = np.zeros(0, np.int64)
        return EarlyRollouts(none, none, none, 0)
    prompts = np.zeros_like(step.lengths) if step.num_prompt_tokens is None else step.num_prompt_tokens
    order = longest_first(step.forecast.lengths, step.forecast.prompts)
    return EarlyRollouts(order, step.lengths, prompts, num_rows)


@compiled_once()
def run_with_rehearsals(
    starts: Float64Array, work: StepRollouts, contexts: Int64Array, early: EarlyRollouts, costs: RehearsalCosts
) -> DoneStep:
    """Simulate a step until it is trained, and the rehearsals in rows that it leaves idle.

    A worker rehearses only what is left when it has nothing else to start, so that no rollout of the step waits for a
    row. Its rows share a clock, so that each rehearsal makes the others as slow as one more row does.

    Args:
        starts: float64 [W]: when each worker can start.
        work: rollouts of the step, of one part each; `num_prompt_tokens` are those that their own worker prefills.
        contexts: int64 [R]: tokens that a worker prefills for a stolen rollout.
        early: rollouts of the next step.
        costs: times, and whether idle workers steal.

    Example: rollouts of 4 and 2 tokens on one worker with two slots and 1 s a token leave a row for 2 s, and both for
    the update: with one of 3 s the next step's two rollouts of 9 tokens have 5 and 3 of them.
    """
    num_slots, num_rollouts = costs.token_s.size - 1, work.lengths.size
    now, due, clock = starts.copy(), starts.copy(), np.zeros(starts.size)
    running, rehearsing, counts = np.zeros((3, starts.size), np.int64)
    keys, numbers = np.empty(starts.size * num_slots), np.empty(starts.size * num_slots, np.int64)
    heads, ends = work.offsets[:-1].copy(), starts.copy()
    started, rehearsed = np.zeros(early.lengths.size), np.zeros(early.lengths.size, np.int64)
    # Heaps as in `simulated_step`: clocks at which rows end, and their rollouts; rehearsals have numbers from R on.
    num_left, num_early, num_stolen = num_rollouts, 0, 0
    sampled, decoded, close = 0.0, 0.0, np.inf
    while True:
        worker = int(np.argmin(due))
        if due[worker] >= close:
            break
        base, now[worker] = worker * num_slots, due[worker]
        if running[worker] + rehearsing[worker] > 0:
            decoded += running[worker] * (keys[base] - clock[worker])
            clock[worker] = keys[base]
        while True:
            rows = running[worker] + rehearsing[worker]
            if rows > 0 and keys[base] <= clock[worker]:
                number = numbers[base]
                pop(keys, numbers, base, rows)
                if number >= num_rollouts:
                    rehearsing[worker] -= 1
                    rehearsed[number - num_rollouts] = early.lengths[number - num_rollouts]
                    continue
                running[worker] -= 1
                counts[worker] += 1
                num_left -= 1
                sampled = max(sampled, now[worker])
                close = sampled + costs.training_s if num_left == 0 else np.inf
                continue
            if rows == num_slots:
                break
            victim = _next_queue(work, heads, worker, costs.stealing)
            if victim >= 0:
                rollout = work.queued[heads[victim]]
                heads[victim] += 1
                num_stolen += int(victim != worker)
                num_prefilled = work.num_prompt_tokens[rollout] if victim == worker else contexts[rollout]
                now[worker] += costs.prefill_s * num_prefilled
                push(keys, numbers, base, rows, clock[worker] + work.lengths[rollout], rollout)
                running[worker] += 1
            elif num_early < early.order.size and (running[worker] == 0 or rehearsing[worker] < early.num_rows):
                rollout = early.order[num_early]
                num_early += 1
                now[worker] += costs.prefill_s * early.num_prompt_tokens[rollout]
                started[rollout] = clock[worker]
                push(keys, numbers, base, rows, clock[worker] + early.lengths[rollout], num_rollouts + rollout)
                rehearsing[worker] += 1
            else:
                break
        due[worker], ends[worker] = np.inf, now[worker]
        if running[worker] + rehearsing[worker] > 0:
            tokens = keys[base] - clock[worker]
            due[worker] = now[worker] + costs.token_s[running[worker] + rehearsing[worker]] * tokens
    for worker in range(starts.size):
        if rehearsing[worker] > 0:
            ends[worker] = max(close, now[worker])
            reached = clock[worker] + max(0.0, close - now[worker]) / costs.token_s[rehearsing[worker]]
            for at in range(worker * num_slots, worker * num_slots + rehearsing[worker]):
                rollout = numbers[at] - num_rollouts
                # A rounded clock must not lose a whole token.
                rehearsed[rollout] = min(early.lengths[rollout], int(reached - started[rollout] + 1e-6))
    return DoneStep(starts, ends, counts, sampled, rehearsed, decoded, num_stolen)


@compiled_once()
def _next_queue(work: StepRollouts, heads: Int64Array, worker: int, stealing: bool) -> int:
    if heads[worker] < work.offsets[worker + 1]:
        return worker
    found, most = -1, 0
    for other in range(heads.size if stealing else 0):
        num_queued = work.offsets[other + 1] - heads[other]
        if num_queued > most:
            found, most = other, num_queued
    return found
