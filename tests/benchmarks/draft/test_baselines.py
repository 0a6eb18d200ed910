"""The published drafters against their rules written out slowly, and by hand."""

from collections import Counter

import numpy as np
from benchmarks.draft.drafters.baselines import Ngram, Rhyme, joined
from benchmarks.draft.drafters.search import favourite_path, occurrences
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.draft.recordings import recording
from treering.analysis.recording import Recorded

TEXTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=4)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def with_history(*responses: list[int], rewards: list[float] | None = None, prompt: int = 1) -> Recorded:
    rollouts = [("a", [*([1] * prompt), *own], "0" * prompt + "1" * len(own)) for own in responses]
    return recording(rollouts, rewards=rewards)


@given(texts=TEXTS, context=st.lists(st.integers(1, 3), min_size=1, max_size=8), shortest=st.integers(1, 4))
def test_the_longest_match_and_all_its_positions_are_found(
    texts: list[list[int]], context: list[int], shortest: int
) -> None:
    text = joined([ints(*own) for own in texts])
    found = []
    for length in range(5, shortest - 1, -1):
        if length <= len(context):
            end = context[-length:]
            found = [at for at in range(length, text.size) if text[at] != -1 and text[at - length : at].tolist() == end]
        if found:
            break
    length_found, positions = occurrences(text, ints(*context), shortest, 5)
    assert positions.tolist() == found
    assert length_found == (length if found else 0)


@given(texts=TEXTS, most=st.integers(1, 5))
def test_the_path_follows_the_most_frequent_token_of_the_positions_left(texts: list[list[int]], most: int) -> None:
    text = joined([ints(*own) for own in texts])
    positions = np.flatnonzero(text != -1)
    path = favourite_path(text, positions, np.zeros(text.size), most, 0.0).tolist()
    left = [text[position:].tolist() for position in positions]
    for token in path:
        counts = Counter(own[0] for own in left if own[0] != -1)
        assert counts[token] == max(counts.values())
        left = [own[1:] for own in left if own[0] == token]
    assert len(path) == most or all(own[0] == -1 for own in left)


def test_ngram_takes_the_first_position_of_the_longest_end_of_its_own_context() -> None:
    ngram = Ngram()
    assert ngram.propose(ints(1, 2, 3, 1, 2, 4, 1, 2)).tolist() == [3, 1, 2, 4, 1, 2]
    assert ngram.propose(ints(2, 3, 4, 3, 4)).tolist() == [3, 4]
    assert ngram.propose(ints(5, 3, 4, 9, 5, 3, 6, 4, 5, 3)).tolist()[:2] == [4, 9]
    assert ngram.propose(ints(1, 1)).tolist() == []  # one token is too short a match
    assert ngram.propose(ints(3, 1, 2)).tolist() == ngram.propose(ints()).tolist() == []
    assert ngram.propose(np.tile(ints(1, 2), 20)).size == 16


def test_the_papers_match_is_of_three_to_seven_tokens_and_prefers_reward() -> None:
    found = with_history([2, 3, 4, 5], [2, 3, 4, 6], [2, 3, 4, 6], rewards=[1.0, 0.25, 0.25])
    for priority, expected in (("reward", [5]), ("frequency", [6])):
        paper = Rhyme("paper", priority)  # type: ignore[arg-type]
        paper.start(found, np.arange(3))
        assert paper.propose(ints(2, 3, 4)).tolist() == expected
        assert paper.propose(ints(9, 3, 4)).tolist() == []
    # A seventh token decides and an eighth does not.
    found = with_history([9, 1, 2, 3, 4, 5, 6, 7, 70], [8, 1, 2, 3, 4, 5, 6, 7, 80], [8, 1, 2, 3, 4, 5, 6, 7, 80])
    paper.start(found, np.arange(3))
    assert paper.propose(ints(9, 1, 2, 3, 4, 5, 6, 7)).tolist() == [80]


def test_the_papers_window_grows_by_two_up_to_32_and_falls_back_to_two() -> None:
    paper = Rhyme("paper", "frequency")
    found = with_history([2, 3, 4, *range(10, 90)])
    paper.start(found, np.arange(1))
    sizes = []
    for rejected in [False] * 17 + [True, False]:
        size = paper.propose(ints(2, 3, 4)).size
        sizes.append(size)
        paper.observe(size, 0 if rejected else size, rejected)
    assert sizes == [*range(2, 33, 2), 32, 32, 2]
    paper.observe(0, 0, False)
    assert paper.propose(ints(2, 3, 4)).size == 4
    paper.observe(1, 1, False)  # a branch that ended does not count as a failure
    assert paper.propose(ints(2, 3, 4)).size == 6
    paper.start(found, np.arange(1))
    assert paper.propose(ints(2, 3, 4)).size == 2


def test_the_released_window_doubles_up_to_16_and_halves_also_after_a_short_draft() -> None:
    released = Rhyme("released", "frequency")
    found = with_history([2, 3, 4, 5, *range(10, 90)])
    released.start(found, np.arange(1))
    sizes = []
    for accepted in (2, 4, 8, 16, 16, 15, 8, 7, 0, 0):
        size = released.propose(ints(2, 3, 4, 5)).size
        sizes.append(size)
        released.observe(size, accepted, accepted < size)
    assert sizes == [2, 4, 8, 16, 16, 16, 8, 16, 8, 4]
    assert released.propose(ints(2, 3, 4, 5)).size == 2
    released.observe(1, 1, False)
    assert released.propose(ints(2, 3, 4, 5)).size == 2
    assert released.propose(ints(2, 3, 4)).size == 0
