"""`treering sft` under torchrun: only one process prints and writes, with the results of a run without torchrun."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models import build
from tests.ranks.commands import torchrun, treering, weights_of
from treering.cli.sft_command import train
from treering.config import SftConfig, load

CONFIG = """
[data]
source = "generated"
max_tasks = 6

[model]
hidden_size = 32
num_layers = 2
device = "cpu"

[train]
num_steps = 3
trees_per_step = 3

[optim]
learning_rate = 1e-3

[eval]
share = 0.4
every = 2

[run]
save_every = 2
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("sft")
    (made / "run.toml").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def of_two(folder: Path) -> subprocess.CompletedProcess[str]:
    """The run of two ranks in `two`."""
    arguments = ("sft", str(folder / "run.toml"), f"run.dir={folder / 'two'}", "--json")
    return treering(*arguments)


def alone(folder: Path, *overrides: str, file: str = "run.toml") -> dict[str, Any]:
    config = load(SftConfig, folder / file, list(overrides))
    return train(config, config_dir=folder, console=Console(quiet=True))[0]


@pytest.mark.ranks
def test_two_ranks_write_the_run_of_one(folder: Path, of_two: subprocess.CompletedProcess[str]) -> None:
    assert of_two.returncode == 0, of_two.stderr[-2000:]
    # One object, although two processes ran.
    summary = json.loads(of_two.stdout)
    rows = [json.loads(line) for line in (folder / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert of_two.stderr.count("resuming the run") == 0
    one = alone(folder, f"run.dir={folder / 'one'}")
    assert summary["unique_tokens"] == one["unique_tokens"]
    assert summary["flat_tokens"] == one["flat_tokens"]
    assert summary["first_loss"] == pytest.approx(one["first_loss"], rel=1e-5)
    ours = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    for step in (0, 2, 3):
        assert rows[step]["eval/loss"] == pytest.approx(ours[step]["eval/loss"], rel=1e-5)
        assert rows[step]["eval/num_tokens"] == ours[step]["eval/num_tokens"]
    expected = weights_of(one)
    for name, weight in weights_of(summary).items():
        # Adam's first steps move each weight by the learning rate, even where a gradient is only rounding.
        assert float((weight - expected[name]).norm() / expected[name].norm()) < 1e-4, name


@pytest.mark.ranks
def test_one_process_goes_on_with_the_run_of_two(folder: Path, of_two: subprocess.CompletedProcess[str]) -> None:
    assert of_two.returncode == 0, of_two.stderr[-2000:]
    summary = alone(folder, f"run.dir={folder / 'two'}", "train.num_steps=4")
    assert summary["resumed_from_step"] == 3
    assert summary["num_steps"] == 4


@pytest.mark.ranks
def test_two_ranks_train_the_adapters_of_one_and_either_goes_on(folder: Path) -> None:
    build(vocab_size=64).save_pretrained(folder / "base")
    sequences = [
        {"task_id": i, "tokens": [5, 6, 7 + j, i], "loss_mask": [0, 1, 1, 1]} for i in range(4) for j in (0, 1)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sequences))
    (folder / "lora.toml").write_text(
        f'[model]\npath = "{folder / "base"}"\ndevice = "cpu"\n[lora]\nrank = 2\n[data]\nfiles = ["data.jsonl"]\n'
        "[train]\nnum_steps = 2\ntrees_per_step = 2\n[optim]\nlearning_rate = 1e-2\n"
    )
    for run in ("lora-two", "lora-one"):
        alone(folder, f"run.dir={folder / run}", "train.num_steps=1", file="lora.toml")
    several = treering("sft", str(folder / "lora.toml"), f"run.dir={folder / 'lora-two'}")
    assert several.returncode == 0, several.stderr[-2000:]
    assert "resuming the run" in several.stderr
    alone(folder, f"run.dir={folder / 'lora-one'}", file="lora.toml")
    one, two = (
        load_file(folder / run / "checkpoints" / "step-000002" / "adapter_model.safetensors")
        for run in ("lora-one", "lora-two")
    )
    assert one.keys() == two.keys()
    assert all(float((one[name] - two[name]).norm()) < 1e-4 * float(one[name].norm()) for name in one)
    assert alone(folder, f"run.dir={folder / 'lora-two'}", "train.num_steps=3", file="lora.toml")["num_steps"] == 3


def script_of_the_document() -> str:
    script = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "many_gpus.md").read_text(), re.DOTALL)
    assert script is not None
    return script[1]


def test_the_script_of_the_document_takes_its_own_device_and_nccl_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class PlacedError(Exception):
        pass

    class Model:
        def to(self, device: torch.device) -> None:
            calls.append(device)
            raise PlacedError

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["script.py", "model"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: Model())
    with pytest.raises(PlacedError):
        exec(script_of_the_document(), {"__name__": "__main__"})
    device = torch.device("cuda", 3)
    # NCCL needs the device to be set before the group exists.
    assert calls == [device, "cpu:gloo,cuda:nccl", device]


@pytest.mark.ranks
def test_the_script_of_the_document_trains(folder: Path) -> None:
    (folder / "script.py").write_text(script_of_the_document())
    build().save_pretrained(folder / "model")
    done = torchrun(str(folder / "script.py"), str(folder / "model"))
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+), ranks are gathered", done.stdout)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
