"""On Ray a run gives what it gives in local processes, whatever dies."""

import pytest
import torch

from tests.runtime.kills import killing
from tests.runtime.runs import pipeline
from tests.runtime.test_deaths import is_complete
from tests.runtime.test_pipeline import Result, assert_same, run
from treering.runtime.ipc.launcher import Launcher

NUM_STEPS = 6


def test_actors_give_bitwise_the_weights_of_local_processes(launcher: Launcher) -> None:
    results = []
    for each in (None, launcher):
        with pipeline(num_steps=NUM_STEPS, launcher=each) as loop:
            results.append(run(loop, NUM_STEPS))
            assert is_complete(loop.account)
    (local, rows), (remote, remote_rows) = results
    assert rows == remote_rows
    assert all(torch.equal(local[name], remote[name]) for name in local)
