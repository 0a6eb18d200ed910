"""A worker's engine, with the weights and the history of its step: files of the host, or what the controller sends."""

from collections.abc import Mapping

from torch import nn

from treering.engine.protocol import Engine, EngineStats
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.reader import HistoryReader
from treering.history.store.snapshot import Snapshot
from treering.rl.drafting import make_drafter
from treering.runtime.ipc.messages import BeginStep, PromptHistories, RefreshHistory, WorkerSettings
from treering.runtime.ipc.weight_store import ProcessWeights
from treering.types import PromptId


class ReceivedHistory:
    """The indexes that the controller has sent, a `SnapshotSource`; it decides which stay (`SentHistory`).

    Example: after `take({"q": index})` and `take({"q": None})` the snapshot is empty; the one in between is unchanged.
    """

    def __init__(self) -> None:
        """Nothing has been sent."""
        self._snapshot = Snapshot()

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The indexes by prompt; a snapshot never changes."""
        return self._snapshot

    def take(self, indexes: Mapping[PromptId, PromptIndex | None]) -> None:
        """Adds or replaces the indexes of some prompts; None drops one that was taken before."""
        self._snapshot = self._snapshot.changed(indexes)


class StepEngine:
    """The engine of a rollout worker; every step begins with weights and history as the controller says.

    Example: after `begin` of a step with policy version 3, `engine.version` is 3.
    """

    def __init__(self, settings: WorkerSettings, model: nn.Module, weights: ProcessWeights) -> None:
        """Makes no engine yet; `weights` are read into the model.

        The history is read in a folder of the host, or taken as it is sent.
        """
        self.step = 0
        """Number of the present step."""
        self._recipe = settings.recipe
        self._model = model
        self._weights = weights
        self._history = ReceivedHistory() if settings.history is None else HistoryReader(settings.history)
        self._drafter = None if settings.drafts is None else make_drafter(self._history, settings.drafts)
        self._engine: Engine | None = None
        self._before = EngineStats()

    @property
    def has_engine(self) -> bool:
        """Whether a step has begun."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine of the present step."""
        assert self._engine is not None, "a step begins before its requests come"
        return self._engine

    def begin(self, message: BeginStep) -> bool:
        """Begins a step with an idle engine; returns whether it is a new one."""
        self.step = message.step
        if self._drafter is not None:
            self._refresh()
            # The drafter's measurements are those of a step.
            self._drafter.load_state(self._drafter.state())
            if self._engine is not None:
                self._engine.refresh_history()
        if self._engine is not None and self._engine.version == message.policy_version:
            # The weights are the same, but an engine's caches of the previous step would change rounding.
            self._engine = None
        else:
            self._weights.read(message.version, self._model)
        if self._engine is not None:
            self._engine.update_weights(message.policy_version)
            return False
        self._engine = self._recipe.make_engine(self._model, self._drafter, message.policy_version)
        self._before = self._engine.stats
        return True

    def take_stats(self) -> EngineStats:
        """What the engine has counted since the previous call."""
        before, self._before = self._before, self.engine.stats
        return self._before.since(before)

    def take_history(self, message: PromptHistories | RefreshHistory) -> None:
        """Takes what was published of the history within a step."""
        if isinstance(message, RefreshHistory):
            self._refresh()
            return
        assert isinstance(self._history, ReceivedHistory), "a worker that reads a folder is sent no history"
        self._history.take(message.indexes)

    def _refresh(self) -> None:
        """Loads the published history from its folder, if there is one."""
        if isinstance(self._history, HistoryReader):
            self._history.refresh()
