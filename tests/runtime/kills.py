"""Kills processes after chosen numbers of messages, so that no clock decides when."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from treering.runtime.process import MAX_DEATHS, Actor, RunProcess


def kill(process: RunProcess) -> None:
    """Kill a process as the controller does."""
    assert process.actor is not None
    process.actor.kill()


@contextmanager
def killing(moments: Mapping[int, str], end: Callable[[RunProcess], None] | None = None) -> Iterator[list[str]]:
    """Kill a process, or end it otherwise, after the n-th message that the controller receives.

    Spares a process whose next death in a row would end the run, until it makes progress.

    Args:
        moments: n -> prefix of the victim's name; the first ready process that matches is the victim.
        end: called with the victim; None kills it.

    Yields:
        The names of the killed processes, in order.
    """
    processes: dict[int, RunProcess] = {}
    due = sorted(moments.items())
    dead: list[str] = []
    killed: list[Actor] = []
    receive, start = RunProcess.receive, RunProcess.start
    count = 0

    def started(process: RunProcess, settings: object) -> None:
        start(process, settings)
        processes[id(process)] = process

    def received(process: RunProcess) -> tuple[list[Any], bool]:
        nonlocal count
        messages, has_died = receive(process)
        for _ in messages:
            count += 1
            if due and count >= due[0][0]:
                # Wait for a later message if the victim is dead and not yet replaced, or on its way.
                ready = (each for each in processes.values() if each.is_ready and each.num_deaths < MAX_DEATHS - 1)
                victim = next((each for each in ready if each.name.startswith(due[0][1])), None)
                if victim is not None and victim.actor is not None and victim.actor not in killed:
                    killed.append(victim.actor)
                    (end or kill)(victim)
                    dead.append(victim.name)
                    del due[0]
        return messages, has_died

    RunProcess.receive, RunProcess.start = received, started  # type: ignore[method-assign]
    try:
        yield dead
    finally:
        RunProcess.receive, RunProcess.start = receive, start  # type: ignore[method-assign]
