"""Starts the processes of a run: writes the weights to shared memory and sends each child its settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from treering.engine.rollout import Rollout
from treering.rl.drafting import DraftOptions
from treering.rl.options import RlOptions
from treering.runtime.account import Account
from treering.runtime.controller import Controller
from treering.runtime.ipc.messages import JudgeSettings, TrainerSettings, WorkerSettings
from treering.runtime.ipc.process import start_method
from treering.runtime.ipc.recipe import Recipe
from treering.runtime.ipc.weight_ring import BASE, WeightRing
from treering.runtime.pools.reward_client import RewardClient
from treering.runtime.pools.rollout_pool import RolloutPool
from treering.runtime.pools.trainer_client import TrainerClient
from treering.runtime.workers.trainer_worker import packed
from treering.schedule.cluster import Cluster
from treering.train.loop.optim import OptimOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blueprint:
    """What the processes of a run have in common, whenever they are started."""

    recipe: Recipe
    optim: OptimOptions
    options: RlOptions
    cluster: Cluster
    max_tokens: int
    """Of a rollout."""
    history: Path | None
    """Folder that workers draft from."""
    drafts: DraftOptions
    time_limit_s: float
    """For one reward or observation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beginning:
    """Where a run begins or goes on; the weights are those of a model beside it."""

    step: int = 0
    """Steps behind the weights."""
    label: int = 0
    """Updates behind them."""
    optimizer: Mapping[str, Any] | None = None
    """Its state; None is a new one."""
    past: tuple[Mapping[str, Any], ...] = ()
    """Earlier weights that the next steps are sampled with: each its "step", "label" and "weights" by name."""


def start_controller(
    blueprint: Blueprint,
    beginning: Beginning,
    model: nn.Module,
    *,
    account: Account,
    on_over: Callable[[Rollout], bool] | None,
) -> Controller:
    """Starts every process; `Controller.wait_until_ready` says when all are there, and what is wrong with them.

    Args:
        blueprint: the run.
        beginning: where it begins.
        model: has its weights, and gets those of each finished step by the caller.
        account: takes deaths.
        on_over: see `Controller`.
    """
    num_slots, step = blueprint.cluster.staleness + 2, beginning.step
    ring = WeightRing(model, num_slots)
    for past in beginning.past:
        ring.put(past["step"], past["weights"])
    ring.write(step, model)
    ring.write(step, model, BASE)
    context = start_method(blueprint.recipe)
    trainer = TrainerSettings(
        recipe=blueprint.recipe,
        num_slots=num_slots,
        optim=blueprint.optim,
        options=blueprint.options,
        version=step,
        state=packed(beginning.optimizer),
    )
    worker = WorkerSettings(
        recipe=blueprint.recipe, num_slots=num_slots, history=blueprint.history, drafts=blueprint.drafts
    )
    judge = JudgeSettings(recipe=blueprint.recipe, max_tokens=blueprint.max_tokens)
    return Controller(
        RolloutPool(worker, ring.memory, context, num_workers=blueprint.cluster.num_workers, account=account),
        RewardClient(judge, ring.memory, context, time_limit_s=blueprint.time_limit_s, account=account),
        TrainerClient(trainer, ring, context, model=model, account=account),
        ring,
        labels={step: beginning.label, **{past["step"]: past["label"] for past in beginning.past}},
        on_over=on_over,
    )
