"""Kills processes after chosen numbers of messages, so that no clock decides when."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from treering.runtime.ipc.process import MAX_DEATHS, ChildProcess


@contextmanager
def killing(moments: Mapping[int, str], number: signal.Signals = signal.SIGKILL) -> Iterator[list[str]]:
    """Kills a process, or sends another signal, after the n-th message that the controller receives.

    Spares a process whose next death in a row would end the run, until it makes progress.

    Args:
        moments: n -> prefix of the victim's name; the first running process that matches.
        number: the signal.

    Yields:
        The names of the killed processes, in order.
    """
    children: dict[int, ChildProcess] = {}
    due = sorted(moments.items())
    dead: list[str] = []
    killed: set[int] = set()
    receive, start = ChildProcess.receive, ChildProcess.start
    count = 0

    def started(child: ChildProcess, settings: object) -> None:
        start(child, settings)
        children[id(child)] = child

    def received(child: ChildProcess) -> tuple[list[Any], bool]:
        nonlocal count
        messages, has_died = receive(child)
        for _ in messages:
            count += 1
            if due and count >= due[0][0]:
                named = (each for each in children.values() if each.name.startswith(due[0][1]))
                victim = next((each for each in named if each.pid), None)
                # Wait for a later message if the victim is dead, and not yet replaced or on its way.
                if victim is None or victim.pid is None:
                    continue
                is_last_chance = victim.num_deaths == MAX_DEATHS - 1
                if victim.pid not in killed and not is_last_chance:
                    os.kill(victim.pid, number)
                    killed.add(victim.pid)
                    dead.append(victim.name)
                    del due[0]
        return messages, has_died

    ChildProcess.receive, ChildProcess.start = received, started  # type: ignore[method-assign]
    try:
        yield dead
    finally:
        ChildProcess.receive, ChildProcess.start = receive, start  # type: ignore[method-assign]
