"""How the rollout pool handles the messages of workers, without processes."""

from typing import Any

import pytest

from tests.rl.rollouts import rollout_of
from tests.runtime.in_process import TestActors
from tests.runtime.runs import TinyRecipe, open_step
from treering.engine.protocol import EngineStats, Request, Rollout
from treering.runtime import rollout_pool as module
from treering.runtime.account import Account
from treering.runtime.messages import (
    EndedWork,
    GiveUp,
    ReportReceived,
    SampleRequests,
    WorkerSettings,
)
from treering.runtime.moves import Move
from treering.runtime.open_step import OpenStep
from treering.runtime.rollout_pool import RolloutPool
from treering.runtime.weight_store import WeightStore
from treering.schedule.measured_latency import MeasuredTimes

POLICY_VERSIONS = {0: 0, 1: 1}


class QuietChild:
    """Child process that sends the messages in `says`."""

    is_ready = True

    def __init__(self, name: str, *_: object, time_limit_s: float) -> None:
        self.name = name
        self.sent: list[Any] = []
        self.says: list[Any] = []
        self.is_dead = False
        self.num_progress = 0

    def start(self, settings: object) -> None:
        self.is_dead = False

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self) -> tuple[list[Any], bool]:
        said, self.says = self.says, []
        return said, self.is_dead

    def end_if_silent(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy

    def reap(self) -> None:
        self.sent.clear()

    def note_progress(self) -> None:
        self.num_progress += 1

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def rollout_pool(monkeypatch: pytest.MonkeyPatch) -> RolloutPool:
    """Return a pool of two quiet workers."""
    monkeypatch.setattr(module, "RunProcess", QuietChild)
    settings = WorkerSettings(recipe=TinyRecipe(), history=None, drafts=None)
    store = WeightStore(TestActors(), 4)
    for version in range(4):
        store.keep(version, {})
    return RolloutPool(settings, TestActors(), store, num_workers=2, time_limit_s=60.0, account=Account())


def children(rollout_pool: RolloutPool) -> list[QuietChild]:
    return rollout_pool.processes  # type: ignore[return-value]


def step_run(step: int = 1, *, moving: str = "drain", stealing: str = "off", size: int = 4) -> OpenStep:
    """Return a step of four or more rollouts, the first half for worker 0."""
    workers = [number * 2 // size for number in range(size)]
    return open_step(workers, step=step, group_size=size, moving=moving, stealing=stealing)


def says(step: int, *rollouts: Rollout, given: list[Rollout] | None = None, progress: Any = None) -> EndedWork:
    return EndedWork(
        step=step,
        ended=list(rollouts),
        given=given,
        progress=progress or {},
        stats=EngineStats(),
        busy_s=0.5,
        times=MeasuredTimes(),
    )


def written(request: Request, num_tokens: int, finish_reason: Any) -> Rollout:
    named = {"prompt_id": request.prompt_id, "sample": request.sample, "draw": request.draw}
    return rollout_of([3] * num_tokens, finish_reason=finish_reason, **named)


def requests_of(child: QuietChild) -> list[Request]:
    return [request for message in child.of(SampleRequests) for request in message.requests]


def asked_to_give(rollout_pool: RolloutPool, run: OpenStep, monkeypatch: pytest.MonkeyPatch) -> Request:
    """Ask worker 0 to give its first rollout to worker 1."""
    rollout_pool.dispatch({run.step: run}, POLICY_VERSIONS)
    first = requests_of(children(rollout_pool)[0])[0]
    monkeypatch.setattr(module, "choose_move", lambda *_: Move(target=1, keys=(first.key,)))
    children(rollout_pool)[0].says.append(says(run.step, progress={first.key: 2}))
    rollout_pool.receive({run.step: run})
    rollout_pool.dispatch({run.step: run}, POLICY_VERSIONS)
    monkeypatch.setattr(module, "choose_move", lambda *_: None)
    assert [message.keys for message in children(rollout_pool)[0].of(GiveUp)] == [(first.key,)]
    return first


def test_a_rollout_goes_back_if_the_target_has_left_the_step_and_is_not_counted_as_moved(
    rollout_pool, monkeypatch
) -> None:
    run = step_run()
    first = asked_to_give(rollout_pool, run, monkeypatch)
    rollout_pool._workers[1].step = 2
    children(rollout_pool)[0].says.append(says(1, given=[written(first, 2, "abort")]))
    rollout_pool.receive({1: run, 2: step_run(2)})
    assert (run.num_queued(0), run.num_queued(1), run.account.moved) == (1, 0, 0)


def test_an_answer_after_the_end_of_its_step_gives_nothing(rollout_pool, monkeypatch) -> None:
    run, later = step_run(), step_run(2)
    asked_to_give(rollout_pool, run, monkeypatch)
    children(rollout_pool)[0].says.append(says(1, given=[]))
    assert rollout_pool.receive({2: later}) == []
    # It may be asked again, and its time counts.
    assert rollout_pool._workers[0].move_target is None
    assert rollout_pool.busy_s == 1.0


def test_a_tail_stays_if_no_later_step_could_start(rollout_pool, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(module, "choose_move", lambda run, *_: asked.append(run.step))
    run, later = step_run(moving="consolidate"), step_run(2)
    for runs in ({1: run}, {1: run, 2: later}):
        for policy_versions in ({0: 0}, POLICY_VERSIONS):
            rollout_pool.dispatch(runs, policy_versions)
            children(rollout_pool)[0].says.append(says(1, progress={requests_of(children(rollout_pool)[0])[0].key: 1}))
            rollout_pool.receive(runs)
            rollout_pool.dispatch(runs, policy_versions)
            assert asked == ([1] if len(runs) == 2 and policy_versions is POLICY_VERSIONS else [])


def test_more_requests_queue_in_an_engine_whose_rollouts_end_many_at_a_time(rollout_pool) -> None:
    run, child, held = step_run(stealing="queued", size=80), children(rollout_pool)[0], []

    def given_after(num_ended: int) -> int:
        ended, held[:num_ended] = held[:num_ended], []
        child.says.append(says(1, *(written(request, 2, "length") for request in ended)))
        child.sent.clear()
        rollout_pool.receive({1: run})
        rollout_pool.dispatch({1: run}, POLICY_VERSIONS)
        held.extend(requests_of(child))
        return len(held)

    assert TinyRecipe().max_batch == 3
    # Three run and one waits. After one ended, two wait; after three ended, three wait; later fewer, one by one.
    assert [given_after(num_ended) for num_ended in (0, 1, 3, 1, 1, 1)] == [4, 5, 6, 6, 5, 5]


def test_a_worker_on_its_way_keeps_no_requests_from_the_others(rollout_pool: RolloutPool) -> None:
    first, second = children(rollout_pool)
    runs = {1: step_run(stealing="queued")}
    first.is_ready = False
    rollout_pool.dispatch(runs, POLICY_VERSIONS)
    assert first.sent == []
    # Two are its own; the others are stolen as if the first worker were busy.
    assert len(requests_of(second)) > 2
    first.is_ready = True
    rollout_pool.dispatch(runs, POLICY_VERSIONS)
    assert len(requests_of(first)) + len(requests_of(second)) == 4


def test_a_report_is_acknowledged_and_does_not_count_as_progress(rollout_pool) -> None:
    run = step_run()
    rollout_pool.dispatch({1: run}, POLICY_VERSIONS)
    child = children(rollout_pool)[0]
    first = requests_of(child)[0]
    child.says.append(says(1, progress={first.key: 2}))
    rollout_pool.receive({1: run})
    assert (len(child.of(ReportReceived)), child.num_progress) == (1, 0)
    child.says.append(says(1, written(first, 3, "length")))
    rollout_pool.receive({1: run})
    assert (len(child.of(ReportReceived)), child.num_progress) == (1, 1)
