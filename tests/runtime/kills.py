"""Kills at chosen moments, counted by what the controller hears, so that no clock has a part in them."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from treering.runtime.ipc.process import MAX_DEATHS, ChildProcess


@contextmanager
def killing(moments: Mapping[int, str]) -> Iterator[list[str]]:
    """A block in which SIGKILL meets a process after the n-th message that the controller has taken.

    One more death in a row would end the run: who has died as often as it may is spared until it has done something.

    Args:
        moments: n -> how the victim's name begins; of several the first that lives.

    Yields:
        The names of the dead, in order.
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
                victim = next(each for each in children.values() if each.name.startswith(due[0][1]) and each.pid)
                # A process dies once: one that is dead and not yet replaced is met again at a later message.
                is_last_chance = victim.num_deaths == MAX_DEATHS - 1
                if victim.pid is not None and victim.pid not in killed and not is_last_chance:
                    os.kill(victim.pid, signal.SIGKILL)
                    killed.add(victim.pid)
                    dead.append(victim.name)
                    del due[0]
        return messages, has_died

    ChildProcess.receive, ChildProcess.start = received, started  # type: ignore[method-assign]
    try:
        yield dead
    finally:
        ChildProcess.receive, ChildProcess.start = receive, start  # type: ignore[method-assign]
