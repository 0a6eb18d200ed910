"""Two ranks under torchrun: every rank has the same gradients, and they are those of the stock trainer under DDP."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trl import runs
from tests.integrations.trl.ddp_run import CASES

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saved."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "tests.integrations.trl.ddp_run", str(folder), runs.saved(), runs.saved(seed=1)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail("\n".join(line for line in done.stderr.splitlines() if "Error" in line))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_bitwise_equal_and_gradients_those_of_stock_ddp(name: str, ranks: list[dict[str, Any]]) -> None:
    for side in ("ours", "grouped"):
        first, second = (rank[f"{name}/{side}"] for rank in ranks)
        for ours, theirs in zip(first, second, strict=True):
            assert all(theirs[weight].equal(grad) for weight, grad in ours.items())
    assert runs.apart(ranks[0][f"{name}/ours"][:1], ranks[0][f"{name}/stock"][:1]) <= 1e-6
    assert runs.apart(ranks[0][f"{name}/ours"], ranks[0][f"{name}/stock"]) <= 3e-6


@pytest.mark.parametrize("name", ["grpo accumulated", "sft"])
def test_every_rank_logs_the_ratio_of_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[f"{name}/grouped/ratio"] for rank in ranks)
    assert first == second
    assert max(ratio for ratio in first if ratio is not None) > 1.2
