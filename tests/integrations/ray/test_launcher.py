"""On Ray a run gives what it gives in local processes, whatever dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.ray.conftest import make_launcher
from tests.killing import ROOT
from tests.processes import wait_for_the_end_of
from tests.runtime import tasks
from tests.runtime.kills import killing
from tests.runtime.runs import TinyRecipe, pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_history import GREEDY, PER_EPOCH, drafting, drafts_of
from tests.runtime.test_history import NUM_STEPS as DRAFTED_STEPS
from tests.runtime.test_history import run as drafted
from tests.runtime.test_pipeline import CLOSE, Result, assert_same, run
from tests.runtime.test_resume import train
from treering.engine.request import Sampling
from treering.errors import ConfigError, InputError
from treering.runtime.account import Account
from treering.runtime.ipc.launcher import Launcher
from treering.runtime.pipeline import PipelineLoop

NUM_STEPS = 6
NUM_PROCESSES = 5
"""Two rollout workers, two reward workers, the trainer."""


def test_actors_give_bitwise_the_weights_of_local_processes(launcher: Launcher) -> None:
    results = []
    for each in (None, launcher):
        with pipeline(num_steps=NUM_STEPS, launcher=each) as loop:
            results.append(run(loop, NUM_STEPS))
            assert is_complete(loop.account)
    (local, rows), (remote, remote_rows) = results
    assert rows == remote_rows
    assert all(torch.equal(local[name], remote[name]) for name in local)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop:
        return run(loop, NUM_STEPS)


def test_each_kind_of_actor_may_be_killed(undisturbed: Result, launcher: Launcher) -> None:
    moments = {9: "rollout worker 0", 18: "trainer", 30: "reward worker"}
    with killing(moments) as dead, pipeline(num_steps=NUM_STEPS, staleness=1, launcher=launcher) as loop:
        result = run(loop, NUM_STEPS)
        account = loop.account
    assert dead == [*moments.values()]
    assert_same(result, undisturbed)
    assert is_complete(account)
    assert (account.worker_deaths, account.reward_worker_deaths, account.trainer_deaths) == (1, 1, 1)


def test_trainer_ranks_that_may_be_elsewhere_give_the_weights_of_one_trainer(
    ray_here: None, undisturbed: Result, address: str
) -> None:
    launcher = make_launcher(listen=address)
    with pipeline(num_steps=NUM_STEPS, staleness=1, launcher=launcher, num_trainer_ranks=2, ranks="gathered") as loop:
        assert_same(run(loop, NUM_STEPS), undisturbed)
        assert "trainer rank 1" in loop.pids
        assert is_complete(loop.account)


@pytest.mark.slow
def test_a_run_whose_controller_is_killed_leaves_no_actor_and_resumes(launcher: Launcher, tmp_path: Path) -> None:
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
    with pipeline(num_steps=NUM_STEPS, staleness=1, launcher=launcher) as resumed:
        rows = train(resumed, tmp_path / "killed")
    assert 0 < len(rows) < NUM_STEPS
    assert rows == expected[-len(rows) :]
    for name, tensor in loop.model.state_dict().items():
        assert (resumed.model.state_dict()[name] - tensor).abs().max() <= CLOSE, name


def test_a_recipe_that_actors_cannot_import_is_refused(ray_here: None, launcher: Launcher) -> None:
    recipe = type("Local", (TinyRecipe,), {"__module__": "__main__"})()
    with pytest.raises(ConfigError, match="move it into a module"):
        pipeline(recipe, num_steps=1, launcher=launcher).step()


def test_an_error_in_an_actor_is_raised_here_with_its_type_and_text(launcher: Launcher) -> None:
    sampling = Sampling(max_tokens=500)
    with pipeline(num_steps=1, num_workers=1, sampling=sampling, launcher=launcher) as loop:
        with pytest.raises(InputError, match="500") as caught:
            loop.step()
        assert "raised in a child process" in caught.value.__notes__[0]


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


def test_actors_that_may_be_elsewhere_draft_what_local_processes_draft(ray_here: None, address: str) -> None:
    def loop(launcher: Launcher | None) -> PipelineLoop:
        recipe = TinyRecipe(task=tasks.Constant)
        return pipeline(recipe, num_steps=DRAFTED_STEPS, drafting=drafting(), launcher=launcher, sampling=GREEDY)

    remote = make_launcher(listen=address)
    assert not remote.shares_host
    local_engines, local_rows = drafted(loop(None))
    engines, rows = drafted(loop(remote))
    assert rows == local_rows
    assert drafts_of(engines) == drafts_of(local_engines)
    assert sum(engine.num_accepted for engine in engines[PER_EPOCH:]) > 0
