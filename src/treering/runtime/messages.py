"""What the controller and the processes of a run send each other, and what each process builds for itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import nn

from treering.config.engine import DraftOptions
from treering.config.loop import RlOptions
from treering.config.optim import OptimOptions
from treering.engine.protocol import Engine, EngineStats, Request, Rollout, RolloutKey
from treering.history.draft.drafter import Drafter
from treering.rl.collect import Group, RewardResult
from treering.rl.environments.episodes import Episode, Run
from treering.rl.tasks.task import Task
from treering.rl.trainer import Trained
from treering.schedule.measured_latency import PassTimes
from treering.train.loop.reference import MakeReference

Work: TypeAlias = Request | Episode
"""What a rollout worker is sent: rollouts to sample, or episodes to run."""


class Recipe(Protocol):
    """Builds a model, a task and engines, the same in every process.

    The weights of the model do not matter: each process loads those of the run first.
    """

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine of `make_engine` runs at a time; of an environment, episodes in flight."""

    def make_model(self) -> nn.Module:
        """Build the model, with any weights."""

    def make_task(self) -> Task:
        """Build prompts and rewards."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        """Make an engine with the model's current weights, which have this policy version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithWeights:
    """A message that may carry weights."""

    weights: Any = None
    """In a process: bytes by name, see `treering.runtime.weights`. In the controller: a reference to them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """From a process: it has built what it needs, and waits for work."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSettings:
    """Settings of a rollout worker."""

    recipe: Recipe
    drafts: DraftOptions | None
    """None disables drafts."""
    history: Path | None
    """Folder of the history that it drafts from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeginStep(WithWeights):
    """To an idle worker: start a step with these weights and the history in its folder."""

    step: int
    policy_version: int
    """The policy version of the weights, which rollouts record."""
    reports: bool
    """Whether to report progress regularly."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequests:
    """To a worker: requests of its current step."""

    requests: Sequence[Work]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GiveUp:
    """To a worker: abort these rollouts and return them, for another worker to continue."""

    keys: Sequence[RolloutKey]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportReceived:
    """To a worker: its progress report has arrived, and it may send the next one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefreshHistory:
    """To a worker: reload the history in its folder within the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedWork:
    """From a worker: finished rollouts or ended runs, and counters since its previous message."""

    step: int
    ended: Sequence[Rollout | Run]
    stats: EngineStats
    busy_s: float
    """With episodes, those that wait included."""
    given: Sequence[Rollout] | None = None
    """The answer to `GiveUp`: those that were still running; None if this is no answer."""
    progress: Mapping[RolloutKey, int] = field(default_factory=dict)
    """Tokens of the running rollouts; empty if no report is due."""
    times: PassTimes = field(default_factory=PassTimes)
    """Of forward passes and weight loads since the previous message; not measured with episodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CloseEnvironment:
    """To a worker that runs episodes: end what its environment has started."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentClosed:
    """The answer to `CloseEnvironment`, the last message of a process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardRequest:
    """To the reward worker: a finished rollout, or those of a group."""

    rollouts: Sequence[Rollout]
    """One, or those that `Collection.full_group` gave."""
    is_group: bool = False

    @property
    def key(self) -> RolloutKey:
        """Of its first rollout; no other open request has it."""
        return self.rollouts[0].key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardReply:
    """From the reward worker: the results of one request, in order."""

    key: RolloutKey
    results: Sequence[RewardResult]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSettings(WithWeights):
    """Settings of the trainer, with the weights that it starts from."""

    recipe: Recipe
    optim: OptimOptions
    options: RlOptions
    state: bytes
    """See `TrainerState`."""
    reference: MakeReference | None = None
    """Makes the reference of a KL; see `RlLoop`."""
    rank: int = 0
    num_ranks: int = 1
    """Processes that train together."""
    is_one_host: bool = True
    """Whether they all run on one host, where they listen on loopback alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendezvous:
    """From the trainer's rank 0, and from the controller to all ranks: where they meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """To the trainer: train a step, and publish its weights unless an earlier trainer did (`is_new`)."""

    step: int
    groups: Sequence[Group]
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep(WithWeights):
    """From the trainer: a step is trained; its weights, if they are new."""

    step: int
    trained: Trained
    train_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchState:
    """To the trainer: send the state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerState:
    """From the trainer: optimiser and random state, as `torch.save` writes them."""

    state: bytes
