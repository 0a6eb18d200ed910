"""Runs of the pipelined loop, put together as `treering train` does it, whose workers record the times of passes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch import nn

from benchmarks.loop.runs import LoopRun
from benchmarks.pipe.machine import Observed
from benchmarks.pipe.passes import TimedRecipe, read_passes
from benchmarks.pipe.prediction import cluster_of
from treering.cli.settings import compute_options, optim_options
from treering.cli.train.loop import make_model
from treering.cli.train.settings import make_drafting, rl_options
from treering.cli.train.task import load_task
from treering.config import RlConfig
from treering.runtime.ipc.weight_ring import WeightRing
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.latency import Latency
from treering.schedule.policies import make_policy
from treering.schedule.predict.lengths import make_predictor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipeRun:
    """One run, and the times of its processes after the first steps."""

    config: RlConfig
    run: LoopRun
    observed: Observed
    measured: Sequence[Latency | None]
    """The measured latency after 0, 1, 2, ... steps; None: nothing is measured yet."""


def run_timed(config: RlConfig, *, first: int) -> PipeRun:
    """Runs all steps of a configuration with workers; `observed` leaves the first `first` steps out."""
    config_dir = config.run.dir.parent
    config.run.dir.mkdir(parents=True)
    source = load_task(config.task, config_dir=config_dir)
    model = make_model(config, config_dir, source)
    num_steps = config.rl.num_steps
    assert num_steps is not None, "configuration sets it"
    policy = make_policy(config.schedule)
    reports, latest, ended = [], [], []
    with (
        PipelineLoop(
            model,
            source.task,
            TimedRecipe(config, config_dir, config.run.dir),
            optim=optim_options(config.optim, num_steps),
            options=rl_options(config, source, compute_options(config.model, config.rl)),
            num_steps=num_steps,
            cluster=cluster_of(config),
            policy=policy,
            predictor=make_predictor(config.lengths, max_tokens=config.sampling.max_tokens),
            drafting=make_drafting(config),
        ) as loop,
    ):
        measured = [loop.measured]
        began = time.perf_counter()
        for _ in range(num_steps):
            reports.append(loop.step())
            ended.append(time.perf_counter())
            latest.append(loop.latest)
            measured.append(loop.measured)
    run = LoopRun(reports=reports, latest=latest, ended_s=np.array(ended) - began)
    phases = [report.phases for report in reports[first:]]
    spans = [(end - phase.train_s - phase.update_s, end) for end, phase in zip(ended[first:], phases, strict=True)]
    gaps = [phase.step_s - phase.rollout_s - phase.train_s - phase.update_s for phase in phases]
    observed = Observed(
        records=read_passes(config.run.dir, since_s=ended[first - 1]),
        trained=np.array(spans),
        gap_s=0.0 if config.rl.staleness else max(0.0, sum(gaps) / len(gaps)),
        num_rollouts=sum(len(step) for step in latest[first:]),
        read_s=_read_s(model),
    )
    return PipeRun(config=config, run=run, observed=observed, measured=measured)


def _read_s(model: nn.Module) -> float:
    """Seconds in which a worker reads the weights from shared memory."""
    ring = WeightRing(model, 1)
    ring.write(0, model)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        ring.read(0, model)
        seconds.append(time.perf_counter() - started)
    ring.close()
    return median(seconds)
