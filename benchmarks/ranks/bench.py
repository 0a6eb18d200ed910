"""Claim: two ranks train faster than one, and sharing trees by cost keeps them busier than equal counts do.

`python -m benchmarks ranks` times steps of one and two ranks of one thread each on samples of real trajectories, under
torchrun on gloo, and counts for all tasks of a set how much longer the busiest rank works than the average one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs, chosen, environment
from benchmarks.ranks.worker import MAX_TOKENS, SHAPE
from benchmarks.tree.sets import NO_DATA, TaskSource, find_source
from treering.errors import StateError
from treering.train.loop.batches import StepTasks
from treering.tree.forest import Forest
from treering.tree.plan import share_among_ranks

NOTE = "several minutes; needs the real-data folder (TREERING_DATA)"
TABLES = {"sets": ("name", "flat_tokens", "flat_tokens_per_s", "seconds", "busiest_over_mean")}

SETS = ("toolbench", "hotpotqa", "math", "text")
SAMPLE_TOKENS = 12_000
NUM_RUNS = 3
TREES_PER_STEP = 16
NUM_RANKS = (2, 4, 8)
ROOT = Path(__file__).parents[2]


def measure(
    *,
    num_runs: int | None = None,
    only: Sequence[str] = (),
    sample_tokens: int = SAMPLE_TOKENS,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Samples of `SETS` of about `sample_tokens` flat tokens; a StateError tells what ended the ranks."""
    runs = NUM_RUNS if num_runs is None else num_runs
    check_runs(runs)
    names = chosen(only, SETS)
    source = find_source()
    if source is None:
        return {"sets": [], "environment": {}, "notes": [NO_DATA]}
    on_progress(f"two ranks on {', '.join(names)}")
    seconds = _run({"sets": names, "sample_tokens": sample_tokens, "num_runs": runs})
    return {
        "sets": [_of_set(name, source, sample_tokens, seconds[name]) for name in names],
        "environment": environment(
            num_cores=os.cpu_count(),
            load_average=list(os.getloadavg()),
            threads_per_rank=1,
            backend="gloo",
            runs=runs,
            model=asdict(SHAPE),
            dtype="float32",
            max_tokens=MAX_TOKENS,
            trees_per_step=TREES_PER_STEP,
        ),
        "notes": ["wall times are those of a shared machine; CPU times are of the slowest rank's process"],
    }


def _of_set(name: str, source: TaskSource, sample_tokens: int, seconds: dict[str, Any]) -> dict[str, Any]:
    sample = source.sample(name, num_tokens=sample_tokens)
    flat = sum(branch.size for group in sample.groups for branch in group)
    return {
        "name": name,
        "num_tasks": len(sample.tasks),
        "flat_tokens": flat,
        "seconds": seconds,
        "flat_tokens_per_s": {way: flat / each["wall_s"] for way, each in seconds.items()},
        "busiest_over_mean": imbalance([Forest.from_sequences(task.sequences) for task in source.tasks(name)]),
    }


def imbalance(forests: Sequence[Forest]) -> dict[str, dict[str, float]]:
    """Tokens of the busiest rank over the mean rank's, summed over the steps of an epoch, by number of ranks.

    Example: forests of 3, 1 and 2 tokens in one step on two ranks are 5/3 in turn, and 1 by cost.
    """
    step_tasks = StepTasks(num_tasks=len(forests), trees_per_step=TREES_PER_STEP, seed=0)
    steps = [[forests[i] for i in step_tasks.tasks_of(step + 1)] for step in range(step_tasks.steps_per_epoch)]
    found = {}
    for num_ranks in NUM_RANKS:
        busiest = {"by_cost": 0.0, "equal_counts": 0.0}
        for step in steps:
            busiest["by_cost"] += max(share.cost for share in share_among_ranks(step, num_ranks))
            sizes = np.array([forest.num_tokens for forest in step])
            busiest["equal_counts"] += max(sizes[rank::num_ranks].sum() for rank in range(num_ranks))
        mean = sum(forest.num_tokens for forest in forests) / num_ranks
        found[str(num_ranks)] = {way: float(total) / mean for way, total in busiest.items()}
    return found


def _run(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", "-m", "benchmarks.ranks.worker", json.dumps(options), str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise StateError(f"the ranks failed: {done.stderr[-500:]}")
        return dict(json.loads(out.read_text()))
