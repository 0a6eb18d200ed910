"""Measured prices of drafting: the fit, and that the run's own state is not involved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import group_requests, run
from treering.engine.speculation.draft_prices import StepTimes, SyntheticSteps, measure_prices, prices_of
from treering.engine.torch_engine import TorchEngine
from treering.history.budget.costs import DraftPrices
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore


def spent(prices: DraftPrices, num_rows: int, num_drafted: int) -> StepTimes:
    """A quarter of a search's price is the slowdown of the next pass."""
    drafting = 0.75 * prices.look + prices.row * num_rows + prices.grown * num_drafted
    pass_after_drafting = 1e-3 + 0.25 * prices.look
    return StepTimes(drafting, 1e-3, pass_after_drafting, prices.learn + prices.drafted * num_drafted, num_drafted)


@given(st.integers(2, 40), st.lists(st.floats(0, 1e-3), min_size=5, max_size=5), st.integers(1, 500))
def test_steps_at_fixed_prices_give_these_prices(num_rows: int, values: list[float], num_more: int) -> None:
    prices = DraftPrices.from_array(np.array(values))
    steps = (
        spent(prices, rows, drafted)
        for rows, drafted in ((num_rows, num_rows + num_more), (num_rows, num_rows), (1, 1))
    )
    found = prices_of(*steps, num_rows=num_rows)
    np.testing.assert_allclose(found.to_array(), prices.to_array(), rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12), st.lists(st.integers(0, 90), min_size=3, max_size=3))
def test_noise_never_makes_a_negative_price(seconds: list[float], counts: list[int]) -> None:
    steps = (StepTimes(*seconds[4 * k : 4 * k + 4], counts[k]) for k in range(3))
    assert (prices_of(*steps, num_rows=8).to_array() >= 0).all()


class Clock:
    """A pass takes a second, every third one `longer` more, and each reading of the clock a millisecond."""

    def __init__(self, longer: float = 0.0) -> None:
        self.now, self.num_passes, self._longer = 0.0, 0, longer

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now

    def one_pass(self) -> None:
        self.num_passes += 1
        self.now += 1.0 + (self._longer if self.num_passes % 3 == 0 else 0.0)


@pytest.mark.parametrize("longer", [0.0, 0.25, -0.25])
def test_every_part_is_timed_after_a_pass_and_a_slower_next_pass_counts(
    longer: float,
) -> None:
    clock = Clock(longer)
    prices = measure_prices(clock.one_pass, max_batch=8, clock=clock)
    # Three passes a step: one before everything, one to compare with, one after the search. Two warm-up steps and a
    # round of three.
    assert clock.num_passes == 3 * (2 + 3)
    assert prices.look == pytest.approx(1e-3 + max(longer, 0.0))
    assert prices.learn == pytest.approx(1e-3)
    assert max(prices.row, prices.grown, prices.drafted) <= 1e-9


class Struck(Clock):
    """Passes of 100 us, 60 % of which other load slows down three to ten times, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def __call__(self) -> float:
        return self.now

    def one_pass(self) -> None:
        self.now += 1e-4 * (1.0 if self._rng.random() < 0.4 else self._rng.uniform(3, 10))


@pytest.mark.parametrize("seed", range(5))
def test_load_on_most_passes_is_no_price_of_a_search(seed: int) -> None:
    # 15 rounds of about 4 ms: the chance that every pass of a kind is disturbed is 0.6 ** 15 = 0.0005.
    clock = Struck(seed)
    assert measure_prices(clock.one_pass, max_batch=8, clock=clock).look < 1e-6


@pytest.mark.parametrize("num_rows", [1, 8, 20])
def test_synthetic_rows_are_replaced_and_stay_in_their_limits(num_rows: int) -> None:
    steps = SyntheticSteps(num_rows, lambda: None, Clock())
    table = steps._table
    for number in range(3 * num_rows):
        changes = table.num_changes
        steps.draft(12)
        assert table.num_rows == num_rows
        # Each step replaces one row, unless there is only one: then all rows would be new to the drafter.
        assert table.num_changes - changes == (2 if num_rows > 1 else 0), number
        lengths = table.columns.num_tokens[:num_rows]
        assert sorted({request.sample for request in table.requests}) == list(range(num_rows))
        assert (lengths >= 32).all()
        assert (lengths <= 256).all()


@pytest.mark.parametrize("num_rows", [1, 8, 20])
def test_synthetic_rows_are_drafted_up_to_the_limit(num_rows: int) -> None:
    steps = SyntheticSteps(num_rows, lambda: None, Clock())
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
