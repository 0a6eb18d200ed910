"""The commands that train, in a folder of their own."""

from pathlib import Path

import pytest

from tests.cli.runs import Commands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREERING_DATA", str(tmp_path / "data"))
    return Commands(tmp_path, monkeypatch, capfd)
