"""The commands that train, in a folder of their own."""

from pathlib import Path

import pytest

from tests.cli.runs import Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, without real data unless a test makes some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREERING_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(folder, monkeypatch, capfd)
