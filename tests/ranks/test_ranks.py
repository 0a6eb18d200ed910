"""Ranks under torchrun: every case is exact on 2 and on 4 of them, and inexact ones are refused by name on each.

One start per number of ranks runs all cases, because a start costs seconds. `make ranks-test` runs this file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import rl_loops
from tests.ranks.exact import cases

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
NUM_RANKS = (2, 4)
EXACT = 1e-10
SAME_WEIGHTS = 1e-8
START_TIMEOUT_S = 500

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of every rank, by number of ranks."""
    found: Found = {}
    before: Path | None = None
    for size in NUM_RANKS:
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        found[size] = run_under_torchrun(size, folder, before)
        before = folder
    return found


def run_under_torchrun(num_ranks: int, folder: Path, before: Path | None) -> list[dict[str, Any]]:
    """Run every case; `before` is the folder of fewer ranks, whose checkpoints are resumed too."""
    rl_loops.run_alone(folder)
    done = torchrun(num_ranks, "tests.ranks.worker", str(folder), "-" if before is None else str(before))
    files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    facts = [json.loads(file.read_text()) if file.exists() else {"failure": done.stderr[-2000:]} for file in files]
    failures = [fact["failure"] for fact in facts if "failure" in fact]
    if failures:
        pytest.fail("\n".join(failures))
    facts[0]["folder"] = str(folder)
    return facts


def torchrun(num_ranks: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", module, *arguments]
    # A library with a planted fault comes first.
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S)


@pytest.mark.parametrize(
    ("size", "name"), [(size, str(case)) for size in NUM_RANKS for case in cases(size)], ids=lambda value: str(value)
)
def test_gradients_are_those_of_one_process(size: int, name: str, found: Found) -> None:
    assert max(rank["exact"][name] for rank in found[size]) <= EXACT


@pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size in NUM_RANKS for case in rl_loops.cases(size)], ids=str
)
def test_ranks_that_share_prompts_train_and_log_as_one(case: rl_loops.RlCase, size: int, found: Found) -> None:
    for rank in found[size]:
        run = rank["rl_loops"][str(case)]
        assert run["error"] <= SAME_WEIGHTS
        assert run["same rollouts"]
        assert run["same history"]
        assert (run["num_drafted"] > 0) == (case.engine == "drafting")
        # Larger trees are cut where ranks need not keep step.
        assert (run["num_micro_batches"] > size * rl_loops.NUM_STEPS) == (case.model == "gathered")
        for own, alone in zip(run["values"], run["expected"], strict=True):
            assert own == pytest.approx(alone, rel=SAME_WEIGHTS, abs=SAME_WEIGHTS)


@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("case", rl_loops.SAVED, ids=str)
def test_an_rl_run_goes_on_with_another_number_of_ranks(case: rl_loops.RlCase, size: int, found: Found) -> None:
    for rank in found[size]:
        assert len(rank["rl_loops"][str(case)]["resumed"]) == 1 + NUM_RANKS.index(size)
        assert max(rank["rl_loops"][str(case)]["resumed"]) <= SAME_WEIGHTS
    assert rl_loops.resume_alone(Path(found[size][0]["folder"]), case) <= SAME_WEIGHTS


@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("case", rl_loops.SAVED, ids=str)
def test_an_rl_run_goes_on_bitwise_with_as_many_ranks(case: rl_loops.RlCase, size: int, found: Found) -> None:
    assert all(rank["rl_loops"][str(case)]["same bits"] for rank in found[size])


@pytest.mark.parametrize("mode", ["sharded", "gathered"])
def test_a_bfloat16_policy_sums_in_float32(mode: str, found: Found) -> None:
    # Rounding of one float32 sum: at most one unit in the last place for each rank that is added.
    assert found[2][0]["bfloat16"][mode] <= 2 * 2**-23


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_ranks_that_hold_a_model_whole_share_its_images(family: str, found: Found) -> None:
    assert all(rank["images"][family] <= 1e-6 for rank in found[2])


GUARDS = {
    "not prepared": ("StateError", "call treering.ranks.prepare"),
    "DDP not prepared": ("StateError", "call treering.ranks.prepare"),
    "module of DDP not prepared": ("StateError", "call treering.ranks.prepare"),
    "averaging kept": ("StateError", "a unit divides them by the number of ranks"),
    "a factor of its own": ("StateError", "a unit divides them by 2.0"),
    "tied apart": ("UnsupportedError", "tied embeddings are one weight"),
    "all are cut": ("ConfigError", "max_tokens=7 cuts 1 of the trees; set ranks=.gathered"),
    "one is cut": ("StateError ConfigError", "max_tokens=9 cuts 1 of the trees; set ranks=.gathered"),
    "sequences are apart": ("ConfigError", "max_tokens=6 puts the branches of a pair into two micro-batches; set"),
    "other objective": ("StateError", "rank 0 has sft .* where rank 1 has dapo"),
    "other mode": ("StateError", "rank 0 has .*gathered.* where rank 1 has .*sharded"),
    "whole but sharded": ("ConfigError", 'use ranks="gathered"'),
    "sharded but alone": ("ConfigError", "trained by all ranks together"),
    "unknown mode": ("ConfigError", "ranks must be one of sharded, gathered, alone"),
    "FSDP1": ("UnsupportedError", "FSDP1.*fully_shard"),
    "FSDP1 prepared": ("UnsupportedError", "FSDP1.*fully_shard"),
    "tensor parallel": ("UnsupportedError", "tensor parallelism.*fully_shard"),
    "tensor parallel prepared": ("UnsupportedError", "tensor parallelism.*fully_shard"),
    "context parallel": ("UnsupportedError", "context parallelism.*fully_shard"),
    "DeepSpeed": ("UnsupportedError", "DeepSpeed.*fully_shard"),
    "submesh": ("ConfigError", "pass the mesh that fully_shard got"),
    "sharded value head": ("UnsupportedError", "a value head must be whole on every rank"),
    "sharded teacher": ("UnsupportedError", "a teacher needs whole weights"),
    "scored by a sharded teacher": ("UnsupportedError", "a teacher needs whole weights"),
    "sharded images": ("UnsupportedError", r"vision part runs outside.*or by treering\.patch"),
    "sharded engine": ("UnsupportedError", "the engine needs whole weights"),
    "forward of DDP": ("UnsupportedError", "treering.ranks.prepare"),
    "forward under ZeRO-3": ("UnsupportedError", "ZeRO-3 has partitioned the weights.*treering.patch"),
}
WORKS = (
    *("patch under ZeRO-3", "alone", "forward", "a large tree in step", "goes on after an error"),
    "a value head of the model",
)


@pytest.mark.parametrize("name", GUARDS)
def test_what_would_be_wrong_is_one_error_on_every_rank(name: str, found: Found) -> None:
    kind, pattern = GUARDS[name]
    for rank in found[2]:
        assert rank["guards"][name] is not None, "nothing was raised"
        assert rank["guards"][name][0] in kind.split()
        assert re.search(pattern, rank["guards"][name][1])


@pytest.mark.parametrize("name", ["one refuses", "one teacher differs"])
def test_a_rank_that_refuses_its_share_stops_the_others_by_name(name: str, found: Found) -> None:
    other, own = (rank["guards"][name] for rank in found[2])
    assert own[0] == "InputError"
    assert other == ["StateError", f"ranks train one batch together, and rank 1 refuses its share: {own[1]}"]


@pytest.mark.parametrize("name", WORKS)
def test_what_is_allowed_works(name: str, found: Found) -> None:
    assert [rank["guards"][name] for rank in found[2]] == [None, None]
