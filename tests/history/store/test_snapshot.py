"""Snapshots are immutable mappings in insertion order and share what does not change."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def test_a_change_copies_what_it_falls_into_and_shares_the_rest() -> None:
    before = Snapshot().changed({number: index_of(number) for number in range(50_000)})
    after = before.changed({7: index_of(1), 8: None, "new": index_of(2)})
    copied = [old for old, new in zip(before._shards, after._shards, strict=True) if old is not new]
    assert len(copied) == len({hash(key) % len(before._shards) for key in (7, 8, "new")})
    assert sum(map(len, copied)) < 200
    assert (len(before), len(after)) == (50_000, 50_000)
    assert before[8].text.tolist() == [-1, 8]
    with pytest.raises(KeyError):
        after[8]


def test_a_snapshot_is_the_same_mapping_in_another_process(tmp_path: Path) -> None:
    # Strings have another hash in every process, and the other one must not have ours.
    snapshot = Snapshot().changed({"b": index_of(7), "a": index_of(8), 3: index_of(9)}).changed({"a": None})
    file = tmp_path / "snapshot"
    file.write_bytes(pickle.dumps(snapshot))
    code = (
        "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb'));"
        "print(len(s), list(s), [int(s[k].text[1]) for k in s], 'a' in s, [s.place(k) for k in s])"
    )
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", code, file], env=env, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "2 ['b', 3] [7, 9] False [0, 2]"
