"""The section [router]: off by default, used by every loop of a configuration, and part of a run's identity."""

import pytest

from treering.cli.settings import compute_options, router_identity, router_losses
from treering.cli.sft.settings import loop_options
from treering.cli.train.settings import warmup_options
from treering.config import RlConfig, SftConfig
from treering.config.load import load
from treering.config.router import RouterConfig
from treering.errors import ConfigError
from treering.train.gradient.router_losses import RouterLosses

SFT = ("train.num_steps=1", "train.trees_per_step=8", "data.source=generated")
RL = ("rl.num_steps=1",)


def test_without_a_setting_there_are_no_router_losses() -> None:
    for config in (load(SftConfig, None, SFT), load(RlConfig, None, RL)):
        assert router_losses(config.router) is None
        assert router_identity(config.router) == {}


def test_the_settings_reach_every_loop() -> None:
    settings = ("router.balance=0.01", "router.z=0.001")
    expected = RouterLosses(balance=0.01, z=0.001)
    sft = load(SftConfig, None, [*SFT, *settings])
    assert loop_options(sft, compute_options(sft.model, sft.train)).router_losses == expected
    rl = load(RlConfig, None, [*RL, *settings, "warmup.num_steps=1"])
    assert warmup_options(rl)[1].router_losses == expected
    assert router_losses(rl.router) == expected
    assert router_identity(rl.router) == {"router.balance": 0.01, "router.z": 0.001}


def test_a_factor_of_0_measures_only() -> None:
    assert router_losses(RouterConfig(balance=0.0)) == RouterLosses()


def test_a_negative_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.z"):
        load(SftConfig, None, [*SFT, "router.z=-1"])
