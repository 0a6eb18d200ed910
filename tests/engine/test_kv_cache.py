"""Spans of slots are shared, cached and copied without changing a token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import recomputing, run
from tests.models import VOCAB
from treering.engine.kv_cache import Source, SpanAllocator, list_copies
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine


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


PROMPT = np.arange(5, 25, dtype=np.int32) % VOCAB


def ask(engine: TorchEngine, context: np.ndarray, call: int | None, num_tokens: int = 6) -> Rollout:
    request = Request(prompt_id="q", prompt=context, sampling=Sampling(max_tokens=num_tokens), call=call)
    return next(iter(engine.generate([request])))


def prefilled(engine: TorchEngine, context: np.ndarray, call: int) -> int:
    before = engine.stats
    ask(engine, context, call)
    return engine.stats.since(before).num_prefilled


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_a_turn_prefills_only_its_new_tokens(model: PreTrainedModel, backend: str) -> None:
    engine = TorchEngine(model, backend=backend, max_tokens=4000)
    context = PROMPT
    assert prefilled(engine, context, 0) == PROMPT.size - 1
    for turn in range(1, 6):
        tail = (np.arange(3 + turn, dtype=np.int32) + turn) % VOCAB
        context = np.concatenate([context, ask(engine, context, turn).tokens, tail])
        assert prefilled(engine, context, 10 + turn) == tail.size


def test_branches_and_other_prompts_share_what_they_begin_with(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, max_tokens=4000)
    first = ask(engine, PROMPT, 0)
    # All tokens of the turn except the last are computed; each row computes the last token of its context.
    whole = np.concatenate([PROMPT, first.tokens])
    for num_kept in (3, PROMPT.size - 1, PROMPT.size, PROMPT.size + 4):
        other = np.concatenate([whole[:num_kept], [(whole[num_kept] + 1) % VOCAB, 1, 2]]).astype(np.int32)
        assert prefilled(engine, other, num_kept) == 2


@pytest.mark.parametrize("max_prefill", [512, 7])
def test_prompts_that_wait_together_compute_their_common_beginning_once(
    model: PreTrainedModel, max_prefill: int
) -> None:
    # All prompts begin with 20 tokens, each group of three with 18 more, and each prompt ends in 5 others.
    rng = np.random.default_rng(0)
    groups, ends = rng.integers(0, VOCAB, (3, 18)), rng.integers(0, VOCAB, (9, 5))
    prompts = [np.concatenate([PROMPT, groups[i // 3], ends[i]]).astype(np.int32) for i in range(9)]
    requests = [
        Request(prompt_id=f"{i}", prompt=prompt, sampling=Sampling(max_tokens=4)) for i, prompt in enumerate(prompts)
    ]
    engine = TorchEngine(model, max_tokens=4000, max_prefill=max_prefill)
    found = {rollout.prompt_id: rollout for rollout in engine.generate(requests)}
    # A row computes the last token of its prompt itself.
    assert engine.stats.num_prefilled == PROMPT.size + 3 * 18 + 9 * 4
    for request in requests:
        (alone,) = TorchEngine(model).generate([request])
        rollout = found[request.prompt_id]
        assert rollout.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(rollout.policy_logprobs, alone.policy_logprobs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_slots", [4000, 70])
def test_reused_keys_change_no_token(model: PreTrainedModel, num_slots: int) -> None:
    """Ask random trees of contexts in random order; 70 slots evict most spans."""
    rng = np.random.default_rng(num_slots)
    reusing = TorchEngine(model, max_tokens=num_slots, max_prefill=7)
    plain = recomputing(TorchEngine(model, max_tokens=4000, backend="plain"))
    contexts = [PROMPT]
    for call in range(40):
        context = contexts[rng.integers(len(contexts))]
        context = np.concatenate([context[: rng.integers(1, 40)], rng.integers(0, VOCAB, 2)]).astype(np.int32)
        one, other = ask(reusing, context, call), ask(plain, context, call)
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.policy_logprobs, other.policy_logprobs, atol=1e-12, rtol=0)
        contexts.append(np.concatenate([context, one.tokens])[:40])
    assert reusing.stats.num_prefilled < plain.stats.num_prefilled


def test_a_copy_that_fails_leaves_no_slot_taken(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(model, max_tokens=100)
    longer = np.concatenate([PROMPT, ask(engine, PROMPT, 0).tokens, [3]]).astype(np.int32)
    with monkeypatch.context() as patched:
        patched.setattr(engine._table, "_move", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            ask(engine, longer, 1)
    engine._table.rollouts.clear()
    assert engine._table.prefixes.allocator.num_free == 100
    assert ask(engine, longer, 1).tokens.tolist() == ask(TorchEngine(model), longer, 1).tokens.tolist()


@pytest.mark.parametrize("call", [None, 0])
def test_finished_rollouts_are_kept_where_later_turns_may_come(model: PreTrainedModel, call: int | None) -> None:
    engine = TorchEngine(model, max_tokens=100)
    rollout = ask(engine, PROMPT, call)
    num_kept = 0 if call is None else rollout.num_tokens
    assert engine._table.prefixes.allocator.num_free == 100 - num_kept
    # Rollouts are kept after `keep_rollouts` or any first continuation.
    asked = TorchEngine(model, max_tokens=100)
    asked.keep_rollouts()
    assert ask(asked, PROMPT, None).num_tokens == 100 - asked._table.prefixes.allocator.num_free
    request = Request(prompt_id="q", prompt=PROMPT, sampling=Sampling(max_tokens=9), call=call, so_far=rollout)
    run(engine, [request])
    assert engine._table.prefixes.allocator.num_free == 100 - num_kept - 9


def test_copies_chain_spans_without_a_gap_and_take_the_longest() -> None:
    tokens = np.arange(20)
    spans = [
        Source(tokens[:5], 0, 100),
        Source(tokens[:3], 0, 200),
        Source(tokens[:12], 4, 300),
        Source(tokens[:18], 13, 400),  # after a gap
        Source(np.append(tokens[:8], 99), 0, 500),
    ]
    assert [tuple(copy) for copy in list_copies(spans, tokens)] == [(500, 0, 8, 500), (304, 8, 4, 300)]
    assert list_copies(spans, tokens, num_computed=12) == []
    assert [copy.first for copy in list_copies(spans, tokens, num_computed=13)] == [13]
