"""Slot allocation, and cached prompts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.engine.kv_cache.allocator import SpanAllocator
from treering.errors import InputError


def prompt(number: int, length: int) -> np.ndarray:
    return np.full(length, number, np.int32)


def computed(spans: SpanAllocator, tokens: np.ndarray) -> int:
    start = spans.take_known(tokens)
    assert start is not None
    spans.set_computed(start, tokens.size)
    return start


def test_the_example() -> None:
    spans = SpanAllocator(10)
    assert [spans.take(4), spans.take(4), spans.take(4)] == [0, 4, None]
    spans.give_back(0)
    assert spans.take(4) == 0


def test_a_prompt_that_comes_again_is_there_still() -> None:
    spans = SpanAllocator(20)
    start = computed(spans, prompt(1, 6))
    spans.give_back(start)
    assert spans.num_free == 20
    assert spans.take(8) == 6
    assert spans.take_known(prompt(1, 6)) == start
    assert spans.num_computed(start) == 6


@pytest.mark.parametrize("tokens", [prompt(2, 6), prompt(1, 5), prompt(1, 7)])
def test_other_tokens_find_nothing(tokens: np.ndarray) -> None:
    spans = SpanAllocator(20)
    spans.give_back(computed(spans, prompt(1, 6)))
    start = spans.take_known(tokens)
    assert start is not None
    assert spans.num_computed(start) == 0


def test_what_is_computed_in_part_is_not_kept() -> None:
    spans = SpanAllocator(20)
    start = spans.take_known(prompt(1, 6))
    spans.set_computed(start, 5)
    spans.give_back(start)
    assert spans.num_computed(spans.take_known(prompt(1, 6))) == 0


def test_new_weights_leave_nothing_kept() -> None:
    spans = SpanAllocator(20)
    spans.give_back(computed(spans, prompt(1, 6)))
    running = computed(spans, prompt(2, 3))
    spans.forget_values()
    assert spans.num_computed(running) == 0
    assert spans.num_computed(spans.take_known(prompt(1, 6))) == 0


def test_the_oldest_goes_first_where_room_is_needed() -> None:
    spans = SpanAllocator(12)
    starts = [computed(spans, prompt(number, 4)) for number in range(3)]
    for number in (1, 0, 2):
        spans.give_back(starts[number])
    assert spans.take(4) == starts[1]
    assert spans.num_computed(spans.take_known(prompt(0, 4))) == 4
    assert spans.num_computed(spans.take_known(prompt(2, 4))) == 4


def test_of_two_equal_prompts_one_is_kept() -> None:
    spans = SpanAllocator(10)
    starts = [computed(spans, prompt(1, 4)) for _ in range(2)]
    for start in starts:
        spans.give_back(start)
    assert spans.num_free == 10
    assert spans.take(6) == 4


def test_no_slots_are_refused() -> None:
    with pytest.raises(InputError, match="raise max_tokens"):
        SpanAllocator(0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_open_spans_never_overlap_and_all_else_can_be_taken(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 40))
    spans = SpanAllocator(num_slots)
    lengths: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["take", "take_known", "give_back", "forget"]))
        length = data.draw(st.integers(1, 12))
        start = None
        if step == "take":
            start = spans.take(length)
        elif step == "take_known":
            start = spans.take_known(prompt(data.draw(st.integers(0, 2)), length))
            if start is not None and data.draw(st.booleans()):
                spans.set_computed(start, length)
        elif step == "give_back" and lengths:
            out = data.draw(st.sampled_from(sorted(lengths)))
            del lengths[out]
            spans.give_back(out)
        elif step == "forget":
            spans.forget_values()
            assert all(spans.num_computed(each) == 0 for each in lengths)
        if start is not None:
            lengths[start] = length
        owners = np.zeros(num_slots, int)
        for first, size in lengths.items():
            owners[first : first + size] += 1
            assert first + size <= num_slots
        assert owners.max() <= 1
        assert spans.num_free == num_slots - sum(lengths.values())
    for start in lengths:
        spans.give_back(start)
    assert spans.take(num_slots) == 0
