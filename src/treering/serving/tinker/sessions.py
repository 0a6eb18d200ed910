"""State that clients hold: sessions with models, samplers and promises, which end with their session."""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from treering.errors import InputError, StateError
from treering.rl.model_samplers import SamplerWeights
from treering.serving.server import Refusal
from treering.serving.tinker.training_thread import Job, TrainingCounts, TrainingThread
from treering.serving.tinker.wire import MAX_WAITING_BYTES
from treering.train.loop.checkpoint import num_tensor_bytes
from treering.train.loop.trainee import Trainee, TraineeOptions

MAX_HELD = 4096
"""Requests of a model that may wait for earlier ones."""
MAX_SNAPSHOT_BYTES = 1 << 30
"""Limit of a model's unnamed sampler weights; the newest are kept whatever their size."""
MAX_ANSWER_BYTES = 1 << 28
"""Limit of a session's answers and open calls; answers that were fetched make room, oldest first."""
_PROMISE_BYTES = 4096


class TrainedModel:
    """Model of a client: its requests in order, and the weights that it gave to samplers."""

    def __init__(self, model_id: str, options: TraineeOptions, metadata: Mapping[str, Any]) -> None:
        """Keep the options; the model can train once `trainee` is set."""
        self.id, self.options, self.metadata = model_id, options, metadata
        self.trainee: Trainee | None = None
        self.counts = TrainingCounts()
        """Tokens since the last update."""
        self.num_steps = 0
        self._next_seq = 1
        self._held: dict[int, Job | None] = {}
        self._snapshots: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    def ready(self) -> Trainee:
        """Return the trainee; call it in the training thread.

        Raises:
            StateError: creating the model failed.
        """
        if self.trainee is None:
            raise StateError(f"{self.id} could not be created, as create_model reported; create another model")
        return self.trainee

    def enqueue(self, thread: TrainingThread, seq_id: int, job: Job | None) -> None:
        """Run jobs in the order of their numbers; None stands for a refused request, 0 for a request without number.

        Raises:
            InputError: the number has already run, or is too far from the next one.
            Refusal: 503, too much waits.
        """
        if seq_id == 0:
            seq_id = self._next_seq
        if not self._next_seq <= seq_id <= self._next_seq + MAX_HELD:
            raise InputError(
                f"the next seq_id of {self.id} is {self._next_seq}, got {seq_id}; number requests in order"
            )
        num_bytes = thread.num_waiting_bytes(self.id)
        # Requests that wait for this one must not keep it out.
        if seq_id > self._next_seq:
            num_bytes += sum(each.num_bytes for each in self._held.values() if each is not None)
        if job is not None and num_bytes > MAX_WAITING_BYTES:
            raise Refusal(503, f"{num_bytes:,} bytes of requests of {self.id} wait; send it again later")
        self._held[seq_id] = job
        while self._next_seq in self._held:
            ready = self._held.pop(self._next_seq)
            self._next_seq += 1
            if ready is not None:
                thread.submit(ready)

    def weights_now(self) -> SamplerWeights:
        """Return the current weights for samplers, cached until they change; call it in the training thread."""
        trainee = self.ready()
        number = trainee.num_changes
        if number not in self._snapshots:
            self._snapshots[number] = trainee.snapshot()
            while (
                len(self._snapshots) > 1 and sum(map(num_tensor_bytes, self._snapshots.values())) > MAX_SNAPSHOT_BYTES
            ):
                self._snapshots.popitem(last=False)
        return SamplerWeights(
            owner=self.id, name=f"{self.id}@{number}", options=self.options, load=partial(self._load, number)
        )

    def _load(self, number: int, model: nn.Module) -> None:
        tensors = self._snapshots.get(number)
        if tensors is None:
            raise StateError(
                "these sampler weights were dropped to make room for newer ones; sample from the newest, or name those "
                "to keep with save_weights_for_sampler"
            )
        own = dict(model.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """Pending answer of a request: an object for JSON, or the bytes of a record."""

    id: str
    answer: "asyncio.Future[Any]"
    num_bytes: int
    """Size of the open call, and later of its answer."""
    more: Mapping[str, Any] = field(default_factory=dict)

    def ticket(self) -> dict[str, Any]:
        """Return the immediate answer to the request."""
        return {"request_id": self.id, **self.more}


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSession:
    """Models, samplers and promises of one client."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    fetched: OrderedDict[str, Promise] = field(default_factory=OrderedDict)
    """Promises whose answer may be forgotten."""
    num_bytes: int = 0
    """Size of all promises."""
    last_seen: float = field(default_factory=time.monotonic)
    is_finished: bool = False


class Holdings:
    """Sessions of a server, and its promises by name."""

    def __init__(self, *, max_sessions: int, max_models: int, timeout_s: float) -> None:
        """Hold the limits; a session that is silent for `timeout_s` seconds ends."""
        self.sessions: dict[str, TinkerSession] = {}
        self._max_sessions, self._max_models, self._timeout_s = max_sessions, max_models, timeout_s
        self._nobody = TinkerSession(id="once")

    def open(self, metadata: Mapping[str, Any]) -> TinkerSession:
        """Open a session.

        Raises:
            Refusal: 503, the limit is reached.
        """
        if len(self.sessions) >= self._max_sessions:
            raise Refusal(503, f"{self._max_sessions} sessions are open, which is the limit; close one")
        session = TinkerSession(metadata=metadata)
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> TinkerSession:
        """Return an open session, and note that its client is alive.

        Raises:
            Refusal: 410, it has ended; 404, it never existed.
        """
        found = self.sessions.get(session_id)
        if found is None or found.is_finished:
            raise Refusal(
                404 if found is None else 410,
                f"session {session_id!r:.80} is not open: it was finished, or silent for {self._timeout_s:.0f} s; "
                "create another ServiceClient",
            )
        found.last_seen = time.monotonic()
        return found

    def model(self, model_id: str) -> TrainedModel:
        """Return a model of an open session.

        Raises:
            Refusal: 404 or 410, it does not exist.
        """
        found = self.session(model_id.partition(":")[0]).models.get(model_id)
        if found is None:
            raise Refusal(404, f"no model {model_id!r:.80}; create it first")
        return found

    def add_model(
        self, session_id: str, number: int, options: TraineeOptions, metadata: Mapping[str, Any]
    ) -> TrainedModel:
        """Add a new model to a session.

        Raises:
            Refusal: 503, the limit is reached.
        """
        session = self.session(session_id)
        if sum(len(each.models) for each in self.sessions.values()) >= self._max_models:
            raise Refusal(503, f"{self._max_models} models are trained, which is the limit; end a session")
        model = TrainedModel(f"{session.id}:train:{number}", options, metadata)
        session.models[model.id] = model
        return model

    def _owner(self, name: str) -> TinkerSession:
        return self.sessions.get(name.partition(":")[0], self._nobody)

    def promise(self, name: str) -> Promise | None:
        """Return an earlier promise of a request, which may have been sent again."""
        return self._owner(name).promises.get(name)

    def check_room(self, name: str) -> None:
        """Forget fetched answers of a request's session until another one fits.

        Raises:
            Refusal: 503, too many answers were not fetched.
        """
        owner = self._owner(name)
        while owner.num_bytes > MAX_ANSWER_BYTES and owner.fetched:
            name, promise = owner.fetched.popitem(last=False)
            if owner.promises.pop(name, None) is not None:
                owner.num_bytes -= promise.num_bytes
        if owner.num_bytes > MAX_ANSWER_BYTES:
            raise Refusal(
                503, f"{owner.num_bytes:,} bytes of open calls and answers wait; fetch them, then send it again"
            )

    def give(self, name: str, answer: "asyncio.Future[Any]", *, num_bytes: int = 0, **more: Any) -> Promise:
        """Add the promise of a call that holds `num_bytes` until it is answered."""
        owner = self._owner(name)
        promise = Promise(id=name, answer=answer, num_bytes=num_bytes + _PROMISE_BYTES, more=more)
        owner.promises[name] = promise
        owner.num_bytes += promise.num_bytes

        def settle(_: object) -> None:
            # Retrieve the exception, in case the client never asks for the answer.
            found = None if answer.cancelled() or answer.exception() is not None else answer.result()
            owner.num_bytes -= promise.num_bytes
            promise.num_bytes = _PROMISE_BYTES + (len(found) if isinstance(found, bytes) else 0)
            owner.num_bytes += promise.num_bytes
            if owner is self._nobody:
                owner.fetched[name] = promise

        answer.add_done_callback(settle)
        return promise

    def note_fetched(self, promise: Promise) -> None:
        """Note that a client has an answer."""
        self._owner(promise.id).fetched[promise.id] = promise

    def take_silent(self) -> list[TinkerSession]:
        """Remove the sessions that have ended, with their promises."""
        now = time.monotonic()
        ended = [each for each in self.sessions.values() if each.is_finished or now - each.last_seen > self._timeout_s]
        for session in ended:
            del self.sessions[session.id]
            for promise in session.promises.values():
                promise.answer.cancel()
        return ended
