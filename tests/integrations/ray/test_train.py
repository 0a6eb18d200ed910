"""`treering train` on Ray: the same rollouts as in local processes."""

from pathlib import Path

import pytest

from tests.cli.train.test_command import folder, prompts
from tests.cli.train.test_processes import REWARD, assert_close, rows_of, train
from treering import extras
from treering.errors import ConfigError, MissingExtraError

__all__ = ["folder"]

ON_RAY = ("runtime.workers=1", "runtime.launcher=ray")


def test_the_launcher_changes_no_rollout(ray_here: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompts(folder, REWARD)
    train(capsys, path, "run.dir=local", "runtime.workers=1")
    summary = train(capsys, path, "run.dir=ray", *ON_RAY, "runtime.resources.trainer.num_cpus=0.5")
    assert rows_of(folder / "local") == rows_of(folder / "ray")
    assert summary["account"]["scheduled"] == len(rows_of(folder / "ray"))


def test_workers_and_trainer_ranks_on_ray_write_the_run_of_one_process(
    ray_here: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts(folder, REWARD)
    alone = train(capsys, path, "run.dir=alone")
    ray = train(capsys, path, "run.dir=ray", "runtime.workers=2", "runtime.trainer_ranks=2", "runtime.launcher=ray")
    assert rows_of(folder / "alone") == rows_of(folder / "ray")
    assert_close(alone, ray)


def test_workers_that_may_be_elsewhere_draft_the_same_rollouts(
    ray_here: None, address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Five prompts, two a step: the fourth step repeats two of them.
    path = prompts(folder, REWARD)
    # Actors do not run in this folder.
    files = (f"task.file={folder / 'p.jsonl'}", f"task.tokenizer={folder / 'words'}")
    train(capsys, path, "run.dir=plain", *files, "runtime.workers=1", "history.drafts=off")
    train(capsys, path, "run.dir=ray", *files, *ON_RAY, f"runtime.listen={address}")
    assert rows_of(folder / "plain") == rows_of(folder / "ray")
    assert not (folder / "ray" / "history-shared").exists()


def test_a_drafter_inside_vllm_is_refused_where_it_may_not_see_the_history(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda _: True)
    with pytest.raises(ConfigError, match=r'set history\.drafts = "off"'):
        train(capsys, prompts(folder, REWARD), *ON_RAY, "runtime.listen=10.0.0.1", "engine.kind=vllm")


def test_without_ray_the_run_names_its_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"pip install 'treering\[ray\]'"):
        train(capsys, prompts(folder, REWARD), *ON_RAY)
