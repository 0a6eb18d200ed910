"""Settings reach every loop of a configuration alike, and a run keeps some from its first start."""

from dataclasses import fields
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from treering.cli.begun import with_chats
from treering.cli.settings import compute_options, router_losses
from treering.cli.sft.settings import loop_options
from treering.cli.train.settings import engine_factory, warmup_options
from treering.config import Config, RlConfig, SftConfig
from treering.config.load import load
from treering.config.loop import LoopConfig
from treering.config.optim import OptimConfig
from treering.config.rl_task import TaskConfig
from treering.config.router import RouterConfig
from treering.config.sft import TrainConfig
from treering.errors import ConfigError, UnsupportedError
from treering.rl.options import RlOptions
from treering.train.gradient.router_losses import RouterLosses
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


def test_router_losses_reach_every_loop_and_are_off_where_nothing_is_set() -> None:
    factors, losses = ("router.balance=0.01", "router.z=0.001"), RouterLosses(balance=0.01, z=0.001)
    sft = ["train.num_steps=1", "train.trees_per_step=8", "data.source=generated"]
    for settings, expected in ((factors, losses), ((), None)):
        config = load(SftConfig, None, [*sft, *settings])
        assert loop_options(config, compute_options(config.model, config.train)).router_losses == expected
        rl = load(RlConfig, None, ["rl.num_steps=1", "warmup.num_steps=1", *settings])
        assert warmup_options(rl)[1].router_losses == router_losses(rl.router) == expected
    assert router_losses(RouterConfig(balance=0.0)) == RouterLosses(), "a factor of 0 measures only"
    with pytest.raises(ConfigError, match=r"router\.z"):
        load(SftConfig, None, [*sft, "router.z=-1"])


def test_prompts_with_pictures_are_refused_before_vllm_starts() -> None:
    config: Any = SimpleNamespace(engine=SimpleNamespace(kind="vllm"))
    source: Any = SimpleNamespace(has_pictures=True)
    model: Any = None
    with pytest.raises(UnsupportedError, match=r'got engine\.kind = "vllm", set "torch"'):
        engine_factory(config, model, source)


@pytest.mark.parametrize(
    ("first", "configured", "expected"),
    [
        ({}, "auto", "auto"),
        ({"template": "plain", "date": None}, "auto", "plain"),
        ({"template": "auto", "date": "2024-07-26"}, "auto", "auto"),
        ({"template": "plain", "date": None}, "hf", "hf"),
        ({"template": "hf", "date": "2024-07-26"}, "plain", "plain"),
    ],
)
def test_a_run_keeps_the_form_and_the_date_of_chats_that_it_began_with(first, configured, expected):
    task = TaskConfig(kind="prompts", file="p.jsonl", template=configured)
    found = with_chats(task, first)
    day = date(2024, 7, 26) if first.get("date") else date.today()
    assert (found.template, found.date) == (expected, None if expected == "plain" else day)
    dated = task.model_copy(update={"date": date(2020, 1, 1)})
    assert with_chats(dated, first).date == date(2020, 1, 1)
