"""Migration of running rollouts: when it happens, and that it changes no result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from tests.runtime.kills import killing
from tests.runtime.runs import PRICES, Dealt, TinyRecipe, open_step, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import Result, assert_same, rows_of, run
from treering.engine.protocol import Rollout, RolloutKey
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.runtime.moves import Held, choose_move
from treering.runtime.open_step import OpenStep
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.migration import MAX_MOVES
from treering.schedule.policy import Assignment, AssignmentRequest, Moving

NUM_STEPS = 4
NUM_SLOTS = 16
GROUP_SIZE = 8
HALFWAY = 6
PATIENCE_S = 60
KEYS: list[RolloutKey] = [(f"p{number // 4}", 0, number % 4) for number in range(8)]


class Moves(Dealt):
    """Policy that assigns the last three rollouts to two workers with long expected lengths, the rest to the first."""

    def __init__(self, moving: Moving) -> None:
        super().__init__()
        self._moving: Moving = moving

    def assign(self, request: AssignmentRequest) -> Assignment:
        size = request.forecasts[0].num_rollouts
        workers = np.zeros(size, np.int32)
        workers[-3:] = (1, 1, 2)
        predicted = np.where(workers == 0, 1.0, 12.0)
        return Assignment(workers=workers, order=np.arange(size), moving=self._moving, predicted_lengths=predicted)


class SlowEngine(TorchEngine):
    def step(self) -> list[Rollout]:
        time.sleep(0.03)
        return super().step()


class MeetingEngine(SlowEngine):
    """Engine that waits in the middle of its rollouts until one is given up, so that no clock decides."""

    meeting: Path

    def step(self) -> list[Rollout]:
        is_halfway = max(self.progress().values(), default=0) >= HALFWAY
        if is_halfway and not self.meeting.exists() and time.time() < self.meeting.parent.stat().st_mtime + PATIENCE_S:
            time.sleep(0.03)
            return []
        return super().step()

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        self.meeting.touch()
        return super().abort(keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRecipe(TinyRecipe):
    """Recipe whose rollouts last for several reports and, with `meeting`, until one of them has moved."""

    meeting: Path | None = None

    @property
    def max_batch(self) -> int:
        return NUM_SLOTS

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        kind = SlowEngine if self.meeting is None else MeetingEngine
        engine = kind(model, drafter, max_batch=NUM_SLOTS, max_tokens=400, version=version, num_threads=1, costs="none")
        if isinstance(engine, MeetingEngine) and self.meeting is not None:
            engine.meeting = self.meeting
        return engine


def slow_pipeline(moving: Moving, meeting: Path | None = None) -> PipelineLoop:
    return pipeline(
        SlowRecipe(meeting=meeting),
        num_steps=NUM_STEPS,
        num_workers=3,
        staleness=1,
        policy=Moves(moving),
        rebalancing="running",
        num_slots=NUM_SLOTS,
        group_size=GROUP_SIZE,
    )


def step_run(moving: Moving, *, stealing: str = "off", workers: tuple[int, ...] = (0, 0, 0, 0, 1, 1, 1, 1)) -> OpenStep:
    """Return a step of two groups of four; expected lengths are 4 on the first worker and 8 on the second."""
    predicted = np.where(np.array(workers) == 0, 4.0, 8.0)
    return open_step(workers, predicted=predicted, predicted_lengths=predicted, moving=moving, stealing=stealing)


def under_way(run: OpenStep, so_far: dict[int, int]) -> list[Held]:
    """Start all rollouts; the given ones run with these numbers of tokens, the others are finished."""
    requests = {request.key: request for request in run.collection.requests()}
    for worker in (0, 1):
        run.take(worker, num_running=0, max_batch=8)
    for number, num_tokens in so_far.items():
        run.note_progress(KEYS[number], num_tokens)
    return [{KEYS[n]: requests[KEYS[n]] for n in so_far if (n >= 4) == bool(worker)} for worker in (0, 1)]


def with_more(held: Held, *numbers: int) -> Held:
    """Add rollouts without a progress report."""
    requests = {request.key: request for request in step_run("off").collection.requests()}
    return {**held, **{KEYS[n]: requests[KEYS[n]] for n in numbers}}


def test_a_tail_goes_to_the_worker_that_runs_more() -> None:
    run = step_run("consolidate")
    held = under_way(run, {2: 3, 4: 1, 5: 1, 6: 1})
    move = choose_move(run, PRICES, held, 0)
    assert move is not None
    assert (move.target, move.keys) == (1, (KEYS[2],))
    assert choose_move(run, PRICES, held, 1) is None


@pytest.mark.parametrize("so_far", [{2: 3}, {1: 3, 2: 3, 4: 1, 5: 1}, {2: 3, 4: 1, 5: 1, 6: 1, 7: 1}])
def test_a_tail_stays_without_a_fuller_worker_or_a_free_slot_and_a_long_rest_is_not_a_tail(so_far) -> None:
    run = step_run("consolidate")
    assert choose_move(run, PRICES, under_way(run, so_far), 0) is None


def test_a_worker_that_can_steal_has_no_tail() -> None:
    run = step_run("consolidate", stealing="queued")
    requests = {request.key: request for request in run.collection.requests()}
    run.take(0, num_running=0, max_batch=4)
    for number in (2, 4, 5):
        run.note_progress(KEYS[number], 3)
    assert run.can_be_stolen
    held = [{KEYS[n]: requests[KEYS[n]] for n in numbers} for numbers in ((2,), (4, 5))]
    assert choose_move(run, PRICES, held, 0) is None
    run.take(1, num_running=0, max_batch=8)
    assert not run.can_be_stolen
    assert choose_move(run, PRICES, held, 0) is not None


def test_an_outlier_moves_to_an_emptier_worker_with_longer_rollouts() -> None:
    run = step_run("drain")
    move = choose_move(run, PRICES, under_way(run, {0: 5, 1: 6, 2: 3, 5: 1}), 0)
    assert move is not None
    # The longest of the rollouts with a report.
    assert (move.target, move.keys) == (1, (KEYS[1],))
    # Nothing ends sooner on a full worker.
    run = step_run("drain")
    assert choose_move(run, PRICES, under_way(run, {0: 4, 1: 5, 5: 1, 6: 1}), 0) is None


def test_an_outlier_stays_if_its_prompt_costs_more_than_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = PRICES._replace(prefill_s=0.001)
    run = step_run("drain")
    held = under_way(run, {0: 5, 1: 6, 2: 3, 5: 1})
    assert choose_move(run, prices, held, 0) is not None
    monkeypatch.setattr(OpenStep, "num_prompt_tokens", lambda *_: 10_000)
    assert choose_move(run, prices, held, 0) is None


def test_rows_never_exceed_the_slots() -> None:
    run = step_run("drain", workers=(0,) * 7 + (1,))
    held = under_way(run, dict.fromkeys(range(8), 6))
    many = with_more(held[0], *range(7))
    few = {KEYS[7]: held[1][KEYS[7]]}
    move = choose_move(run, PRICES, [many, few], 0)
    # The decision uses times of at most four rows: 4 there are now, 2 there.
    assert move is not None
    assert choose_move(run, PRICES._replace(token_s=np.array([0.0, 21, 21, 21, 21])), [many, few], 0) is None


def test_a_rollout_moves_a_few_times_at_most() -> None:
    run = step_run("drain")
    requests = {request.key: request for request in run.collection.requests()}
    held = under_way(run, {0: 4, 1: 5, 2: 3, 5: 1})
    for _ in range(MAX_MOVES):
        assert choose_move(run, PRICES, held, 0) is not None
        run.move(requests[KEYS[1]], 0)
        assert choose_move(run, PRICES, held, 0) is None
        run.take(0, num_running=2, max_batch=8)
        run.note_progress(KEYS[1], 5)
    assert choose_move(run, PRICES, held, 0) is None
    assert run.account.moved == MAX_MOVES


@pytest.fixture(scope="module")
def unmoved() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1, group_size=GROUP_SIZE) as loop:
        return run(loop, NUM_STEPS)


@pytest.mark.parametrize("moving", ["drain", "consolidate"])
def test_moves_change_no_result(unmoved: Result, moving: Moving, tmp_path: Path) -> None:
    rows, num_moved = [], []
    with slow_pipeline(moving, meeting=tmp_path / "meeting") as loop:
        for _ in range(NUM_STEPS):
            overlap = loop.step().overlap
            assert overlap is not None
            num_moved.append(overlap.num_moved)
            rows.append(rows_of(loop))
        assert_same((loop.model.state_dict(), rows), unmoved)
        assert loop.account.moved == sum(num_moved) > 0


def test_workers_that_give_or_take_may_die(unmoved: Result) -> None:
    moments = {6: "rollout worker 0", 19: "rollout worker 1"}
    with killing(moments) as dead, slow_pipeline("drain") as loop:
        assert_same(run(loop, NUM_STEPS), unmoved)
        account = loop.account
    assert len(dead) == len(moments)
    assert is_complete(account, account.scheduled)
