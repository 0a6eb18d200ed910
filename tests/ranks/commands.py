"""Commands under torchrun, and their results."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

SCRIPT = "from treering.cli.start import main; main()"


def treering(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --no-python --nproc-per-node 2 treering ARGUMENTS` in a folder, which is on the import path."""
    return torchrun("--no-python", sys.executable, "-c", SCRIPT, *arguments, folder=folder, **variables)


def torchrun(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if folder is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


def weights_of(summary: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a summary's last checkpoint, as `AutoModelForCausalLM` loads them."""
    return dict(AutoModelForCausalLM.from_pretrained(summary["checkpoint"], dtype=torch.float32).state_dict())
