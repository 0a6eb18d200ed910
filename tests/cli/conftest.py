from pathlib import Path

import pytest

from tests.cli.runs import Call, Commands, trainer
from tests.runtime.in_process import TestActors
from treering.cli.run_training import run_sft, run_train


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, without real data unless a test makes some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREERING_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of a run be objects of this process instead of Ray actors."""
    monkeypatch.setattr("treering.cli.train.make_actors", lambda _: TestActors())


@pytest.fixture
def commands(
    folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Commands:
    return Commands(folder, monkeypatch, capfd)


@pytest.fixture
def sft(capsys: pytest.CaptureFixture[str]) -> Call:
    """`sft(path, *overrides)` returns the JSON summary of `treering sft`, and its stderr."""
    return trainer(run_sft, capsys)


@pytest.fixture
def train(in_process: None, capsys: pytest.CaptureFixture[str]) -> Call:
    """`train(path, *overrides)` returns the JSON summary of `treering train`, and its stderr."""
    return trainer(run_train, capsys)
