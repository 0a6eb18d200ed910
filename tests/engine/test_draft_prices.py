"""Measured prices of drafting: what is made of the times, and that nothing of the run takes part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import group_requests, run
from tests.models import build_float64
from treering.engine.draft_prices import Spent, Steps, measure_prices, prices_of
from treering.engine.torch_engine import TorchEngine
from treering.history.costs import DraftPrices
from treering.history.draft import Drafter
from treering.history.store import HistoryStore


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_float64("qwen3").eval()


def spent(prices: DraftPrices, num_rows: int, num_drafted: int) -> Spent:
    looking = prices.look + prices.row * num_rows + prices.grown * num_drafted
    return Spent(looking, prices.learn + prices.drafted * num_drafted, num_drafted)


@given(st.integers(2, 40), st.lists(st.floats(0, 1e-3), min_size=5, max_size=5), st.integers(1, 500))
def test_steps_at_fixed_prices_give_these_prices(num_rows: int, values: list[float], num_more: int) -> None:
    prices = DraftPrices.from_array(np.array(values))
    steps = (
        spent(prices, rows, drafted)
        for rows, drafted in ((num_rows, num_rows + num_more), (num_rows, num_rows), (1, 1))
    )
    found = prices_of(*steps, num_rows=num_rows)
    np.testing.assert_allclose(found.to_array(), prices.to_array(), rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.lists(st.integers(0, 90), min_size=3, max_size=3))
def test_no_noise_makes_a_price_that_is_none(seconds: list[float], counts: list[int]) -> None:
    steps = (Spent(seconds[2 * k], seconds[2 * k + 1], counts[k]) for k in range(3))
    assert (prices_of(*steps, num_rows=8).to_array() >= 0).all()


def test_one_row_has_no_price_of_its_own() -> None:
    one = Spent(1e-4, 5e-5, 1)
    found = prices_of(Spent(2e-4, 6e-5, 11), one, one, num_rows=1)
    np.testing.assert_allclose(found.to_array(), [9e-5, 0.0, 1e-5, 4.9e-5, 1e-6])


class Clock:
    """A pass takes a second, and each look at the clock a millisecond."""

    def __init__(self) -> None:
        self.now, self.num_passes = 0.0, 0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now

    def one_pass(self) -> None:
        self.now += 1.0
        self.num_passes += 1


def test_every_part_is_timed_behind_a_pass_that_does_not_count() -> None:
    clock = Clock()
    prices = measure_prices(clock.one_pass, max_batch=8, clock=clock)
    # Looking and learning behind a pass each: two steps to be warm, and a round of three however long it takes.
    assert clock.num_passes == 2 * (2 + 3)
    assert max(prices.to_array()) <= 1e-3 + 1e-9
    assert prices.look == pytest.approx(1e-3)
    assert prices.learn == pytest.approx(1e-3)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 20])
def test_the_made_up_rows_are_drafted_as_much_as_is_asked(num_rows: int) -> None:
    steps = Steps(num_rows, lambda: None, Clock())
    few = [steps.draft(1).num_drafted for _ in range(70)]
    many = [steps.draft(12).num_drafted for _ in range(70)]
    assert np.mean(few) > 0.8 * num_rows
    assert np.mean(many) > 5 * np.mean(few)


def test_an_engines_measured_costs_have_prices_and_its_drafter_gets_them(model: PreTrainedModel) -> None:
    drafter = Drafter(HistoryStore())
    run(TorchEngine(model, drafter, max_batch=2), group_requests(2, 1))
    assert drafter.costs is not None
    assert drafter.costs.prices != DraftPrices()
    assert drafter.costs.prices.look > 0


def test_measuring_leaves_what_the_drafter_knows_as_it_was(model: PreTrainedModel) -> None:
    drafter = Drafter(HistoryStore())
    engine = TorchEngine(model, drafter, max_batch=2, costs="none")
    before = drafter.state()
    engine.measure_costs()
    after = drafter.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert drafter.costs is None
