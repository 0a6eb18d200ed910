"""Renders the parts of a file in several processes, in their order; a small file in this one."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from treering.data.rendering.rendered_trajectory import RenderedTrajectory
from treering.data.rendering.renderer import RenderCounts, Renderer
from treering.data.trajectory import Trajectory
from treering.errors import DataWarning, StateError

MAX_WORKERS = 4
"""Each holds a tokenizer and a part."""

_Part: TypeAlias = tuple[int, list[Trajectory]]
_Rendered: TypeAlias = tuple[list[Trajectory], list[RenderedTrajectory]]


def num_workers_here() -> int:
    """Processes that pay on this machine: one for each processor that this process may use, at most `MAX_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def render_parts(renderer: Renderer, parts: Iterable[_Part], num_workers: int) -> Iterator[_Rendered]:
    """The parts with their rows, in order, whatever the number of workers.

    Args:
        renderer: which renders, or whose settings the workers take; it counts what they rendered.
        parts: the index of the first trajectory, and trajectories.
        num_workers: processes; below 2, all is done in this one.

    Raises:
        InputError, ConfigError, MissingExtraError: as `Renderer.render_batch`.
        StateError: a worker was killed.
    """
    if num_workers < 2:
        for first, part in parts:
            yield part, renderer.render_batch(part, first)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(renderer)) for _ in range(num_workers)]
        given: dict[int, _Part] = {}
        for number, numbered in enumerate(parts):
            # In turn, and one part at a time: so results come in order, and no two wait for each other's pipe.
            done = _result(renderer, workers, given, number - num_workers)
            with _killed():
                workers[number % num_workers].send(numbered)
            given[number] = numbered
            yield from done
        for left in sorted(given):
            yield from _result(renderer, workers, given, left)


def _result(renderer: Renderer, workers: list[Connection], given: dict[int, _Part], number: int) -> list[_Rendered]:
    """What a worker has made of a part; nothing for a part that was not given."""
    if number not in given:
        return []
    _, part = given.pop(number)
    with _killed():
        found, counts, said = workers[number % len(workers)].recv()
    for sentence in said:
        warnings.warn(sentence, DataWarning, stacklevel=2)
    if isinstance(found, Exception):
        raise found
    renderer.counts.add(counts)
    return [(part, found)]


@contextmanager
def _killed() -> Iterator[None]:
    """Says what the end of a connection to a worker means."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise StateError(
            "a process that renders trajectories was killed, as where memory is full; free some, and start again"
        ) from error


@contextmanager
def _worker(renderer: Renderer) -> Iterator[Connection]:
    # Forking a process that has threads may hang it.
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    settings = {"tokenizer": renderer.tokenizer, "template": renderer.template, "date": renderer.date}
    process = context.Process(target=_work, args=(its, settings), daemon=True)
    process.start()
    its.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def _work(connection: Connection, settings: dict[str, Any]) -> None:
    """Renders parts until the other end of the connection is closed, as by the end of its process."""
    # The parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    renderer = Renderer(**settings)
    try:
        while True:
            first, part = connection.recv()
            connection.send(_rendered(renderer, first, part))
    except (EOFError, ConnectionError):
        return


def _rendered(
    renderer: Renderer, first_index: int, part: list[Trajectory]
) -> tuple[list[RenderedTrajectory] | Exception, RenderCounts, list[str]]:
    """The rows or what was raised, the counts, and the sentences that were said of the data."""
    renderer.counts = RenderCounts()
    found: list[RenderedTrajectory] | Exception
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        try:
            found = renderer.render_batch(part, first_index)
        except Exception as error:
            found = error
    return found, renderer.counts, list(dict.fromkeys(str(each.message) for each in caught))
