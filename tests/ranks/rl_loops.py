"""Run by every rank, and by the test itself as one process: RL loops, saved and resumed on other numbers of ranks."""

import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tests.models import build_float64
from tests.ranks.exact import error_of
from tests.ranks.wraps import with_lora
from tests.rl.runs import PLAIN, TinyTask, eager, options, store, uneven
from treering.config.model import DistillOptions
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.ranks import prepare
from treering.ranks.group import RankGroup
from treering.ranks.sharded_state import as_whole
from treering.rl.loop import RlLoop
from treering.train.loop.compute import shard_model

NUM_STEPS, SAVED_STEP = 5, 3
MAX_TOKENS = 20
"""Cuts the trees, which have 20 to 50 tokens, where ranks need not keep step."""
VALUES = (
    *("rollout/num_rollouts", "rollout/num_turns", "rollout/num_sampled", "rollout/length_mean", "reward/mean"),
    *("train/loss", "train/grad_norm", "train/num_branch_tokens", "train/num_branches"),
)

Engine = Literal["scripted", "distilled", "drafting", "adapters"]
"""Fixed rollouts, also with a teacher, or those of an engine that reads the weights: with a history of all ranks'
rollouts, or without it and with adapters.
"""
Model = Literal["whole", "gathered", "sharded"]
"""How each rank holds the model, and how ranks keep step."""


class RlCase(NamedTuple):
    model: Model
    engine: Engine

    def __str__(self) -> str:
        return "/".join(self)


CASES = (
    RlCase("whole", "scripted"),
    RlCase("gathered", "distilled"),
    RlCase("gathered", "drafting"),
    RlCase("sharded", "drafting"),
    RlCase("sharded", "adapters"),
)
SAVED = CASES[2:4]


def cases(num_ranks: int) -> tuple[RlCase, ...]:
    """Return the cases of a number of ranks: more than two run those that are saved."""
    return CASES if num_ranks == 2 else SAVED


class Run(NamedTuple):
    """Results of a loop: final weights, and of each step its values and its rollouts with rewards."""

    weights: dict[str, Tensor]
    values: list[dict[str, float]]
    rollouts: list[list[Any]]
    num_drafted: float
    num_micro_batches: float
    num_remembered: int
    """Tokens in the history."""


def make_loop(case: RlCase, *, on_ranks: bool, seed: int = 0) -> RlLoop:
    model = build(case, seed)
    whole, rank_group = model, RankGroup()
    if on_ranks and case.model == "whole":
        rank_group = prepare(model)
    elif on_ranks:
        whole = copy.deepcopy(model)
        rank_group = shard_model(model, "none")

    def make_engine(drafter: Drafter | None, version: int) -> Any:
        if case.engine in ("scripted", "distilled"):
            return uneven(drafter, version)
        return TorchEngine(whole, drafter, max_batch=4, max_tokens=200, version=version, num_threads=1, costs="none")

    mode = None if case.model == "whole" or not on_ranks else case.model
    max_tokens = MAX_TOKENS if mode == "gathered" else "auto"
    is_distilled = case.engine == "distilled"
    # Against one process without them.
    rehearse = "on" if on_ranks and case.engine == "adapters" else "off"
    distill = DistillOptions(divergence="jsd", weight=0.5) if is_distilled else None
    return RlLoop(
        model,
        TinyTask(),
        make_engine,
        optim=PLAIN,
        options=options(
            prompts_per_step=3,
            ranks=mode or "gathered",
            max_batch_tokens=max_tokens,
            distill=distill,
            rehearse=rehearse,
        ),
        drafting=eager() if case.engine == "drafting" else None,
        # Each rank holds the whole teacher.
        teacher=build_float64(seed=2) if is_distilled else None,
        rank_group=rank_group,
        rollout_model=None if whole is model else whole,
    )


def build(case: RlCase, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return with_lora(build_float64(seed=seed)) if case.engine == "adapters" else build_float64(seed=seed)


def train(loop: RlLoop, saved_to: Path | None = None) -> Run:
    """Train to the last step, and save the loop after `SAVED_STEP` if there is a folder."""
    values, rollouts, num_drafted, num_micro_batches = [], [], 0.0, 0
    while loop.num_steps_done < NUM_STEPS:
        report = loop.step()
        found = report.values()
        num_drafted += report.engine.num_drafted
        num_micro_batches += 0 if report.update is None else report.update.num_micro_batches
        values.append({name: found[name] for name in VALUES if name in found})
        rollouts.append([[row.task_id, row.trial, row.tokens.tolist(), row.reward] for row in loop.latest])
        if saved_to is not None and report.step == SAVED_STEP:
            store(saved_to, rank_group=loop._rank_group).save(loop)
    weights = {name: as_whole(weight.detach()).clone() for name, weight in loop.model.named_parameters()}
    num_remembered = 0 if loop._drafting is None else loop._drafting.store.num_tokens
    return Run(weights, values, rollouts, num_drafted, num_micro_batches, num_remembered)


def run_alone(folder: Path) -> None:
    """Save the runs of one process by engine; the one with a history is saved to `rl-one` after `SAVED_STEP`."""
    for case in (RlCase("whole", engine) for engine in get_args(Engine)):
        run = train(make_loop(case, on_ranks=False), folder / "rl-one" if case.engine == "drafting" else None)
        torch.save(tuple(run), expected_file(folder, case))


def resume(folder: Path, case: RlCase, *, on_ranks: bool) -> RlLoop:
    """Resume a loop, which has other weights at first, from the checkpoint."""
    loop = make_loop(case, on_ranks=on_ranks, seed=1)
    assert store(folder, rank_group=loop._rank_group).restore_newest(loop) == SAVED_STEP
    return loop


def resume_alone(folder: Path, case: RlCase) -> float:
    """Return the error of the final weights if one process resumes the checkpoint of several."""
    run = train(resume(folder / f"rl-{case.model}", case, on_ranks=False))
    return error_of(run.weights, expected_of(folder, case).weights)


def run_rl_loops(folder: Path, before: Path | None, num_ranks: int, rank: int) -> dict[str, Any]:
    """Return the results of each case on every rank: errors of the final weights, and the log.

    `folder` belongs to this number of ranks and has the runs of one process; `before` belongs to fewer ranks.
    """
    found: dict[str, Any] = {}
    for case in cases(num_ranks):
        expected = expected_of(folder, case)
        run = train(make_loop(case, on_ranks=True), folder / f"rl-{case.model}" if case in SAVED else None)
        found[str(case)] = {
            "error": error_of(run.weights, expected.weights),
            "values": run.values,
            "expected": expected.values,
            "same rollouts": run.rollouts == expected.rollouts,
            "same history": run.num_remembered == expected.num_remembered,
            "num_drafted": run.num_drafted,
            "num_micro_batches": run.num_micro_batches,
        }
        if case in SAVED:
            found[str(case)] |= resumed(case, folder, before, run, expected)
    return found


def resumed(case: RlCase, folder: Path, before: Path | None, run: Run, expected: Run) -> dict[str, Any]:
    """Return the errors of runs that resume a checkpoint of these ranks, of one process, and of fewer ranks."""
    again = train(resume(folder / f"rl-{case.model}", case, on_ranks=True))
    others = [folder / "rl-one", *([] if before is None else [before / f"rl-{case.model}"])]
    return {
        "same bits": all(torch.equal(again.weights[name], weight) for name, weight in run.weights.items()),
        "resumed": [error_of(train(resume(other, case, on_ranks=True)).weights, expected.weights) for other in others],
    }


def expected_file(folder: Path, case: RlCase) -> Path:
    return folder / f"rl-{case.engine}.pt"


def expected_of(folder: Path, case: RlCase) -> Run:
    return Run(*torch.load(expected_file(folder, case)))
