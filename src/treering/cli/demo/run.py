"""The two runs of the demo: one policy trained by two loops from the same start and seeds, taking turns step by step.

Because they take turns, other load on the machine slows both alike. The plain loop is ours without drafts and trees:
the same engine and shared prompts, sequences packed without padding.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel

from treering.cli.demo.policy import MAX_NUMBER, MAX_ROLLOUT_TOKENS
from treering.cli.toml import pair, section
from treering.cli.train.run import OpenRun, open_training
from treering.config import RlConfig, load
from treering.data import Trajectory
from treering.engine.torch_engine import TorchEngine
from treering.files.writing import writing
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of
from treering.rl.step_report import RlStepReport
from treering.tree.forest import Forest
from treering.tree.stats import Work, flat_work, tree_work

Side = Literal["plain", "treering"]
SIDES: tuple[Side, Side] = ("plain", "treering")
START_FOLDER = "start"
_NO_WORK = Work(num_tokens=0, num_pairs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """How much is trained."""

    num_prompts: int = 128
    prompts_per_step: int = 32
    group_size: int = 16
    num_epochs: int = 5
    max_batch: int = 8
    """Rollouts that run at one time, on both sides."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts."""
        return -(-self.num_prompts // self.prompts_per_step)

    @property
    def num_steps(self) -> int:
        """Steps of a run."""
        return self.num_epochs * self.steps_per_epoch


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What both runs did, step by step."""

    reports: dict[Side, list[RlStepReport]] = field(default_factory=lambda: {side: [] for side in SIDES})
    flat: Work = _NO_WORK
    """Work of the plain side's training."""
    tree: Work = _NO_WORK
    """Work of the same training as trees."""
    first_difference: int | None = None
    """First step at which any token of the two runs differs; None if none does."""


def compare(
    out: Path, size: DemoSize, threads: Mapping[Side, int], *, seed: int, on_step: Callable[[Comparison], None]
) -> Comparison:
    """Trains the model of `out/start` in `out/plain` and `out/treering`; `threads` are for sampling."""
    result = Comparison()
    with ExitStack() as stack:
        runs: dict[Side, OpenRun] = {
            side: stack.enter_context(
                open_training(
                    load(RlConfig, write_config(out, size, side=side, num_threads=threads[side], seed=seed)),
                    config_dir=out,
                    console=Console(quiet=True),
                )
            )
            for side in SIDES
        }
        for plain, ours in zip(runs["plain"].steps, runs["treering"].steps, strict=True):
            result.reports["plain"].append(plain)
            result.reports["treering"].append(ours)
            latest = {side: run.loop.latest for side, run in runs.items()}
            lengths = [forest.branch_length for forest in _forests(latest["plain"])]
            result.flat += flat_work(np.concatenate([np.zeros(0, np.int64), *lengths]))
            result.tree += tree_work(_forests(latest["treering"]))
            if result.first_difference is None and _tokens(latest["plain"]) != _tokens(latest["treering"]):
                result.first_difference = ours.step
            on_step(result)
    return result


def write_config(out: Path, size: DemoSize, *, side: Side, num_threads: int, seed: int) -> Path:
    """Writes the configuration of one side for `treering train`; sides differ in two settings and in threads."""
    ours = side == "treering"
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": START_FOLDER},
        "task": {"kind": "sums", "num_prompts": size.num_prompts, "max_number": MAX_NUMBER, "seed": seed},
        "sampling": {"max_tokens": MAX_ROLLOUT_TOKENS},
        "rl": {
            "num_epochs": size.num_epochs,
            "prompts_per_step": size.prompts_per_step,
            "group_size": size.group_size,
            "layout": "tree" if ours else "packed",
            "seed": seed,
        },
        "engine": {"max_batch": size.max_batch, "num_threads": num_threads, "seed": seed},
        "history": {"drafts": "on", "verify_costs": "measured"} if ours else {"drafts": "off"},
        "optim": {"learning_rate": 2e-4, "betas": [0.9, 0.99]},
        "run": {"dir": str(out / side), "save_every": size.steps_per_epoch},
    }
    file = out / f"{side}.toml"
    with writing(file):
        text = [section(name, [pair(*each) for each in settings.items()]) for name, settings in sections.items()]
        file.write_text("".join(text), encoding="utf-8")
    return file


def _forests(trajectories: list[Trajectory]) -> list[Forest]:
    """The trees that a step trained: one per group whose rewards differ."""
    groups: dict[object, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task_id, []).append(trajectory)
    return [
        Forest.from_sequences([_ids(member) for member in group])
        for group in groups.values()
        if any(member.advantage for member in group)
    ]


def _ids(trajectory: Trajectory) -> Any:
    assert trajectory.tokens is not None
    return trajectory.tokens


def _tokens(trajectories: list[Trajectory]) -> list[list[int]]:
    return [_ids(trajectory).tolist() for trajectory in trajectories]


_TOKENS_PER_ROW = 8
"""In a typical pass with drafts."""


def best_threads(model: PreTrainedModel, max_batch: int) -> dict[Side, int]:
    """One thread or torch's number of threads per side, by passes of one token per row and of eight.

    Example: where 8 tokens take 0.35 ms with one thread and 0.40 ms with two, and 64 tokens 1.5 ms and 1.1 ms, the
    plain side gets one thread and the other one two.
    """
    counts = sorted({1, torch.get_num_threads()})
    return fastest(
        {count: TorchEngine(model, max_batch=max_batch, num_threads=count).measure_costs() for count in counts},
        max_batch,
    )


def fastest(costs: dict[int, VerifyCosts], max_batch: int) -> dict[Side, int]:
    """The best number of threads for each side, given the costs of each; ties go to the first."""

    def best(num_tokens: float) -> int:
        return min(costs, key=lambda count: seconds_of(num_tokens, costs[count].num_tokens, costs[count].seconds))

    return {"plain": best(max_batch), "treering": best(_TOKENS_PER_ROW * max_batch)}
