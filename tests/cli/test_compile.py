"""`treering compile`: what it has compiled, no later process compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treering.cli import compile as compiling
from treering.cli.compile import forests, parts

COUNT = """
from numba.core import event
from treering.cli.compile import forests
with event.install_recorder("numba:compile") as found:
    forests()
print(sum(step.is_start for _, step in found.buffer))
"""


def test_a_part_that_was_run_is_not_compiled_in_later_processes(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (
        int(subprocess.run([sys.executable, "-c", COUNT], env=environment, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(2)
    )
    assert first > 0
    assert again == 0


def test_every_part_is_run_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    each = {name: lambda name=name: done.append(name) for name in ("forests", "engine")}
    monkeypatch.setattr(compiling, "parts", lambda: each)
    assert compiling.run(json_output=True) == 0
    assert done == list(json.loads(capsys.readouterr().out)["seconds"]) == ["forests", "engine"]
    assert parts()["forests"] is forests
