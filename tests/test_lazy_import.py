"""Importing treering is light: heavy libraries are loaded only by the first use that needs them."""

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "numba", "peft", "triton", "tensorboard"}
PROBE = """
import json, sys
{statement}
print(json.dumps(sorted(set(sys.modules) & set({heavy}))))
"""


def loaded_by(statement: str) -> set[str]:
    """Return the heavy libraries that a fresh interpreter has loaded after the statement."""
    code = PROBE.format(statement=statement, heavy=sorted(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_light_import_loads_nothing_heavy() -> None:
    names = "objectives", "metrics", "types", "config", "cli.main"
    imports = ", ".join(["treering", *(f"treering.{name}" for name in names)])
    assert loaded_by(f"import {imports}; treering.__version__; dir(treering); treering.errors") == set()


def test_a_room_without_torch_loads_no_torch() -> None:
    names = "Forest", "Drafter(treering.HistoryStore())", "Request", "Sampling", "Rollout", "tree_advantages"
    uses = ", ".join(f"treering.{name}" for name in names)
    assert loaded_by(f"import treering, treering.data; {uses}") & {"torch", "transformers"} == set()


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numba" in loaded_by("import numba")
