"""A worker's engine, with the weights and the history of its step: files of the host, or what the controller sends."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.reader import HistoryReader
from treering.history.store.snapshot import Snapshot
from treering.rl.drafting import DraftOptions, make_drafter
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


class DraftHistory:
    """A worker's copy or map of the controller's history, and its drafter.

    Example: `DraftHistory(None, options).take({"q": index})` lets its `drafter` draft rows of "q".
    """

    def __init__(self, folder: Path | None, options: DraftOptions) -> None:
        """Reads the history in a folder; None: takes what is sent."""
        self._source = ReceivedHistory() if folder is None else HistoryReader(folder)
        self.drafter = make_drafter(self._source, options)

    def begin(self) -> None:
        """Starts a step: loads the published history, and resets the drafter's per-step measurements."""
        self.refresh()
        self.drafter.load_state(self.drafter.state())

    def refresh(self) -> None:
        """Loads the published history from its folder, if there is one."""
        if isinstance(self._source, HistoryReader):
            self._source.refresh()

    def take(self, indexes: Mapping[PromptId, PromptIndex | None]) -> None:
        """See `ReceivedHistory.take`."""
        assert isinstance(self._source, ReceivedHistory), "a worker that reads a folder is sent no history"
        self._source.take(indexes)


class StepEngine:
    """The engine of a rollout worker; every step begins with weights and history as the controller says.

    Example: after `begin` of a step with policy version 3, `engine.version` is 3.
    """

    def __init__(self, settings: WorkerSettings, model: nn.Module, weights: ProcessWeights) -> None:
        """Makes no engine yet; `weights` are read into the model."""
        self._recipe = settings.recipe
        self._model = model
        self._weights = weights
        self._history = None if settings.drafts is None else DraftHistory(settings.history, settings.drafts)
        self._engine: Engine | None = None

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
        if self._history is not None:
            self._history.begin()
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
        return True

    def take_history(self, message: PromptHistories | RefreshHistory) -> None:
        """Takes what was published of the history within a step."""
        if self._history is None:
            return
        if isinstance(message, PromptHistories):
            self._history.take(message.indexes)
        else:
            self._history.refresh()

    @property
    def _drafter(self) -> Drafter | None:
        return None if self._history is None else self._history.drafter
