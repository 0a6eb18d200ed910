"""DDP, FSDP2 and DeepSpeed's ZeRO on several ranks: gradients and weights equal the stock trainer's under each."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trl import runs
from tests.integrations.trl.rank_runs import DDP, FSDP, REFUSALS, ZERO
from tests.integrations.trl.test_exactness import GRADIENTS

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

ROOT = Path(__file__).parents[3]
FOUR = ("sft tied", "grpo offloaded checkpointed")
LAUNCHES = {
    "ddp": (2, "ddp", [*DDP]),
    "fsdp": (2, "fsdp", [*(name for name in FSDP if name not in FOUR), *REFUSALS]),
    "fsdp on 4": (4, "fsdp", [*FOUR]),
    "zero": (2, "zero", [*ZERO]),
}


@pytest.fixture(scope="module", params=LAUNCHES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results that each rank of a launch saved."""
    num_ranks, kind, names = LAUNCHES[request.param]
    if kind == "zero" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: make trl-test")
    folder = tmp_path_factory.mktemp(kind)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "tests.integrations.trl.rank_runs", kind, str(folder), *names]
    # Accelerate's integration of DeepSpeed supports only devices.
    environment = {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"} if kind == "zero" else {}
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": str(kind != "zero"),
        **environment,
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail("\n".join(line for line in done.stderr.splitlines() if "Error" in line))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]


def test_gradients_and_weights_are_those_of_the_stock_trainer_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    names = [name.removesuffix("/ours") for name in ranks[0] if name.endswith("/ours")]
    assert names
    for name in names:
        for saved in ranks:
            ours, stock = saved[f"{name}/ours"], saved[f"{name}/stock"]
            assert len(stock["gradients"]) == 3, name
            assert runs.apart(ours["gradients"][:1], stock["gradients"][:1]) <= 1e-6, name
            assert runs.apart(ours["gradients"], stock["gradients"]) <= GRADIENTS, name
            assert runs.apart([ours["weights"]], [stock["weights"]]) <= 1e-6, name
            # The ratio covers all ranks, and gradients are bitwise equal on all.
            assert ours["ratio"] == ranks[0][f"{name}/ours"]["ratio"]
            assert min(ours["ratio"]) > 1, name
            assert ours["is_partitioned"] == name.endswith("3")
            for step, other in zip(ours["gradients"], ranks[0][f"{name}/ours"]["gradients"], strict=True):
                assert all(other[weight].equal(grad) for weight, grad in step.items()), name


@pytest.mark.parametrize("ranks", ["fsdp"], indirect=True)
def test_what_one_rank_gets_wrong_stops_all(ranks: list[dict[str, Any]]) -> None:
    for name, text in (
        ("wrong", "the first micro-batch's gradients on trees"),
        ("images on one rank", "rank 0 has images where rank 1 has none"),
    ):
        assert {saved[name] for saved in ranks} == {ranks[0][name]}
        assert text in ranks[0][name]
