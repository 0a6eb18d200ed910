"""Loops with router losses train as `backward` does, log the losses, and refuse models without routers."""

import pytest

from tests.models import build
from tests.rl.runs import scripted_loop
from tests.train.loop.runs import tiny_loop
from treering.config.steps import RouterLosses
from treering.errors import UnsupportedError

LOSSES = RouterLosses(balance=0.05, z=0.01)
NAMES = {"train/router_balance", "train/router_z", "train/expert_load_max"}


@pytest.mark.parametrize("make", [tiny_loop, scripted_loop])
def test_a_loop_trains_and_logs_its_routers(make: object) -> None:
    with_losses = make(build("mixtral"), router_losses=LOSSES).step().update  # type: ignore[operator]
    measured = make(build("mixtral"), router_losses=RouterLosses()).step().update  # type: ignore[operator]
    without = make(build("mixtral")).step().update  # type: ignore[operator]
    own = measured.values()
    assert set(own) - set(without.values()) == NAMES
    assert measured.loss == pytest.approx(without.loss, rel=1e-6)
    assert measured.grad_norm == pytest.approx(without.grad_norm, rel=1e-4)
    added = LOSSES.balance * own["train/router_balance"] + LOSSES.z * own["train/router_z"]
    assert with_losses.loss - without.loss == pytest.approx(added, rel=1e-4)


@pytest.mark.parametrize("make", [tiny_loop, scripted_loop])
def test_a_loop_refuses_a_model_without_routers(make: object) -> None:
    with pytest.raises(UnsupportedError, match="has no routers"):
        make(build(), router_losses=LOSSES)  # type: ignore[operator]
