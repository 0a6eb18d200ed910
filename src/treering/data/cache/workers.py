"""Renders the parts of a file in several processes, in their order; a small file in this one."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date as Date
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from treering.data.rendering.renderer import RenderCounts, RenderedTrajectory, Renderer, Template
from treering.data.trajectory import Trajectory
from treering.errors import StateError

MAX_WORKERS = 4
"""Each holds a tokenizer, and a few parts."""

_Part: TypeAlias = list[Trajectory]
_Rendered: TypeAlias = list[RenderedTrajectory]
_Settings: TypeAlias = tuple[Path | None, Template, Date | None]


def num_workers_here() -> int:
    """Processes that pay on this machine: one for each processor that this process may use, at most `MAX_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def render_parts(
    renderer: Renderer, parts: Iterable[tuple[int, _Part]], num_workers: int
) -> Iterator[tuple[int, _Part, _Rendered]]:
    """The parts with their rows, in order, whatever the number of workers.

    Args:
        renderer: which renders, or whose settings the workers take; it counts what they rendered.
        parts: trajectories, with the index of the first one.
        num_workers: processes; below 2, all is done in this one.

    Raises:
        InputError, ConfigError, MissingExtraError: as `Renderer.render_batch`.
        StateError: a worker was killed.
    """
    if num_workers < 2:
        for first, part in parts:
            yield first, part, renderer.render_batch(part, first)
        return
    settings = (renderer.tokenizer, renderer.template, renderer.date)
    # Forking a process that has threads may hang it.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), initializer=_begin)
    waiting: deque[tuple[int, _Part, Future[tuple[_Rendered, RenderCounts]]]] = deque()
    try:
        for first, part in parts:
            waiting.append((first, part, pool.submit(_render, settings, part, first)))
            if len(waiting) > 2 * num_workers:
                yield _next(renderer, waiting)
        while waiting:
            yield _next(renderer, waiting)
    except BrokenProcessPool as error:
        raise StateError(
            "a process that renders trajectories was killed, as where memory is full; free some, and start again"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _next(
    renderer: Renderer, waiting: deque[tuple[int, _Part, Future[tuple[_Rendered, RenderCounts]]]]
) -> tuple[int, _Part, _Rendered]:
    first, part, future = waiting.popleft()
    rendered, counts = future.result()
    renderer.counts.add(counts)
    return first, part, rendered


def _begin() -> None:
    """Makes a worker leave signals to its parent, end with it, and tokenize on one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _render(settings: _Settings, part: _Part, first_index: int) -> tuple[_Rendered, RenderCounts]:
    renderer = _renderer(settings)
    renderer.counts = RenderCounts()
    return renderer.render_batch(part, first_index), renderer.counts


@lru_cache(maxsize=1)
def _renderer(settings: _Settings) -> Renderer:
    tokenizer, template, date = settings
    return Renderer(tokenizer=tokenizer, template=template, date=date)
