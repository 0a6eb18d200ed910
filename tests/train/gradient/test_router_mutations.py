"""Typical errors of router losses on trees, each built in on purpose: law 2's check must fail for every one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.train.gradient.test_router_losses import BATCH, MODEL, assert_routed_step_is_exact, untrained
from treering.train.gradient import partitioned, router_losses
from treering.train.gradient import run as units
from treering.train.gradient.partitioned import PartitionedStep
from treering.train.gradient.router_losses import Routing

pytestmark = pytest.mark.usefixtures("no_self_check")

TRAINED = untrained(BATCH, {1, 3})


@pytest.fixture(autouse=True)
def clean_gradients() -> Iterator[None]:
    yield
    MODEL.zero_grad(set_to_none=True)


def count_each_token_once(patch: pytest.MonkeyPatch) -> None:
    """Shared tokens weigh as much as any other."""
    for module in (units, partitioned):
        patch.setattr(module, "branches_through", lambda forest: np.ones(forest.num_tokens, np.int64))


def take_the_load_of_one_forward(patch: pytest.MonkeyPatch) -> None:
    """The routed shares are those of the micro-batch at hand."""
    honest = Routing.loss

    def alone(self: Routing, routes: Any, branches: Any) -> Tensor:
        self._counts[:], self._has_load = 0.0, False
        self.count(routes, branches)
        self._counts *= self._num_rows / (branches.sum() * len(routes))
        self._has_load = True
        return honest(self, routes, branches)

    patch.setattr(Routing, "loss", alone)


def divide_by_the_tokens_of_one_forward(patch: pytest.MonkeyPatch) -> None:
    """Means are over the micro-batch at hand."""
    honest = Routing.loss

    def alone(self: Routing, routes: Any, branches: Any) -> Tensor:
        self._num_rows = branches.sum() * len(routes)
        return honest(self, routes, branches)

    patch.setattr(Routing, "loss", alone)


def leave_out_gradients_of_probabilities(patch: pytest.MonkeyPatch) -> None:
    """The balance loss has a value and no gradient."""
    honest = router_losses._mean_probabilities
    patch.setattr(router_losses, "_mean_probabilities", lambda *given: honest(*given).detach())


def leave_partitions_out(patch: pytest.MonkeyPatch) -> None:
    """Partitions add nothing for their routers."""
    honest = PartitionedStep._compute

    def silent(self: PartitionedStep, live: Any) -> None:
        honest(self, live)
        live.router_loss = None

    patch.setattr(PartitionedStep, "_compute", silent)


def skip_what_is_not_trained(patch: pytest.MonkeyPatch) -> None:
    """Partitions without a scored edge do not run."""
    patch.setattr(PartitionedStep, "_has_loss", lambda self, number: self.tables[number].edges.size > 0)


def route_by_packed_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Branches are counted from the token before in packed order."""
    for module in (units, partitioned):
        patch.setattr(module, "branches_through", lambda forest: np.roll(router_losses.branches_through(forest), 1))


def forget_the_logits_size(patch: pytest.MonkeyPatch) -> None:
    """The z loss is the square of the mean, not the mean of squares."""

    def squared(logits: Tensor, weights: Any) -> Tensor:
        size = logits.logsumexp(-1)
        share = size.new_tensor(weights / weights.sum())
        return (share * size).sum() ** 2 * float(weights.sum())

    patch.setattr(router_losses, "_mean_square", squared)


MUTATIONS = [
    route_by_packed_neighbours,
    forget_the_logits_size,
    count_each_token_once,
    take_the_load_of_one_forward,
    divide_by_the_tokens_of_one_forward,
    leave_out_gradients_of_probabilities,
    leave_partitions_out,
    skip_what_is_not_trained,
]


def test_the_honest_step_passes() -> None:
    assert_routed_step_is_exact(MODEL, TRAINED, max_tokens=30)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_each_trap_breaks_law_2(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        assert_routed_step_is_exact(MODEL, TRAINED, max_tokens=30)
