"""`make gpu` with a python that only notes what it is asked to run: the order, the limits and the exit status."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("timeout") is None, reason="make or timeout is not installed"
)


def make_gpu(tmp_path: Path, script: str, *settings: str) -> tuple[int, list[list[str]]]:
    """Exit status, and the arguments of every call; `script` decides what a call does."""
    log, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >> {log}\n{script}\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={python}", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return done.returncode, [line.split() for line in log.read_text().splitlines()]


def test_the_tests_of_all_files_that_need_a_device_run_and_then_the_benchmarks(tmp_path: Path) -> None:
    status, (tests, measured) = make_gpu(tmp_path, "exit 0")
    assert status == 0
    files = sorted(
        str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text()
    )
    assert [arg for arg in tests if arg.startswith("tests/")] == files
    assert measured[:2] == ["-m", "benchmarks.gpu.bench"]
    # Nothing took any time.
    assert measured[measured.index("--budget-s") + 1] in ("1199", "1200")
