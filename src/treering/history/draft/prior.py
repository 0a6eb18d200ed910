"""What a drafter takes for granted before it has observed anything: how much a place's vote counts.

Written down, not fitted: what is fitted to recorded rollouts is made of them, and the terms of most forbid to ship it.
`benchmarks/draft/prior.py` measures what a fitted prior would bring. Knows buckets. Knows nothing of what was observed.
"""

import numpy as np

from treering.arrays import Float64Array
from treering.history.features import NUM_EDITS, NUM_LENGTHS, NUM_SHIFTS, NUM_SOURCES

SHARES = (0.7, 0.1, 0.1, 0.1, 0.1, 0.2)
"""Weights of a candidate's shares: among all places most, in each source and among the longest matches a little."""

_NUM_SHORT_LENGTHS = 7
_NUM_AGES = 4
_LENGTH = 0.6
_NO_MATCH = -1.0
_SOURCES = (0.0, -0.2, -0.5, -0.5)
_EDIT = 0.5
_LONG = 4
_AGE = -0.2
_SHIFTS = (-0.3, 0.8, 0.6, 0.2, -0.2, -0.8)
_NONE = 0.5
_NONE_LENGTH = 0.17


def vote_tables() -> dict[str, Float64Array]:
    """Factors of a place's vote by source and length, length and edit, source and age, shift; and what speaks for none.

    `length` [4 * 11], `edit` [7 * 5], `age` [4 * 4], `shift` [6], `none` [11].

    Example: of two places of the prompt's history, the one whose match is a bucket longer counts exp(0.6) = 1.8 times
    as much, and one of own context exp(-0.5) = 0.6 times as much as either.
    """
    lengths, edits = np.arange(NUM_LENGTHS), np.arange(NUM_EDITS)
    by_source = np.array(_SOURCES)[:, None]
    # Behind a long match an edit says less.
    trust_in_edits = np.where(np.arange(_NUM_SHORT_LENGTHS) < _LONG, _EDIT, _EDIT / 2)[:, None]
    ages = np.broadcast_to(_AGE * np.arange(_NUM_AGES), (NUM_SOURCES, _NUM_AGES))
    logs = {
        "length": _NO_MATCH + _LENGTH * lengths + by_source,
        "edit": trust_in_edits * edits,
        "age": ages,
        "shift": np.array(_SHIFTS),
        "none": _NONE + _NONE_LENGTH * lengths,
    }
    assert logs["shift"].size == NUM_SHIFTS
    return {name: np.exp(values).ravel() for name, values in logs.items()}
