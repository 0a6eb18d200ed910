"""[lora] in `sft` and `train`: adapters train, are saved and resume; anything inexact is refused by name."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cli.hub_cache import save_model, save_tokenizer
from tests.cli.runs import Commands
from tests.cli.test_hub import SFT, TRAIN, hub_commands
from treering.cli.doctor_run import measure_mismatch
from treering.cli.train import open_training
from treering.config import RlConfig, load
from treering.model.forward import forward
from treering.rl.tasks.task import Prompt
from treering.tree.forest import Forest

__all__ = ["hub_commands"]

LORA = '[lora]\nrank = 2\nalpha = 8\ntarget_modules = ["q_proj", "v_proj", "down_proj"]\n'


PROMPTS = """[task]
kind = "prompts"
file = "prompts.jsonl"
template = "raw"
reward = "tests.cli.test_lora:num_words"
"""


def num_words(prompt: Prompt, text: str) -> float:
    """A reward that differs between rollouts already with random weights."""
    return float(len(set(text.split())))


@pytest.fixture
def lora_commands(hub_commands: Commands) -> Commands:
    """Commands whose model has adapters, on a base model in the folder `base`."""
    save_model(hub_commands.folder / "base")
    save_tokenizer(hub_commands.folder / "base")
    (hub_commands.folder / "prompts.jsonl").write_text('{"prompt": "1 2 3"}\n{"prompt": "1 2 4"}\n')
    train = TRAIN.replace("[task]\nmax_prompts = 2\n", PROMPTS).replace("group_size = 2", "group_size = 4")
    for name, text in (("sft", SFT), ("train", train + "save_every = 1\nkeep = 9\n")):
        lines = text.replace('path = "org/tiny"', 'path = "./base"')
        (hub_commands.folder / f"{name}.toml").write_text(f"{lines}{LORA}")
    return hub_commands


def adapters(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_of_adapters_resumes_bitwise_and_loads_in_peft_and_transformers(lora_commands: Commands) -> None:
    folder = lora_commands.folder
    # Rank 2: of q [16, 16], v [8, 16] and down [16, 16] in two layers.
    assert 2 * 2 * (32 + 24 + 32) == 352
    assert "352 of them trained" in (err := lora_commands.done("sft", "train.num_steps=4", "run.dir=whole")), err
    lora_commands.done("sft", "train.num_steps=2")
    assert "resuming the run in out after step 2" in lora_commands.done("sft", "train.num_steps=4")
    assert_same(adapters(folder / "out", 4), adapters(folder / "whole", 4))
    assert all(weight.any() for weight in adapters(folder / "out", 4).values())
    checkpoint = folder / "out" / "checkpoints" / "step-000004"
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    ids = torch.tensor([[5, 6, 7]])
    plain = base(ids).logits.detach()
    ours = PeftModel.from_pretrained(base, checkpoint)(ids).logits
    assert not torch.allclose(ours, plain)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(checkpoint)(ids).logits, ours)


def test_a_resumed_run_meets_the_base_weights_that_it_began_with(lora_commands: Commands) -> None:
    lora_commands.done("sft")
    save_model(lora_commands.folder / "base", seed=1)
    assert "lora.base is '" in lora_commands.refused("sft", "train.num_steps=3")


def test_other_target_modules_on_resume_are_the_one_cause_that_is_named(lora_commands: Commands) -> None:
    lora_commands.done("sft")
    message = lora_commands.refused("sft", "train.num_steps=3", 'lora.target_modules=["q_proj"]')
    assert "lora.target_modules is " in message
    assert "lora.base" not in message


def test_the_engine_samples_with_the_log_probs_of_the_trained_adapters(lora_commands: Commands) -> None:
    config = load(RlConfig, Path("train.toml"), ["rl.num_steps=4", "optim.learning_rate=1e-1"])
    with open_training(config, config_dir=Path(), console=Console(quiet=True)) as run:
        gaps, has_moved = [], False
        weights = {name: weight.clone() for name, weight in run.loop.model.state_dict().items()}
        for report in run.steps:
            after = {name: weight.clone() for name, weight in run.loop.model.state_dict().items()}
            run.loop.model.load_state_dict(weights)
            gaps.append(largest_gap(run.loop.model, run.loop.latest))
            run.loop.model.load_state_dict(after)
            has_moved = has_moved or (report.step < 4 and report.update is not None)
            weights = after
    assert has_moved
    # Both sides compute in float32.
    assert max(gaps) < 1e-5


def largest_gap(model: Any, rollouts: Any) -> float:
    forest = Forest.from_sequences([rollout.tokens for rollout in rollouts])
    with torch.no_grad():
        own = forward(model, forest).logprobs.double().numpy()
    gaps = []
    for branch, rollout in enumerate(rollouts):
        sampled = np.flatnonzero(np.asarray(rollout.loss_mask))
        gaps.append(np.abs(np.asarray(rollout.logprobs)[sampled] - own[forest.path(branch)][sampled]).max())
    return float(max(gaps))


def test_workers_train_the_same_adapters(lora_commands: Commands) -> None:
    folder = lora_commands.folder
    lora_commands.done("train", "run.dir=alone", "rl.num_steps=3")
    lora_commands.done("train", "run.dir=several", "runtime.workers=1")
    lora_commands.done("train", "run.dir=several", "runtime.workers=1", "rl.num_steps=3")
    ours, theirs = (adapters(folder / run, 3) for run in ("several", "alone"))
    assert all(weight.any() for weight in theirs.values()), "without an update lora_B is zero"
    assert ours.keys() == theirs.keys()
    # float32: which rollouts share a batch decides how sums are rounded.
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in ours)
    report = measure_mismatch(folder / "alone", ["step-000001"])
    assert report["num_rollouts"] > 0
    assert report["largest"] < 1e-5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.r=4", "unknown key 'lora.r'; did you mean 'lora.rank'"),
        ('lora.target_modules=["q"]', "got 'q'; .* has down_proj"),
        ("lora.target_modules=[]", "lora.target_modules"),
    ],
)
def test_what_adapters_cannot_be_is_refused_by_name(lora_commands: Commands, override: str, message: str) -> None:
    for name in ("sft", "train"):
        line = lora_commands.refused(name, override)
        assert re.search(message, line), line


def test_adapters_need_a_rank_and_pre_trained_weights(commands: Commands) -> None:
    assert "adapters need lora.rank, got only alpha; set lora.rank to 16" in commands.refused("sft", "lora.alpha=4")
    for name in ("sft", "train"):
        assert "got lora.rank = 4 without model.path; set model.path" in commands.refused(name, "lora.rank=4")
