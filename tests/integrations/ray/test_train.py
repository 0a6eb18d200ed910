"""`treering train` on Ray: the same rollouts as in local processes."""

from pathlib import Path

import pytest

from tests.cli.conftest import folder, train
from tests.cli.runs import Call
from tests.cli.train.test_command import prompts
from tests.cli.train.test_processes import REWARD, assert_close, rows_of
from treering import extras
from treering.errors import ConfigError

__all__ = ["folder", "train"]


def test_workers_and_trainer_ranks_on_ray_write_the_run_of_one_process(
    ray_here: None, folder: Path, train: Call
) -> None:
    path = prompts(folder, REWARD)
    alone = train(path, "run.dir=alone")[0]
    on_ray = ("runtime.launcher=ray", "runtime.workers=2", "runtime.trainer_ranks=2")
    ray = train(path, "run.dir=ray", *on_ray, "runtime.resources.trainer.num_cpus=0.5")[0]
    assert rows_of(folder / "alone") == rows_of(folder / "ray")
    assert ray["account"]["scheduled"] == len(rows_of(folder / "ray"))
    assert_close(alone, ray)


def test_a_drafter_inside_vllm_is_refused_where_it_may_not_see_the_history(
    folder: Path, train: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda _: True)
    elsewhere = ("runtime.workers=1", "runtime.launcher=ray", "runtime.listen=10.0.0.1")
    with pytest.raises(ConfigError, match=r'set history\.drafts = "off"'):
        train(prompts(folder, REWARD), *elsewhere, "engine.kind=vllm")
