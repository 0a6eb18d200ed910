"""Law 6: whatever the workers and the clock do, a run has the rollouts and weights of sequential steps."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import build_float64
from tests.rl.runs import PLAIN, TinyTask, options, sampling_loop
from tests.runtime import tasks
from tests.runtime.runs import Lopsided, TinyRecipe, pipeline
from treering import metrics
from treering.config.rl_options import RlOptions
from treering.errors import ConfigError, InputError, StateError
from treering.rl.collect import collect
from treering.rl.environments.collect_episodes import collect_episodes
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.loop import RlLoop
from treering.rl.sampler import with_stops
from treering.rl.trainer import Trainer
from treering.runtime.messages import Recipe
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.batches import StepTasks

CLOSE = 1e-8

Result = tuple[dict[str, torch.Tensor], list[list[tuple[object, ...]]]]


def rows_of(loop: PipelineLoop | RlLoop) -> list[tuple[object, ...]]:
    """Return prompt, sample, tokens, reward and version of the latest step's rollouts."""
    return [(t.task_id, t.trial, t.tokens.tolist(), t.reward, t.version) for t in loop.latest]


def run(loop: PipelineLoop | RlLoop, num_steps: int) -> Result:
    """Run some steps; return the weights and the rollouts of each step."""
    rows = []
    for _ in range(num_steps):
        loop.step()
        rows.append(rows_of(loop))
    return {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}, rows


def assert_same(actual: Result, expected: Result) -> None:
    assert actual[1] == expected[1]
    for name, tensor in expected[0].items():
        assert (actual[0][name] - tensor).abs().max() <= CLOSE, name


def stale(recipe: Recipe, chosen: RlOptions, num_steps: int, staleness: int) -> Result:
    """Run a sequential reference: the weights after step max(0, k - 1 - staleness) sample step k."""
    model, task = recipe.make_model(), recipe.make_task()
    trainer, sampling = Trainer(model, PLAIN, chosen), with_stops(chosen.sampling, task)
    weights, rows = [copy.deepcopy(model.state_dict())], []
    draws = dict.fromkeys((prompt.prompt_id for prompt in task.prompts), 0)
    step_tasks = StepTasks(num_tasks=len(task.prompts), trees_per_step=chosen.prompts_per_step, seed=chosen.seed)
    sample: Any = collect_episodes if isinstance(task, EnvironmentTask) else collect
    for step in range(1, num_steps + 1):
        version = max(0, step - 1 - staleness)
        sampler = recipe.make_model()
        sampler.load_state_dict(weights[version])
        prompts = [task.prompts[i] for i in step_tasks.tasks_of(step)]
        engine = recipe.make_engine(sampler, None, version)
        groups = sample(engine, task, prompts, draws, group_size=chosen.group_size, sampling=sampling).groups
        trainer.train(step, groups)
        weights.append(copy.deepcopy(model.state_dict()))
        draws |= {prompt.prompt_id: draws[prompt.prompt_id] + 1 for prompt in prompts}
        rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        assert all((rollout.versions == version).all() for _, rollout in rollouts)
        rows.append(
            [(p.prompt_id, r.sample, [*p.tokens.tolist(), *r.tokens.tolist()], r.reward, version) for p, r in rollouts]
        )
    return weights[-1], rows


@pytest.fixture(scope="module")
def synchronous() -> Result:
    return run(sampling_loop(build_float64("llama")), 5)


def test_a_step_reports_its_finished_rollouts() -> None:
    calls: list[tuple[str, int, int]] = []
    with pipeline(num_steps=1) as loop:
        loop.on_progress = lambda *call: calls.append(call)
        loop.step()
    # Several may finish between two looks.
    done = [call[1] for call in calls if call[0] == "sampling"]
    assert {total for phase, _, total in calls if phase == "sampling"} == {8}
    assert (done[0], done[-1]) == (0, 8)
    assert done == sorted(done)
    # Before that it waits for its processes, all of which build the model.
    num_ready = [call[1:] for call in calls if call[0] == "starting"]
    assert (num_ready[0][0], len(set(num_ready[-1]))) == (0, 1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_on_policy_the_weights_are_those_of_the_synchronous_loop(synchronous: Result, num_workers: int) -> None:
    with pipeline(num_steps=5, num_workers=num_workers) as loop:
        assert_same(run(loop, 5), synchronous)
        assert loop.version == loop.num_steps_done == 5


@pytest.mark.parametrize(("staleness", "num_workers"), [(1, 3), (2, 2)])
def test_stale_steps_are_sampled_wholly_by_the_version_of_the_rule(staleness: int, num_workers: int) -> None:
    with pipeline(num_steps=6, num_workers=num_workers, staleness=staleness) as loop:
        assert_same(run(loop, 6), stale(TinyRecipe(), options(), 6, staleness))


def test_reports_name_version_and_staleness_of_each_step() -> None:
    with pipeline(num_steps=4, staleness=1) as loop:
        reports = [loop.step() for _ in range(4)]
    assert [report.version for report in reports] == [0, 0, 1, 2]
    assert [report.overlap.staleness for report in reports if report.overlap is not None] == [0, 1, 1, 1]
    for report in reports:
        assert report.engine.num_sampled == report.rollouts.num_tokens > 0
        assert report.phases.rollout_s > 0
        assert report.phases.train_s > 0
        values = report.values()
        assert 0 <= values[metrics.BUBBLE] <= 1
        assert values[metrics.TRAINER_WAIT_S] >= 0
        assert values[metrics.STALENESS] in (0, 1)


def test_stealing_moves_work_and_no_result(synchronous: Result) -> None:
    with pipeline(num_steps=5, policy=Lopsided("queued"), staleness=0) as loop:
        assert_same(run(loop, 5), synchronous)
        assert loop.account.stolen > 0
    with pipeline(num_steps=5, policy=Lopsided("off")) as loop:
        assert_same(run(loop, 5), synchronous)
        assert loop.account.stolen == 0


def test_drafts_from_the_shared_history_change_nothing(synchronous: Result, tmp_path: Path) -> None:
    with pipeline(num_steps=5, history=tmp_path / "history") as loop:
        rows, engines = [], []
        for _ in range(5):
            engines.append(loop.step().engine)
            rows.append(rows_of(loop))
        assert_same((loop.model.state_dict(), rows), synchronous)
    assert sum(engine.num_accepted for engine in engines) > 0


def test_groups_that_only_a_kl_trains_are_counted_once() -> None:
    kl = {"kl": 0.5, "kl_in": "loss", "reference": partial(build_float64, "llama", seed=4)}
    with pipeline(TinyRecipe(task=tasks.Constant), num_steps=1, num_workers=1, **kl) as loop:
        loop.step()
        assert (loop.account.trained, loop.account.without_variance) == (8, 0)


def test_a_trainer_makes_the_reference_of_a_kl() -> None:
    kl = {"kl": 0.5, "kl_in": "reward", "reference": partial(build_float64, "llama", seed=4)}
    expected = run(sampling_loop(build_float64("llama"), **kl), 2)
    with pipeline(num_steps=2, num_workers=1, **kl) as loop:
        assert_same(run(loop, 2), expected)
    assert loop.latest[0].advantage is not None


class FewPositions(TinyRecipe):
    """Recipe with a model of 15 positions; the longest prompts have 5 tokens, and rollouts 12."""

    def make_model(self) -> nn.Module:
        return build_float64(max_position_embeddings=15)


def test_invalid_arguments_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="reward_time_limit_s must be positive, got 0"):
        pipeline(num_steps=1, reward_time_limit_s=0.0)
    with pytest.raises(ConfigError, match="num_workers"):
        pipeline(num_steps=1, num_workers=0)
    with pytest.raises(InputError, match="prompt 'p2': the model has 15 positions"):
        pipeline(FewPositions(), num_steps=1)
    with pytest.raises(InputError, match="at least one prompt"):
        pipeline(TinyRecipe(task=partial(TinyTask, 0)), num_steps=1)


def test_a_loop_refuses_steps_after_its_last_one_and_after_close() -> None:
    with pipeline(num_steps=1) as loop:
        loop.step()
        with pytest.raises(StateError, match="all 1 are done"):
            loop.step()
        assert loop.account.scheduled == 8
    fresh = pipeline(num_steps=1)
    fresh.close()
    with pytest.raises(StateError, match="was closed or has failed"):
        fresh.step()
