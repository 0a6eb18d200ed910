"""Contexts reuse the keys and values of whatever earlier call or prompt begins like them; tokens stay the same."""

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.models import VOCAB
from treering.engine.kv_cache.rollout_cache import Source, plan_copies
from treering.engine.request import Request, Sampling
from treering.engine.rollout import Rollout
from treering.engine.torch_engine import TorchEngine

PROMPT = np.arange(5, 25, dtype=np.int32) % VOCAB


def ask(engine: TorchEngine, context: np.ndarray, call: int, num_tokens: int = 6) -> Rollout:
    request = Request(prompt_id="q", prompt=context, sampling=Sampling(max_tokens=num_tokens), call=call)
    return next(iter(engine.generate([request])))


def prefilled(engine: TorchEngine, context: np.ndarray, call: int) -> int:
    before = engine.stats
    ask(engine, context, call)
    return engine.stats.since(before).num_prefilled


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_a_turn_prefills_its_new_tokens_alone(model: PreTrainedModel, backend: str) -> None:
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
    # Of the turn, all but its last token are computed; the last token of a context is the row's own.
    whole = np.concatenate([PROMPT, first.tokens])
    for num_kept in (3, PROMPT.size - 1, PROMPT.size, PROMPT.size + 4):
        other = np.concatenate([whole[:num_kept], [(whole[num_kept] + 1) % VOCAB, 1, 2]]).astype(np.int32)
        assert prefilled(engine, other, num_kept) == 2


@pytest.mark.parametrize("num_slots", [4000, 70])
def test_reused_keys_change_no_token(model: PreTrainedModel, num_slots: int) -> None:
    """Random trees of contexts, in random order; 70 slots evict most spans."""
    rng = np.random.default_rng(num_slots)
    reusing = TorchEngine(model, max_tokens=num_slots, max_prefill=7)
    plain = TorchEngine(model, max_tokens=4000, continuation="prefill", backend="plain", duplicate_rows="each")
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


def test_the_off_switch_computes_all_again(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, continuation="prefill")
    ask(engine, PROMPT, 0)
    longer = np.concatenate([PROMPT, [3]]).astype(np.int32)
    assert prefilled(engine, longer, 1) == PROMPT.size


def test_copies_chain_spans_without_a_gap_and_take_the_longest() -> None:
    tokens = np.arange(20)
    spans = [
        Source(tokens[:5], 0, 100),
        Source(tokens[:3], 0, 200),
        Source(tokens[:12], 4, 300),
        Source(tokens[:18], 13, 400),  # after a gap
        Source(np.append(tokens[:8], 99), 0, 500),
    ]
    assert [tuple(copy) for copy in plan_copies(spans, tokens)] == [(500, 0, 8, 500), (304, 8, 4, 300)]
    assert plan_copies(spans, tokens, num_computed=12) == []
    assert [copy.first for copy in plan_copies(spans, tokens, num_computed=13)] == [13]
