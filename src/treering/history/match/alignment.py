"""Where each row was in old rollouts, step after step: the threads that it resumes behind an edit.

Knows what a row followed. Knows nothing of how places are found anew.

    S slots
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.features import NOT_TRIED
from treering.history.jit import lean
from treering.history.match.arena import Histories
from treering.history.match.history_matches import LEAST_EDIT, NEAR, put_history
from treering.history.match.matches import IN_HISTORY, Places, is_known, longest_of
from treering.history.match.suffix_search import measure

MAX_THREADS = 3
_MAX_MISSED = 8


class Threads(NamedTuple):
    """Where each slot's row was in old rollouts at its latest step; [S, MAX_THREADS] where nothing else is said."""

    at: Int32Array  # of the token that was to come, from the start of the prompt's text; -1 is none
    missed: Int32Array  # tokens since it agreed
    num_tokens: Int64Array  # [S], of the context then; -1 is no step yet
    num_expected: Int64Array  # [S], of the context now, if nothing but sampled tokens has come
    generation: Int64Array  # [S], of the arena then
    state: Int64Array  # [S], see `features.NUM_STATES`


def make_threads(num_slots: int) -> Threads:
    """Of slots whose rows have followed nothing yet."""
    at, missed = np.full((num_slots, MAX_THREADS), -1, np.int32), np.zeros((num_slots, MAX_THREADS), np.int32)
    num_tokens, num_expected, generation = np.full((3, num_slots), -1, np.int64)
    return Threads(at, missed, num_tokens, num_expected, generation, np.zeros(num_slots, np.int64))


@lean
def find_threads(
    places: Places,
    num: int,
    threads: Threads,
    slot: int,
    history: Histories,
    prompt_slot: int,
    context: Int32Array,
    begin: int,
) -> int:
    """Notes where the old rollouts go on that the row followed before, a token earlier or later where that fits better.

    See `find_in_history`. Where that found enough, the threads only go along.
    """
    start, size = history.spans[prompt_slot]
    num_new = context.size - threads.num_tokens[slot]
    is_needed = longest_of(places, num) < NEAR
    for k in range(MAX_THREADS):
        if threads.at[slot, k] < 0:
            continue
        if not is_needed:
            threads.at[slot, k] = min(threads.at[slot, k] + num_new, size)
            continue
        best, best_length, best_edit = -1, 0, 0
        for shift in (0, 1, -1):
            at = threads.at[slot, k] - 1 + num_new + shift
            if at < 0 or at >= size:
                continue
            length, edit = measure(history.text, start + at, context, begin)
            if length + edit > best_length + best_edit:
                best, best_length, best_edit = at, length, edit
        missed = threads.missed[slot, k] + num_new
        if best >= 0 and (best_length > 0 or best_edit >= LEAST_EDIT):
            threads.missed[slot, k] = 0
            threads.at[slot, k] = best + 1
            if not is_known(places, num, IN_HISTORY, start + best + 1):
                num = put_history(places, num, history, start + best, context, begin, best_length, best_edit)
        elif missed > _MAX_MISSED or threads.at[slot, k] + num_new >= size:
            threads.at[slot, k] = -1
        else:
            threads.missed[slot, k] = missed
            threads.at[slot, k] += num_new
    return num


@lean
def refresh_threads(threads: Threads, slot: int, num_tokens: int, generation: int) -> None:
    """Forgets what a slot's row followed where that means nothing now."""
    is_new = not 0 <= threads.num_tokens[slot] <= num_tokens
    if is_new or threads.generation[slot] != generation:
        for k in range(MAX_THREADS):
            threads.at[slot, k] = -1
        threads.generation[slot] = generation
    if is_new or threads.num_expected[slot] != num_tokens:
        threads.state[slot] = NOT_TRIED
    if is_new:
        threads.num_tokens[slot] = num_tokens


@lean
def follow(threads: Threads, slot: int, places: Places, num_found: int, start: int) -> None:
    """Remembers where the longest matches go on."""
    for i in range(min(num_found, 2)):
        at = places[i].at - start
        is_known = False
        for k in range(MAX_THREADS):
            is_known |= threads.at[slot, k] == at
        if is_known:
            continue
        worst = 0
        for k in range(MAX_THREADS):
            if threads.at[slot, k] < 0:
                worst = k
                break
            if threads.missed[slot, k] > threads.missed[slot, worst]:
                worst = k
        threads.at[slot, worst], threads.missed[slot, worst] = at, 0


@lean
def go_along(threads: Threads, slot: int, leader: int) -> None:
    """A row with the same tokens as the leader's is where that is."""
    for k in range(MAX_THREADS):
        threads.at[slot, k], threads.missed[slot, k] = threads.at[leader, k], threads.missed[leader, k]
    threads.num_tokens[slot], threads.num_expected[slot] = threads.num_tokens[leader], threads.num_expected[leader]
    threads.generation[slot], threads.state[slot] = threads.generation[leader], threads.state[leader]
