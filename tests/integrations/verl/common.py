"""Helpers of the tests of verl: count distinct tokens by their definition, and build environments without an opt-in."""

import os
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]


def num_distinct(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of distinct beginnings; a token is identified by all tokens up to it."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def environment(**chosen: str) -> dict[str, str]:
    """Return variables of a process that finds the sources and these tests, with no setting but those given."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "TREERING_VERL_"))}
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **chosen}
