"""The engine's feedback to its drafter, and its measured costs of passes."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, chain
from tests.engine.test_torch_engine import assert_same, drafter_of, group_requests, run
from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.plain_decoder import Decoder
from treering.engine.speculation import LOAD_S, ObservedCosts, measure, needs_another_round
from treering.engine.torch_engine import TorchEngine
from treering.history.budget import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.store.store import HistoryStore


class Watching(Drafter):
    """Drafter that records the rows of each call."""

    def __init__(self, store: HistoryStore) -> None:
        super().__init__(store)
        self.seen: list[tuple[DraftRows, list[int]]] = []
        self.were_last: list[bool] = []

    def propose(self, rows: DraftRows, *, is_last: bool = False) -> Drafts:
        self.seen.append((rows, rows.num_tokens.tolist()))
        self.were_last.append(is_last)
        return super().propose(rows, is_last=is_last)


def test_a_drafter_that_backs_off_is_not_called_and_changes_no_rollout(model: PreTrainedModel) -> None:
    plain = run(TorchEngine(model, max_batch=4), group_requests(2, 3, max_tokens=24))
    store = HistoryStore()
    for rollout in plain.values():
        store.add(rollout.prompt_id, [rollout.tokens], version=0)
    store.publish()
    # Drafts are accepted, but feedback costs as much as a thousand steps.
    expensive = VerifyCosts(num_tokens=[1, 64], seconds=[1.0, 1.1], prices=DraftPrices(learn=1000.0))
    drafter = Watching(store)
    drafter.use_costs(expensive)
    engine = TorchEngine(model, drafter, max_batch=4)
    assert_same(run(engine, group_requests(2, 3, max_tokens=24)), plain)
    assert engine.stats.num_accepted > 0
    assert 1 < len(drafter.seen) < engine.stats.num_forwards


def test_rows_are_the_last_once_no_request_of_generate_waits_and_none_is_rehearsed(model: PreTrainedModel) -> None:
    drafter = Watching(HistoryStore())
    engine = TorchEngine(model, drafter, max_batch=4, costs="none")
    first, later = group_requests(3, 2, max_tokens=12), group_requests(1, 1, draw=1, max_tokens=40)
    num_waiting = []
    for _ in engine.generate(first):
        num_waiting.append(len(engine._waiting))
    assert num_waiting[-1] == 0
    assert drafter.were_last == sorted(drafter.were_last)
    assert set(drafter.were_last) == {False, True}
    drafter.were_last.clear()
    # More may be submitted at any time.
    engine.submit([replace(request, draw=2) for request in first])
    while engine.num_unfinished:
        engine.step()
    engine.rehearse(later)
    next(engine.generate([replace(request, draw=3) for request in first[:2]]))
    assert not any(drafter.were_last)


class Timed(Decoder):
    """Decoder whose pass over T tokens takes T**2 seconds of simulated time, plus spikes."""

    def __init__(self, spikes: Mapping[int, float] | None = None) -> None:
        self.now = 0.0
        self._spikes = {} if spikes is None else spikes
        self.batches: list[TokenBatch] = []

    @property
    def spare_slot(self) -> int:
        return 1000

    def run(self, batch: TokenBatch) -> Tensor:
        self.now += batch.num_tokens**2 + self._spikes.get(len(self.batches), 0.0)
        self.batches.append(batch)
        return torch.zeros(batch.wanted.size, 5)

    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        raise AssertionError("nothing is accepted for good")


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 19, 24]),
        (8, [1, 2, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 40, 64]),
        (100, [1, 2, 4, 8, 16, 32, 64, 100, 101, 102, 103, 104, 105, 106, 107, 108, 116, 132, 164, 228, 256]),
        (256, [1 << k for k in range(9)]),
        (1000, [1 << k for k in range(9)]),
    ],
)
def test_every_size_is_timed(max_batch: int, sizes: list[int]) -> None:
    decoder = Timed()
    costs = measure(decoder, num_slots=100, max_batch=max_batch, context=10, clock=lambda: decoder.now)
    assert costs.num_tokens.tolist() == sizes
    assert costs.seconds.tolist() == [size**2 for size in sizes]
    # One warm-up pass per size, and one round however long it takes.
    assert [batch.num_tokens for batch in decoder.batches] == sizes * 2


@pytest.mark.parametrize(
    ("round_s", "num_rounds"), [(0.001, 25), (0.01, 20), (0.045, 5), (0.15, 5), (0.6, 2), (0.99, 2), (2.0, 1)]
)
def test_few_rounds_are_measured_in_more_time_than_many(round_s: float, num_rounds: int) -> None:
    done = 0
    while needs_another_round(done, done * round_s + 1e-9, most=25, budget_s=0.2):
        done += 1
    assert done == num_rounds
    # At least one round runs even if the clock jumped before it.
    assert needs_another_round(0, 100.0, most=25, budget_s=0.2)


def test_measured_passes_write_one_slot_and_see_a_typical_context() -> None:
    decoder = Timed()
    measure(decoder, num_slots=40, max_batch=2, context=10, clock=lambda: decoder.now)
    for batch in decoder.batches:
        assert set(batch.slots.tolist()) == {1000}
        assert set((batch.num_prefix + batch.num_own).tolist()) == {10}
        assert batch.own_start.min() >= 0
        assert (batch.own_start + batch.num_own).max() <= 40
        assert batch.wanted.tolist() == list(range(batch.num_tokens))
    decoder = Timed()
    measure(decoder, num_slots=4, max_batch=2, context=10, clock=lambda: decoder.now)
    assert set(decoder.batches[0].num_own.tolist()) == {4}


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_measuring_changes_no_rollout_and_no_count(model: PreTrainedModel, backend: str) -> None:
    requests = group_requests(3, 2)
    expected = run(TorchEngine(model), requests)
    engine = TorchEngine(model, max_batch=4, max_tokens=120, backend=backend)
    engine.submit(requests)
    finished = []
    for step in itertools.count():
        if not engine.num_unfinished:
            break
        finished += engine.step()
        if step % 8:
            continue
        before = engine.stats
        costs = engine.measure_costs()
        assert engine.stats == before
        assert costs.num_tokens.tolist() == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 32]
    assert_same({rollout.key: rollout for rollout in finished}, expected)


class Listener(ScriptedDrafter):
    """Drafter of one token that records the costs it receives."""

    def __init__(self) -> None:
        super().__init__(lambda prompt_id, so_far, max_drafts: chain([1]))
        self.received: list[VerifyCosts] = []

    def use_costs(self, costs: VerifyCosts) -> None:
        self.received.append(costs)


def test_an_engine_measures_once_before_its_first_pass(model: PreTrainedModel) -> None:
    drafter = Listener()
    engine = TorchEngine(model, drafter, max_batch=2)
    engine.step()
    assert drafter.received == []
    run(engine, group_requests(3, 1))
    run(engine, group_requests(3, 1, draw=1))
    engine.update_weights(1)
    run(engine, group_requests(3, 1, draw=2))
    assert [costs.num_tokens.tolist() for costs in drafter.received] == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16]]


NUM_ROWS = 8
PLAIN_S = 0.5


def step(costs: ObservedCosts, *, num_new: int = 1, drafted: bool = False, seconds: float = PLAIN_S) -> None:
    tokens, none = np.full(NUM_ROWS, num_new), np.zeros(NUM_ROWS, bool)
    costs.note_step(tokens, none, num_waiting=1, drafted=drafted, seconds=seconds)


def simulate(costs: ObservedCosts, num_steps: int, *, num_new: int, seconds: float) -> list[bool]:
    """Return which steps drafted, if a step with drafts gains `num_new` tokens per row in `seconds`."""
    asked = []
    for _ in range(num_steps):
        asked.append(costs.may_draft(NUM_ROWS))
        step(costs, num_new=num_new if asked[-1] else 1, drafted=asked[-1], seconds=seconds if asked[-1] else PLAIN_S)
    return asked


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
@pytest.mark.parametrize("max_loss", [0.0, 0.02, 0.1])
def test_losing_drafts_lose_no_more_than_their_share(max_loss: float, factor: float) -> None:
    costs = ObservedCosts(max_loss=max_loss)
    asked = simulate(costs, 20_000, num_new=1, seconds=factor * PLAIN_S)
    lost = sum(asked) * (factor - 1) * PLAIN_S
    assert costs.saved_s == pytest.approx(-lost)
    # A step starts only within the budget, so at most the last one exceeds it.
    assert lost <= max_loss * costs.total_s + (factor - 1) * PLAIN_S * bool(max_loss)
    assert any(asked) == bool(max_loss)
    # Each loss in a row lengthens the rest.
    assert sum(asked) < 40


@pytest.mark.parametrize("load_s", [LOAD_S, 2.0])
def test_paying_drafts_are_made_in_nearly_all_steps(load_s: float) -> None:
    costs = ObservedCosts(load_s=load_s)
    asked = simulate(costs, 4000, num_new=3, seconds=2 * PLAIN_S)
    first = asked.index(True)
    # The first drafts need a budget for one step and for loading the drafter.
    assert 0.025 * PLAIN_S * (first - 1) < PLAIN_S + load_s <= 0.025 * PLAIN_S * (first + 1)
    assert 0.95 < np.mean(asked[first:]) < 1
    assert costs.saved_s == pytest.approx(sum(asked) * PLAIN_S)


def test_a_known_horizon_allows_an_earlier_start() -> None:
    costs = ObservedCosts()
    costs.horizon_s = 1000.0
    assert simulate(costs, 2, num_new=3, seconds=PLAIN_S) == [False, True]


def test_drafts_that_begin_to_lose_are_given_up_and_tried_again() -> None:
    costs = ObservedCosts(max_loss=0.05)
    simulate(costs, 500, num_new=3, seconds=2 * PLAIN_S)
    asked = simulate(costs, 500, num_new=1, seconds=2 * PLAIN_S)
    assert sum(asked) < 25
    assert any(asked[100:])


def test_overhead_counts_as_a_loss() -> None:
    costs = ObservedCosts(max_loss=0.1)
    costs.horizon_s = 100.0
    assert costs.can_spend(9.0)
    costs.note_overhead(9.0)
    assert (costs.total_s, costs.saved_s) == (9.0, -9.0)
    assert not costs.can_spend(1.1)


@pytest.mark.parametrize(
    ("num_new", "is_finished", "num_waiting", "expected_s"),
    [
        # Four rows take 1.3 s: 0.1 s per row, and 0.9 s that are saved for every step avoided.
        ([1, 1, 1, 1], [0, 0, 0, 0], 0, 1.3),
        ([5, 2, 2, 2], [0, 0, 0, 0], 0, 2 * 0.9 + 11 * 0.1),
        ([5, 1, 2, 2], [0, 1, 0, 0], 0, 2 * 0.9 + 10 * 0.1),
        ([5, 1, 2, 2], [1, 1, 1, 1], 0, 5 * 0.9 + 10 * 0.1),
        ([5, 1, 2, 2], [0, 1, 0, 0], 3, 10 * 1.3 / 4),
    ],
)
def test_a_step_saves_what_its_tokens_would_have_taken(
    num_new: list[int], is_finished: list[int], num_waiting: int, expected_s: float
) -> None:
    costs = ObservedCosts()
    for num_rows, seconds in ((1, 1.0), (4, 1.3)):
        one = np.ones(num_rows, np.int64)
        costs.note_step(one, one < 0, num_waiting=0, drafted=False, seconds=seconds)
    finished = np.array(is_finished, bool)
    costs.note_step(np.array(num_new), finished, num_waiting=num_waiting, drafted=True, seconds=0.0)
    assert costs.saved_s == pytest.approx(expected_s)


def test_an_engine_drafts_where_it_pays_and_changes_no_token(model: PreTrainedModel) -> None:
    requests = group_requests(16, 4, stop_tokens=(7,))
    expected = run(TorchEngine(model), requests)
    costs = ObservedCosts(max_loss=1.0)
    costs.horizon_s = 1e6
    engine = TorchEngine(model, drafter_of(expected), max_batch=6, costs=costs)
    assert_same(run(engine, requests), expected)
    assert engine.stats.num_accepted > 0
    assert costs.total_s > 0
