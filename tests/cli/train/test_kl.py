"""`rl.kl` from the command line: a resumed run keeps its first reference, and without `rl.kl` no reference is read."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.runs import Commands, assert_same_weights
from tests.cli.test_hub import hub_commands
from tests.cli.test_lora import adapters, assert_same, lora_commands
from treering.cli import train as command

__all__ = ["hub_commands", "lora_commands"]


def kl_of(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["train/kl"] for row in rows if "train/kl" in row]


@pytest.mark.parametrize(
    "overrides",
    [
        # The bonus moves the policy: at the reference a KL has no gradient, and no answer is right.
        ("rl.kl=0.5", "rl.entropy_coefficient=0.5", "optim.learning_rate=1e-2"),
        ("rl.kl=0.5", "rl.kl_in=reward", "warmup.num_steps=2", "optim.learning_rate=1e-2"),
    ],
)
def test_a_resumed_run_has_the_reference_that_it_began_with(commands: Commands, overrides: tuple[str, ...]) -> None:
    commands.done("train", *overrides, "run.dir=whole", "rl.num_steps=3")
    commands.done("train", *overrides, "rl.num_steps=2")
    torch.manual_seed(7)
    assert "resuming the run in out after step 2" in commands.done("train", *overrides, "rl.num_steps=3")
    assert_same_weights(commands.folder / "whole", commands.folder / "out", 3)
    first, *_, last = kl_of(commands.folder / "out")
    # The first rollouts are the reference's own, with sums in another order.
    assert abs(first) < 1e-6 < abs(last)


@pytest.fixture
def none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a reference was loaded")

    monkeypatch.setattr(command, "make_reference", refuse)


@pytest.mark.usefixtures("none_is_loaded")
def test_a_resumed_run_of_adapters_has_the_base_model(lora_commands: Commands) -> None:
    for run, steps in (("whole", 3), ("out", 2), ("out", 3)):
        lora_commands.done("train", "rl.kl=0.5", f"run.dir={run}", f"rl.num_steps={steps}")
    assert_same(adapters(lora_commands.folder / "out", 3), adapters(lora_commands.folder / "whole", 3))
    assert kl_of(lora_commands.folder / "out")[0] == 0.0 < kl_of(lora_commands.folder / "out")[-1]
    assert "warmup.num_steps = 0" in lora_commands.refused("train", "rl.kl=0.5", "warmup.num_steps=1")


@pytest.mark.usefixtures("none_is_loaded")
def test_a_run_without_it_loads_no_reference(commands: Commands) -> None:
    commands.done("train", "rl.num_steps=1")
    assert kl_of(commands.folder / "out") == []
