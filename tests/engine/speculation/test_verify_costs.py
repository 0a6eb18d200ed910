"""Measured costs of verification: the passes run, the fit, and that rollouts do not change."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import ScriptedDrafter, chain
from tests.engine.test_torch_engine import assert_same, group_requests, run
from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.protocol import Decoder
from treering.engine.speculation.verify_costs import measure
from treering.engine.torch_engine import TorchEngine
from treering.history.budget.costs import VerifyCosts


class Timed(Decoder):
    """A pass over T tokens takes T**2 seconds of simulated time, plus spikes."""

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
    """Drafts one token, and records the costs that it is given."""

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
