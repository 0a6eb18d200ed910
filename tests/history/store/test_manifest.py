"""The ledger tracks live blocks and merges files: they stay half alive and few, and little is rewritten."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.history.store.manifest import Ledger

STEPS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abcdefghijk"), st.integers(1, 50), max_size=4), st.sampled_from("abcz")),
    max_size=30,
)


@given(STEPS)
def test_what_is_listed_alive_is_the_last_of_every_prompt_that_was_not_forgotten(steps: list[Any]) -> None:
    ledger, files, homes = Ledger(), {}, {}
    for number, (blocks, forgotten) in enumerate(steps):
        ledger.take_in(number, f"d{number}", list(blocks.items()), None)
        files[number] = list(blocks)
        homes.update(dict.fromkeys(blocks, number))
        assert ledger.forget(forgotten) == (homes.pop(forgotten, None) is not None)
    for listed in ledger.listed(()):
        bits = np.unpackbits(np.frombuffer(listed.alive, np.uint8)).astype(bool).tolist()
        names = files[listed.number]
        assert bits == [homes.get(name) == listed.number for name in names] + [False] * (len(bits) - len(names))
        assert ledger.prompts([listed.number]) == [name for name in names if homes.get(name) == listed.number]
        assert listed.digest == f"d{listed.number}"
    again = Ledger()
    for listed in ledger.listed(()):
        blocks = list(steps[listed.number][0].items())
        again.take_in(listed.number, listed.digest, blocks, listed.alive)
    assert again.listed(()) == ledger.listed(())


def test_thin_and_small_files_are_folded_and_no_others() -> None:
    ledger = Ledger()
    ledger.take_in(0, "", [("a", 40), ("b", 60)], None)
    ledger.take_in(1, "", [("c", 30)], None)
    ledger.take_in(2, "", [("d", 500)], None)
    assert ledger.foldable(29, 1000) == []
    assert ledger.foldable(30, 1000) == [1]
    # With the 30 there are 100, which is as much as file 0.
    assert ledger.foldable(70, 1000) == [0, 1]
    assert ledger.foldable(9999, 1000) == [0, 1]
    assert ledger.foldable(9999, 1001) == [0, 1, 2]
    ledger.forget("b")
    assert ledger.foldable(0, 1000) == [0, 1]
    ledger.remove([0])
    assert ledger.foldable(0, 1000) == []
    assert not ledger.forget("a")


def test_many_small_publishes_make_few_files_and_rewrite_each_rollout_about_once_per_doubling() -> None:
    ledger, num_written = Ledger(), 0
    for number in range(1000):
        folded = ledger.foldable(1, 10**9)
        moved = ledger.prompts(folded)
        ledger.remove(folded)
        ledger.take_in(number, "", [(prompt_id, 1) for prompt_id in (*moved, number)], None)
        num_written += len(moved) + 1
        assert len(ledger.listed(())) <= 10
    assert num_written <= 1000 * 11
