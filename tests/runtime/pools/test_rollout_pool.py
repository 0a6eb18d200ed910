"""What the controller makes of what rollout workers say, without any process."""

from typing import Any

import numpy as np
import pytest

from tests.rl.runs import SAMPLING, TinyTask
from tests.runtime.runs import TinyRecipe
from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.collect import Collection
from treering.rl.drafting import DraftOptions
from treering.runtime.account import Account
from treering.runtime.ipc.messages import Begin, Give, Heard, Sample, Sampled, WorkerSettings
from treering.runtime.pools import rollout_pool as module
from treering.runtime.pools.rollout_pool import RolloutPool
from treering.runtime.step.migration import Move
from treering.runtime.step.planning import Plan
from treering.runtime.step.step_run import StepRun
from treering.schedule.measured_latency import PassTimes
from treering.schedule.policy import Assignment
from treering.schedule.simulator.destinations import Prices

PRICES = Prices(20 + 0.05 * np.arange(5), 0.0, 12.0)
LABELS = {0: 0, 1: 1}


class QuietSeat:
    """A child that says what it is told to."""

    is_ready = True

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.sent: list[Any] = []
        self.says: list[Any] = []
        self.is_dead = False
        self.num_progress = 0

    def fill(self, settings: object) -> None:
        self.is_dead = False

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self) -> tuple[list[Any], bool]:
        said, self.says = self.says, []
        return said, self.is_dead

    def bury(self) -> None:
        self.sent.clear()

    def note_progress(self) -> None:
        self.num_progress += 1

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> RolloutPool:
    monkeypatch.setattr(module, "Seat", QuietSeat)
    settings = WorkerSettings(recipe=TinyRecipe(), num_slots=3, history=None, drafts=DraftOptions())
    return RolloutPool(settings, None, None, num_workers=2, account=Account())  # type: ignore[arg-type]


def seats(fleet: RolloutPool) -> list[QuietSeat]:
    return fleet.seats  # type: ignore[return-value]


def step_run(
    step: int = 1, *, max_turns: int = 1, moving: str = "faster", stealing: str = "off", size: int = 4
) -> StepRun:
    """Four rollouts or more, the first half for worker 0."""
    assignment = Assignment(
        workers=np.arange(size) * 2 // size,
        order=np.arange(size),
        stealing=stealing,  # type: ignore[arg-type]
        moving=moving,  # type: ignore[arg-type]
    )
    collection = Collection(TinyTask(1).prompts, {}, group_size=size, sampling=SAMPLING, max_turns=max_turns)
    plan = Plan(step=step, assignment=assignment, predicted=np.ones(size))
    return StepRun(plan, collection, version=step - 1, num_workers=2, ratios=np.ones(1), prices=PRICES)


def says(step: int, *rollouts: Rollout, given: list[Rollout] | None = None, progress: Any = None) -> Sampled:
    return Sampled(
        step=step,
        rollouts=list(rollouts),
        given=given,
        progress=progress or {},
        stats=EngineStats(),
        busy_s=0.5,
        times=PassTimes(),
    )


def written(request: Request, num_tokens: int, finish_reason: Any) -> Rollout:
    return Rollout(
        prompt_id=request.prompt_id,
        draw=request.draw,
        sample=request.sample,
        tokens=np.full(num_tokens, 3, np.int32),
        logprobs=np.zeros(num_tokens),
        policy_logprobs=np.zeros(num_tokens),
        loss_mask=np.ones(num_tokens, bool),
        versions=np.zeros(num_tokens, np.int32),
        finish_reason=finish_reason,
    )


def requests_of(seat: QuietSeat) -> list[Request]:
    return [request for message in seat.of(Sample) for request in message.requests]


def asked_to_give(fleet: RolloutPool, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> Request:
    """Worker 0 is asked for its first rollout, for worker 1."""
    fleet.dispatch({run.step: run}, LABELS)
    first = requests_of(seats(fleet)[0])[0]
    monkeypatch.setattr(module, "choose_move", lambda *_: Move(target=1, keys=(first.key,)))
    seats(fleet)[0].says.append(says(run.step, progress={first.key: 2}))
    fleet.receive({run.step: run})
    fleet.dispatch({run.step: run}, LABELS)
    monkeypatch.setattr(module, "choose_move", lambda *_: None)
    assert [message.keys for message in seats(fleet)[0].of(Give)] == [(first.key,)]
    return first


def test_what_one_gives_up_goes_on_at_the_other_with_what_it_has(fleet, monkeypatch) -> None:
    run = step_run()
    first = asked_to_give(fleet, run, monkeypatch)
    given = written(first, 2, "abort")
    seats(fleet)[0].says.append(says(1, given=[given]))
    assert fleet.receive({1: run}) == []
    fleet.dispatch({1: run}, LABELS)
    handed_on = requests_of(seats(fleet)[1])[-1]
    assert (handed_on.key, handed_on.so_far) == (first.key, given)
    assert run.account.moved == 1


def test_what_comes_back_from_a_worker_that_has_gone_on_goes_back_and_counts_as_no_move(fleet, monkeypatch) -> None:
    run = step_run()
    first = asked_to_give(fleet, run, monkeypatch)
    fleet._posts[1].step = 2
    seats(fleet)[0].says.append(says(1, given=[written(first, 2, "abort")]))
    fleet.receive({1: run, 2: step_run(2)})
    assert (run.num_queued(0), run.num_queued(1), run.account.moved) == (1, 0, 0)


def test_an_answer_behind_the_end_of_its_step_says_that_nothing_was_left(fleet, monkeypatch) -> None:
    run, later = step_run(), step_run(2)
    asked_to_give(fleet, run, monkeypatch)
    seats(fleet)[0].says.append(says(1, given=[]))
    assert fleet.receive({2: later}) == []
    # It may be asked again, and its time counts.
    assert fleet._posts[0].gives_to is None
    assert fleet.busy_s == 1.0


def test_a_report_is_heard_and_is_no_progress_of_a_worker_that_dies_again_and_again(fleet) -> None:
    run = step_run()
    fleet.dispatch({1: run}, LABELS)
    seat = seats(fleet)[0]
    first = requests_of(seat)[0]
    seat.says.append(says(1, progress={first.key: 2}))
    fleet.receive({1: run})
    assert (len(seat.of(Heard)), seat.num_progress) == (1, 0)
    seat.says.append(says(1, written(first, 3, "length")))
    fleet.receive({1: run})
    assert (len(seat.of(Heard)), seat.num_progress) == (1, 1)


def test_somebody_stays_in_a_step_whose_rollouts_may_come_back_from_the_judge(fleet) -> None:
    run, later = step_run(max_turns=2), step_run(2)
    runs = {1: run, 2: later}
    fleet.dispatch(runs, LABELS)
    seat = seats(fleet)[0]
    mine: list[RolloutKey] = []
    for request in requests_of(seat):
        seat.says.append(says(1, written(request, 3, "stop")))
        mine.append(request.key)
    assert len(fleet.receive(runs)) == 2
    # Both are at the judge when their worker dies; the next one does not go on to step 2.
    seat.is_dead = True
    fleet.receive(runs)
    fleet.dispatch(runs, LABELS)
    assert seat.sent == []
    following = Request(
        prompt_id=mine[0][0], prompt=TinyTask(1).prompts[0].tokens, sampling=SAMPLING, draw=0, sample=mine[0][2]
    )
    fleet.note_judged(run, mine[0], following)
    fleet.dispatch(runs, LABELS)
    assert [message.step for message in seat.of(Begin)] == [1]
    assert [request.key for request in requests_of(seat)] == [mine[0]]


def test_a_tail_stays_where_no_later_step_could_begin(fleet, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(module, "choose_move", lambda run, *_: asked.append(run.step))
    run, later = step_run(moving="consolidate"), step_run(2)
    for runs in ({1: run}, {1: run, 2: later}):
        for labels in ({0: 0}, LABELS):
            fleet.dispatch(runs, labels)
            seats(fleet)[0].says.append(says(1, progress={requests_of(seats(fleet)[0])[0].key: 1}))
            fleet.receive(runs)
            fleet.dispatch(runs, labels)
            assert asked == ([1] if len(runs) == 2 and labels is LABELS else [])


def test_more_waits_in_an_engine_whose_rollouts_end_many_at_a_time(fleet) -> None:
    run, seat, held = step_run(stealing="queued", size=80), seats(fleet)[0], []

    def given_after(num_ended: int) -> int:
        ended, held[:num_ended] = held[:num_ended], []
        seat.says.append(says(1, *(written(request, 2, "length") for request in ended)))
        seat.sent.clear()
        fleet.receive({1: run})
        fleet.dispatch({1: run}, LABELS)
        held.extend(requests_of(seat))
        return len(held)

    assert TinyRecipe().max_batch == 3
    # Three run and one waits; where one has ended, two wait, and where three have, three; later fewer, one by one.
    assert [given_after(num_ended) for num_ended in (0, 1, 3, 1, 1, 1)] == [4, 5, 6, 6, 5, 5]
