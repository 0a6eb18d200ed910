"""Thread that trains the models of all clients, one request after another.

Consecutive waiting requests of a model that add gradients run as one forest, with the same answers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from treering.closing import Closing
from treering.errors import StateError
from treering.serving.tinker.wire import TinkerBatch, forward_backward_answer
from treering.train.loop.trainee import Trainee


@dataclass(slots=True, kw_only=True)
class TrainingCounts:
    """Tokens of training requests, as flat sequences and as computed, and the processor time of the thread."""

    flat_tokens: int = 0
    computed_tokens: int = 0
    requests: int = 0
    forests: int = 0
    processor_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Request of a model: a batch, which may run together with others, or a function."""

    model_id: str
    run: Callable[[], Any] | None = None
    batch: TinkerBatch | None = None
    trainee: Callable[[], Trainee] | None = None
    counts: TrainingCounts = field(default_factory=TrainingCounts)
    answer: "Future[Any]" = field(default_factory=Future)

    @property
    def num_bytes(self) -> int:
        """Memory that it holds while it waits."""
        return 4096 + (0 if self.batch is None else self.batch.num_bytes)


class TrainingThread(Closing):
    """Thread that runs jobs one by one, and consecutive waiting batches of a model together.

    Example: three `forward_backward` requests that arrive while another client's job runs become one forest.
    """

    def __init__(self, *, merges: bool = True, max_merged: int = 1 << 20) -> None:
        """Start; at most `max_merged` flat tokens run together. `merges` False runs each batch separately."""
        self._merges, self._max_merged = merges, max_merged
        self.counts = TrainingCounts()
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="treering-training", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its future gets the answer."""
        with self._wake:
            if self._is_closed:
                raise StateError("the server is closed and trains no more; start another")
            self._jobs.append(job)
            self._wake.notify()

    def num_waiting_bytes(self, model_id: str) -> int:
        """Count the bytes of the waiting jobs of a model."""
        with self._wake:
            return sum(job.num_bytes for job in self._jobs if job.model_id == model_id)

    def drop(self, model_id: str) -> None:
        """Cancel the waiting jobs of a model."""
        with self._wake:
            dropped = [job for job in self._jobs if job.model_id == model_id]
            self._jobs = deque(job for job in self._jobs if job.model_id != model_id)
        for job in dropped:
            job.answer.cancel()

    def close(self) -> None:
        """End after the current job; cancel the waiting ones."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()
        for job in self._jobs:
            job.answer.cancel()

    def _serve(self) -> None:
        while jobs := self._next():
            started = time.thread_time()
            self._run(jobs)
            self.counts.processor_s += time.thread_time() - started
            # Holding it while waiting for the next would keep its model in memory.
            del jobs

    def _next(self) -> list[Job]:
        """Return the next job and those that run with it; empty at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return []
            jobs = [self._jobs.popleft()]
            first = jobs[0].batch
            if first is None or not self._merges:
                return jobs
            num_tokens = first.num_tokens
            for job in [each for each in self._jobs if each.model_id == jobs[0].model_id]:
                num_tokens += 0 if job.batch is None else job.batch.num_tokens
                if job.batch is None or job.batch.trains != first.trains or num_tokens > self._max_merged:
                    break
                self._jobs.remove(job)
                jobs.append(job)
            return jobs

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            answers = self._train(jobs) if jobs[0].run is None else [jobs[0].run()]
        except BaseException as error:
            if len(jobs) == 1:
                with suppress(InvalidStateError):
                    jobs[0].answer.set_exception(error)
                return
            # Run each job separately, so that only the faulty ones fail.
            for job in jobs:
                self._run([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            with suppress(InvalidStateError):
                job.answer.set_result(answer)

    def _train(self, jobs: Sequence[Job]) -> list[bytes]:
        batches = [job.batch for job in jobs if job.batch is not None]
        assert jobs[0].trainee is not None
        trainee = jobs[0].trainee()
        data = [datum for batch in batches for datum in batch.data]
        scores = (trainee.add_gradients if batches[0].trains else trainee.score)(data)
        for counts in (self.counts, jobs[0].counts):
            counts.flat_tokens += scores.num_flat_tokens
            counts.computed_tokens += scores.num_computed_tokens
            counts.requests += len(jobs)
            counts.forests += 1
        answers, first = [], 0
        for batch in batches:
            own = slice(first, first + len(batch.data))
            answers.append(forward_backward_answer(scores.logprobs[own], {"loss:sum": sum(scores.losses[own])}))
            first = own.stop
        return answers
