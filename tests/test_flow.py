"""How much code a reader passes through: the files and functions that one `backward` and one step of `train` enter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "max_files", "max_functions"),
    [
        ("backward", 32, 231),
        pytest.param("train", 150, 1155, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_a_step_enters_no_more_files_and_functions_than_before(name: str, max_files: int, max_functions: int) -> None:
    """Lower a bound when the count falls; raise one only for a feature that every step needs."""
    command = [sys.executable, "tools/flow.py", name, "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert found[name]["files"] <= max_files
    assert found[name]["functions"] <= max_functions
