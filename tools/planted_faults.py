"""Plants known faults in the library one at a time and says which test catches each, and how long that took.

    python tools/planted_faults.py                     # the tests that each fault names
    python tools/planted_faults.py --only journal      # faults whose name or file has this word
    python tools/planted_faults.py --all-tests         # all that `make test` runs, until the first failure

The faults are in `planted_faults.toml`: a file of `src/treering`, a text that occurs once in it, what replaces it, and
the tests that are to fail. The library is copied for each; this checkout stays as it is. Exit code 1: a fault that no
test caught, or whose text is gone.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800
"""Seconds of one run of tests; a fault that makes them hang is caught."""

COMPILED = ("@kernel", "@lean", "@compiled_once")
"""What compiled functions are marked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong, in a few words.
        file: below `src/treering`.
        old: a text that occurs once in the file.
        new: what replaces it.
        tests: paths of the tests that are to see it, separated by spaces.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def main() -> int:
    """Runs the chosen faults; 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name or file has this text")
    parser.add_argument("--all-tests", action="store_true", help="all of `make test`, not only the named tests")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest")
    arguments = parser.parse_args()
    chosen = [fault for fault in read_faults() if arguments.only in f"{fault.name} {fault.file}"]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(chosen, 1):
            start = time.monotonic()
            cache = plant(fault, Path(folder))
            caught = run(Path(folder), cache, "tests" if arguments.all_tests else fault.tests, arguments.workers)
            survivors += caught is None
            seconds = time.monotonic() - start
            print(f"{number}/{len(chosen)}  {seconds:6.1f} s  {fault.name}: {caught or 'NOT CAUGHT'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults are caught")
    return 1 if survivors else 0


def read_faults() -> list[Fault]:
    """The faults of the list."""
    with (ROOT / "tools" / "planted_faults.toml").open("rb") as stream:
        return [Fault(**each) for each in tomllib.load(stream)["fault"]]


def plant(fault: Fault, folder: Path) -> Path:
    """Makes `folder/src`, the library with the fault; returns where its compiled functions are to be kept."""
    source = folder / "src"
    shutil.rmtree(source, ignore_errors=True)
    # Times of files stay, so that compiled functions are found again.
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    file = source / "treering" / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: its text occurs {text.count(fault.old)} times in {fault.file}; correct the list")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    if not any(mark in text for mark in COMPILED):
        return folder / "compiled"
    # Functions of other files that call it are compiled with it, and their own files have not changed.
    cache = folder / "compiled-with-fault"
    shutil.rmtree(cache, ignore_errors=True)
    return cache


def run(folder: Path, cache: Path, tests: str, num_workers: int) -> str | None:
    """The first test that fails on the library in `folder/src`; None if none does."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}",
        "NUMBA_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(num_workers)]
    command += ["-m", "not gpu and not ranks" if tests == "tests" else "not gpu", *tests.split()]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_S} s"
    if ran.returncode == 0:
        return None
    if ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED or "during collection" in ran.stdout:
        # A library that cannot be imported fails every test, and shows nothing about this fault.
        sys.exit(f"{tests} did not run: {ran.stdout.strip()[-500:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if found is None:
        return f"exit code {ran.returncode}: {(ran.stdout + ran.stderr).strip()[-200:]}"
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
