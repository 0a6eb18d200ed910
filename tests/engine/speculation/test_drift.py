"""Costs measured on a busy machine are measured again; others are not."""

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import assert_same, group_requests, run
from treering.engine.protocol import EngineStats
from treering.engine.speculation.verify_costs import CostDrift
from treering.engine.torch_engine import TorchEngine
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore

COSTS = VerifyCosts(num_tokens=np.array([1, 8, 64]), seconds=np.array([1.0, 2.0, 8.0]))


def watched(seconds: list[float], num_tokens: int = 8) -> list[int]:
    """Numbers of the passes after which `note` requested a new measurement, which gave the same costs."""
    watch, found = CostDrift(), []
    watch.begin(COSTS)
    for number, spent in enumerate(seconds, 1):
        if watch.note(num_tokens, spent):
            found.append(number)
            watch.begin(COSTS)
    return found


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1, 1.0), (8, 2.0), (36, 5.0), (64, 8.0), (120, 14.0)])
def test_costs_end_when_passes_take_less_than_half_of_them(num_tokens: int, seconds: float) -> None:
    assert watched([0.51 * seconds] * 200, num_tokens) == []
    assert watched([0.49 * seconds] * 100, num_tokens) == [64]


def test_windows_grow_so_that_measuring_stays_cheap() -> None:
    assert watched([0.5] * 2000) == [64, 64 + 256, 64 + 256 + 1024]


def test_a_few_fast_passes_do_not_end_costs() -> None:
    assert watched(([0.5] * 32 + [1.5] * 32) * 10) == []
    assert watched([0.5] * 33 + [1.5] * 31) == [64]


def test_without_costs_no_measurement_is_requested() -> None:
    watch = CostDrift()
    assert not any(watch.note(8, 0.0) for _ in range(200))
    watch.begin(COSTS)
    assert [watch.note(8, 0.0) for _ in range(64)][-1]
    assert not any(watch.note(8, 0.0) for _ in range(500))


def test_an_engine_that_measured_on_a_busy_machine_measures_again_then_drafts(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request for draw in range(8) for request in group_requests(3, 2, draw=draw, max_tokens=40)]
    plain = run(TorchEngine(model, max_batch=2), requests)
    store = HistoryStore()
    for rollout in plain.values():
        store.add(rollout.prompt_id, [rollout.tokens], version=0)
    store.publish()
    sizes, nothing = np.array([1, 2, 16]), DraftPrices.from_array(np.zeros(5))
    # First a pass seems to take a minute and a search an hour, then next to nothing.
    found = [
        VerifyCosts(num_tokens=sizes, seconds=np.array([60.0, 60.0, 600.0]), prices=DraftPrices(look=3600.0)),
        VerifyCosts(num_tokens=sizes, seconds=np.array([1e-9, 1e-9, 2e-9]), prices=nothing),
    ]
    measured: list[EngineStats] = []

    def measure(self: TorchEngine) -> VerifyCosts:
        measured.append(self.stats)
        return found[len(measured) - 1]

    monkeypatch.setattr(TorchEngine, "measure_costs", measure)
    drafter = Drafter(store)
    engine = TorchEngine(model, drafter, max_batch=2)
    assert_same(run(engine, requests), plain)
    assert drafter.costs is found[1]
    # A window of passes, plus those with prefill.
    early, late = measured[1], engine.stats.since(measured[1])
    assert 64 <= early.num_forwards < 90
    # Drafts hardly pay at the first costs, and do at the second.
    assert late.num_accepted / late.num_forwards > 3 * early.num_accepted / early.num_forwards


def test_given_costs_are_never_measured_again(model: PreTrainedModel) -> None:
    given = VerifyCosts(num_tokens=np.array([1, 16]), seconds=np.array([60.0, 600.0]))
    told, own = Drafter(HistoryStore()), Drafter(HistoryStore())
    own.use_costs(given)
    for drafter, engine in ((told, TorchEngine(model, told, max_batch=2, costs=given)), (own, TorchEngine(model, own))):
        run(engine, group_requests(3, 2, max_tokens=60))
        assert drafter.costs is given
