"""Rows that are searched together, each in other sources, get what each gets alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, drafted, store_of
from treering.history.draft.drafter import Drafter
from treering.history.match.suffix_search import MAX_QUERIES

TOKENS = st.integers(0, 3)
ROLLOUTS = st.lists(st.lists(TOKENS, max_size=30), min_size=1, max_size=4)
ROWS = st.tuples(
    st.integers(0, 3),  # the last prompt has no history
    st.lists(TOKENS, max_size=20),
    st.sampled_from([0, 64, 64, 64]),
)


@settings(max_examples=100, deadline=None)
@given(
    histories=st.lists(ROLLOUTS, min_size=3, max_size=3),
    parts=st.lists(ROWS, min_size=2, max_size=2 * MAX_QUERIES + 1),
    others=st.booleans(),
)
def test_rows_together_get_what_each_gets_alone(
    histories: list[list[list[int]]], parts: list[tuple[int, list[int], int]], others: bool
) -> None:
    store = store_of({prompt: {0: rollouts} for prompt, rollouts in enumerate(histories)})
    # In one group, so that none of the rows is another group's running rollout to the others.
    rows = [Row(prompt_id=prompt, rollout=tuple(tokens), max_drafts=most) for prompt, tokens, most in parts]

    def propose(some: list[Row]) -> tuple[list[list[int]], np.ndarray]:
        drafter = Drafter(store, min_acceptance=1e-6, sources=("history", "others") if others else ("history",))
        drafts = drafter.propose(draft_rows(some))
        return drafted(drafts), drafts.acceptance

    together, acceptance = propose(rows)
    alone = [propose([row]) for row in rows]
    assert together == [tokens for (tokens,), _ in alone]
    assert acceptance.tolist() == np.concatenate([estimates for _, estimates in alone]).tolist()
