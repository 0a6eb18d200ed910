"""What is learnt of a token after one or two others applies after exactly these, drafted ones included."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, NUM_HASHES, NUM_PAIRS, hash_of

ROWS = draft_rows([Row(rollout=(5, 6, 7))])
TRIPLES = [(30, 7, 6), (31, 30, 7), (32, 31, 30), (33, 32, 31)]


def weights_of(token: int, before: int, earlier: int) -> dict[str, int]:
    """The weights that are the token's behind the two others."""
    return {
        "behind one": FIRST.before + before % NUM_HASHES,
        "token": FIRST.token + token % NUM_HASHES,
        "pair": FIRST.pair + hash_of.py_func(token, before, 0, NUM_PAIRS),
        "triple": FIRST.triple + hash_of.py_func(token, before, earlier + 1, NUM_PAIRS),
    }


@pytest.mark.parametrize("kind", ["behind one", "token", "pair", "triple"])
@pytest.mark.parametrize("place", range(len(TRIPLES)))
def test_a_weight_of_tokens_moves_the_estimate_of_these_alone(place: int, kind: str) -> None:
    drafter = Drafter(store_of({"q": {0: [[5, 6, 7, 30, 31, 32, 33]] * 2}}), min_acceptance=1e-6)
    plain = drafter.propose(ROWS)
    assert plain.tokens.tolist() == [token for token, _, _ in TRIPLES]
    state = drafter.state()
    state["weights"][weights_of(*TRIPLES[place])[kind]] += 1.0
    drafter.load_state(state)
    moved = np.flatnonzero(drafter.propose(ROWS).acceptance > plain.acceptance + 0.01)
    assert moved.tolist() == [place]
