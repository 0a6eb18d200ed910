"""Running rollouts that go to another worker: when they do, and that no result notices."""

import time

import numpy as np
import pytest
from torch import nn

from tests.rl.runs import SAMPLING, TinyTask
from tests.runtime.kills import killing
from tests.runtime.runs import Dealt, TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import Result, assert_same, rows_of, run
from treering.engine.rollout import Rollout, RolloutKey
from treering.engine.torch_engine import TorchEngine
from treering.history.draft import Drafter
from treering.rl.collect import Collection
from treering.runtime.moving import choose_move
from treering.runtime.pipeline import PipelineLoop
from treering.runtime.planning import Plan
from treering.runtime.step_run import StepRun
from treering.schedule.cluster import Rebalancing
from treering.schedule.destinations import Prices
from treering.schedule.migration import MAX_MOVES
from treering.schedule.policy import Assignment, Moving, Outlook

NUM_STEPS = 4
PRICES = Prices(20 + 0.05 * np.arange(5), 0.0, 12.0)
DEAR = PRICES._replace(prefill_s=100.0)
KEYS: list[RolloutKey] = [(f"p{number // 4}", 0, number % 4) for number in range(8)]


class Moves(Dealt):
    """The last three on two workers, which are believed to have long ones, and the rest on the first."""

    def __init__(self, moving: Moving) -> None:
        super().__init__()
        self._moving: Moving = moving

    def assign(self, outlook: Outlook) -> Assignment:
        size = outlook.forecasts[0].num_rollouts
        workers = np.zeros(size, np.int32)
        workers[-3:] = (1, 1, 2)
        beliefs = np.where(workers == 0, 1.0, 12.0)
        return Assignment(workers=workers, order=np.arange(size), moving=self._moving, beliefs=beliefs)


class SlowEngine(TorchEngine):
    def step(self) -> list[Rollout]:
        time.sleep(0.03)
        return super().step()


class SlowRecipe(TinyRecipe):
    """Rollouts that last for several reports."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        return SlowEngine(model, drafter, max_batch=3, max_tokens=200, version=version, num_threads=1, costs="none")


def slow_pipeline(moving: Moving, *, rebalancing: Rebalancing = "running") -> PipelineLoop:
    return pipeline(
        SlowRecipe(),
        num_steps=NUM_STEPS,
        num_workers=3,
        staleness=1,
        policy=Moves(moving),
        rebalancing=rebalancing,
    )


def step_run(moving: Moving, *, stealing: str = "off", workers: tuple[int, ...] = (0, 0, 0, 0, 1, 1, 1, 1)) -> StepRun:
    """A step of two groups of four; the first worker's are believed to have 4 tokens, the second's 8."""
    beliefs = np.where(np.array(workers) == 0, 4.0, 8.0)
    assignment = Assignment(
        workers=np.array(workers),
        order=np.arange(8),
        moving=moving,
        beliefs=beliefs,
        stealing=stealing,  # type: ignore[arg-type]
    )
    collection = Collection(TinyTask(2).prompts, {}, group_size=4, sampling=SAMPLING, max_turns=1)
    plan = Plan(step=1, assignment=assignment, predicted=beliefs)
    return StepRun(plan, collection, version=0, num_workers=2, ratios=np.ones(1), prices=PRICES)


def under_way(run: StepRun, so_far: dict[int, int]) -> list[tuple[RolloutKey, ...]]:
    """Starts everything; these run, with so many tokens each, and the others are over."""
    for worker in (0, 1):
        run.take(worker, num_running=0, max_batch=8)
    for number, num_tokens in so_far.items():
        run.note_progress(KEYS[number], num_tokens)
    return [tuple(KEYS[n] for n in so_far if n < 4), tuple(KEYS[n] for n in so_far if n >= 4)]


def test_a_tail_goes_to_the_worker_that_runs_more() -> None:
    run = step_run("gathering")
    move = choose_move(run, PRICES, under_way(run, {2: 3, 4: 1, 5: 1, 6: 1}))
    assert move is not None
    assert (move.source, move.target, move.keys) == (0, 1, (KEYS[2],))


@pytest.mark.parametrize("so_far", [{2: 3}, {1: 3, 2: 3, 4: 1, 5: 1}, {2: 3, 4: 1, 5: 1, 6: 1, 7: 1}])
def test_a_tail_stays_where_nobody_has_more_where_it_is_no_tail_or_where_there_is_no_slot(so_far) -> None:
    run = step_run("gathering")
    assert choose_move(run, PRICES, under_way(run, so_far)) is None


def test_a_tail_stays_where_reading_it_again_costs_more_than_it_frees() -> None:
    run = step_run("gathering")
    assert choose_move(run, DEAR, under_way(run, {2: 3, 4: 1, 5: 1, 6: 1})) is None


def test_nothing_moves_before_its_worker_has_said_how_far_it_is() -> None:
    run = step_run("gathering")
    held = under_way(run, {4: 1, 5: 1, 6: 1})
    assert choose_move(run, PRICES, [(KEYS[2],), held[1]]) is None


def test_a_worker_that_can_steal_has_no_tail() -> None:
    run = step_run("gathering", stealing="queued")
    run.take(0, num_running=0, max_batch=4)
    for number in (2, 4, 5):
        run.note_progress(KEYS[number], 3)
    run._queues[1].extend(run.take(1, num_running=0, max_batch=1)[:1])
    assert run.can_be_stolen
    assert choose_move(run, PRICES, [(KEYS[2],), (KEYS[4], KEYS[5])]) is None


def test_what_has_outgrown_its_worker_goes_to_an_emptier_one_of_longer_rollouts() -> None:
    run = step_run("faster")
    move = choose_move(run, PRICES, under_way(run, {0: 4, 1: 5, 2: 3, 5: 1}))
    assert move is not None
    assert (move.source, move.target, move.keys) == (0, 1, (KEYS[1],))
    # As full, nothing ends sooner there.
    run = step_run("faster")
    assert choose_move(run, PRICES, under_way(run, {0: 4, 1: 5, 5: 1, 6: 1})) is None


def test_a_rollout_moves_a_few_times_at_most() -> None:
    run = step_run("faster")
    requests = {request.key: request for request in run.collection.requests()}
    held = under_way(run, {0: 4, 1: 5, 2: 3, 5: 1})
    for _ in range(MAX_MOVES):
        assert choose_move(run, PRICES, held) is not None
        run.move(requests[KEYS[1]], 0)
        assert choose_move(run, PRICES, held) is None
        run.take(0, num_running=2, max_batch=8)
        run.note_progress(KEYS[1], 5)
    assert choose_move(run, PRICES, held) is None
    assert run.account.moved == MAX_MOVES


def test_without_prices_nothing_moves() -> None:
    assignment = Assignment(workers=np.zeros(8), order=np.arange(8), moving="faster")
    collection = Collection(TinyTask(2).prompts, {}, group_size=4, sampling=SAMPLING, max_turns=1)
    plan = Plan(step=1, assignment=assignment, predicted=np.ones(8))
    run = StepRun(plan, collection, version=0, num_workers=2, ratios=np.ones(1))
    assert run.moving == "off"
    assert choose_move(run, PRICES, under_way(run, {0: 4, 1: 5})) is None


@pytest.fixture(scope="module")
def unmoved() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


@pytest.mark.parametrize("moving", ["faster", "freeing", "gathering"])
def test_moves_change_no_result(unmoved: Result, moving: Moving) -> None:
    rows, num_moved = [], []
    with slow_pipeline(moving) as loop:
        for _ in range(NUM_STEPS):
            overlap = loop.step().overlap
            assert overlap is not None
            num_moved.append(overlap.num_moved)
            rows.append(rows_of(loop))
        assert_same((loop.model.state_dict(), rows), unmoved)
        assert loop.account.moved == sum(num_moved) > 0


def test_a_cluster_that_moves_nothing_running_has_no_moves() -> None:
    with slow_pipeline("faster", rebalancing="queued") as loop:
        loop.step()
        assert loop.account.moved == 0


@pytest.mark.parametrize("moments", [{6: "rollout worker 0", 19: "rollout worker 1"}, {11: "rollout worker 1"}])
def test_workers_that_give_or_take_may_die(unmoved: Result, moments: dict[int, str]) -> None:
    with killing(moments) as dead, slow_pipeline("faster") as loop:
        assert_same(run(loop, NUM_STEPS), unmoved)
        account = loop.account
    assert len(dead) == len(moments)
    assert is_complete(account, account.scheduled)
