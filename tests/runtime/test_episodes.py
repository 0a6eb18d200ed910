"""Episodes in rollout workers: whatever the workers and their deaths, episodes and weights are those of one process."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import build_float64
from tests.rl.environments.worlds import TASKS, TURN_END, VOCAB, WORLDS, World, engine_of, task_of
from tests.rl.runs import PLAIN, options
from tests.runtime.in_process import TestActors
from tests.runtime.kills import killing
from tests.runtime.runs import Dealt
from tests.runtime.test_pipeline import assert_same, run, stale
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Engine, Sampling
from treering.history.draft.drafter import Drafter
from treering.rl.environments.environment import EnvironmentTask, EnvTask, Outcome
from treering.rl.environments.policy_calls import Policy as Asked
from treering.rl.loop import RlLoop
from treering.runtime.controller import PipelineSpec
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.cluster import STANDARD, Cluster
from treering.schedule.policy import Assignment, AssignmentRequest, SchedulePolicy
from treering.schedule.predict import make_predictor

CHOSEN = RlOptions(
    prompts_per_step=2, group_size=3, sampling=Sampling(max_tokens=500, stop_tokens=(TURN_END,)), seed=options().seed
)
MAX_ROWS = 3


class Faulty(World):
    """Environment in which, per group of the first step, one episode raises, one hangs and one exits."""

    tasks = TASKS[:2]

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def run(self, task: EnvTask, policy: Asked) -> float | Outcome:
        session = policy.session
        if session.draw == 0 and task.id == "t0":
            match session.sample:
                case 0:
                    raise ValueError("no such file")
                case 1:
                    await asyncio.sleep(3600)
                case 2:
                    sys.exit("bye")
        reply = await policy.chat([{"role": "user", "content": f"task {task.data}"}])
        return self.reward([reply.text])

    def close(self) -> None:
        (self._folder / f"closed-{id(self)}").touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRecipe:
    """Recipe with the model, the environment and the engine of `alone`."""

    world: Callable[[], World]
    timeout_s: float = 600.0

    @property
    def max_batch(self) -> int:
        return 2 * MAX_ROWS

    def make_model(self) -> nn.Module:
        return build_float64("qwen3", vocab_size=VOCAB)

    def make_task(self) -> EnvironmentTask:
        return task_of(self.world(), max_rows=MAX_ROWS, episode_timeout=self.timeout_s, episode_order="in_order")

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        return engine_of(model, drafter=drafter, version=version, num_threads=1, costs="none", max_batch=MAX_ROWS)  # type: ignore[arg-type]


def alone(recipe: EnvRecipe) -> RlLoop:
    model = recipe.make_model()

    def make_engine(drafter: Drafter | None, version: int) -> Engine:
        return recipe.make_engine(model, drafter, version)

    return RlLoop(model, recipe.make_task(), make_engine, optim=PLAIN, options=CHOSEN)


class InOrder(Dealt):
    """Policy that starts rollouts in the order of one process."""

    def assign(self, request: AssignmentRequest) -> Assignment:
        dealt = super().assign(request)
        return replace(dealt, order=np.arange(request.forecasts[0].num_rollouts))


def in_workers(
    recipe: EnvRecipe, num_steps: int, *, num_workers: int = 2, staleness: int = 0, policy: SchedulePolicy | None = None
) -> PipelineLoop:
    spec = PipelineSpec(
        recipe=recipe,
        optim=PLAIN,
        options=CHOSEN,
        num_steps=num_steps,
        cluster=Cluster(
            num_workers=num_workers, num_slots=MAX_ROWS, max_tokens=500, staleness=staleness, latency=STANDARD
        ),
        policy=policy or Dealt("queued"),
        predictor=make_predictor(max_tokens=500),
        actors=TestActors(),
    )
    return PipelineLoop(recipe.make_model(), recipe.make_task(), spec)


@pytest.mark.parametrize(("name", "num_workers"), [("SubAgents", 1), ("TwoSeats", 2)])
def test_the_weights_are_those_of_one_process(name: str, num_workers: int) -> None:
    recipe = EnvRecipe(world=WORLDS[name])
    expected = run(alone(recipe), 3)
    with in_workers(recipe, 3, num_workers=num_workers, policy=InOrder() if num_workers == 1 else None) as loop:
        found = run(loop, 3)
        account = loop.account
    assert_same(found, expected)
    if num_workers == 1:
        # The same batches.
        assert all(torch.equal(found[0][key], expected[0][key]) for key in expected[0])
    assert account.scheduled == account.sampled == account.evaluated == 18
    assert account.trained + account.without_variance == 18


def test_a_stale_step_is_sampled_wholly_by_the_version_of_the_rule() -> None:
    recipe = EnvRecipe(world=WORLDS["Rerendered"])
    with in_workers(recipe, 3, staleness=1) as loop:
        assert_same(run(loop, 3), stale(recipe, CHOSEN, 3, 1))


def test_killed_workers_lose_no_finished_episode_and_change_no_weight() -> None:
    recipe = EnvRecipe(world=WORLDS["Linear"])
    expected = run(alone(recipe), 3)
    with killing({2: "rollout worker 0", 4: "rollout worker 1", 6: "trainer"}) as dead, in_workers(recipe, 3) as loop:
        assert_same(run(loop, 3), expected)
        account = loop.account
    assert sorted(dead) == ["rollout worker 0", "rollout worker 1", "trainer"]
    assert account.worker_deaths == 2
    assert account.scheduled == account.sampled == account.evaluated == 18
    # Only those that ran on a dead worker run again.
    assert account.sampled_again <= 2 * 2 * MAX_ROWS


def test_episodes_that_fail_are_counted_by_cause_and_change_no_other(tmp_path: Path) -> None:
    recipe = EnvRecipe(world=partial(Faulty, str(tmp_path)), timeout_s=3.0)
    expected = run(alone(recipe), 2)
    with in_workers(recipe, 2) as loop:
        reports: list[Any] = []
        rows = []
        for _ in range(2):
            reports.append(loop.step())
            rows.append([(t.task_id, t.trial, t.tokens.tolist(), t.reward, t.version) for t in loop.latest])
        account = loop.account
    assert rows == expected[1]
    assert [report.rollouts.num_reward_errors for report in reports] == [3, 0]
    for error, cause in zip(
        reports[0].rollouts.reward_errors, ("ValueError: no such file", "no end within 3 s", "SystemExit"), strict=True
    ):
        assert cause in error
    assert (account.reward_errors, account.sampled, account.worker_deaths) == (3, 12, 0)
    # Each worker has closed its environment.
    assert len(list(tmp_path.glob("closed-*"))) == 2
