"""Costs learnt from real steps: drafts are used where they pay, and elsewhere lose no more than their budget."""

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import assert_same, drafter_of, group_requests, run
from treering.engine.speculation.observed_costs import LOAD_S, ObservedCosts
from treering.engine.torch_engine import TorchEngine

NUM_ROWS = 8
PLAIN_S = 0.5


def step(costs: ObservedCosts, *, num_new: int = 1, drafted: bool = False, seconds: float = PLAIN_S) -> None:
    tokens, none = np.full(NUM_ROWS, num_new), np.zeros(NUM_ROWS, bool)
    costs.note_step(tokens, none, num_waiting=1, drafted=drafted, seconds=seconds)


def simulate(costs: ObservedCosts, num_steps: int, *, num_new: int, seconds: float) -> list[bool]:
    """Which steps drafted, where a step with drafts gains `num_new` tokens a row and takes `seconds`."""
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
    # A step is begun only within the budget, so at most the last one exceeds it.
    assert lost <= max_loss * costs.total_s + (factor - 1) * PLAIN_S * bool(max_loss)
    assert any(asked) == bool(max_loss)
    # Each loss in a row makes the rest longer.
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
        # 4 rows take 1.3 s, of which 0.1 s are each row's: the other 0.9 s are saved once for every step less.
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
