"""Short runs of the demo's policy and task by different loops, from one start and with the same seeds."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.progress import OnProgress
from treering.cli.demo import ENOUGH, MAX_NUMBER, MAX_ROLLOUT_TOKENS, demo_task, warm_start
from treering.cli.train import make_loop, make_model
from treering.cli.train_task import load_task
from treering.config import RlConfig
from treering.data import Trajectory
from treering.rl.step_report import RlStepReport
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.cluster import Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How much a run samples and trains."""

    num_prompts: int = 64
    prompts_per_step: int = 32
    group_size: int = 16
    num_steps: int = 14
    max_batch: int = 16
    """Rollouts that an engine runs at one time."""
    max_tokens: int = MAX_ROLLOUT_TOKENS
    """Most tokens of a rollout."""
    num_train_threads: int | None = None
    """None is as many as torch takes."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that show every prompt once; they are not timed, because no prompt has history yet."""
        return -(-self.num_prompts // self.prompts_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The policy that all runs begin with."""

    folder: Path
    num_steps: int
    """Supervised steps that it took."""
    accuracy: float
    """Share of right answers to prompts that it was not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to run the loop; the defaults are the plain one."""

    name: str
    layout: Literal["packed", "tree"] = "packed"
    drafts: Literal["off", "on"] = "off"
    workers: int = 0
    schedule: str = "fifo"
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopRun:
    """The steps of a run.

    Example: steps that ended at 2, 3 and 5 s took 1.5 s each from the second one on.
    """

    reports: Sequence[RlStepReport]
    latest: Sequence[Sequence[Trajectory]]
    """Rollouts of each step, prompts in order, then samples."""
    ended_s: NDArray[np.float64]
    """float64 [K]: when each step ended, on the machine's clock."""
    measured: Sequence[Latency | None]
    """What a loop with workers had measured of them after 0, 1, 2, ... steps; None: nothing yet."""

    def step_s(self, first: int) -> float:
        """Seconds of a step, the mean after the first `first`: overlapping steps end late and early in turn."""
        return float(self.ended_s[-1] - self.ended_s[first - 1]) / (self.ended_s.size - first)

    def lengths(self) -> list[NDArray[np.int64]]:
        """int64 [R] for each step: sampled tokens of its rollouts."""
        return [np.array([_sampled(each).size for each in step], np.int64) for step in self.latest]

    def tokens(self) -> list[list[list[int]]]:
        """Sampled tokens of all rollouts, step by step."""
        return [[_sampled(each).tolist() for each in step] for step in self.latest]


def make_start(folder: Path, num_prompts: int, *, seed: int, on_progress: OnProgress, enough: float = ENOUGH) -> Start:
    """Trains the demo's policy as the demo does, and saves it into a new folder."""
    start = warm_start(
        demo_task(num_prompts),
        seed=seed,
        enough=enough,
        on_step=lambda step, accuracy: on_progress(f"warm start: step {step}, {accuracy:.0%} right"),
    )
    start.model.save_pretrained(folder)
    return Start(folder=folder, num_steps=start.num_steps, accuracy=start.accuracy)


def configuration(
    start: Start, size: RunSize, variant: Variant, *, seed: int, run_dir: Path, device: str = "cpu"
) -> RlConfig:
    """The configuration that `treering train` would read for this run."""
    sections: dict[str, Any] = {
        "model": {"path": start.folder.absolute(), "device": device},
        "task": {"kind": "sums", "max_prompts": size.num_prompts, "max_number": MAX_NUMBER},
        "sampling": {"max_tokens": size.max_tokens},
        "rl": {
            "num_steps": size.num_steps,
            "prompts_per_step": size.prompts_per_step,
            "group_size": size.group_size,
            "layout": variant.layout,
            "num_train_threads": size.num_train_threads,
            "staleness": variant.staleness,
            "seed": seed,
        },
        "engine": {"max_batch": size.max_batch, "num_threads": 1},
        "history": {"drafts": variant.drafts, "min_acceptance": 0.4},
        "optim": {"learning_rate": 2e-4, "betas": (0.9, 0.99)},
        "run": {"dir": run_dir},
        "runtime": {"workers": variant.workers},
    }
    return RlConfig(**sections, schedule=variant.schedule)


def run_loop(config: RlConfig) -> LoopRun:
    """Runs all steps of a configuration, and writes nothing but the history that workers read."""
    config_dir = config.run.dir.parent
    source = load_task(config.task, config_dir=config_dir)
    model = make_model(config, config_dir, source)

    num_steps = config.rl.num_steps
    assert num_steps is not None, "configuration sets it"
    loop = make_loop(config, config_dir, source, model, num_steps=num_steps)
    reports, latest, ended, measured = [], [], [], list[Latency | None]()
    with ExitStack() as stack:
        if isinstance(loop, PipelineLoop):
            stack.enter_context(loop)
        for _ in range(num_steps):
            measured.append(loop.measured if isinstance(loop, PipelineLoop) else None)
            reports.append(loop.step())
            ended.append(time.perf_counter())
            latest.append(loop.latest)
    return LoopRun(reports=reports, latest=latest, ended_s=np.array(ended), measured=measured)


def count_differing(run: LoopRun, other: LoopRun) -> int:
    """Rollouts whose tokens differ from those at the same index in another run."""
    return sum(
        mine != theirs
        for own_step, other_step in zip(run.tokens(), other.tokens(), strict=True)
        for mine, theirs in zip(own_step, other_step, strict=True)
    )


def _sampled(trajectory: Trajectory) -> NDArray[np.int32]:
    assert trajectory.tokens is not None, "rollouts have tokens"
    assert trajectory.loss_mask is not None, "and a mask"
    return trajectory.tokens[trajectory.loss_mask]
