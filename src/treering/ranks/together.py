"""Ranks write one folder together: rank 0 makes it, each adds its own part, and an error of one is an error of all."""

from collections.abc import Callable

from treering.errors import StateError
from treering.ranks.group import RankGroup


def write_together(group: RankGroup, make: Callable[[Callable[[], None]], None], write_own: Callable[[], None]) -> None:
    """Writes a folder; all ranks call it, and it returns when all are done.

    Args:
        group: the ranks.
        make: run by rank 0; calls its argument once the folder is there, and returns when the folder is complete.
        write_own: writes a rank's own part, on all ranks at a time, when rank 0 has called that.

    Raises:
        OSError: this rank could not write.
        StateError: this rank or another one could not.
    """
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        if all(group.gather(True)):
            write_own()

    problem: Exception | None = None
    try:
        if group.rank == 0:
            make(begin)
        else:
            begin()
    except (OSError, StateError) as error:
        problem = error
        if not has_begun:
            # The others wait to hear whether there is a folder.
            group.gather(False)
    problems = [told for told in group.gather(None if problem is None else str(problem)) if told is not None]
    if problem is not None:
        raise problem
    if problems:
        raise StateError(f"ranks write a checkpoint together, and one could not: {problems[0]}")
