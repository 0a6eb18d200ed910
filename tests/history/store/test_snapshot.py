"""Snapshots are immutable mappings in insertion order."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.history.store.prompt_index import PromptIndex
from treering.history.store.snapshot import Snapshot

CHANGES = st.lists(
    st.dictionaries(st.one_of(st.integers(0, 3000), st.sampled_from("abc")), st.booleans(), max_size=4), max_size=12
)


def index_of(token: int) -> PromptIndex:
    return PromptIndex.build({0: np.array([-1, token], np.int32)})


@given(CHANGES)
def test_every_state_is_the_dictionary_that_it_was_made_as(changes: list[dict[Any, bool]]) -> None:
    snapshot, model = Snapshot(), {}
    states = []
    for number, change in enumerate(changes):
        # True puts a new index, False takes the prompt out where it is here.
        applied = {key: index_of(number) if put else None for key, put in change.items() if put or key in model}
        snapshot = snapshot.changed(applied)
        for key, index in applied.items():
            if index is None:
                del model[key]
            else:
                model[key] = index
        states.append((snapshot, dict(model)))
    for state, expected in states:
        assert list(state.items()) == list(expected.items())
        assert len(state) == len(expected)
        assert "never" not in state
        assert sorted(state, key=state.place) == list(expected)
