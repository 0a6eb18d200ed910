"""Processor time that the host of a virtual machine gave to others: what nothing that runs here can be blamed for.

Knows the kernel's counts. Knows nothing of what is measured. A processor that idles waits for its turn as well when it
wakes up, and the kernel counts that, though nobody here waited: so a processor counts while it has no idle time.
"""

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

_FILE = Path("/proc/stat")
_BUSY, _IDLE, _STOLEN = (0, 1, 2, 5, 6), (3, 4), 7
"""Columns: user, nice, system and both kinds of interrupts; idle and waiting for files; what others had."""


class Ticks(NamedTuple):
    """Counts of one processor since the machine started."""

    busy: int
    idle: int
    stolen: int


def ticks(file: Path = _FILE) -> tuple[Ticks, ...]:
    """The counts now, of each processor; none where the kernel keeps none.

    Example: "cpu1  400 10 80 9000 5 0 10 100 0 0" is 500 busy, 9005 idle and 100 stolen.
    """
    if not file.exists():
        return ()
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        name, *counts = line.split()
        if name == "cpu" or not name.startswith("cpu") or len(counts) <= _STOLEN:
            continue
        busy, idle = (sum(int(counts[at]) for at in columns) for columns in (_BUSY, _IDLE))
        found.append(Ticks(busy, idle, int(counts[_STOLEN])))
    return tuple(found)


def slowness(samples: Sequence[tuple[Ticks, ...]]) -> float:
    """How many times longer processes took than they would have, had nothing been stolen; 1 where nothing is known.

    Args:
        samples: of the same processors, one after another.

    Example: between two samples one processor was 10 ticks busy, none idle and 2 stolen, another one 5 idle and 5
    stolen: 1.2.
    """
    busy = stolen = 0
    for before, after in pairwise(samples):
        for old, new in zip(before, after, strict=True):
            if new.idle == old.idle:
                busy, stolen = busy + new.busy - old.busy, stolen + new.stolen - old.stolen
    return 1.0 + stolen / busy if busy > 0 else 1.0


class TickWatch:
    """Takes samples, in a thread of its own, for as long as its block lasts.

    Example: of a block of one second, with a sample every 0.1 s, `samples` has about 10 at its end.
    """

    def __init__(self, *, every_s: float = 0.1, file: Path = _FILE) -> None:
        """`every_s`: short enough that a busy processor has whole intervals without idle time; a tick is 0.01 s."""
        self.samples: list[tuple[Ticks, ...]] = []
        self._every_s = every_s
        self._file = file
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.samples.append(ticks(self._file))
            if self._is_over.wait(self._every_s):
                return
