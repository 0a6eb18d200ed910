from pathlib import Path

import pytest

from tests.cli.inspect.runs import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")
