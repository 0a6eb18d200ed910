"""Shared fixtures of the history tests."""

from pathlib import Path

import pytest

from tests.history.stores import data_files, large, write


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder with three data files; the middle one holds only b and c."""
    write(tmp_path, {"a": large(1)}, {"b": large(3)[:160_000], "c": [4]}, {"d": [5, 6]})
    assert len(data_files(tmp_path)) == 3
    return tmp_path
