"""Laws of both commands that train: a resumed run ends like an uninterrupted one, and only with the same settings."""

import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from tests.cli.runs import Call, Commands, is_same, metrics_of
from tests.cli.sft import test_command as of_sft
from tests.cli.train import test_command as of_train
from treering.errors import StateError

COMMANDS = {"sft": "train", "train": "rl"}
"""Commands, with the section that has their number of steps."""


@pytest.fixture(params=COMMANDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def call(name: str, folder: Path, sft: Call, train: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Train by the command with overrides; return the JSON summary and stderr."""
    monkeypatch.setitem(sys.modules, "tests_rewards", of_train)
    return partial(sft, of_sft.config(folder)) if name == "sft" else partial(train, of_train.prompts(folder))


def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(name: str, call: Call, folder: Path) -> None:
    length = f"{COMMANDS[name]}.num_steps"
    whole, _ = call("run.dir=whole", f"{length}=7")
    call("run.dir=parts", f"{length}=5")
    rest, err = call("run.dir=parts", f"{length}=7")
    assert "resuming the run in parts after step 5" in err
    assert "warning" not in err
    assert (rest["resumed_from_step"], rest["num_steps"]) == (5, 7)
    assert is_same(whole, rest)
    losses = [[(row["step"], row.get("train/loss")) for row in metrics_of(folder / run)] for run in ("whole", "parts")]
    assert losses[0] == losses[1]
    files = [sorted((folder / run).glob("rollouts/*")) for run in ("whole", "parts")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    assert bool(files[0]) == (name == "train")
    done, _ = call("run.dir=parts", f"{length}=7")
    total = done if name == "sft" else done["total"]
    assert (total["seconds"], total["flat_tokens"], done["checkpoint"]) == (0, 0, rest["checkpoint"])


REFUSED = {
    "sft": {
        "model.hidden_size=32": "model.hidden_size is 16 there and 32 here",
        "model.dtype=bfloat16": "model.dtype is 'float32' there and 'bfloat16' here",
        "data.max_tasks=4": "data has changed",
        "train.layout=packed": "train.layout is 'tree' there and 'packed' here",
        "optim.betas=[0.5, 0.9]": r"optim.betas is '\[0.9, 0.95\]' there and '\[0.5, 0.9\]' here",
        "optim.schedule=cosine": "optim.schedule is 'constant' there and 'cosine' here",
    },
    "train": {
        "task.max_prompts=4": r"task \(p.jsonl\) has changed",
        "rl.seed=1": "rl.seed is 0 there and 1 here; set",
        "rl.group_size=4": "rl.group_size is 3 there and 4 here",
        "sampling.temperature=0.5": "sampling.temperature is 1.0 there and 0.5 here",
        "optim.learning_rate=1e-3": "optim.learning_rate is 0.01 there and 0.001 here",
    },
}


def test_a_run_of_other_settings_is_refused_by_name(name: str, call: Call, folder: Path) -> None:
    call("run.dir=out", f"{COMMANDS[name]}.num_steps=1")
    before = [(folder / "out" / file).read_bytes() for file in ("metrics.jsonl", "config.json")]
    for override, key in REFUSED[name].items():
        with pytest.raises(StateError, match=key):
            call("run.dir=out", override)
    assert [(folder / "out" / file).read_bytes() for file in ("metrics.jsonl", "config.json")] == before


def test_settings_that_change_only_memory_speed_or_length_may_change(name: str, call: Call) -> None:
    section = COMMANDS[name]
    call("run.dir=out")
    changed = ["max_batch_tokens=200", "gradient_checkpointing=reentrant", "num_steps=5"]
    own = ["engine.max_batch=4", "engine.backend=plain", "history.drafts=off"] if name == "train" else []
    summary, _ = call("run.dir=out", "run.keep=1", *(f"{section}.{setting}" for setting in changed), *own)
    assert (summary["resumed_from_step"], summary["num_steps"]) == (4, 5)


PASSED = {
    "sft": ("model.dtype=bfloat16", "train.seed=1", "train.num_epochs=1"),
    "train": ("model.dtype=bfloat16", "rl.seed=1", "sampling.temperature=0.5", "optim.warmup_steps=3"),
}


def test_a_setting_that_is_passed_by_hand_reaches_the_training(name: str, call: Call) -> None:
    plain, _ = call("run.dir=plain")
    for override in PASSED[name]:
        other, _ = call(f"run.dir={override}", override)
        assert not is_same(plain, other), override


@pytest.mark.parametrize("name", ["sft", "train"])
def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    commands.done(name, "run.dir=whole")
    checkpoint = next(Path("whole/checkpoints").iterdir())
    tensors = load_file(checkpoint / "model.safetensors")
    # Float32 weights and their two moments.
    size = 3 * sum(tensor.nbytes for tensor in tensors.values())

    def with_free(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    with_free(size - 1)
    told = commands.refused(name)
    assert f"a checkpoint takes {size / 1e9:.2f} GB" in told
    assert "set run.dir elsewhere" in told
    assert not list(Path("out").glob("checkpoints/step-*"))
    with_free(2 * size)
    assert "up to 3 more will be written (run.keep = 2)" in commands.done(name)
    # A finished run saves nothing more.
    with_free(0)
    commands.done(name)
    with_free(3 * size)
    assert "warning: a checkpoint" not in commands.done(name, "run.dir=other")
