"""A run on Ray gives the results of a run in one process, whichever process dies."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.killing import ROOT
from tests.processes import wait_for_the_end_of
from tests.runtime import tasks
from tests.runtime.kills import killing
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import CLOSE, Result, assert_same, rows_of, run
from tests.runtime.test_resume import train
from treering import extras
from treering.engine.protocol import Sampling
from treering.errors import ConfigError, InputError, MissingExtraError
from treering.runtime.account import Account
from treering.runtime.process import RunProcess
from treering.runtime.ray_actors import RayActors, check_room

NUM_STEPS = 6
NUM_PROCESSES = 4
"""Two rollout workers, a reward worker, the trainer."""


PRINTING = ("changes the folder", "prints", "forks", "leaves a process")
"""Rewards that print, apart from the others because printing after stdout was closed raises."""


def test_actors_give_bitwise_the_weights_of_objects_in_one_process_though_rewards_print_and_fork(
    actors: RayActors,
) -> None:
    with pipeline(num_steps=NUM_STEPS) as loop:
        local, rows = run(loop, NUM_STEPS)
    with pipeline(TinyRecipe(task=partial(tasks.Doing, *PRINTING)), num_steps=NUM_STEPS, actors=actors) as loop:
        remote, remote_rows = run(loop, NUM_STEPS)
        started = members_of(loop.pids["reward worker"])
        assert loop.account.reward_worker_deaths == loop.account.reward_errors == 0
        assert is_complete(loop.account)
    assert rows == remote_rows
    assert all(torch.equal(local[name], remote[name]) for name in local)
    assert len(started) > 1
    wait_for_the_end_of(started)


def test_an_actor_that_rehearses_while_a_step_is_trained_gives_the_weights_of_one_that_does_not(
    actors: RayActors,
) -> None:
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="off") as loop:
        expected = run(loop, NUM_STEPS)
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on", actors=actors) as loop:
        found, num_kept = [], 0
        for _ in range(NUM_STEPS):
            num_kept += loop.step().engine.num_kept
            found.append(rows_of(loop))
        # A pass over rehearsed tokens rounds otherwise than passes over one.
        assert_same((loop.model.state_dict(), found), expected)
    assert num_kept > 0


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


def test_each_kind_of_actor_may_be_killed(undisturbed: Result, actors: RayActors) -> None:
    moments = {9: "rollout worker 0", 18: "trainer", 30: "reward worker"}
    # Harmless, too: these rewards end no process, so the account below counts the kills only.
    recipe = TinyRecipe(task=partial(tasks.Doing, *(name for name in tasks.HARMLESS if name not in PRINTING)))
    with (
        killing(moments, kill_for_real) as dead,
        pipeline(recipe, num_steps=NUM_STEPS, staleness=1, actors=actors) as loop,
    ):
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert dead == [*moments.values()]
    assert_same(result, undisturbed)
    assert is_complete(account)
    assert (account.worker_deaths, account.reward_worker_deaths, account.trainer_deaths) == (1, 1, 1)


def kill_for_real(process: RunProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


def test_ranks_of_a_trainer_give_the_weights_of_one_and_may_die(undisturbed: Result, ray_here: None) -> None:
    actors = RayActors(num_rollout_workers=1, num_trainer_ranks=2)
    ranks: dict[str, Any] = {"num_workers": 1, "num_trainer_ranks": 2, "ranks": "gathered"}
    with (
        killing({20: "trainer rank 1"}) as dead,
        pipeline(num_steps=NUM_STEPS, staleness=1, actors=actors, **ranks) as loop,
    ):
        assert_same(run(loop, NUM_STEPS), undisturbed)
        account = loop.account
    assert dead == ["trainer rank 1"]
    assert is_complete(account)
    assert account.trainer_deaths == 1


def test_a_reward_that_crashes_or_hangs_costs_its_rollout(actors: RayActors) -> None:
    recipe = TinyRecipe(task=partial(tasks.Doing, "crashes", "hangs"))
    one: dict[str, Any] = {"num_steps": 1, "prompts_per_step": 1, "num_workers": 1}
    with pipeline(recipe, **one, reward_time_limit_s=3.0, actors=actors) as loop:
        report, account = loop.step().rollouts, loop.account
    assert (report.num_reward_errors, account.reward_worker_deaths, account.reward_workers_stopped) == (2, 3, 1)
    assert is_complete(account, 4)


def members_of(group: int) -> list[int]:
    """Return the processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[2]) == group:
            members.append(int(entry.name))
    return members


@pytest.mark.slow
def test_a_run_whose_controller_is_killed_leaves_no_actor_and_resumes(actors: RayActors, tmp_path: Path) -> None:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        expected = train(loop, tmp_path / "whole")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.integrations.ray.controller", str(tmp_path / "killed")]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        controller.kill()
        wait_for_the_end_of(pids)
    assert len(pids) == NUM_PROCESSES
    with pipeline(num_steps=NUM_STEPS, staleness=1, actors=actors) as resumed:
        rows = train(resumed, tmp_path / "killed")
    assert 0 < len(rows) < NUM_STEPS
    assert rows == expected[-len(rows) :]
    for name, tensor in loop.model.state_dict().items():
        assert (resumed.model.state_dict()[name] - tensor).abs().max() <= CLOSE, name


@pytest.mark.slow
def test_a_node_may_die(ray_here: None) -> None:
    with pipeline(num_steps=4, staleness=1) as loop:
        expected = [[row[2] for row in rows] for rows in run(loop, 4)[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.integrations.ray.two_nodes"]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    account = Account(**found["account"])
    assert account.worker_deaths + account.reward_worker_deaths + account.trainer_deaths > 0
    assert is_complete(account, account.scheduled)
    assert found["rows"] == expected


def test_an_error_in_an_actor_is_raised_here_with_its_type_and_text(actors: RayActors) -> None:
    sampling = Sampling(max_tokens=500)
    with pipeline(num_steps=1, num_workers=1, sampling=sampling, actors=actors) as loop:
        with pytest.raises(InputError, match="500") as caught:
            loop.step()
        assert "raised in a worker" in caught.value.__notes__[0]


def test_a_recipe_that_actors_cannot_import_is_refused(actors: RayActors) -> None:
    recipe = type("Local", (TinyRecipe,), {"__module__": "__main__"})()
    with pytest.raises(ConfigError, match="move it into a module"):
        pipeline(recipe, num_steps=1, actors=actors).step()


@pytest.mark.parametrize(
    ("free", "need", "text"),
    [
        (
            [4.0, 4.0],
            3.0,
            "3 rollout workers and 1 trainer ranks need 9 CPUs, but the cluster has 8; lower engine.num_threads",
        ),
        ([4.0] * 4, 5.0, "one needs 5 CPUs and no node has more than 4"),
        ([], 1.0, "need 3 CPUs, but the cluster has 0"),
    ],
)
def test_what_a_cluster_or_a_node_has_no_room_for_is_refused_with_both_numbers(
    free: list[float], need: float, text: str
) -> None:
    needs: Any = {"rollout_worker": need, "reward_worker": 0.0, "trainer": 0.0}
    counts: Any = {"rollout_worker": 3, "reward_worker": 1, "trainer": 1}
    with pytest.raises(ConfigError, match=text):
        check_room(free, needs, counts)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"runtime.workers = 1 needs ray: pip install .*'ray<3,>=2\.60'"):
        RayActors(num_rollout_workers=1)
