"""Run an engine in its own thread, so that any number of callers can ask it for calls at the same time."""

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
from treering.errors import InputError, StateError, plural

Watch = Callable[[Rollout], None]
"""Called in the engine's thread after each step, with the rollout so far of a call that is still running."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    request: Request
    answer: "Future[Rollout]"
    rank: int
    watch: "Watch | None"


@dataclass(frozen=True, slots=True)
class _Left:
    key: RolloutKey
    answer: "Future[Rollout]"


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    function: Callable[[], None]


class EngineHost(Closing):
    """Host that runs an engine in its own thread and answers calls; nothing else may use the engine until it is closed.

    The unit is one call: an episode without an open call takes no row and no reservation. The thread blocks while no
    call is open. Cancelling a future aborts its call.

    Example:
        >>> with EngineHost(engine) as host:                                                    # doctest: +SKIP
        ...     host.submit(request).result().tokens
    """

    def __init__(
        self, engine: Engine, *, settle: Callable[[], None] | None = None, max_rows: int | None = None
    ) -> None:
        """Start the thread.

        Args:
            engine: an idle engine.
            settle: called in the thread before a step if calls arrived or answers left since the last step. If it
                returns once all callers have sent their next call, deterministic callers get deterministic batches.
            max_rows: most calls that the engine gets at a time; others queue here by rank. None: it gets all of them.

        Raises:
            StateError: if the engine has unfinished requests.
        """
        if engine.num_unfinished > 0:
            raise StateError(
                f"a host needs an idle engine, got one with {plural(engine.num_unfinished, 'request')}; finish them"
            )
        self._engine = engine
        self._settle = settle
        self._inbox: SimpleQueue[_Call | _Left | _Task | None] = SimpleQueue()
        self._max_rows = max_rows
        self._open: dict[RolloutKey, _Call] = {}
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
    def engine(self) -> Engine:
        """The engine, to be used only in the thread (`run`)."""
        return self._engine

    @property
    def is_waiting(self) -> bool:
        """Whether the thread blocks because no call is open."""
        return self._is_waiting.is_set()

    @property
    def busy_s(self) -> float:
        """Seconds spent in the engine's steps so far."""
        return self._busy_s

    @property
    def error(self) -> BaseException | None:
        """The error that ended the service; None if it is running."""
        return self._error

    def submit(self, request: Request, *, rank: int = 0, watch: Watch | None = None) -> "Future[Rollout]":
        """Submit a call from any thread; the future gets its rollout, or the engine's error.

        Queued calls run by rank, lowest first; calls of equal rank run in order of arrival. `watch` must not raise.

        Raises:
            StateError: if the host is closed.
        """
        answer: Future[Rollout] = Future()
        self._put(_Call(request, answer, rank, watch))

        def note_leaving(future: "Future[Rollout]") -> None:
            if future.cancelled():
                # Waits on several futures see the cancellation only after this call.
                future.set_running_or_notify_cancel()
                self._inbox.put(_Left(request.key, future))

        answer.add_done_callback(note_leaving)
        return answer

    async def sample(self, request: Request, watch: Watch | None = None) -> Rollout:
        """Submit a call from a coroutine; cancelling the coroutine aborts the call."""
        return await asyncio.wrap_future(self.submit(request, watch=watch))

    def run(self, function: Callable[[], None]) -> None:
        """Run a function in the thread before the engine's next step, after all earlier messages.

        Raises:
            StateError: if the host is closed.
        """
        self._put(_Task(function))

    def close(self) -> None:
        """End the thread after its current step; open calls are aborted, and their futures raise StateError."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)
        self._thread.join()

    def _put(self, message: _Call | _Task) -> None:
        with self._lock:
            if self._is_closed:
                raise StateError("this engine's host is closed and takes no more calls; open another one")
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
            self._fail_all(StateError("this engine's host was closed before it answered the call"))

    def _handle_messages(self) -> bool:
        """Handle the inbox, and wait while no call is open; return False to end the thread."""
        while not self._open or not self._inbox.empty():
            if not self._open and self._inbox.empty():
                self._is_waiting.set()
            message = self._inbox.get()
            self._is_waiting.clear()
            if message is None:
                return False
            self._handle(message)
        return True

    def _handle(self, message: _Call | _Left | _Task) -> None:
        if isinstance(message, _Task):
            self._attempt(message.function)
        elif isinstance(message, _Left):
            # Another call may have the key, if this one was refused or has ended.
            found = self._open.get(message.key)
            if found is not None and found.answer is message.answer:
                del self._open[message.key]
                self._withdraw([message.key])
        elif self._error is not None:
            _fail(message.answer, self._error)
        elif not message.answer.cancelled():
            self._begin(message)

    def _begin(self, call: _Call) -> None:
        key = call.request.key
        if key in self._open:
            _fail(call.answer, InputError(f"a key must be unique, and {key} is open; number the samples of a group"))
            return
        self._open[key] = call
        self._num_queued += 1
        heappush(self._queue, (call.rank, self._num_queued, call.request))
        if self._max_rows is None:
            self._fill()
        self._is_settled = self._is_settled and key not in self._open

    def _fill(self) -> None:
        """Submit queued calls to the engine, lowest rank first."""
        while self._queue and (self._max_rows is None or self._engine.num_unfinished < self._max_rows):
            request = heappop(self._queue)[2]
            try:
                self._engine.submit([request])
            except Exception as error:
                # The error concerns only this request, which the engine did not queue.
                _fail(self._open.pop(request.key).answer, error)

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
            call = self._open.pop(rollout.key, None)
            if call is not None:
                # The caller may have cancelled.
                with suppress(InvalidStateError):
                    call.answer.set_result(rollout)
        watches = {key: call.watch for key, call in self._open.items() if call.watch is not None}
        if watches:
            for rollout in self._engine.peek(list(watches)):
                watches[rollout.key](rollout)

    def _attempt(self, function: Callable[[], object]) -> None:
        """Run a function; an error ends the service, and every caller gets it, now and later."""
        try:
            function()
        except BaseException as error:
            self._error = self._error or error
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        calls = list(self._open.values())
        self._open.clear()
        self._withdraw([call.request.key for call in calls])
        for call in calls:
            _fail(call.answer, error)


def _fail(answer: "Future[Rollout]", error: BaseException) -> None:
    with suppress(InvalidStateError):
        answer.set_exception(error)
