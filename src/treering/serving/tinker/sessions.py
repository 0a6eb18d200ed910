"""What clients hold: sessions with models, samplers and promises, all of which end with them."""

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
"""Requests of a model that wait for earlier ones."""
MAX_SNAPSHOT_BYTES = 1 << 30
"""Of a model's unnamed sampler weights; the newest are kept whatever their size."""
MAX_PROMISES = 20_000


class TrainedModel:
    """A client's model: its requests in order, and the weights that it gave to samplers."""

    def __init__(self, model_id: str, options: TraineeOptions, metadata: Mapping[str, Any]) -> None:
        """It is trained once `trainee` is there."""
        self.id, self.options, self.metadata = model_id, options, metadata
        self.trainee: Trainee | None = None
        self.counts, self.logged = TokenCounts(), TokenCounts()
        self.num_steps = 0
        self._next_seq = 1
        self._held: dict[int, Job | None] = {}
        self._snapshots: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    def ready(self) -> Trainee:
        """The model, in the thread that trains.

        Raises:
            StateError: making it has failed.
        """
        if self.trainee is None:
            raise StateError(f"{self.id} could not be made, see the answer of create_model; create another one")
        return self.trainee

    def enqueue(self, thread: TrainingThread, seq_id: int, job: Job | None) -> None:
        """Runs jobs in the order of their numbers; None is a request that was refused, 0 one without a number.

        Raises:
            InputError: a number that has run, or too many that wait for an earlier one.
        """
        if seq_id == 0:
            seq_id = self._next_seq
        if seq_id < self._next_seq or len(self._held) >= MAX_HELD or seq_id > self._next_seq + MAX_HELD:
            raise InputError(f"seq_id of {self.id} is {self._next_seq} next, got {seq_id}; count requests one by one")
        self._held[seq_id] = job
        while self._next_seq in self._held:
            ready = self._held.pop(self._next_seq)
            self._next_seq += 1
            if ready is not None:
                thread.submit(ready)

    def weights_now(self) -> SamplerWeights:
        """The present weights for samplers, in the thread that trains; the same ones until they change."""
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
                "these sampler weights made room for newer ones; sample from the newest, or name those to keep by "
                "save_weights_for_sampler"
            )
        own = dict(model.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSession:
    """What one client holds."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    last_seen: float = field(default_factory=time.monotonic)
    is_finished: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """The answer of a request, which comes later: an object for JSON, or the bytes of a record."""

    id: str
    answer: "asyncio.Future[Any]"
    more: Mapping[str, Any] = field(default_factory=dict)

    def ticket(self) -> dict[str, Any]:
        """What the request itself is answered."""
        return {"request_id": self.id, **self.more}


class Holdings:
    """The sessions of a server, and its promises by name."""

    def __init__(self, *, max_sessions: int, max_models: int, timeout_s: float) -> None:
        """`timeout_s`: after which a silent session ends."""
        self.sessions: dict[str, TinkerSession] = {}
        self._max_sessions, self._max_models, self._timeout_s = max_sessions, max_models, timeout_s
        self._promises: OrderedDict[str, Promise] = OrderedDict()

    def open(self, metadata: Mapping[str, Any]) -> TinkerSession:
        """A session.

        Raises:
            Refusal: 503, there are enough.
        """
        if len(self.sessions) >= self._max_sessions:
            raise Refusal(503, f"{self._max_sessions} sessions are open, which is the limit; close one")
        session = TinkerSession(metadata=metadata)
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> TinkerSession:
        """An open session, which is heard of.

        Raises:
            Refusal: 410, it has ended; 404, there was none.
        """
        found = self.sessions.get(session_id)
        if found is None or found.is_finished:
            raise Refusal(
                404 if found is None else 410,
                f"session {session_id!r:.80} is not open: it was finished or silent for {self._timeout_s:.0f} s; make "
                "another ServiceClient",
            )
        found.last_seen = time.monotonic()
        return found

    def model(self, model_id: str) -> TrainedModel:
        """A model of an open session.

        Raises:
            Refusal: 404 or 410, there is none.
        """
        found = self.session(model_id.partition(":")[0]).models.get(model_id)
        if found is None:
            raise Refusal(404, f"there is no model {model_id!r:.80}; create it first")
        return found

    def add_model(
        self, session_id: str, number: int, options: TraineeOptions, metadata: Mapping[str, Any]
    ) -> TrainedModel:
        """A new model of a session.

        Raises:
            Refusal: 503, there are enough.
        """
        session = self.session(session_id)
        if sum(len(each.models) for each in self.sessions.values()) >= self._max_models:
            raise Refusal(503, f"{self._max_models} models are trained, which is the limit; end a session")
        model = TrainedModel(f"{session.id}:train:{number}", options, metadata)
        session.models[model.id] = model
        return model

    def promise(self, name: str) -> Promise | None:
        """A promise that was given before, also to the request that is sent again."""
        return self._promises.get(name)

    def give(self, name: str, answer: "asyncio.Future[Any]", **more: Any) -> Promise:
        """A new promise; the oldest that are kept are forgotten."""
        promise = self._promises[name] = Promise(id=name, answer=answer, more=more)
        # Nobody may ask for it.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        for old in list(self._promises.values())[: max(0, len(self._promises) - MAX_PROMISES)]:
            if old.answer.done():
                del self._promises[old.id]
        return promise

    def take_silent(self) -> list[TinkerSession]:
        """Removes the sessions that have ended, with their promises."""
        now = time.monotonic()
        ended = [each for each in self.sessions.values() if each.is_finished or now - each.last_seen > self._timeout_s]
        for session in ended:
            del self.sessions[session.id]
            for name in [name for name in self._promises if name.startswith(session.id)]:
                self._promises.pop(name).answer.cancel()
        return ended
