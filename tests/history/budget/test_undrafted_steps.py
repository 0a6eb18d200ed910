"""Steps without drafts leave the cutoff as it was, since they show nothing about what pays."""

import numpy as np

from tests.history.reference import Row, draft_rows, store_of
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST

FLAT = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1.001]))


def test_tokens_that_pay_are_drafted_again_behind_steps_that_found_no_place() -> None:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}))
    drafter.use_costs(FLAT)
    state = drafter.state()
    state["weights"][FIRST.any] -= 4
    drafter.load_state(state)
    known, unknown = (draft_rows([Row(rollout=(token,))]) for token in (1, 77))
    before = drafter.propose(known)
    assert 0.02 < before.acceptance[0] < 0.45
    for _ in range(30):
        assert drafter.propose(unknown).tokens.size == 0
    sizes = [drafter.propose(known).tokens.size for _ in range(20)]
    assert min(sizes) >= before.tokens.size
