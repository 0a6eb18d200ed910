"""Slot allocation, and cached prompts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.engine.kv_cache.allocator import SpanAllocator


def prompt(number: int, length: int) -> np.ndarray:
    return np.full(length, number, np.int32)


def computed(spans: SpanAllocator, tokens: np.ndarray) -> int:
    start = spans.allocate_prompt(tokens)
    assert start is not None
    spans.set_computed(start, tokens.size)
    return start


def test_a_repeated_prompt_is_cached() -> None:
    spans = SpanAllocator(20)
    start = computed(spans, prompt(1, 6))
    spans.free(start)
    assert spans.num_free == 20
    assert spans.allocate(8) == 6
    assert spans.allocate_prompt(prompt(1, 6)) == start
    assert spans.num_computed(start) == 6


def test_new_weights_clear_the_cache() -> None:
    spans = SpanAllocator(20)
    spans.free(computed(spans, prompt(1, 6)))
    running = computed(spans, prompt(2, 3))
    spans.invalidate()
    assert spans.num_computed(running) == 0
    assert spans.num_computed(spans.allocate_prompt(prompt(1, 6))) == 0


def test_the_oldest_cached_prompt_is_evicted_first() -> None:
    spans = SpanAllocator(12)
    starts = [computed(spans, prompt(number, 4)) for number in range(3)]
    for number in (1, 0, 2):
        spans.free(starts[number])
    assert spans.allocate(4) == starts[1]
    assert spans.num_computed(spans.allocate_prompt(prompt(0, 4))) == 4
    assert spans.num_computed(spans.allocate_prompt(prompt(2, 4))) == 4


def test_of_two_equal_prompts_one_is_cached() -> None:
    spans = SpanAllocator(10)
    starts = [computed(spans, prompt(1, 4)) for _ in range(2)]
    for start in starts:
        spans.free(start)
    assert spans.num_free == 10
    assert spans.allocate(6) == 4


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_spans_never_overlap_and_the_rest_can_be_allocated(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 40))
    spans = SpanAllocator(num_slots)
    lengths: dict[int, int] = {}
    prompts: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["allocate", "allocate_prompt", "free", "forget", "shrink"]))
        length = data.draw(st.integers(1, 12))
        start = None
        if step == "allocate":
            start = spans.allocate(length)
        elif step == "allocate_prompt":
            start = spans.allocate_prompt(prompt(data.draw(st.integers(0, 2)), length))
            if start is not None and data.draw(st.booleans()):
                spans.set_computed(start, length)
        elif step == "free" and lengths:
            out = data.draw(st.sampled_from(sorted(lengths)))
            del lengths[out]
            spans.free(out)
        elif step == "shrink" and lengths:
            kept = data.draw(st.sampled_from(sorted(lengths)))
            # Only spans without a prompt shrink: a cached prompt is found by all of its tokens.
            if kept not in prompts:
                lengths[kept] = data.draw(st.integers(1, lengths[kept]))
                spans.shrink(kept, lengths[kept])
        elif step == "forget":
            spans.invalidate()
            assert all(spans.num_computed(each) == 0 for each in lengths)
        if start is not None:
            lengths[start] = length
            prompts = prompts | {start} if step == "allocate_prompt" else prompts - {start}
        owners = np.zeros(num_slots, int)
        for first, size in lengths.items():
            owners[first : first + size] += 1
            assert first + size <= num_slots
        assert owners.max() <= 1
        assert spans.num_free == num_slots - sum(lengths.values())
    for start in lengths:
        spans.free(start)
    assert spans.allocate(num_slots) == 0
