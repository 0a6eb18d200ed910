import subprocess
import sys

import pytest

from tests.killing import ROOT

# Torch could start while the command line is imported.
PROGRAM = """
import os, sys, types

command_line = types.ModuleType("treering.cli.main")
command_line.main = lambda: print("torch" in sys.modules, *sorted(
    f"{name}={value}" for name, value in os.environ.items() if name.endswith("ALLOC_CONF")))
sys.modules["treering.cli.main"] = command_line
from treering.cli.start import main
main()
"""


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_allocator_has_growing_segments_before_torch_starts_unless_the_user_sets_it(name: str | None) -> None:
    own = {} if name is None else {name: "max_split_size_mb:64"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / "src"), **own},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert done.stdout.split() == ["False", *(f"{key}={value}" for key, value in wanted.items())]
