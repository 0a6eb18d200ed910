"""The run that faults meet: a tiny policy on easy sums, which has learnt enough that its rewards differ."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.common.tiny_model import TINY_MODEL
from benchmarks.faults.runs import Ended, Server
from treering.errors import StateError

SAVE_EVERY = 2
SETTINGS = """
[model]
{model}
[task]
max_prompts = 4
max_terms = 2
max_number = 3
[sampling]
max_tokens = 8
[rl]
prompts_per_step = 2
group_size = 8
[engine]
num_threads = 1
[optim]
learning_rate = 1e-2
[run]
save_every = 2
"""
LEARN = ("warmup.num_steps=20", "warmup.learning_rate=2e-2", "rl.num_steps=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The configuration of the run, and what undisturbed runs of it leave.

    Attributes:
        config: the file.
        whole: folder of an undisturbed run.
        half: folder of one that has ended halfway.
        num_steps: of the whole run.
    """

    config: Path
    whole: Path
    half: Path
    num_steps: int


def arguments(task: Task, folder: Path, num_steps: int | None = None) -> list[str]:
    """The command that trains in a folder."""
    return ["train", str(task.config), f"run.dir={folder}", f"rl.num_steps={num_steps or task.num_steps}"]


def make_task(server: Server, folder: Path, num_steps: int) -> Task:
    """Trains the policy to start from and the undisturbed runs.

    Raises:
        StateError: one of them failed, or no weight moved, so that every run would end with the same weights.
    """
    first = folder / "first.toml"
    first.write_text(SETTINGS.format(model=TINY_MODEL))
    server.warm(["train", str(first), f"run.dir={folder / 'warm'}", "rl.num_steps=2", "rl.prompts_per_step=1"])
    _check(server.start(["train", str(first), f"run.dir={folder / 'first'}", *LEARN]).end())
    config = folder / "run.toml"
    start = folder / "first" / "checkpoints" / "step-000001"
    config.write_text(SETTINGS.format(model=f'path = "{start}"'))
    task = Task(config=config, whole=folder / "whole", half=folder / "half", num_steps=num_steps)
    _check(server.start(arguments(task, task.whole)).end())
    _check(server.start(arguments(task, task.half, num_steps - SAVE_EVERY)).end())
    left, right = weights_of(task.whole, num_steps), weights_of(task.half, num_steps - SAVE_EVERY)
    if all(torch.equal(left[name], right[name]) for name in left):
        raise StateError("faults are told by the weights, and the run moved none; choose another seed or task")
    return task


def undisturbed(
    folder: Path, server: Server, task: Task, name: str, overrides: Sequence[str] = ()
) -> tuple[Task, float]:
    """The task with a run of these settings as its undisturbed one, made by the first case that needs it; its seconds.

    Raises:
        ValueError: that run failed.
    """
    whole, seconds = folder / f"whole-{name}", folder / f"{name}.seconds"
    if not seconds.exists():
        started = time.monotonic()
        ended = server.start([*arguments(task, whole), *overrides]).end()
        if ended.code != 0:
            raise ValueError(f"an undisturbed run ended with {ended.code}: {ended.stderr[-200:]!r}")
        seconds.write_text(str(time.monotonic() - started))
    return replace(task, whole=whole), float(seconds.read_text())


def save_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    """A folder with a tokenizer of a few words, and of the marks of the plain template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _check(ended: Ended) -> None:
    if ended.code != 0:
        raise StateError(f"an undisturbed run ends with exit code 0, and one ended with {ended.code}: {ended.stderr}")


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a step's checkpoint; empty if there is none."""
    file = folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors"
    return load_file(file) if file.is_file() else {}
