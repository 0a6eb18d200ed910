"""A killed process costs only time: no rollout is lost or trained twice, and the weights are the same."""

import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.killing import ROOT
from tests.processes import is_alive, wait_for_the_end_of
from tests.runtime import tasks
from tests.runtime.kills import killing
from tests.runtime.runs import DeadlyEngines, TinyRecipe, pipeline
from tests.runtime.test_pipeline import Result, assert_same, run
from treering.engine.request import Sampling
from treering.errors import InputError, StateError
from treering.runtime.account import Account

NUM_STEPS = 6
NUM_ROLLOUTS = 8 * 4 + 4 * 2


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


def is_complete(account: Account, num_rollouts: int = NUM_ROLLOUTS) -> bool:
    """Whether every scheduled rollout was sampled, evaluated and trained once."""
    counts = (account.scheduled, account.sampled, account.evaluated)
    left_out = account.reward_errors + account.empty + account.without_variance
    return counts == (num_rollouts,) * 3 and account.trained + left_out == num_rollouts


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


def test_a_process_that_hangs_with_work_is_replaced(undisturbed: Result) -> None:
    # The first message comes from a process that is ready; later ones tell that there is work.
    stopping = killing({5: "rollout worker 0", 6: "trainer"}, signal.SIGSTOP)
    with stopping as hung, pipeline(num_steps=NUM_STEPS, staleness=1, worker_time_limit_s=20.0) as loop:
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert hung == ["rollout worker 0", "trainer"]
    assert_same(result, undisturbed)
    assert is_complete(account)
    assert min(account.worker_deaths, account.trainer_deaths) >= 1


def test_a_new_trainer_restores_bitwise_the_weights_of_the_dead_one() -> None:
    results = []
    for moments in ({}, {40: "trainer", 70: "trainer"}):
        with killing(moments) as dead, pipeline(num_steps=NUM_STEPS, num_workers=1, staleness=1) as loop:
            results.append(run(loop, NUM_STEPS)[0])
            assert (loop.account.steps_trained_again > 0) == bool(moments)
        assert len(dead) == len(moments)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.slow
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


def test_a_reward_over_the_time_limit_leaves_out_only_its_rollout() -> None:
    with pipeline(TinyRecipe(task=tasks.Slow), num_steps=1, reward_time_limit_s=3.0) as loop:
        report = loop.step().rollouts
        account = loop.account
        pids = loop.pids
    assert report.num_reward_errors == account.reward_errors == 2
    assert account.reward_workers_stopped == 2
    assert account.reward_worker_deaths == 0
    assert report.num_rollouts == 6
    assert all("runtime.reward_time_limit_s = 3 s" in message for message in report.reward_errors)
    assert "TimeoutError" in report.reward_errors[0]
    assert "reward worker" in pids
    assert is_complete(account, 8)


def test_a_rollout_that_kills_one_reward_worker_is_evaluated_again(tmp_path: Path) -> None:
    recipe = TinyRecipe(task=partial(tasks.DeadlyOnce, str(tmp_path / "died")))
    with pipeline(recipe, num_steps=1) as loop:
        assert loop.step().rollouts.num_reward_errors == 0
        assert loop.account.reward_worker_deaths == 1
        assert loop.account.evaluated_again >= 1
        assert is_complete(loop.account, 8)


def test_a_run_outlives_its_fork_server() -> None:
    with pipeline(num_steps=3, num_workers=1) as loop:
        loop.step()
        server = int(Path(f"/proc/{loop.pids['reward worker']}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert server != os.getpid()
        children = [*loop.pids.values()]
        os.kill(server, signal.SIGKILL)
        # On a busy machine all steps could finish before the signals arrive.
        wait_for_the_end_of([server, *children])
        loop.step()
        loop.step()
        assert is_complete(loop.account, 20)
        # No child outlives the server, the spare reward worker neither.
        assert (loop.account.worker_deaths, loop.account.reward_worker_deaths, loop.account.trainer_deaths) == (1, 2, 1)


def test_an_error_in_a_child_is_raised_here_with_its_type_and_text() -> None:
    with pipeline(num_steps=1, sampling=Sampling(max_tokens=500)) as loop:
        with pytest.raises(InputError, match="500") as caught:
            loop.step()
        assert "raised in a child process" in caught.value.__notes__[0]
        assert loop.pids == {}
        with pytest.raises(StateError, match="is over"):
            loop.step()


def test_a_process_that_always_dies_ends_the_run() -> None:
    with pytest.raises(StateError, match=r"rollout worker 0 died 5 times in a row.*signal SIGKILL"):
        pipeline(DeadlyEngines(), num_steps=1, num_workers=1).step()


@pytest.mark.slow
def test_processes_end_with_a_controller_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.runtime.controller"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 5
        assert all(is_alive(pid) for pid in pids)
        controller.kill()
        wait_for_the_end_of(pids)
