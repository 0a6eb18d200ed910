"""All loops of a configuration compute their steps with the same options."""

from dataclasses import fields

import pytest

from treering.cli.settings import compute_options
from treering.cli.sft.settings import loop_options
from treering.cli.train.settings import warmup_options
from treering.config import Config, RlConfig, SftConfig
from treering.config.load import load
from treering.config.optim import OptimConfig
from treering.config.rl import LoopConfig
from treering.config.sft import TrainConfig
from treering.errors import ConfigError
from treering.rl.options import RlOptions
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.optim import OptimOptions
from treering.train.loop.sft import LoopOptions

MEMORY = (
    "max_batch_tokens=9",
    "parents=recompute",
    "gradient_checkpointing=reentrant",
    "layers=compiled",
)
EXPECTED = ComputeOptions(
    max_tokens=9,
    parents="recompute",
    autocast="bfloat16",
    gradient_checkpointing="reentrant",
    layers="compiled",
)


def test_every_setting_of_computing_reaches_the_record() -> None:
    others = ["model.dtype=bfloat16", "train.num_steps=1", "train.trees_per_step=8", "data.source=generated"]
    config = load(SftConfig, None, [*(f"train.{setting}" for setting in MEMORY), *others])
    assert loop_options(config, compute_options(config.model, config.train)).compute == EXPECTED


@pytest.mark.parametrize(
    ("record", "section", "own"),
    [
        (RlOptions, LoopConfig, {"compute", "distill", "router_losses", "sampling"}),
        (LoopOptions, TrainConfig, {"compute", "distill", "router_losses"}),
        (ComputeOptions, LoopConfig, {"autocast", "backend", "costs", "max_tokens"}),
        (ComputeOptions, TrainConfig, {"autocast", "backend", "costs", "max_tokens"}),
        (OptimOptions, OptimConfig, {"num_steps"}),
    ],
)
def test_options_have_the_names_of_their_settings_but_for_those_that_are_made(
    record: type, section: type[Config], own: set[str]
) -> None:
    # An option under another name would keep its default, whatever is set.
    assert {each.name for each in fields(record)} - section.model_fields.keys() == own


def test_the_warm_up_computes_as_the_loop_does() -> None:
    others = ["model.dtype=bfloat16", "rl.num_steps=1", "warmup.num_steps=1"]
    config = load(RlConfig, None, [*(f"rl.{setting}" for setting in MEMORY), *others])
    _, options = warmup_options(config)
    assert options.compute == compute_options(config.model, config.rl) == EXPECTED


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match='max_tokens is at least 1 or "auto", got 0; None sets no limit'):
        ComputeOptions(max_tokens=0)
