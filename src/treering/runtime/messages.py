"""Define the messages between controller and processes of a run, and the recipe that each process builds from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import nn

from treering.config.engine import DraftOptions
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Engine, EngineStats, Request, Rollout, RolloutKey
from treering.history.draft.drafter import Drafter
from treering.rl.collect import Group, RewardResult
from treering.rl.environments.episodes import Episode, Run
from treering.rl.rehearsal import Rehearse
from treering.rl.tasks.task import Task
from treering.rl.trainer import Trained
from treering.schedule.measured_latency import MeasuredTimes
from treering.train.loop.other_models import MakeReference

Work: TypeAlias = Request | Episode
"""Work of a rollout worker: a rollout to sample, or an episode to run."""


class Recipe(Protocol):
    """Builder of a model, a task and engines, the same in every process.

    The model's weights do not matter, because each process first loads those of the run.
    """

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine of `make_engine` runs at a time; with an environment, episodes in flight."""

    def make_model(self) -> nn.Module:
        """Build the model, with any weights."""

    def make_task(self) -> Task:
        """Build prompts and rewards."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        """Make an engine with the model's current weights, which have policy version `version`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithWeights:
    """Message that may carry weights."""

    weights: Any = None
    """In a process, bytes by name (`treering.runtime.weight_store`); in the controller, a reference to them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """Message from a process that it is built and waits for work."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSettings:
    """Settings of a rollout worker."""

    recipe: Recipe
    drafts: DraftOptions | None
    """None disables drafts."""
    history: Path | None
    """Folder of the history that it drafts from."""
    rehearse: Rehearse = "off"
    """Whether idle rows sample requests of `RehearseRequests`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeginStep(WithWeights):
    """Message to an idle worker to start a step with these weights and the history in its folder."""

    step: int
    policy_version: int
    """Policy version of the weights, which rollouts record."""
    reports: bool
    """Whether to report progress regularly."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequests:
    """Message to a worker with requests of its current step."""

    requests: Sequence[Work]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RehearseRequests:
    """Message to a worker with requests of its next step, which idle rows sample early until that step begins."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GiveUp:
    """Message to a worker to abort these rollouts and return them, so that another worker can continue them."""

    keys: Sequence[RolloutKey]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportReceived:
    """Message to a worker that its progress report has arrived, so that it may send the next one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefreshHistory:
    """Message to a worker to reload the history in its folder within the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedWork:
    """Message from a worker with finished rollouts or ended runs, and counters since its previous message."""

    step: int
    ended: Sequence[Rollout | Run]
    stats: EngineStats
    busy_s: float
    """Busy seconds; with episodes, waiting time included."""
    given: Sequence[Rollout] | None = None
    """Answer to `GiveUp`: the rollouts that were still running; None if this message is not an answer."""
    progress: Mapping[RolloutKey, int] = field(default_factory=dict)
    """Tokens of the running rollouts; empty if no report is due."""
    times: MeasuredTimes = field(default_factory=MeasuredTimes)
    """Times of forward passes and weight loads since the previous message; not measured with episodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CloseEnvironment:
    """Message to a worker with episodes to end everything that its environment has started."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentClosed:
    """Answer to `CloseEnvironment`, and the last message of a process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardRequest:
    """Message to the reward worker with a finished rollout, or the rollouts of a group."""

    rollouts: Sequence[Rollout]
    """One rollout, or the group that `Collection.full_group` returned."""
    is_group: bool = False

    @property
    def key(self) -> RolloutKey:
        """Key of the first rollout, which no other open request shares."""
        return self.rollouts[0].key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardReply:
    """Message from the reward worker with the results of one request, in order."""

    key: RolloutKey
    results: Sequence[RewardResult]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSettings(WithWeights):
    """Settings of the trainer, with the weights that it starts from."""

    recipe: Recipe
    optim: OptimOptions
    options: RlOptions
    state: bytes
    """Optimiser and random state, as in `TrainerState`."""
    reference: MakeReference | None = None
    """Makes the reference model of a KL, as for `RlLoop`."""
    rank: int = 0
    num_ranks: int = 1
    """Number of processes that train together."""
    is_one_host: bool = True
    """Whether they all run on one host, where they listen only on loopback."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendezvous:
    """Meeting point of the trainer's ranks, sent from rank 0 to the controller and from there to all ranks."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """Message to the trainer to train a step, and to publish its weights unless an earlier trainer did (`is_new`)."""

    step: int
    groups: Sequence[Group]
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep(WithWeights):
    """Message from the trainer that a step is trained, with its weights if they are new."""

    step: int
    trained: Trained
    train_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchState:
    """Message to the trainer to send its state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerState:
    """Message from the trainer with optimiser and random state, as `torch.save` writes them."""

    state: bytes
