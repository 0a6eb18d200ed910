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
from treering.serving.tinker.training_thread import Job, TokenCounts, TrainingThread
from treering.train.loop.checkpoint import num_tensor_bytes
from treering.train.loop.trainee import Trainee, TraineeOptions

MAX_HELD = 4096
"""Requests of a model that may wait for earlier ones."""
MAX_SNAPSHOT_BYTES = 1 << 30
"""Limit of a model's unnamed sampler weights; the newest are kept whatever their size."""
MAX_PROMISES = 20_000


class TrainedModel:
    """Model of a client: its requests in order, and the weights that it gave to samplers."""

    def __init__(self, model_id: str, options: TraineeOptions, metadata: Mapping[str, Any]) -> None:
        """Keep the options; the model can train once `trainee` is set."""
        self.id, self.options, self.metadata = model_id, options, metadata
        self.trainee: Trainee | None = None
        self.counts, self.logged = TokenCounts(), TokenCounts()
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
            InputError: the number has already run, or too many requests wait for an earlier one.
        """
        if seq_id == 0:
            seq_id = self._next_seq
        if seq_id < self._next_seq or len(self._held) >= MAX_HELD or seq_id > self._next_seq + MAX_HELD:
            raise InputError(
                f"the next seq_id of {self.id} is {self._next_seq}, got {seq_id}; number requests in order"
            )
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
class TinkerSession:
    """Models and samplers of one client."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    last_seen: float = field(default_factory=time.monotonic)
    is_finished: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """Pending answer of a request: an object for JSON, or the bytes of a record."""

    id: str
    answer: "asyncio.Future[Any]"
    more: Mapping[str, Any] = field(default_factory=dict)

    def ticket(self) -> dict[str, Any]:
        """Return the immediate answer to the request."""
        return {"request_id": self.id, **self.more}


class Holdings:
    """Sessions of a server, and its promises by name."""

    def __init__(self, *, max_sessions: int, max_models: int, timeout_s: float) -> None:
        """Hold the limits; a session that is silent for `timeout_s` seconds ends."""
        self.sessions: dict[str, TinkerSession] = {}
        self._max_sessions, self._max_models, self._timeout_s = max_sessions, max_models, timeout_s
        self._promises: OrderedDict[str, Promise] = OrderedDict()

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

    def promise(self, name: str) -> Promise | None:
        """Return an earlier promise of a request, which may have been sent again."""
        return self._promises.get(name)

    def give(self, name: str, answer: "asyncio.Future[Any]", **more: Any) -> Promise:
        """Add a promise, and forget the oldest answered ones."""
        promise = self._promises[name] = Promise(id=name, answer=answer, more=more)
        # Retrieve the exception, in case the client never asks for the answer.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        for old in list(self._promises.values())[: max(0, len(self._promises) - MAX_PROMISES)]:
            if old.answer.done():
                del self._promises[old.id]
        return promise

    def take_silent(self) -> list[TinkerSession]:
        """Remove the sessions that have ended, with their promises."""
        now = time.monotonic()
        ended = [each for each in self.sessions.values() if each.is_finished or now - each.last_seen > self._timeout_s]
        for session in ended:
            del self.sessions[session.id]
            for name in [name for name in self._promises if name.startswith(session.id)]:
                self._promises.pop(name).answer.cancel()
        return ended
