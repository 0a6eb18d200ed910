"""A worker's engine, with the weights and the history of its step."""

from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.runtime.ipc.messages import BeginStep, PromptHistories, RefreshHistory, WorkerSettings
from treering.runtime.ipc.weight_store import ProcessWeights
from treering.runtime.workers.draft_history import DraftHistory


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
