"""Steps are planned as early as possible, while the trainer works."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.runtime.runs import Dealt, pipeline
from treering.runtime.pools.trainer_client import TrainerClient
from treering.runtime.run_state import RunState
from treering.schedule.policy import Assignment, PlanRequest


class Noting(Dealt):
    """Records when steps are planned and learnt."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        super().__init__()
        self._events = events

    def assign(self, request: PlanRequest) -> Assignment:
        self._events.append(("planned", request.step))
        return super().assign(request)

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        self._events.append(("learnt", step))


def test_a_step_is_planned_while_the_last_one_that_it_knows_of_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    staleness = 1
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(TrainerClient, "train", noting(TrainerClient.train, "sent", events))
    monkeypatch.setattr(RunState, "complete_step", noting(RunState.complete_step, "trained", events))
    with pipeline(num_steps=4, staleness=staleness, policy=Noting(events)) as loop:
        for _ in range(4):
            loop.step()
    first = [("planned", step) for step in range(1, 2 + staleness)]
    for step in range(1, 5):
        later = step + 1 + staleness
        planned = [("planned", later)] if later <= 4 else []
        first += [("sent", step), ("learnt", step), *planned, ("trained", step)]
    assert events == first


def noting(method: Callable[..., Any], name: str, events: list[tuple[str, int]]) -> Callable[..., Any]:
    """Wraps a method to record the step of its first argument."""

    def noted(self: Any, what: Any, *arguments: Any) -> Any:
        events.append((name, what if isinstance(what, int) else what.open_step.step))
        return method(self, what, *arguments)

    return noted
