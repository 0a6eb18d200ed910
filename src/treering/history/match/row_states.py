"""The outcome of each running row's latest draft, and the length of its context at that step.

S slots
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int64Array
from treering.history.features import NOT_TRIED
from treering.lean import lean


class RowStates(NamedTuple):
    """The latest step of the row in each slot, all [S]."""

    state: Int64Array  # see `features.NUM_STATES`
    num_tokens: Int64Array  # of the context then
    num_expected: Int64Array  # of the context now if only sampled tokens were added; -1 for a new row


def make_row_states(num_slots: int) -> RowStates:
    """States of slots whose rows have had no step yet."""
    num_tokens, num_expected = np.full((2, num_slots), -1, np.int64)
    return RowStates(np.full(num_slots, NOT_TRIED, np.int64), num_tokens, num_expected)


@lean
def update_state(states: RowStates, slot: int, num_tokens: int) -> None:
    """Stores the length of a row's context; if unsampled tokens were added, the latest draft's outcome is reset."""
    if states.num_expected[slot] != num_tokens:
        states.state[slot] = NOT_TRIED
    states.num_tokens[slot] = num_tokens


@lean
def copy_state(states: RowStates, slot: int, source: int) -> None:
    """Gives a slot the state of another one, whose row has the same tokens."""
    states.state[slot] = states.state[source]
    states.num_tokens[slot], states.num_expected[slot] = states.num_tokens[source], states.num_expected[source]
