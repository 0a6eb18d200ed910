"""Run by every rank, and by the test itself as one process: SFT loops, saved and resumed on other numbers of ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models import build_float64
from tests.ranks.exact import error_of
from tests.train.loop.runs import store, tiny_tasks
from treering.ranks.group import RankGroup
from treering.ranks.state import as_whole
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.optim import OptimOptions
from treering.train.loop.ranks import shard_model
from treering.train.loop.sft import LoopOptions, SftLoop

NUM_STEPS, SAVED_STEP = 5, 3
MAX_TOKENS = 100
"""Cuts the larger ones of the trees, which have 60 to 200 tokens."""
MODES = ("gathered", "sharded")


def run_alone(folder: Path) -> dict[str, Any]:
    """The run of one process: saved to `one` after `SAVED_STEP`; its final weights, and the values of its reports."""
    loop = make_loop(RankGroup(), None)
    values = train(loop, SAVED_STEP)
    store(folder / "one").save(loop)
    values += train(loop, NUM_STEPS)
    torch.save(weights_of(loop), folder / "expected.pt")
    return {"values": values}


def resume_alone(folder: Path, mode: str) -> float:
    """The error of the final weights of one process that goes on from the checkpoint of several."""
    loop = make_loop(RankGroup(), None, seed=1)
    assert store(folder / mode).restore_newest(loop) == SAVED_STEP
    train(loop, NUM_STEPS)
    return error_of(weights_of(loop), torch.load(folder / "expected.pt"))


def run_loops(folder: Path, num_ranks: int, rank: int) -> dict[str, Any]:
    """The errors of the final weights of runs of all ranks, and what they report."""
    expected = torch.load(folder / "expected.pt")
    found: dict[str, Any] = {}
    for mode in MODES:
        loop = sharded_loop(mode)
        values = train(loop, SAVED_STEP)
        store(folder / mode, group=loop._group).save(loop)
        values += train(loop, NUM_STEPS)
        found[mode] = {"error": error_of(weights_of(loop), expected), "values": values}
        resumed = sharded_loop(mode, seed=1)
        assert store(folder / "one", group=resumed._group).restore_newest(resumed) == SAVED_STEP
        train(resumed, NUM_STEPS)
        found[mode]["resumed"] = error_of(weights_of(resumed), expected)
    return found


def sharded_loop(mode: Any, seed: int = 0) -> SftLoop:
    model = build_float64(seed=seed, tie_word_embeddings=True)
    return make_loop(shard_model(model), mode, model=model)


def make_loop(group: RankGroup, mode: Any, *, model: Any = None, seed: int = 0) -> SftLoop:
    # In step no tree may be cut.
    compute = ComputeOptions(max_tokens=None if mode == "sharded" else MAX_TOKENS, parents="keep")
    return SftLoop(
        build_float64(seed=seed, tie_word_embeddings=True) if model is None else model,
        tiny_tasks(),
        optim=OptimOptions(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1),
        options=LoopOptions(trees_per_step=2, compute=compute, ranks=mode),
        group=group,
    )


def train(loop: SftLoop, num_steps: int) -> list[dict[str, float]]:
    reports = []
    while loop.num_steps_done < num_steps:
        reports.append(loop.step().update.values())
    return reports


def weights_of(loop: SftLoop) -> dict[str, Tensor]:
    return {name: as_whole(weight.detach()).clone() for name, weight in loop.model.named_parameters()}
