"""Messages between the controller and its child processes.

`child` and `process` pickle them. Torch's own tensor sharing is not used, because its memory dies with the sender.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.collect import Group
from treering.rl.drafting import DraftOptions
from treering.rl.judging import RewardResult
from treering.rl.options import RlOptions
from treering.rl.trainer import Trained
from treering.runtime.ipc.recipe import Recipe
from treering.schedule.measured_latency import PassTimes
from treering.train.loop.optim import OptimOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSettings:
    """What a rollout worker is told when it starts."""

    recipe: Recipe
    num_slots: int
    """Of the ring of weights."""
    history: Path | None
    """Folder of the history that it drafts from; None drafts nothing."""
    drafts: DraftOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begin:
    """To a worker that has nothing to do: go on with the weights of a version, and the history as it is now."""

    step: int
    version: int
    """Steps behind the weights: where the ring has them."""
    label: int
    """Updates behind the weights: what rollouts record."""
    reports: bool
    """Whether to say from time to time how far rollouts are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """To a worker: requests of the step that it has begun."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Give:
    """To a worker: take these rollouts out, for another one to go on with."""

    keys: Sequence[RolloutKey]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heard:
    """To a worker: its report has arrived, and the next one may come."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refresh:
    """To a worker: the history has grown within the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """From a worker: rollouts whose turn has ended, and what it took since the message before."""

    step: int
    rollouts: Sequence[Rollout]
    given: Sequence[Rollout] | None
    """The answer to a `Give`: what was still running; None where there was none."""
    progress: Mapping[RolloutKey, int]
    """Tokens of what runs; empty where no report is due."""
    stats: EngineStats
    busy_s: float
    times: PassTimes
    """Of passes and loads since the message before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgeSettings:
    """What a judge is told when it starts."""

    recipe: Recipe
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A rollout whose turn has ended."""

    rollout: Rollout
    is_last_turn: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cases:
    """To an idle judge: what to judge, one after another."""

    cases: Sequence[Case]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """From the judge, for each case as soon as it has it."""

    key: RolloutKey
    verdict: RewardResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSettings:
    """What a trainer is told when it starts; its weights are those of the ring's base."""

    recipe: Recipe
    num_slots: int
    """Of the ring of weights."""
    optim: OptimOptions
    options: RlOptions
    version: int
    """Of the base: steps behind it."""
    state: bytes
    """As `Saved` has it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Train:
    """To the trainer: train a step, and put its weights into the ring unless they are there from an earlier trainer."""

    step: int
    groups: Sequence[Group]
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """From the trainer: a step is trained, and its weights lie in the ring."""

    step: int
    trained: Trained
    train_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Save:
    """To the trainer: send your state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """From the trainer: optimiser and random state, as `torch.save` writes them."""

    state: bytes
