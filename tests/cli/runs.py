"""Tiny runs of the commands that train, for tests of their folder."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.killing import ROOT
from treering.cli.main import main

MODEL = """
[model]
hidden_size = 16
num_layers = 1
device = "cpu"
[run]
dir = "out"
save_every = 2
"""
SFT = f"""{MODEL}
[data]
source = "generated"
max_tasks = 5
[train]
num_steps = 4
trees_per_step = 2
max_batch_tokens = 4000
[optim]
learning_rate = 1e-2
"""
TRAIN = f"""{MODEL}
[task]
max_prompts = 4
[sampling]
max_tokens = 6
[rl]
num_steps = 4
prompts_per_step = 2
group_size = 3
[engine]
num_threads = 1
"""
CONFIGS = {"sft": SFT, "train": TRAIN}


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Return the exit code of `treering WORDS`."""
    monkeypatch.setattr(sys, "argv", ["treering", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def take_signals() -> None:
    """Reset signals: a program started in the background or by nohup inherits that some are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def started(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start `treering WORDS` in its own process, in a folder that it imports from, with more environment variables."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, folder)))
    return subprocess.Popen(
        [sys.executable, "-c", "from treering.cli.start import main; main()", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_signals,
    )


Call = Callable[..., tuple[dict[str, Any], str]]


def trainer(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function of a configuration and overrides that trains and returns the JSON summary and stderr."""

    def call(path: Path, *overrides: str) -> tuple[dict[str, Any], str]:
        run(config_path=path, overrides=list(overrides), json_output=True)
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


class Commands:
    """Commands in the current folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        for name, text in CONFIGS.items():
            (folder / f"{name}.toml").write_text(text)

    def run(self, name: str, *overrides: str) -> tuple[int, str]:
        """Run `treering NAME NAME.toml OVERRIDES`; return exit code and stderr."""
        code = call(self._monkeypatch, name, f"{name}.toml", *overrides, "--json")
        return code, self._capfd.readouterr().err

    def done(self, name: str, *overrides: str) -> str:
        """Run a command that must succeed; return its stderr."""
        code, err = self.run(name, *overrides)
        assert code == 0, err
        return err

    def refused(self, name: str, *overrides: str) -> str:
        """Run a command that must fail; return its one line of stderr."""
        code, err = self.run(name, *overrides)
        lines = [line for line in err.splitlines() if line.startswith("treering: ")]
        assert code == 2, err
        assert len(lines) == 1, err
        assert err.endswith(f"{lines[0]}\n")
        assert "Traceback" not in err
        return lines[0]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def assert_same_weights(left: Path, right: Path, step: int) -> None:
    ours, theirs = weights(left, step), weights(right, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return rows(run_dir / "metrics.jsonl")


def weights_of(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint as Hugging Face loads them."""
    return AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()  # type: ignore[no-any-return]


def is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two runs, given by their summaries, have bitwise the same weights."""
    ours, theirs = weights_of(left["checkpoint"]), weights_of(right["checkpoint"])
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
