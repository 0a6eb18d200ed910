"""Processor time that the host of a virtual machine gave to others: what nothing that runs here can be blamed for.

Knows the kernel's counts. Knows nothing of what is measured.
"""

from pathlib import Path
from typing import NamedTuple

_FILE = Path("/proc/stat")
_BUSY, _STOLEN = (0, 1, 2, 5, 6), 7
"""Columns: user, nice, system and both kinds of interrupts; what others had while something here could have run."""


class Ticks(NamedTuple):
    """Counts since the machine started, of all processors."""

    busy: int
    stolen: int


def ticks(file: Path = _FILE) -> Ticks:
    """The counts now; zeros where the kernel keeps none.

    Example: "cpu  400 10 80 9000 5 0 10 100 0 0" is 500 busy and 100 stolen.
    """
    if not file.exists():
        return Ticks(0, 0)
    name, *counts = file.read_text(encoding="utf-8").splitlines()[0].split()
    if name != "cpu" or len(counts) <= _STOLEN:
        return Ticks(0, 0)
    return Ticks(sum(int(counts[at]) for at in _BUSY), int(counts[_STOLEN]))


def slowness(before: Ticks, after: Ticks) -> float:
    """How many times longer processes took than they would have, had nothing been stolen; 1 where nothing is known.

    Example: 500 ticks busy and 100 stolen are 1.2.
    """
    busy, stolen = after.busy - before.busy, after.stolen - before.stolen
    return 1.0 + stolen / busy if busy > 0 else 1.0
