"""What a drafter assumes before it has observed anything: how much a match's vote counts.

The numbers are chosen, not fitted: a fit to recorded rollouts would be derived from them, and most of their licences
forbid shipping that.
"""

import numpy as np

from treering.history.features import NUM_EDITS, NUM_LENGTH_CLASSES, NUM_LENGTHS

SHARES = (0.7, 0.1, 0.1, 0.1, 0.1, 0.2)
"""Weights of a candidate's vote shares: among all matches, in each of four sources, among the longest matches."""

_LONG = 4
_BY_LENGTH = -1.0 + 0.6 * np.arange(NUM_LENGTHS)
_BY_SOURCE = np.array([0.0, -0.2, -0.5, -0.5])[:, None]
# After a long match, agreement after an edit says less.
_PER_EDIT = np.where(np.arange(NUM_LENGTH_CLASSES) < _LONG, 0.5, 0.25)[:, None]

LENGTH_FACTORS = np.exp(_BY_LENGTH + _BY_SOURCE).ravel()
"""Factor of a match's vote, [sources * lengths]. Of two matches in the prompt's history, the one that is a length
bucket longer counts exp(0.6) = 1.8 times as much; one in own context counts exp(-0.5) = 0.6 times as much."""
EDIT_FACTORS = np.exp(_PER_EDIT * np.arange(NUM_EDITS)).ravel()
"""Factor by agreement after an edit, [length classes * edits]."""
SHIFT_FACTORS = np.exp(np.array([-0.3, 0.8, 0.6, 0.2, -0.2, -0.8]))
"""Factor by how far a match's position in its rollout is from the row's in its own, [shifts]."""
NO_TOKEN_VOTES = np.exp(0.5 + 0.17 * np.arange(NUM_LENGTHS))
"""Votes for none of the candidates, [lengths], by the longest match."""
