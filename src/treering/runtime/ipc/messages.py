"""Messages between the controller and its child processes.

`child` and `process` pickle them. Torch's own tensor sharing is not used, because its memory dies with the sender.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.history.store.prompt_index import PromptIndex
from treering.rl.collect import Group
from treering.rl.drafting import DraftOptions
from treering.rl.environments.episodes import Episode
from treering.rl.environments.run import Run
from treering.rl.options import RlOptions
from treering.rl.reward_results import RewardResult
from treering.rl.trainer import Trained
from treering.runtime.ipc.launcher import Recipe
from treering.schedule.measured_latency import PassTimes
from treering.train.loop.optim import OptimOptions
from treering.train.loop.reference import MakeReference
from treering.types import PromptId

Work: TypeAlias = Request | Episode
"""What a rollout worker is sent: rollouts to sample, or episodes to run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSettings:
    """Settings of a rollout worker."""

    recipe: Recipe
    drafts: DraftOptions | None
    """None disables drafts."""
    history: Path | None
    """Folder of the history that it drafts from; None: it is sent as `PromptHistories`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeginStep:
    """To an idle worker: start a step with these weights and the history in its folder."""

    step: int
    version: int
    """The step that produced the weights: their version in the store."""
    policy_version: int
    """The policy version of the weights, which rollouts record."""
    reports: bool
    """Whether to report progress regularly."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptHistories:
    """To a worker without a folder of the history: published indexes of prompts, before or among their requests."""

    indexes: Mapping[PromptId, PromptIndex | None]
    """None drops a prompt."""


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
    """To a worker that runs episodes: end what its environment has started, and exit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardRequest:
    """A finished rollout, or those of a group."""

    rollouts: Sequence[Rollout]
    """One, or those that `Collection.full_group` gave."""
    is_group: bool = False

    @property
    def key(self) -> RolloutKey:
        """Of its first rollout; no other open request has it."""
        return self.rollouts[0].key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardRequests:
    """To an idle reward worker: requests, to be answered in order."""

    requests: Sequence[RewardRequest]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardReply:
    """From the reward worker: the results of one request, in order, sent as soon as they are known."""

    key: RolloutKey
    results: Sequence[RewardResult]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSettings:
    """Settings of the trainer, which starts from the base of the weight store."""

    recipe: Recipe
    optim: OptimOptions
    options: RlOptions
    version: int
    """Of the base: steps done."""
    state: bytes
    """See `TrainerState`."""
    reference: MakeReference | None = None
    """Makes the reference of a KL; see `RlLoop`."""
    rank: int = 0
    num_ranks: int = 1
    """Processes that train together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendezvous:
    """From the trainer's rank 0, and from the controller to the other ranks: where it waits for them."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """To the trainer: train a step; publish its weights unless an earlier trainer did (`is_new`)."""

    step: int
    groups: Sequence[Group]
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """From the trainer: a step is trained, and its weights are published."""

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
