"""Runs a module on several ranks under torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]


def on_ranks(num_ranks: int, module: str, folder: Path, *arguments: str, on_cpu: bool = True) -> list[dict[str, Any]]:
    """What each rank of `python -m tests.integrations.trl.MODULE FOLDER ARGUMENTS` saved as `rankN.pt` there.

    Args:
        num_ranks: processes.
        module: see above.
        folder: see above.
        arguments: see above.
        on_cpu: whether Accelerate is told so; its part for DeepSpeed is of devices only.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", f"tests.integrations.trl.{module}", str(folder), *arguments]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": str(on_cpu),
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail("\n".join(line for line in done.stderr.splitlines() if "Error" in line))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]
