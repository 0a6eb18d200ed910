"""Runs episodes of an environment at the same time, with one engine.

What an episode does depends on its task and key alone, never on which ends first.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from treering.closing import Closing
from treering.engine.host import EngineHost
from treering.engine.protocol import Engine
from treering.engine.request import Sampling
from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import StateError
from treering.rl.environments.environment import Outcome, as_outcome
from treering.rl.environments.episode_loop import EpisodeLoop
from treering.rl.environments.policy import CallLimits, Policy, Session
from treering.rl.environments.run import Run, finished_run, unknown_names
from treering.rl.environments.task import EnvironmentTask
from treering.rl.environments.waiting import TurnClock
from treering.rl.reward_results import whose
from treering.rl.user_code import in_words, place_of_frame
from treering.types import PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """An episode to run.

    Example: `Episode(prompt_id="17+5", draw=0, sample=3, sampling=Sampling(max_tokens=512))`
    """

    prompt_id: PromptId
    """The id of its task."""
    draw: int
    """How many times the run has scheduled the task before."""
    sample: int
    """Index within the group."""
    sampling: Sampling
    """Of every call; `max_tokens` bounds a context with its turn."""

    @property
    def key(self) -> RolloutKey:
        """That of its run."""
        return self.prompt_id, self.draw, self.sample

    @property
    def prompt(self) -> TokenIds:
        """int32 [0]: each call brings its own context."""
        return np.zeros(0, np.int32)


class Episodes(Closing):
    """Episodes that run, started in order, as many at a time as the task's options say.

    Example:
        >>> with Episodes(engine, task) as episodes:                                            # doctest: +SKIP
        ...     episodes.start([Episode(prompt_id="q", draw=0, sample=0, sampling=sampling)])
        ...     while not (ended := episodes.take(1.0)):
        ...         pass
    """

    def __init__(
        self, engine: Engine, task: EnvironmentTask, *, on_finished: Callable[[Rollout], None] | None = None
    ) -> None:
        """Takes the engine until it is closed.

        Args:
            engine: idle.
            task: the environment.
            on_finished: called in the engine's thread with the branches of each episode that is kept.
        """
        self._task, self._on_finished = task, on_finished
        self._ended: SimpleQueue[Run] = SimpleQueue()
        self._started: list[Future[None]] = []
        self._loop = EpisodeLoop()
        self._is_ordered = task.options.episode_order == "longest_first"
        max_rows = task.options.max_rows if self._is_ordered else None
        self._host = EngineHost(engine, settle=self._loop.settle, max_rows=max_rows)
        self._num_started = 0
        self._slots = asyncio.Semaphore(task.options.limit)

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine made steps."""
        return self._host.busy_s

    def start(self, episodes: Iterable[Episode]) -> None:
        """Runs episodes after those that were started before, whose calls come first where they queue."""
        self._started = [each for each in self._started if not each.done() or each.exception() is not None]
        ranked = list(enumerate(episodes, self._num_started))
        self._num_started += len(ranked)
        self._started.append(self._loop.start(self._all(ranked)))

    def take(self, timeout_s: float) -> list[Run]:
        """The runs that have ended; waits for one, but not longer than `timeout_s`.

        Raises:
            StateError: an episode blocks the others.
            Exception: the engine's error.
        """
        found = self._next(timeout_s)
        if not found:
            self._check_running()
        if self._host.error is not None:
            raise self._host.error
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def in_engine(self, function: Callable[[], None]) -> None:
        """Runs a function in the engine's thread before its next step."""
        self._host.run(function)

    def close(self) -> None:
        """Cancels what runs, and leaves the engine idle."""
        # Before the engine's, so that open calls leave it.
        self._loop.close()
        self._host.close()

    def _next(self, timeout_s: float) -> list[Run]:
        try:
            return [self._ended.get(timeout=timeout_s)]
        except Empty:
            return []

    def _check_running(self) -> None:
        """Raises what ended the episodes, or that one blocks the others."""
        for started in self._started:
            if started.done() and self._ended.empty():
                started.result()
        limit = self._task.options.episode_timeout_s
        if self._loop.busy_s() > limit:
            frame = self._loop.frame()
            place = None if frame is None else place_of_frame(frame)
            raise StateError(
                f"episodes share one event loop, and one has blocked it for {limit:g} s"
                f"{'' if place is None else f' at {place}'}; await what waits there, or call it by asyncio.to_thread"
            )

    async def _all(self, ranked: Sequence[tuple[int, Episode]]) -> None:
        await asyncio.gather(*(self._one(rank, episode) for rank, episode in ranked))

    async def _one(self, rank: int, episode: Episode) -> None:
        async with self._slots:
            run = await self._run(rank, episode)
        if self._on_finished is not None:
            for rollout in run.rollouts:
                self._host.run(lambda rollout=rollout: self._on_finished(rollout))  # type: ignore[misc]
        self._ended.put(run)

    async def _run(self, rank: int, episode: Episode) -> Run:
        options = self._task.options
        session = Session(
            host=self._host,
            prompt_id=episode.prompt_id,
            draw=episode.draw,
            sample=episode.sample,
            sampling=episode.sampling,
            limits=CallLimits(max_context=episode.sampling.max_tokens, max_turn_tokens=options.max_turn_tokens),
            chat=self._task.chat,
            clock=TurnClock(self._loop.num_pauses),
            rank=rank if self._is_ordered else 0,
        )
        running = asyncio.ensure_future(self._outcome(session))
        done, _ = await asyncio.wait({running}, timeout=options.episode_timeout_s)
        session.close()
        if not done:
            running.cancel()
            limit = f"no end within {options.episode_timeout_s:g} s (task.episode_timeout)"
            return Run(key=episode.key, error=f"{whose(episode.key)}{limit}")
        found = running.result()
        error = found if isinstance(found, str) else unknown_names(session, found)
        if isinstance(found, str) or error is not None:
            return Run(key=episode.key, error=f"{whose(episode.key)}{error}")
        return finished_run(session, found, options.shared)

    async def _outcome(self, session: Session) -> Outcome | str:
        """What the user's coroutine returns, or its error in words."""
        process = os.getpid()
        task = self._task.tasks[session.prompt_id]
        try:
            return as_outcome(await self._task.environment.run(task, Policy(session)))
        except asyncio.CancelledError:
            return "CancelledError: the episode cancelled itself"
        except BaseException as error:
            return in_words(error)
        finally:
            if os.getpid() != process:
                # A fork came back from the episode; only the original continues the run.
                os._exit(0)
