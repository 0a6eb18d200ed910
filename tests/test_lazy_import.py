"""Importing stays light: heavy libraries are loaded by the first use that needs them, not before."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numba", "peft", "triton", "tensorboard"}
PROBE = """
import json, sys
{statement}
print(json.dumps(sorted(set(sys.modules) & set({heavy}))))
"""


def loaded_by(statement: str) -> set[str]:
    """Which heavy libraries a fresh interpreter holds after the statement."""
    code = PROBE.format(statement=statement, heavy=sorted(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import treering",
        "import treering; treering.__version__; dir(treering)",
        "import treering.objectives",
        "from treering import objectives, errors",
        "import treering.metrics, treering.types",
        "import treering.config",
        "import treering.cli.main",
    ],
)
def test_a_light_import_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import treering.data",
        "import treering; treering.Forest",
        "import treering; treering.Drafter(treering.HistoryStore())",
        "import treering; treering.Request, treering.Sampling, treering.Rollout",
        "import treering; treering.tree_advantages",
    ],
)
def test_a_room_without_torch_loads_no_torch(statement: str) -> None:
    assert loaded_by(statement) & {"torch", "transformers"} == set()


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numba" in loaded_by("import numba")
