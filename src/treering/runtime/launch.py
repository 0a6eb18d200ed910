"""Starts the processes of a run: writes the weights to their store and sends each child its settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from treering.engine.rollout import Rollout
from treering.rl.drafting import Drafting
from treering.rl.options import RlOptions
from treering.runtime.account import Account
from treering.runtime.controller import Controller
from treering.runtime.ipc.launcher import Launcher, Recipe
from treering.runtime.ipc.messages import TrainerSettings, WorkerSettings
from treering.runtime.ipc.weight_store import BASE, WeightStore
from treering.runtime.pools.reward_client import RewardClient
from treering.runtime.pools.rollout_pool import RolloutPool
from treering.runtime.pools.trainer_client import TrainerClient
from treering.runtime.workers.trainer_worker import packed
from treering.schedule.cluster import Cluster
from treering.train.loop.optim import OptimOptions
from treering.train.loop.reference import MakeReference


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSpec:
    """The settings of a run's processes."""

    recipe: Recipe
    reference: MakeReference | None
    launcher: Launcher
    optim: OptimOptions
    options: RlOptions
    cluster: Cluster
    num_trainer_ranks: int
    drafting: Drafting | None
    """The history that workers draft from; None disables drafts."""
    time_limit_s: float
    """Of one reward."""
    worker_time_limit_s: float
    """Of the silence of a process that has work."""
    reward_name: str
    """See `Task.reward_name`."""
    runs_episodes: bool
    """Whether the workers run episodes of an environment, which bring their rewards."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartState:
    """Where a run starts or resumes; the weights are passed separately, as a model."""

    step: int = 0
    """Steps done."""
    policy_version: int = 0
    """Updates done."""
    optimizer: Mapping[str, Any] | None = None
    """The optimiser's state; None starts a new one."""
    past: tuple[Mapping[str, Any], ...] = ()
    """Earlier weights that the next steps are sampled with: "step", "policy_version" and "weights" by name."""


def start_controller(
    spec: RunSpec,
    start_state: StartState,
    model: nn.Module,
    *,
    account: Account,
    on_finished: Callable[[Rollout], bool] | None,
) -> Controller:
    """Starts every process. `Controller.wait_until_ready` waits for them and raises their errors.

    Args:
        spec: the run.
        start_state: where it starts.
        model: its weights; the caller updates them after each finished step.
        account: counts deaths.
        on_finished: see `Controller`.
    """
    num_slots, step = spec.cluster.staleness + 2, start_state.step
    store = spec.launcher.open(spec.recipe, model, num_slots)
    for past in start_state.past:
        store.put(past["step"], past["weights"])
    store.write(step, model)
    store.write(step, model, BASE)
    return Controller(
        _rollout_workers(spec, account),
        None if spec.runs_episodes else _rewards(spec, account),
        _trainer(spec, start_state, model, store, account),
        store,
        spec.launcher,
        policy_versions={
            step: start_state.policy_version,
            **{past["step"]: past["policy_version"] for past in start_state.past},
        },
        on_finished=on_finished,
    )


def _rollout_workers(spec: RunSpec, account: Account) -> RolloutPool:
    drafting = spec.drafting
    # Mapped files cost no message, and are in memory once for all workers.
    folder = drafting.folder if drafting is not None and spec.launcher.shares_host else None
    return RolloutPool(
        WorkerSettings(recipe=spec.recipe, drafts=None if drafting is None else drafting.options, history=folder),
        spec.launcher,
        num_workers=spec.cluster.num_workers,
        time_limit_s=spec.worker_time_limit_s,
        account=account,
        history=drafting if folder is None else None,
        runs_episodes=spec.runs_episodes,
    )


def _trainer(
    spec: RunSpec, start_state: StartState, model: nn.Module, store: WeightStore, account: Account
) -> TrainerClient:
    settings = TrainerSettings(
        recipe=spec.recipe,
        optim=spec.optim,
        options=spec.options,
        version=start_state.step,
        state=packed(start_state.optimizer),
        reference=spec.reference,
    )
    return TrainerClient(
        settings,
        store,
        spec.launcher,
        model=model,
        num_ranks=spec.num_trainer_ranks,
        time_limit_s=spec.worker_time_limit_s,
        account=account,
    )


def _rewards(spec: RunSpec, account: Account) -> RewardClient:
    return RewardClient(
        spec.recipe,
        spec.launcher,
        reward_name=spec.reward_name,
        time_limit_s=spec.time_limit_s,
        worker_time_limit_s=spec.worker_time_limit_s,
        account=account,
    )
