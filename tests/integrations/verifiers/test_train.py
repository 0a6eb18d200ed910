"""`treering train` on a taskset of verifiers, with verifiers and with a script in its place."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from treering.cli.commands import app

SETTINGS = """
[task]
kind = "verifiers"
env = "{env}"
python = "{python}"
tokenizer = "{tokenizer}"
max_turn_tokens = 6
max_failed = 0.0
[task.renderer]
name = "default"
[model]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_size = 16
intermediate_size = 64
[sampling]
max_tokens = 300
[rl]
num_steps = {num_steps}
prompts_per_step = 2
group_size = 3
[run]
dir = "{folder}"
"""


def train(tmp_path: Path, num_steps: int, **fields: object) -> list[dict[str, float]]:
    """The metrics of a run of so many steps, which goes on where its folder has one."""
    file = tmp_path / "my.toml"
    file.write_text(SETTINGS.format(num_steps=num_steps, folder=tmp_path / "run", **fields))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_taskset_trains_from_one_file_and_goes_on_where_it_stopped(tmp_path: Path, tokenizer: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {Path(__file__).with_name('fake_worker.py')}\n")
    python.chmod(0o755)
    assert len(train(tmp_path, 1, env="x", python=python, tokenizer=tokenizer)) == 1
    lines = train(tmp_path, 3, env="x", python=python, tokenizer=tokenizer)
    assert len(lines) == 3


@pytest.mark.usefixtures("_tasksets")
@pytest.mark.timeout(300)
def test_verifiers_own_tasksets_train_from_one_file(tmp_path: Path, tokenizer: Path, python: str) -> None:
    lines = train(tmp_path, 2, env="turns_taskset", python=python, tokenizer=tokenizer)
    assert len(lines) == 2
