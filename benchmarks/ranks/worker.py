"""One rank of the benchmark, started by torchrun: times the steps of each way on samples of real trajectories."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.distill.bench import STUDENT as SHAPE
from benchmarks.tree.cases import build_model
from benchmarks.tree.sets import TaskSample, find_source
from treering.objectives import sft
from treering.ranks.group import RankGroup
from treering.train.loop.batches import StepBatch, make_batch
from treering.train.loop.compute import shard_model, share_batch
from treering.train.step import backward

MAX_TOKENS = 16_384


def main(options: dict[str, Any], out: Path) -> None:
    """Runs every way on every set; rank 0 writes the medians of the slowest rank's seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = build_model(shape=SHAPE)
    sharded = build_model(shape=SHAPE)
    rank_group = shard_model(sharded, "none")
    source = find_source()
    assert source is not None
    found = {}
    for name in options["sets"]:
        sample = source.sample(name, num_tokens=options["sample_tokens"])
        found[name] = measure(whole, sharded, sample, rank_group, options["num_runs"])
    if rank_group.rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(
    whole: nn.Module, sharded: nn.Module, sample: TaskSample, rank_group: RankGroup, num_runs: int
) -> dict[str, dict[str, float]]:
    """Seconds of the slowest rank by way: wall time, and CPU time of its process."""
    batch = make_batch(sample.tasks, "tree")
    shares = {"by_cost": share_batch(batch, rank_group, None).batch, "equal_counts": every_nth(batch, rank_group)}

    def step(model: nn.Module, own: StepBatch, mode: Any) -> None:
        model.zero_grad()
        backward(model, own.forests, sft(own.loss_masks), MAX_TOKENS, ranks=mode)

    ways: dict[str, Callable[[], None]] = {
        "one_rank": lambda: step(whole, batch, "alone") if rank_group.rank == 0 else None,
        "gathered_by_cost": lambda: step(sharded, shares["by_cost"], "gathered"),
        "gathered_equal_counts": lambda: step(sharded, shares["equal_counts"], "gathered"),
        "sharded_by_cost": lambda: step(sharded, shares["by_cost"], "sharded"),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in range(num_runs + 1):
        for name, way in ways.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            own = time.perf_counter() - wall, time.process_time() - cpu
            slowest = max(told[0] for told in rank_group.gather(own)), max(told[1] for told in rank_group.gather(own))
            # The first round warms up.
            if run:
                seconds[name].append(slowest)
    return {
        name: {"wall_s": median(each[0] for each in times), "cpu_s": median(each[1] for each in times)}
        for name, times in seconds.items()
    }


def every_nth(batch: StepBatch, rank_group: RankGroup) -> StepBatch:
    """Equally many forests a rank, in turn, as a plain distributed sampler deals them."""
    first = np.cumsum([0, *(forest.num_branches for forest in batch.forests)])
    own = range(rank_group.rank, len(batch.forests), rank_group.size)
    return StepBatch(
        num_tasks=batch.num_tasks,
        forests=[batch.forests[i] for i in own],
        loss_masks=[mask for i in own for mask in batch.loss_masks[first[i] : first[i + 1]]],
    )


def median(values: Any) -> float:
    listed: Sequence[float] = list(values)
    return statistics.median(listed)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
