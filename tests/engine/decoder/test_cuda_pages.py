"""Pages and paged spans agree with a model that tracks what the readers of every page expect in it."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.engine.decoder.cuda.pages import PAGE_SLOTS, PageAllocator, PagedAllocator

NUM_PAGES = 12


def prompt(*blocks: int, rest: int = 0) -> np.ndarray:
    """Return a prompt of whole pages, each one token repeated 16 times, plus `rest` tokens."""
    return np.concatenate([np.repeat(np.array(blocks, np.int32), PAGE_SLOTS), np.full(rest, 77, np.int32)])


def allocate_prompt(pages: PageAllocator, tokens: np.ndarray) -> list[int]:
    taken = pages.allocate_prompt(tokens)
    assert taken is not None
    return taken


def test_freed_pages_are_cached_and_the_oldest_evicted_first() -> None:
    pages = PageAllocator(4)
    for block in (1, 2):
        taken = allocate_prompt(pages, prompt(block, block))
        pages.set_computed(taken, 32)
        pages.free(taken)
    assert pages.num_free == 4
    again = allocate_prompt(pages, prompt(1, 1))
    assert pages.num_computed(again) == 32
    pages.free(again)
    # The other prompt is now the older one, and its second page is evicted before its first.
    one = pages.allocate(1)
    known = allocate_prompt(pages, prompt(2, rest=0))
    assert pages.num_computed(known) == 16
    assert one is not None
    pages.free([*one, *known])
    assert pages.num_computed(allocate_prompt(pages, prompt(1, 1))) == 32


def test_new_weights_leave_nothing_computed() -> None:
    pages = PageAllocator(6)
    gone, stays = allocate_prompt(pages, prompt(1)), allocate_prompt(pages, prompt(2, 3))
    for taken in (gone, stays):
        pages.set_computed(taken, 32)
    pages.free(gone)
    pages.invalidate()
    assert pages.num_computed(stays) == 0
    # The pages are still shared: the first reader to compute them does so for both.
    both = allocate_prompt(pages, prompt(2, 3))
    assert both == stays
    pages.set_computed(both, 32)
    assert pages.num_computed(stays) == 32
    assert pages.num_computed(allocate_prompt(pages, prompt(1))) == 0


def test_too_few_pages_allocate_nothing() -> None:
    pages = PageAllocator(3)
    taken = allocate_prompt(pages, prompt(1, 2))
    pages.set_computed(taken, 32)
    assert pages.allocate(2) is None
    assert pages.allocate_prompt(prompt(5, 6)) is None
    pages.free(taken)
    # The prompt's two cached pages are free, but it needs two more.
    assert pages.allocate_prompt(prompt(1, 2, 3, 4)) is None
    assert pages.num_computed(allocate_prompt(pages, prompt(1, 2, rest=1))) == 32


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.lists(st.integers(1, 2), max_size=4), st.integers(0, 15)),
        st.tuples(st.just("own"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 80)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_pages_never_hold_another_prompts_values_and_are_never_lost(operations: list) -> None:
    pages, version = PageAllocator(NUM_PAGES), 0
    # Content of each slot of each page: the tokens up to it and the weights' version.
    slots: dict[tuple[int, int], tuple[bytes, int]] = {}
    spans: list[tuple[list[int], np.ndarray | None]] = []
    for kind, what, amount in operations:
        if kind == "prompt":
            tokens = prompt(*what, rest=amount)
            taken = pages.allocate_prompt(tokens) if tokens.size else None
            spans += [(taken, tokens)] if taken is not None else []
        elif kind == "own":
            taken = pages.allocate(what)
            spans += [(taken, None)] if taken is not None else []
        elif kind == "forget":
            pages.invalidate()
            version += 1
        elif spans:
            taken, span_tokens = spans[what % len(spans)]
            if kind == "leave":
                pages.free(taken)
                del spans[what % len(spans)]
            elif span_tokens is not None:
                compute(pages, slots, taken, span_tokens, min(amount, span_tokens.size), version)
        check(pages, slots, spans, version)


def compute(
    pages: PageAllocator, slots: dict, taken: list[int], tokens: np.ndarray, num_tokens: int, version: int
) -> None:
    for index in range(pages.num_computed(taken), num_tokens):
        slots[taken[index // PAGE_SLOTS], index % PAGE_SLOTS] = (tokens[: index + 1].tobytes(), version)
    pages.set_computed(taken, num_tokens)


def check(pages: PageAllocator, slots: dict, spans: list[tuple[list[int], np.ndarray | None]], version: int) -> None:
    read = {page for taken, _ in spans for page in taken}
    assert pages.num_free == NUM_PAGES - len(read)
    readers: dict[int, list[np.ndarray | None]] = {}
    for taken, tokens in spans:
        for index, page in enumerate(taken):
            readers.setdefault(page, []).append(None if tokens is None else tokens[: (index + 1) * PAGE_SLOTS])
        if tokens is None:
            assert pages.num_computed(taken) == 0
            continue
        for index in range(pages.num_computed(taken)):
            slot = taken[index // PAGE_SLOTS], index % PAGE_SLOTS
            assert slots[slot] == (tokens[: index + 1].tobytes(), version)
    for beginnings in readers.values():
        if len(beginnings) > 1:
            assert all(other is not None and np.array_equal(beginnings[0], other) for other in beginnings)
            assert beginnings[0] is not None
            assert beginnings[0].size % PAGE_SLOTS == 0


def slots_of(spans: PagedAllocator, start: int, length: int) -> list[int]:
    addresses = np.arange(start, start + length)
    return (spans.table[addresses // PAGE_SLOTS] * PAGE_SLOTS + addresses % PAGE_SLOTS).tolist()


def test_spans_are_addresses_whose_pages_are_shared() -> None:
    spans = PagedAllocator(64)
    first = spans.allocate_prompt(prompt(1, 2, rest=3))
    own = spans.allocate(20)
    second = spans.allocate_prompt(prompt(1, 9))
    assert (first, own, second) == (0, 48, 80)
    spans.set_computed(0, 20)
    assert (spans.num_computed(0), spans.num_computed(80)) == (20, 16)
    assert slots_of(spans, 0, 16) == slots_of(spans, 80, 16)
    others = [*slots_of(spans, 16, 19), *slots_of(spans, 48, 20), *slots_of(spans, 96, 16)]
    assert len({*others, *slots_of(spans, 0, 16)}) == 16 + len(others)


@pytest.mark.parametrize(("length", "num_pages"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_a_span_that_shrinks_keeps_its_first_pages(length: int, num_pages: int) -> None:
    spans = PagedAllocator(64)
    whole = spans.num_free
    start = spans.allocate(40)
    kept = slots_of(spans, start, length)
    spans.shrink(start, length)
    assert spans.num_free == whole - num_pages * PAGE_SLOTS
    assert spans.allocate(spans.num_free) == num_pages * PAGE_SLOTS
    assert slots_of(spans, start, length) == kept
    spans.free(start)
    assert spans.num_free == num_pages * PAGE_SLOTS


@pytest.mark.parametrize("num_slots", [1, 15, 16, 17, 100])
def test_requests_that_fit_the_slots_fit_the_pages(num_slots: int) -> None:
    for num_prefix in range(num_slots):
        spans = PagedAllocator(num_slots)
        assert num_prefix == 0 or spans.allocate(num_prefix) is not None
        assert spans.allocate(num_slots - num_prefix) is not None


def test_changes_of_the_page_table_are_reported_once() -> None:
    spans = PagedAllocator(64)
    received = np.full_like(spans.table, -1)

    def follow() -> None:
        changed = spans.pop_changed()
        if changed is not None:
            received[slice(*changed)] = spans.table[slice(*changed)]

    takes: list[Callable[[], int | None]] = [lambda: spans.allocate(33), lambda: spans.allocate_prompt(prompt(1))]
    for allocate in takes:
        allocate()
        follow()
        assert np.array_equal(received, spans.table)
    assert spans.pop_changed() is None
    spans.free(0)
    assert spans.allocate(40) == 0
    follow()
    assert np.array_equal(received, spans.table)
