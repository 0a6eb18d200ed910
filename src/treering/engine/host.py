"""A thread that owns an engine, so that any number of callers can ask it for calls at the same time."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from queue import SimpleQueue

from treering.closing import Closing
from treering.engine.protocol import Engine, Request, Rollout, RolloutKey
from treering.errors import InputError, StateError


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    request: Request
    answer: "Future[Rollout]"
    rank: int


@dataclass(frozen=True, slots=True)
class _Left:
    key: RolloutKey
    answer: "Future[Rollout]"


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    function: Callable[[], None]


class EngineHost(Closing):
    """Runs an engine in a thread of its own and answers calls; nothing else may use the engine until it is closed.

    The unit is one call: an episode that asks for nothing holds no row and no reservation. The thread blocks while no
    call is open. A caller that leaves, by cancelling its future, aborts its call.

    Example:
        >>> with EngineHost(engine) as host:                                                    # doctest: +SKIP
        ...     host.submit(request).result().tokens
    """

    def __init__(
        self, engine: Engine, *, settle: Callable[[], None] | None = None, max_rows: int | None = None
    ) -> None:
        """Starts the thread.

        Args:
            engine: idle.
            settle: called in the thread before a step, if calls came or answers went out since. One that returns once
                all callers have asked what they ask next makes the batches of deterministic callers deterministic.
            max_rows: calls that the engine gets at one time; the others queue here by rank. None: it gets all at once.

        Raises:
            StateError: the engine has unfinished requests.
        """
        if engine.num_unfinished > 0:
            raise StateError(f"a host needs an idle engine, and this one has {engine.num_unfinished} requests")
        self._engine = engine
        self._settle = settle
        self._inbox: SimpleQueue[_Call | _Left | _Run | None] = SimpleQueue()
        self._max_rows = max_rows
        self._open: dict[RolloutKey, Future[Rollout]] = {}
        self._queue: list[tuple[int, int, Request]] = []
        self._num_queued = 0
        self._error: BaseException | None = None
        self._busy_s = 0.0
        self._is_closed = False
        self._is_settled = True
        self._lock = threading.Lock()
        self._is_waiting = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="treering-engine", daemon=True)
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        """Whether the thread blocks because no call is open."""
        return self._is_waiting.is_set()

    @property
    def busy_s(self) -> float:
        """Seconds in the engine's steps so far."""
        return self._busy_s

    @property
    def error(self) -> BaseException | None:
        """The error that ended the service; None while there is none."""
        return self._error

    def submit(self, request: Request, *, rank: int = 0) -> "Future[Rollout]":
        """Asks for a call, from any thread; the future gets its rollout, or the engine's error.

        Where calls queue, the lowest rank is first, and of one rank the earliest.

        Raises:
            StateError: the host is closed.
        """
        answer: Future[Rollout] = Future()
        self._put(_Call(request, answer, rank))

        def note_leaving(future: "Future[Rollout]") -> None:
            if future.cancelled():
                # Only now is it done for those who wait for several futures.
                future.set_running_or_notify_cancel()
                self._inbox.put(_Left(request.key, future))

        answer.add_done_callback(note_leaving)
        return answer

    async def sample(self, request: Request) -> Rollout:
        """`submit` for a coroutine; cancelling it aborts the call."""
        return await asyncio.wrap_future(self.submit(request))

    def run(self, function: Callable[[], None]) -> None:
        """Runs a function in the thread before the engine's next step, after all that came before.

        Raises:
            StateError: the host is closed.
        """
        self._put(_Run(function))

    def close(self) -> None:
        """Ends the thread after its present step; open calls are aborted, and their futures raise StateError."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)
        self._thread.join()

    def _put(self, message: _Call | _Run) -> None:
        with self._lock:
            if self._is_closed:
                raise StateError("the host of this engine is closed, and answers no more calls; open another one")
            self._inbox.put(message)

    def _serve(self) -> None:
        try:
            while self._handle_messages():
                if self._is_settled or self._settle is None:
                    self._step()
                else:
                    self._is_settled = True
                    self._attempt(self._settle)
        finally:
            self._fail_all(StateError("the host of this engine was closed before the call was answered"))

    def _handle_messages(self) -> bool:
        """Handles what is in the inbox, and waits for a call where none is open; False to end."""
        while not self._open or not self._inbox.empty():
            if not self._open and self._inbox.empty():
                self._is_waiting.set()
            message = self._inbox.get()
            self._is_waiting.clear()
            if message is None:
                return False
            self._handle(message)
        return True

    def _handle(self, message: _Call | _Left | _Run) -> None:
        if isinstance(message, _Run):
            self._attempt(message.function)
        elif isinstance(message, _Left):
            # Another call may have the key: this one was refused then, or is over.
            if self._open.get(message.key) is message.answer:
                del self._open[message.key]
                self._withdraw([message.key])
        elif self._error is not None:
            _fail(message.answer, self._error)
        elif not message.answer.cancelled():
            self._begin(message)

    def _begin(self, call: _Call) -> None:
        key = call.request.key
        if key in self._open:
            _fail(call.answer, InputError(f"a key names one call, and {key} is open; count the samples of a group"))
            return
        self._open[key] = call.answer
        self._num_queued += 1
        heappush(self._queue, (call.rank, self._num_queued, call.request))
        if self._max_rows is None:
            self._fill()
        self._is_settled = self._is_settled and key not in self._open

    def _fill(self) -> None:
        """Gives the engine calls of the queue, the first ones first."""
        while self._queue and (self._max_rows is None or self._engine.num_unfinished < self._max_rows):
            request = heappop(self._queue)[2]
            try:
                self._engine.submit([request])
            except Exception as error:
                # Of this request alone: none is queued in the engine.
                _fail(self._open.pop(request.key), error)

    def _withdraw(self, keys: list[RolloutKey]) -> None:
        queued = {request.key for _, _, request in self._queue}.intersection(keys)
        if queued:
            self._queue = [each for each in self._queue if each[2].key not in queued]
            heapify(self._queue)
        running = [key for key in keys if key not in queued]
        if running:
            self._attempt(lambda: self._engine.abort(running))

    def _step(self) -> None:
        self._fill()
        if not self._engine.num_unfinished:
            return
        finished: list[Rollout] = []
        started_s = time.perf_counter()
        self._attempt(lambda: finished.extend(self._engine.step()))
        self._busy_s += time.perf_counter() - started_s
        self._is_settled = not finished
        for rollout in finished:
            answer = self._open.pop(rollout.key, None)
            if answer is not None:
                # Its caller may have left.
                with suppress(InvalidStateError):
                    answer.set_result(rollout)

    def _attempt(self, function: Callable[[], object]) -> None:
        """Runs a function whose error ends the service: every caller gets it, now and later."""
        try:
            function()
        except BaseException as error:
            self._error = self._error or error
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        keys, answers = list(self._open), list(self._open.values())
        self._open.clear()
        self._withdraw(keys)
        for answer in answers:
            _fail(answer, error)


def _fail(answer: "Future[Rollout]", error: BaseException) -> None:
    with suppress(InvalidStateError):
        answer.set_exception(error)
