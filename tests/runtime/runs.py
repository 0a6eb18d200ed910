"""Recipes, policies and pipelined loops shared by the runtime tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from tests.models import build, build_float64
from tests.rl.runs import PLAIN, SAMPLING, TinyTask, options
from tests.runtime.in_process import TestActors, die
from treering.config.engine import DraftOptions
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.rl.collect import Collection
from treering.rl.drafting import Drafting
from treering.rl.tasks.task import Task
from treering.runtime.controller import PipelineSpec
from treering.runtime.open_step import OpenStep
from treering.runtime.pipeline import PipelineLoop
from treering.runtime.process import Actors
from treering.runtime.scheduling import StepAssignment, StepScheduler
from treering.schedule.cluster import Cluster, Latency, Rebalancing, linear_latency
from treering.schedule.migration import Prices
from treering.schedule.policy import Assignment, AssignmentRequest, SchedulePolicy
from treering.schedule.predict import LengthPredictor, make_predictor
from treering.train.loop.other_models import MakeReference

MAX_BATCH = 3


class Dealt(SchedulePolicy):
    """Policy that assigns rollouts round-robin, optionally with stealing."""

    def __init__(self, stealing: Literal["off", "queued"] = "off") -> None:
        self._stealing = stealing

    @property
    def name(self) -> str:
        return f"dealt {self._stealing}"

    def assign(self, request: AssignmentRequest) -> Assignment:
        size = request.forecasts[0].num_rollouts
        workers = (np.arange(size) + request.step) % request.cluster.num_workers
        return Assignment(workers=workers, order=np.arange(size)[::-1], stealing=self._stealing)


class Lopsided(Dealt):
    """Policy that assigns all rollouts but the last one to the first worker."""

    def assign(self, request: AssignmentRequest) -> Assignment:
        size = request.forecasts[0].num_rollouts
        workers = np.zeros(size, np.int32)
        workers[-1] = request.cluster.num_workers - 1
        return Assignment(workers=workers, order=np.arange(size), stealing=self._stealing)


class Noting(Dealt):
    """Policy that records its calls in order: the kind, the step, and predicted sums or actual lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self.latencies: dict[int, Latency] = {}

    def assign(self, request: AssignmentRequest) -> Assignment:
        self.events.append(("assigned", request.step, [float(each.lengths.sum()) for each in request.forecasts]))
        self.latencies[request.step] = request.cluster.latency
        return super().assign(request)

    def learn(self, step: int, predicted: np.ndarray, lengths: np.ndarray) -> None:
        self.events.append(("learnt", step, lengths.tolist()))


GIVEN = linear_latency(step_s=20.0, row_s=0.05)


def scheduler(policy: SchedulePolicy, *, num_workers: int = 2, rebalancing: Rebalancing = "queued") -> StepScheduler:
    """Return a scheduler of five steps of two prompts in groups of two, at staleness 1."""
    return StepScheduler(
        policy,
        LengthPredictor(guess=10),
        Cluster(
            num_workers=num_workers, num_slots=4, max_tokens=12, staleness=1, latency=GIVEN, rebalancing=rebalancing
        ),
        prompt_ids=["a", "b", "c"],
        prompts_of=lambda step: np.array([[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]][step - 1]),
        group_size=2,
        num_steps=5,
    )


PRICES = Prices(20 + 0.05 * np.arange(5), 0.0, 12.0)


def open_step(
    workers: Sequence[int], *, predicted: Sequence[float] | None = None, step: int = 1, group_size: int = 4, **more: Any
) -> OpenStep:
    """Return a step of groups whose rollouts run on these workers, of two; `more` has fields of its `Assignment`."""
    size = len(workers)
    more = {"order": np.arange(size), **more}
    return OpenStep(
        StepAssignment(
            step=step,
            assignment=Assignment(workers=np.array(workers), **more),
            predicted=np.ones(size) if predicted is None else np.array(predicted, float),
        ),
        Collection(TinyTask(size // group_size).prompts, {}, group_size=group_size, sampling=SAMPLING),
        version=step - 1,
        num_workers=2,
        ratios=np.ones(1),
        prices=PRICES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """Recipe of `tests.rl.runs.sampling_loop`: its model, task and engine."""

    dtype: Literal["float32", "float64"] = "float64"
    task: Callable[[], Task] = TinyTask
    family: str = "llama"

    @property
    def max_batch(self) -> int:
        return MAX_BATCH

    def make_model(self) -> nn.Module:
        return build_float64(self.family) if self.dtype == "float64" else build(self.family)

    def make_task(self) -> Task:
        return self.task()

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        return TorchEngine(
            model, drafter, max_batch=MAX_BATCH, max_tokens=200, version=version, num_threads=1, costs="none"
        )


class DeadlyEngines(TinyRecipe):
    """Recipe that kills every worker before it has an engine."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        die()
        return super().make_engine(model, drafter, version)


def pipeline(
    recipe: TinyRecipe | None = None,
    *,
    num_steps: int,
    num_workers: int = 2,
    staleness: int = 0,
    policy: SchedulePolicy | None = None,
    history: Path | None = None,
    drafting: Drafting | None = None,
    reward_time_limit_s: float = 60.0,
    worker_time_limit_s: float = 3600.0,
    rebalancing: Rebalancing = "queued",
    num_slots: int = MAX_BATCH,
    actors: Actors | None = None,
    num_trainer_ranks: int = 1,
    reference: MakeReference | None = None,
    **changes: object,
) -> PipelineLoop:
    """Return a loop over the recipe's task, with two groups of four per step and workers in this process."""
    recipe = recipe or TinyRecipe()
    spec = PipelineSpec(
        recipe=recipe,
        optim=PLAIN,
        options=options(**changes),
        num_steps=num_steps,
        cluster=Cluster(
            num_workers=num_workers,
            num_slots=num_slots,
            max_tokens=12,
            staleness=staleness,
            latency=GIVEN,
            rebalancing=rebalancing,
        ),
        policy=policy or Dealt(),
        predictor=make_predictor(max_tokens=12),
        drafting=drafting if history is None else Drafting(DraftOptions(min_acceptance=0.01), history),
        reward_time_limit_s=reward_time_limit_s,
        worker_time_limit_s=worker_time_limit_s,
        actors=actors or TestActors(),
        num_trainer_ranks=num_trainer_ranks,
        reference=reference,
    )
    return PipelineLoop(recipe.make_model(), recipe.make_task(), spec)
