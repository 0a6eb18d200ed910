"""`treering train` with workers on Ray: the rollouts and weights of one process, also after signals."""

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import folder
from tests.cli.runs import Call, trainer
from tests.cli.train.test_command import prompts
from tests.cli.train.test_interrupts import check_interruptions
from tests.cli.train.test_processes import REWARD, assert_close, rows_of
from treering.cli.run_training import run_train

__all__ = ["folder"]


@pytest.fixture
def train(ray_here: None, capsys: pytest.CaptureFixture[str]) -> Call:
    return trainer(run_train, capsys)


def test_workers_and_trainer_ranks_on_ray_write_the_run_of_one_process(folder: Path, train: Call) -> None:
    path = prompts(folder, REWARD)
    alone = train(path, "run.dir=alone")[0]
    ray = train(path, "run.dir=ray", "runtime.workers=2", "runtime.trainer_ranks=2")[0]
    assert rows_of(folder / "alone") == rows_of(folder / "ray")
    assert ray["account"]["scheduled"] == len(rows_of(folder / "ray"))
    assert_close(alone, ray)


@pytest.mark.slow
def test_a_run_with_workers_interrupted_at_random_moments_ends_with_the_same_weights(
    ray_here: None, folder: Path
) -> None:
    interruptions = (("run.lock", 1, signal.SIGTERM), ("metrics.jsonl", 3, signal.SIGHUP))
    check_interruptions(folder, 2, interruptions)
