"""`treering train` on a taskset of verifiers, with verifiers and with a script in its place."""

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import folder, in_process, train
from tests.cli.runs import MODEL, Call

__all__ = ["folder", "in_process", "train"]

SETTINGS = f"""{MODEL}
[task]
kind = "verifiers"
env = "{{env}}"
python = "{{python}}"
tokenizer = "{{tokenizer}}"
max_turn_tokens = 6
max_failed = 0.0
[task.renderer]
name = "default"
[sampling]
max_tokens = 300
[rl]
num_steps = 1
prompts_per_step = 2
group_size = 3
"""


def config(folder: Path, **fields: object) -> Path:
    file = folder / "my.toml"
    file.write_text(SETTINGS.format(**fields))
    return file


def test_a_taskset_trains_from_one_file_and_goes_on_where_it_stopped(
    folder: Path, train: Call, tokenizer: Path
) -> None:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {Path(__file__).with_name('fake_worker.py')}\n")
    python.chmod(0o755)
    file = config(folder, env="x", python=python, tokenizer=tokenizer)
    train(file)
    summary, _ = train(file, "rl.num_steps=3")
    assert (summary["resumed_from_step"], summary["num_steps"]) == (1, 3)


@pytest.mark.usefixtures("_tasksets")
@pytest.mark.timeout(300)
def test_verifiers_own_tasksets_train_from_one_file(folder: Path, train: Call, tokenizer: Path, python: str) -> None:
    summary, _ = train(config(folder, env="turns_taskset", python=python, tokenizer=tokenizer), "rl.num_steps=2")
    assert summary["num_steps"] == 2
