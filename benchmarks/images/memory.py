"""Peak memory of one step in its own process: `python -m benchmarks.images.memory WAY CASE`.

A step on small images comes first, so that what is loaded or compiled once does not count. Weights, inputs and
gradients do: of these only the inputs differ, as a padded batch repeats its images.
"""

import gc
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.timing import one_thread
from benchmarks.images.cases import Case, model_of, small
from benchmarks.images.steps import WAYS

# Freed memory goes back at once, so that what a process holds is what it uses.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_ROOT = Path(__file__).resolve().parents[2]


def peak_bytes(case: Case) -> dict[str, int]:
    """Bytes that each way adds to what its process held before the model was made."""
    return {way: _in_child(way, case) for way in WAYS}


def _in_child(way: str, case: Case) -> int:
    command = [sys.executable, "-m", "benchmarks.images.memory", way, json.dumps(asdict(case))]
    done = subprocess.run(command, cwd=_ROOT, env=os.environ | _ALLOCATOR, capture_output=True, text=True, check=True)
    return int(done.stdout)


def _peak_of_step(way: str, case: Case) -> int:
    with one_thread():
        WAYS[way](model_of(case), small(case))()
        gc.collect()
        held = _resident_bytes()
        WAYS[way](model_of(case), case)()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(_peak_of_step(sys.argv[1], Case(**json.loads(sys.argv[2]))))
