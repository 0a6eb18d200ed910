"""A process that ends costs only time: no rollout is lost or trained twice, and the weights are the same."""

import random
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.runtime import tasks
from tests.runtime.in_process import TestActor
from tests.runtime.kills import killing
from tests.runtime.runs import DeadlyEngines, TinyRecipe, pipeline
from tests.runtime.test_pipeline import Result, assert_same, run
from treering.engine.protocol import Sampling
from treering.errors import InputError, StateError
from treering.runtime import process, rewards
from treering.runtime.account import Account
from treering.runtime.process import RunProcess

NUM_STEPS = 6
NUM_ROLLOUTS = 8 * 4 + 4 * 2


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


def is_complete(account: Account, num_rollouts: int = NUM_ROLLOUTS) -> bool:
    """Return whether every scheduled rollout was sampled, evaluated and trained once."""
    counts = (account.scheduled, account.sampled, account.evaluated)
    left_out = account.reward_errors + account.empty + account.without_variance
    return counts == (num_rollouts,) * 3 and account.trained + left_out == num_rollouts


def tick(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let a second pass whenever the module looks at its clock."""
    ticks = count()
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=lambda: float(next(ticks)), perf_counter=lambda: float(next(ticks)))
    )


def test_each_kind_of_process_may_die(undisturbed: Result) -> None:
    kinds = ["rollout worker 0", "reward worker", "trainer"] * 2
    moments = dict(zip((9, 16, 23, 30, 37, 44), kinds, strict=True))
    with killing(moments) as dead, pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert dead == kinds
    assert_same(result, undisturbed)
    assert is_complete(account)
    assert (account.worker_deaths, account.reward_worker_deaths, account.trainer_deaths) == (2, 2, 2)


def stop(victim: RunProcess) -> None:
    assert isinstance(victim.actor, TestActor)
    victim.actor.is_hung = True


def test_a_process_that_hangs_with_work_is_replaced(undisturbed: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch, process)
    # The first message comes from a process that is ready; later ones announce work.
    stopping = killing({5: "rollout worker 0", 6: "trainer"}, stop)
    with stopping as hung, pipeline(num_steps=NUM_STEPS, staleness=1, worker_time_limit_s=1000.0) as loop:
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert hung == ["rollout worker 0", "trainer"]
    assert_same(result, undisturbed)
    assert is_complete(account)
    assert (account.worker_deaths, account.trainer_deaths) == (1, 1)


def test_a_new_trainer_restores_bitwise_the_weights_of_the_dead_one() -> None:
    results = []
    for moments in ({}, {40: "trainer", 70: "trainer"}):
        with killing(moments) as dead, pipeline(num_steps=NUM_STEPS, num_workers=1, staleness=1) as loop:
            results.append(run(loop, NUM_STEPS)[0])
            assert (loop.account.steps_trained_again > 0) == bool(moments)
        assert len(dead) == len(moments)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_twenty_kills_at_random_moments_leave_the_same_weights_and_an_exact_account() -> None:
    num_steps = 18
    generator = random.Random(7)
    moments = dict.fromkeys(sorted(generator.sample(range(3, 200), 20)), "")
    kinds = [generator.choice(["rollout worker 0", "rollout worker 1", "reward worker", "trainer"]) for _ in moments]
    with pipeline(num_steps=num_steps, staleness=1) as loop:
        expected = run(loop, num_steps)
    with killing(dict(zip(moments, kinds, strict=True))) as dead, pipeline(num_steps=num_steps, staleness=1) as loop:
        result = run(loop, num_steps)
        account = loop.account
    assert dead == kinds
    assert_same(result, expected)
    assert is_complete(account, 6 * 20)
    assert account.worker_deaths == sum(kind.startswith("rollout") for kind in kinds)
    assert account.reward_worker_deaths == kinds.count("reward worker")
    assert account.trainer_deaths == kinds.count("trainer")
    assert account.reward_workers_stopped == 0


def test_a_reward_over_the_time_limit_leaves_out_only_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch, rewards)
    with pipeline(TinyRecipe(task=partial(tasks.Doing, "hangs")), num_steps=1, reward_time_limit_s=1000.0) as loop:
        report = loop.step().rollouts
        account = loop.account
    assert report.num_reward_errors == account.reward_errors == 2
    assert account.reward_workers_stopped == 2
    assert account.reward_worker_deaths == 0
    assert report.num_rollouts == 6
    assert all("runtime.reward_time_limit_s = 1000 s" in message for message in report.reward_errors)
    assert "TimeoutError" in report.reward_errors[0]
    assert is_complete(account, 8)


def test_a_rollout_that_kills_one_reward_worker_is_evaluated_again(tmp_path: Path) -> None:
    recipe = TinyRecipe(task=partial(tasks.DeadlyOnce, str(tmp_path / "died")))
    with pipeline(recipe, num_steps=1) as loop:
        assert loop.step().rollouts.num_reward_errors == 0
        assert loop.account.reward_worker_deaths == 1
        assert loop.account.evaluated_again >= 1
        assert is_complete(loop.account, 8)


def test_an_error_in_a_process_is_raised_here_with_its_type_and_text() -> None:
    with pipeline(num_steps=1, sampling=Sampling(max_tokens=500)) as loop:
        with pytest.raises(InputError, match="500"):
            loop.step()
        assert loop.pids == {}
        with pytest.raises(StateError, match="was closed or has failed"):
            loop.step()


def test_a_process_that_always_dies_ends_the_run() -> None:
    with pytest.raises(StateError, match=r"rollout worker 0 died 5 times in a row.*a kill of the test"):
        pipeline(DeadlyEngines(), num_steps=1, num_workers=1).step()
