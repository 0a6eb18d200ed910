"""Settings reach every loop of a configuration alike, and a run keeps some from its first start."""

from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from treering.cli.session import with_chats
from treering.cli.train_engine import engine_factory, warmup_options
from treering.config import RlConfig, SftConfig
from treering.config.record import load
from treering.config.rl_task import TaskConfig
from treering.config.steps import ComputeOptions, RouterLosses
from treering.errors import ConfigError, UnsupportedError

MEMORY = ("max_batch_tokens=9", "gradient_checkpointing=reentrant", "layers=compiled")


def test_the_steps_of_every_loop_compute_as_it_is_set() -> None:
    expected = ComputeOptions(
        max_batch_tokens=9, autocast="bfloat16", gradient_checkpointing="reentrant", layers="compiled"
    )
    others = ["model.dtype=bfloat16", "train.num_steps=1", "data.source=generated"]
    sft = load(SftConfig, None, [*(f"train.{setting}" for setting in MEMORY), *others])
    others = ["model.dtype=bfloat16", "rl.num_steps=1", "warmup.num_steps=1"]
    rl = load(RlConfig, None, [*(f"rl.{setting}" for setting in MEMORY), *others])
    for options in (sft.options, rl.options, warmup_options(rl)[1]):
        assert {name: getattr(options, name) for name in ComputeOptions.model_fields} == dict(expected)


def test_router_losses_reach_every_loop_and_are_off_where_nothing_is_set() -> None:
    factors, losses = ("router.balance=0.01", "router.z=0.001"), RouterLosses(balance=0.01, z=0.001)
    sft = ["train.num_steps=1", "data.source=generated"]
    for settings, expected in ((factors, losses), ((), None)):
        rl = load(RlConfig, None, ["rl.num_steps=1", "warmup.num_steps=1", *settings])
        loops = (load(SftConfig, None, [*sft, *settings]).options, rl.options, warmup_options(rl)[1])
        assert [options.router_losses for options in loops] == [expected] * 3
    with pytest.raises(ConfigError, match=r"router\.z"):
        load(SftConfig, None, [*sft, "router.z=-1"])


def test_prompts_with_images_are_refused_before_vllm_starts() -> None:
    config: Any = SimpleNamespace(engine=SimpleNamespace(kind="vllm"))
    source: Any = SimpleNamespace(has_images=True)
    model: Any = None
    with pytest.raises(UnsupportedError, match=r'engine\.kind = "vllm" does not .*set engine\.kind = "torch"'):
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
