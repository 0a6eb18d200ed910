"""The published drafters against their rules written out slowly, and by hand."""

from collections import Counter

import numpy as np
from benchmarks.draft.drafters.baselines import Naive, Ngram, Rhyme, joined
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
def test_the_longest_match_and_all_its_places_are_found(
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
    length_found, places = occurrences(text, ints(*context), shortest, 5)
    assert places.tolist() == found
    assert length_found == (length if found else 0)


@given(texts=TEXTS, most=st.integers(1, 5))
def test_the_path_follows_the_most_frequent_token_of_the_places_left(texts: list[list[int]], most: int) -> None:
    text = joined([ints(*own) for own in texts])
    places = np.flatnonzero(text != -1)
    path = favourite_path(text, places, np.zeros(text.size), most, 0.0).tolist()
    left = [text[place:].tolist() for place in places]
    for token in path:
        counts = Counter(own[0] for own in left if own[0] != -1)
        assert counts[token] == max(counts.values())
        left = [own[1:] for own in left if own[0] == token]
    assert len(path) == most or all(own[0] == -1 for own in left)


def test_a_path_ends_before_its_share_falls_too_low() -> None:
    text = joined([ints(7, 8), ints(7, 9), ints(7, 8), ints(5)])
    places = np.array([1, 4, 7, 10])
    assert favourite_path(text, places, np.zeros(text.size), 4, 0.0).tolist() == [7, 8]
    assert favourite_path(text, places, np.zeros(text.size), 4, 0.5).tolist() == [7, 8]  # 3/4 x 2/3
    assert favourite_path(text, places, np.zeros(text.size), 4, 0.51).tolist() == [7]
    assert favourite_path(text, places, np.zeros(text.size), 4, 0.76).tolist() == []


def test_ngram_takes_the_first_place_of_the_longest_end_of_its_own_context() -> None:
    ngram = Ngram()
    assert ngram.propose(ints(1, 2, 3, 1, 2, 4, 1, 2)).tolist() == [3, 1, 2, 4, 1, 2]
    assert ngram.propose(ints(2, 3, 4, 3, 4)).tolist() == [3, 4]
    assert ngram.propose(ints(5, 3, 4, 9, 5, 3, 6, 4, 5, 3)).tolist()[:2] == [4, 9]
    assert ngram.propose(ints(1, 1)).tolist() == []  # one token is too short a match
    assert ngram.propose(ints(3, 1, 2)).tolist() == ngram.propose(ints()).tolist() == []
    assert ngram.propose(np.tile(ints(1, 2), 20)).size == 16


def test_naive_takes_the_most_frequent_path_in_history_and_context() -> None:
    found = with_history([5, 6, 7], [5, 6, 8, 9], [5, 6, 8, 9])
    naive = Naive("frequency")
    naive.start(found, np.arange(3))
    assert naive.propose(ints(5, 6)).tolist() == [8, 9]
    assert naive.propose(ints(6, 7, 4, 6, 7)).tolist() == [4, 6, 7]
    assert naive.propose(ints(2)).tolist() == []
    naive.start(found, np.arange(1))
    assert naive.propose(ints(5, 6)).tolist() == [7]
    assert naive.num_bytes == 4 * 5
    naive.start(with_history(list(range(20, 60))), np.arange(1))
    assert naive.propose(ints(22)).tolist() == list(range(23, 31))


def test_naive_takes_the_branch_of_the_greatest_rewards_or_of_the_newest_generation() -> None:
    responses = [("a", [1, 5, 6, last], "0111") for last in (7, 8, 8, 9)]
    found = recording(responses, epochs=[0, 0, 0, 1], rewards=[1.0, 0.25, 0.25, 0.0])
    for priority, expected in (("frequency", [8]), ("reward", [7]), ("recency", [9])):
        naive = Naive(priority)  # type: ignore[arg-type]
        naive.start(found, np.arange(4))
        assert naive.propose(ints(5, 6)).tolist() == expected


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
    paper.observe(1, 1, False)  # a branch that ended is no failure
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


def test_the_released_tree_knows_the_prompt_and_its_last_five_tokens_before_a_response_and_the_papers_neither() -> None:
    found = recording([("a", [1, 2, 3, 4, 5, 6, 7, 8], "00000011")])
    for version, context, expected in (
        ("released", [2, 3, 4, 5, 6], [7, 8]),
        # Behind more of the prompt than that it goes on in the prompt, where the longer match is.
        ("released", [1, 2, 3, 4, 5, 6], [7, 8]),
        ("released", [1, 2, 3, 4], [5, 6]),
        ("paper", [1, 2, 3, 4, 5, 6], []),
        ("paper", [1, 2, 3, 4], []),
    ):
        drafter = Rhyme(version, "frequency")  # type: ignore[arg-type]
        drafter.start(found, np.arange(1))
        assert drafter.propose(ints(*context)).tolist() == expected
        # Markers before, between and behind: the prompt of 6 and 5 + 2 tokens, or 2.
        assert drafter.num_bytes == 4 * (16 if version == "released" else 4)


def test_the_released_tree_has_a_tasks_prompt_once_however_many_responses_it_has() -> None:
    # Its prompt goes on with 5 once, its responses with 9 twice: by frequency that is 2 of 3 places.
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    found = recording([("a", [*prompt, 1, 2, 3, 4, last], "0" * 10 + "1" * 5) for last in (5, 9, 9)])
    drafter = Rhyme("released", "frequency")
    drafter.start(found, np.arange(1, 3))
    assert drafter.propose(ints(1, 2, 3, 4)).tolist() == [9]
    assert drafter.num_bytes == 4 * (1 + 11 + 2 * 11)
    two_tasks = recording([(task, [1, 2, 3], "001") for task in "abab"])
    drafter.start(two_tasks, np.arange(4))
    assert drafter.num_bytes == 4 * (1 + 2 * 3 + 4 * 4)
    drafter.start(two_tasks, np.arange(0))
    assert drafter.propose(ints(1, 2, 3, 4)).tolist() == []
