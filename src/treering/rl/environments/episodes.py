"""Episodes that run concurrently in one event loop next to the engine's thread, and the run that each one leaves."""

import asyncio
import inspect
import os
import selectors
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.closing import Closing
from treering.data.trajectory import Turn
from treering.engine.host import EngineHost
from treering.engine.protocol import Engine, Rollout, RolloutKey, Sampling
from treering.errors import InputError, StateError
from treering.rl.collect import whose
from treering.rl.environments.environment import EnvironmentTask, Outcome, as_outcome
from treering.rl.environments.policy_calls import Call, CallLimits, Policy, Session, TurnClock, branches_of
from treering.rl.user_code import in_words, location_of_frame
from treering.types import PromptId, TokenIds

CLEAN_UP_S = 30.0
"""Seconds that cancelled episodes have to clean up, for example to close a sandbox."""

_PATIENCE_S = 1.0
"""Seconds that a blocked loop has to answer, and that tasks cancelled last have to end."""

_CALLS: ContextVar["set[Future[Any]] | None"] = ContextVar("calls that a task and its children run in threads")


class DaemonThreads(ThreadPoolExecutor):
    """Executor that runs each call in its own daemon thread.

    Example:
        >>> DaemonThreads().submit(pow, 2, 5).result()
        32
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        super().__init__()
        self.running: set[Future[Any]] = set()
        """Calls that have not ended."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a call in a new thread, as `Executor.submit` does."""
        found: Future[Any] = Future()
        for calls in (self.running, _CALLS.get(None)):
            if calls is not None:
                calls.add(found)
                found.add_done_callback(calls.discard)

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(fn(*args, **kwargs))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, name="treering-tool", daemon=True).start()
        return found


class _Selector(selectors.DefaultSelector):
    """Selector that reports when its loop is about to wait with nothing left to run, and when it resumes."""

    def __init__(self, on_idle: Callable[[], None], on_busy: Callable[[], None]) -> None:
        super().__init__()
        self._on_idle, self._on_busy = on_idle, on_busy

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._on_idle()
        try:
            return super().select(timeout)
        finally:
            self._on_busy()


class EpisodeLoop(Closing):
    """Event loop in a daemon thread; code that blocks it can be seen and abandoned from outside.

    `SystemExit` in a task only ends that task.

    Example:
        >>> async def double(number):
        ...     return 2 * number
        >>> with EpisodeLoop() as loop:
        ...     loop.start(double(4)).result()
        8
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._state = threading.Condition()
        self._is_marked = self._is_idle = self._is_closing = False
        self._busy_since: float | None = time.monotonic()
        self._num_pauses = 0
        self._loop = asyncio.SelectorEventLoop(_Selector(self._note_idle, self._note_busy))
        # Nobody awaits errors of episodes that have ended.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._threads = DaemonThreads()
        self._loop.set_default_executor(self._threads)
        self._calls: dict[asyncio.Task[Any], set[Future[Any]]] = {}
        self._left: set[asyncio.Task[Any] | Future[Any]] = set()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="treering-episodes", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run a coroutine in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def task(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task whose clean-up is awaited if it is cancelled; call this inside a task of the loop."""
        calls: set[Future[Any]] = set()
        token = _CALLS.set(calls)
        task = asyncio.ensure_future(coroutine)
        _CALLS.reset(token)
        self._calls[task] = calls
        task.add_done_callback(self._calls.pop)
        return task

    async def cancel(self, task: "asyncio.Task[Any]") -> bool:
        """Cancel a running task of `task`; return whether it and its calls in threads end within `CLEAN_UP_S`."""
        works = {task, *self._calls.get(task, ())}
        task.cancel()
        return await self._wait(works, CLEAN_UP_S)

    @property
    def is_cleaning_up(self) -> bool:
        """Whether a task of `task` was cancelled and has not ended."""
        return any(task.cancelling() for task in list(self._calls))

    @property
    def num_left(self) -> int:
        """Number of cancelled tasks and thread calls that were given up and still run."""
        return sum(not work.done() for work in self._left)

    def settle(self) -> None:
        """Wait until everything in the loop waits for a time, a file or another thread.

        Work that other threads handed to the loop before this call has run by then. Return at once while the loop ends.
        """
        with self._state:
            if self._is_closing:
                return
            self._is_marked = False
            self._is_idle = False
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._mark)
        with self._state:
            self._state.wait_for(lambda: self._is_idle or self._is_closing)

    def num_pauses(self) -> int:
        """Return how often the loop has had nothing to run."""
        return self._num_pauses

    def busy_s(self) -> float:
        """Return for how many seconds the loop has been running without a pause; 0.0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def frame(self) -> FrameType | None:
        """Return the frame that the loop's thread runs now."""
        return sys._current_frames().get(self._thread.ident or -1)

    def close(self, *, patience_s: float = CLEAN_UP_S) -> None:
        """Cancel all tasks, wait up to `CLEAN_UP_S` for their clean-up, and end the thread.

        A task that blocks the loop for longer than `patience_s` is abandoned.
        """
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._is_ending.wait(patience_s):
            self._thread.join(CLEAN_UP_S + 3 * _PATIENCE_S)

    def _mark(self) -> None:
        with self._state:
            self._is_marked = True

    def _note_idle(self) -> None:
        self._busy_since = None
        self._num_pauses += 1
        with self._state:
            if self._is_marked:
                self._is_idle = True
                self._state.notify_all()

    def _note_busy(self) -> None:
        self._busy_since = time.monotonic()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing:
            # asyncio gives a task its SystemExit as result, and ends the loop too.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._is_ending.set()
        ending = self._loop.create_task(self._end())
        while not ending.done():
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(ending)
        self._loop.close()

    async def _end(self) -> None:
        """Cancel the episodes and wait for them, then for everything else.

        Tasks that an episode starts to clean up were not started by `task`, so they are not cancelled before it ends.
        """
        end_s = time.monotonic() + CLEAN_UP_S
        episodes = set(self._calls) - self._left
        calls = {call for task in episodes for call in self._calls[task]}
        await self._wait(_cancelled(episodes) | calls, CLEAN_UP_S)
        # Give unreferenced generators the turn in which asyncio begins to close them.
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await self._wait(_cancelled(others), max(end_s - time.monotonic(), _PATIENCE_S))
        await self._wait(self._threads.running - self._left, max(end_s - time.monotonic(), 0.0))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._loop.shutdown_asyncgens(), max(end_s - time.monotonic(), _PATIENCE_S))

    async def _wait(self, works: "Iterable[asyncio.Task[Any] | Future[Any]]", timeout_s: float) -> bool:
        """Return whether all end in time; the others count as left."""
        futures = {asyncio.wrap_future(work) if isinstance(work, Future) else work: work for work in works}
        left = (await asyncio.wait(futures, timeout=timeout_s))[1] if futures else set()
        self._left |= {futures[future] for future in left}
        return not left


def _cancelled(tasks: "set[asyncio.Task[Any]]") -> "set[asyncio.Task[Any]]":
    """Cancel tasks once: a second cancel would end their clean-up, and so would cancelling an `aclose`."""
    for task in tasks:
        if not task.cancelling() and type(task.get_coro()).__name__ != "async_generator_athrow":
            task.cancel()
    return tasks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """Training data of one agent of a run."""

    agent: str
    rollouts: tuple[Rollout, ...]
    """Branches of the agent, whole contexts included."""
    turns: tuple[NDArray[np.int32], ...]
    """Index of the call that sampled each token, as in `Runs.turns`."""
    turn_rewards: tuple[float, ...]
    """Rewards of the agent's calls, as in `Runs.turn_rewards`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A finished episode: its trained agents, or why it failed."""

    key: RolloutKey
    seats: tuple[Seat, ...] = ()
    num_calls: int = 0
    num_cut: int = 0
    """Calls that reached the maximum turn length."""
    num_sampled: int = 0
    """Sampled tokens of all calls."""
    turns: tuple[Turn, ...] = ()
    """Turns of all agents, with the waits between them."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        """Branches of all agents."""
        return [rollout for seat in self.seats for rollout in seat.rollouts]


def _finished_run(session: Session, outcome: Outcome) -> Run:
    """Return the run of an episode that has ended."""
    calls = [session.calls[number] for number in sorted(session.calls)]
    agents = dict.fromkeys(call.agent for call in calls if session.trainable[call.agent])
    seats = [_seat(session, agent, [call for call in calls if call.agent == agent], outcome) for agent in agents]
    turns = session.clock.turns()
    wait_s = sum(turn.wait_s for turn in turns)
    numbers = {
        "calls": float(len(calls)),
        "branches": float(sum(len(seat.rollouts) for seat in seats)),
        **({"wait_s": wait_s} if wait_s else {}),
        **{name: float(value) for name, value in outcome.numbers.items()},
    }
    return Run(
        key=(session.prompt_id, session.draw, session.sample),
        seats=tuple(seats),
        num_calls=len(calls),
        num_cut=sum(call.rollout.finish_reason == "length" for call in calls),
        num_sampled=sum(call.rollout.num_tokens for call in calls),
        turns=turns,
        numbers=numbers,
    )


def _unknown_names(session: Session, outcome: Outcome) -> str | None:
    """Return an error text for agents or calls that the outcome rewards but the run lacks, else None."""
    agents = [name for name in outcome.rewards if name not in session.trainable]
    calls = [number for number in outcome.turn_rewards if number not in session.calls]
    if agents:
        return f"rewards must name agents of the run, got {agents[0]!r}; make it with policy.agent"
    if calls:
        return f"turn_rewards must name calls of the run, got {calls[0]!r}; use Reply.call"
    return None


def _seat(session: Session, agent: str, calls: Sequence[Call], outcome: Outcome) -> Seat:
    branches = branches_of(calls)
    worth = tuple(float(outcome.turn_rewards.get(call.number, 0.0)) for call in calls)
    rollouts = [
        Rollout(
            prompt_id=session.prompt_id,
            draw=session.draw,
            sample=session.sample,
            tokens=branch.tokens,
            logprobs=branch.logprobs,
            policy_logprobs=branch.policy_logprobs,
            loss_mask=branch.loss_mask,
            versions=branch.versions,
            finish_reason="stop",
            reward=float(outcome.rewards.get(agent, outcome.reward)),
            routed_experts=branch.routed_experts,
        )
        for branch in branches
    ]
    return Seat(
        agent=agent,
        rollouts=tuple(rollouts),
        turns=tuple(branch.turns for branch in branches),
        turn_rewards=worth if any(worth) else (),
    )


_BLOCKED_S = 2.0
"""Seconds for a loop to answer that an episode has blocked for its whole time limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """An episode to run."""

    prompt_id: PromptId
    """Id of its task."""
    draw: int
    """Number of times that the run scheduled the task before."""
    sample: int
    """Index within the group."""
    sampling: Sampling
    """Sampling of every call; `max_tokens` bounds a context with its turn."""

    @property
    def key(self) -> RolloutKey:
        """Key of its run."""
        return self.prompt_id, self.draw, self.sample

    @property
    def prompt(self) -> TokenIds:
        """int32 [0]: each call brings its own context."""
        return np.zeros(0, np.int32)


class Episodes(Closing):
    """Running episodes, started in order; the task's options limit how many run at a time."""

    def __init__(
        self, engine: Engine, task: EnvironmentTask, *, on_finished: Callable[[Rollout], None] | None = None
    ) -> None:
        """Take the engine until `close`.

        Args:
            engine: an idle engine.
            task: the environment.
            on_finished: called in the engine's thread with the branches of each kept episode.
        """
        self._task, self._on_finished = task, on_finished
        self._ended: SimpleQueue[Run] = SimpleQueue()
        self._started: list[Future[None]] = []
        self._loop = EpisodeLoop()
        self._is_ordered = task.options.episode_order == "longest_first"
        max_rows = task.options.max_rows if self._is_ordered else None
        self._host = EngineHost(engine, settle=self._loop.settle, max_rows=max_rows)
        self._num_started = 0
        self._slots = asyncio.Semaphore(task.options.num_in_flight)

    @property
    def busy_s(self) -> float:
        """Seconds that the engine spent in steps."""
        return self._host.busy_s

    def start(self, episodes: Iterable[Episode]) -> None:
        """Run episodes after the earlier ones, whose calls come first if calls queue."""
        self._started = [each for each in self._started if not each.done() or each.exception() is not None]
        ranked = list(enumerate(episodes, self._num_started))
        self._num_started += len(ranked)

        async def run_all() -> None:
            await asyncio.gather(*(self._one(rank, episode) for rank, episode in ranked))

        self._started.append(self._loop.start(run_all()))

    def take(self, timeout_s: float) -> list[Run]:
        """Return the runs that have ended; wait up to `timeout_s` for the first.

        Raises:
            StateError: an episode blocks the others.
            Exception: the engine's error.
        """
        found: list[Run] = []
        with suppress(Empty):
            found.append(self._ended.get(timeout=timeout_s))
        if not found:
            self._check_running()
        if self._host.error is not None:
            raise self._host.error
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def in_engine(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread before its next step."""
        self._host.run(function)

    def close(self) -> None:
        """Cancel running episodes, and leave the engine idle."""
        is_blocked = self._loop.busy_s() > self._max_busy_s
        # Close the loop before the engine, so that open calls leave the engine.
        self._loop.close(patience_s=_BLOCKED_S if is_blocked else CLEAN_UP_S)
        self._host.close()
        if self._loop.num_left:
            warnings.warn(
                f"{self._loop.num_left} cancelled episodes, or their tasks and calls in threads, did not end within "
                f"{CLEAN_UP_S:g} s and were abandoned: resources such as sandboxes may stay open",
                stacklevel=2,
            )

    @property
    def _max_busy_s(self) -> float:
        """Seconds that an episode may block the loop: its time limit, or the time for clean-up."""
        limit = self._task.options.episode_timeout
        return max(limit, CLEAN_UP_S) if self._loop.is_cleaning_up else limit

    def _check_running(self) -> None:
        """Raise the error that ended the episodes, or report that one blocks the others."""
        for started in self._started:
            if started.done() and self._ended.empty():
                started.result()
        limit = self._max_busy_s
        if self._loop.busy_s() > limit:
            frame = self._loop.frame()
            location = None if frame is None else location_of_frame(frame)
            raise StateError(
                f"episodes share one event loop, and one has blocked it for {limit:g} s"
                f"{'' if location is None else f' at {location}'}; await the slow call, or run it by asyncio.to_thread"
            )

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
        running = self._loop.task(self._outcome(session))
        done, _ = await asyncio.wait({running}, timeout=options.episode_timeout)
        session.close()
        if not done:
            limit = f"no end within {options.episode_timeout:g} s (task.episode_timeout)"
            if not await self._loop.cancel(running):
                limit += f", and its clean-up did not end within {CLEAN_UP_S:g} s"
            return Run(key=episode.key, error=f"{whose(episode.key)}{limit}")
        found = running.result()
        error = found if isinstance(found, str) else _unknown_names(session, found)
        if isinstance(found, str) or error is not None:
            return Run(key=episode.key, error=f"{whose(episode.key)}{error}")
        return _finished_run(session, found)

    async def _outcome(self, session: Session) -> Outcome | str:
        """Return the result of the user's coroutine, or its error as text."""
        process = os.getpid()
        task = self._task.tasks[session.prompt_id]
        try:
            episode: object = self._task.environment.run(task, Policy(session))
            if not inspect.isawaitable(episode):
                raise InputError(
                    f"run of an environment must be a coroutine, got a {type(episode).__name__}; write async def run"
                )
            return as_outcome(await episode)
        except asyncio.CancelledError:
            return "CancelledError: the episode cancelled itself"
        except BaseException as error:
            return in_words(error)
        finally:
            if os.getpid() != process:
                # The episode forked; only the original process continues the run.
                os._exit(0)
