"""Train a run in one or several ranks: the trainer's role, and the client that replays its steps after a crash."""

import io
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from treering.ranks.group import RankGroup, is_of_another
from treering.ranks.sharded_state import whole_state, whole_state_dict
from treering.rl.collect import Group
from treering.rl.trainer import Trainer
from treering.runtime.account import Account
from treering.runtime.messages import (
    FetchState,
    Ready,
    Rendezvous,
    TrainedStep,
    TrainerSettings,
    TrainerState,
    TrainStep,
)
from treering.runtime.process import Actors, RunProcess
from treering.runtime.weight_store import Weights, WeightStore, load_weights, model_tensors, weights_of
from treering.train.loop.checkpoint import random_state, set_random_state
from treering.train.loop.compute import shard_model
from treering.train.loop.lora_adapters import has_adapter

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that set the network interface of torch's backends."""

_TOKEN_BYTES = 25
"""Bytes per token of a rollout: its id, two log-probabilities, a mask and a version."""

_LEAST_BYTES = 64 << 20


class TrainerWorker:
    """Role of the trainer and each of its ranks, which shard the model; only rank 0 answers."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Build model and optimiser; several ranks first wait for their meeting point."""
        self._settings = settings
        self._messages: deque[TrainStep | FetchState] = deque()
        self._answers: list[Any] = []
        self._store: Any = None
        if settings.num_ranks == 1:
            self._build(RankGroup())
        elif settings.rank == 0:
            self._store, rendezvous = _listening(settings)
            self._answers.append(rendezvous)

    @property
    def is_busy(self) -> bool:
        """Whether a step has to be trained or a message is due."""
        return bool(self._messages or self._answers)

    def do(self, message: Rendezvous | TrainStep | FetchState) -> None:
        """Handle a message from the controller."""
        if isinstance(message, Rendezvous):
            self._with_others(lambda: self._meet(message))
        else:
            self._messages.append(message)

    def advance(self) -> list[Any]:
        """Train a step, or fetch the state."""
        if self._messages:
            message = self._messages.popleft()
            self._with_others(lambda: self._fetch() if isinstance(message, FetchState) else self._train(message))
        answers, self._answers = self._answers, []
        return answers

    def _with_others(self, act: Any) -> None:
        """Do something that other ranks take part in, and exit if another rank has ended."""
        try:
            act()
        except RuntimeError as error:
            if self._settings.num_ranks == 1 or not is_of_another(error):
                raise
            # Another rank's end is not an error of the run: the controller replaces all ranks.
            print(f"trainer rank {self._settings.rank} exits, because another rank has ended: {error}", file=sys.stderr)
            os._exit(1)

    def _meet(self, rendezvous: Rendezvous) -> None:
        settings = self._settings
        store = self._store or dist.TCPStore(  # type: ignore[attr-defined]
            rendezvous.host, rendezvous.port, settings.num_ranks, False, wait_for_workers=False
        )
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            # Before the model is built. Ray shows a process only its own devices.
            torch.cuda.set_device(settings.rank % torch.cuda.device_count())
        if settings.is_one_host:
            stay_on_loopback()
        backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=settings.rank, world_size=settings.num_ranks)
        self._build(None)

    def _build(self, rank_group: RankGroup | None) -> None:
        settings = self._settings
        self._model = settings.recipe.make_model()
        load_weights(settings.weights, self._model)
        self._rank_group = shard_model(self._model, settings.options.autocast) if rank_group is None else rank_group
        self._trainer = Trainer(
            self._model, settings.optim, settings.options, rank_group=self._rank_group, reference=settings.reference
        )
        state = unpacked(settings.state)
        if state["optimizer"] is not None:
            self._trainer.load_state(state["optimizer"])
        # Last, because building a model consumes random numbers.
        set_random_state(state["random"])
        self._answers.append(Ready(pid=os.getpid()))

    def _train(self, message: TrainStep) -> None:
        started = time.perf_counter()
        trained = self._trainer.train(message.step, message.groups)
        ended = time.perf_counter()
        weights = self._published() if message.is_new else None
        update_s = time.perf_counter() - ended
        if self._rank_group.rank == 0:
            self._answers.append(
                TrainedStep(
                    step=message.step, trained=trained, train_s=ended - started, update_s=update_s, weights=weights
                )
            )

    def _published(self) -> Weights | None:
        """Return the new weights on rank 0, and None on other ranks."""
        is_whole = self._rank_group.size == 1
        whole = None if is_whole else whole_state_dict(self._model, trained_only=has_adapter(self._model))
        return weights_of(model_tensors(self._model, whole)) if self._rank_group.rank == 0 else None

    def _fetch(self) -> None:
        state = self._trainer.state()
        if self._rank_group.size > 1:
            state = whole_state(state)
        if self._rank_group.rank == 0:
            self._answers.append(TrainerState(state=packed(state)))


def packed(optimizer: Mapping[str, Any] | None) -> bytes:
    """Serialise an optimiser's state (None before the first step) and this process's random state."""
    stream = io.BytesIO()
    torch.save({"optimizer": optimizer, "random": random_state()}, stream)
    return stream.getvalue()


def unpacked(state: bytes) -> dict[str, Any]:
    """Return the inverse of `packed`: "optimizer" and "random"."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found


def stay_on_loopback() -> None:
    """Make torch's backends listen only on loopback, unless the user has set an interface."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            for variable in _INTERFACES:
                os.environ.setdefault(variable, name)
            return


def _listening(settings: TrainerSettings) -> tuple[Any, Rendezvous]:
    """Return torch's store, and the address at which the other ranks reach it."""
    host = "127.0.0.1"
    if not settings.is_one_host:
        import ray

        host = ray.util.get_node_ip_address()
    # Torch's store would listen on all interfaces, so give it a socket that listens on one.
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, settings.num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, Rendezvous(host=host, port=port)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """Step that the trainer received after its base, with the size of its rollouts."""

    message: TrainStep
    num_bytes: int


class TrainerClient:
    """Client of the trainer, which is one process or several ranks.

    Its base is the last fetched state: weights, and the optimiser as bytes. It keeps the rollouts of later steps; after
    a crash, a new trainer replays them and gets bitwise the same weights. Once they need more memory than the base, a
    new base replaces them. If a rank dies, the others are ended too, because their common work cannot be finished.

    Example: with the base at step 4, a trainer that dies in step 7 is replaced by one that trains 5, 6 and 7.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        store: WeightStore,
        actors: Actors,
        *,
        num_ranks: int,
        time_limit_s: float,
        account: Account,
    ) -> None:
        """Start the trainer.

        Args:
            settings: settings with the initial weights and state.
            store: gets the weights of each trained step.
            actors: starts the processes.
            num_ranks: number of processes that train together.
            time_limit_s: limit for one step.
            account: counts deaths.
        """
        self._settings, self._store, self._actors, self._account = settings, store, actors, account
        self._jobs: list[_Job] = []
        self._expected: list[int] = []
        self._pending: int | None = None
        self._saved: list[bytes] = []
        self._is_fetching = False
        # Messages for several ranks that have not met yet.
        self._held: list[TrainStep | FetchState] = []
        self._have_met = False
        names = ["trainer", *(f"trainer rank {rank}" for rank in range(1, num_ranks))]
        self.processes = [
            RunProcess(name, "trainer", TrainerWorker, actors, time_limit_s=time_limit_s) for name in names
        ]
        self._start()

    def train(self, step: int, groups: Sequence[Group]) -> None:
        """Send the next step."""
        tokens = sum(group.prompt.tokens.size + r.num_tokens for group in groups for r in group.rollouts)
        job = _Job(message=TrainStep(step=step, groups=groups, is_new=True), num_bytes=_TOKEN_BYTES * tokens)
        self._jobs.append(job)
        self._pending = step
        self._train(job.message)

    def receive(self) -> TrainedStep | None:
        """Return the sent step once it is trained, and replace a dead trainer.

        Raises:
            StateError: if trainers die repeatedly.
            Exception: the error that the trainer raised.
        """
        messages, dead = self._receive_all()
        done = None
        for message in messages:
            for process in self.processes:
                process.note_progress()
            if isinstance(message, TrainerState):
                self._saved.append(message.state)
                continue
            assert message.step == self._expected.pop(0), "steps are trained in order"
            if message.step == self._pending:
                done, self._pending = message, None
                self._store.keep(message.step, message.weights)
        self._end_if_silent()
        if dead:
            self._account.trainer_deaths += 1
            # Dead processes first, so that an error names one of them.
            for process in sorted(self.processes, key=lambda each: each not in dead):
                process.reap()
            self._start()
        return done

    def fetch(self) -> bytes:
        """Fetch the trainer's state after the last step and make it the base; only between steps.

        Raises:
            StateError, Exception: as in `receive`.
        """
        assert self._pending is None, "a state is fetched between steps"
        state = self._fetch_state()
        if self._jobs:
            weights = self._store.ref(self._jobs[-1].message.step)
            self._settings = replace(self._settings, weights=weights)
        self._settings = replace(self._settings, state=state)
        self._jobs.clear()
        return state

    def compact(self) -> None:
        """Make a new base if the kept rollouts are larger than the state of the current one."""
        kept = sum(job.num_bytes for job in self._jobs)
        if kept > max(_LEAST_BYTES, len(self._settings.state)):
            self.fetch()

    def close(self) -> None:
        """Stop the trainer."""
        for process in self.processes:
            process.stop()

    def _fetch_state(self) -> bytes:
        """Return the trainer's state; the request is sent again if the trainer is replaced."""
        asked: int | None = None
        self._is_fetching = True
        self._saved.clear()
        while not self._saved:
            if asked != self.processes[0].num_starts:
                self._send(FetchState())
                asked = self.processes[0].num_starts
            self._actors.wait([process.actor for process in self.processes if process.actor is not None], 1.0)
            self.receive()
        self._is_fetching = False
        return self._saved.pop()

    def _start(self) -> None:
        """Start all ranks from the base, and send them the later steps."""
        self._expected.clear()
        self._held.clear()
        num_ranks = len(self.processes)
        self._have_met = num_ranks == 1
        for rank, process in enumerate(self.processes):
            process.start(replace(self._settings, rank=rank, num_ranks=num_ranks, is_one_host=self._actors.is_one_host))
        for job in self._jobs:
            is_new = job.message.step == self._pending
            self._account.steps_trained_again += not is_new
            self._train(replace(job.message, is_new=is_new))

    def _train(self, message: TrainStep) -> None:
        self._expected.append(message.step)
        self._send(message)

    def _send(self, message: TrainStep | FetchState) -> None:
        """Send a message to all ranks, once they know their meeting point."""
        if not self._have_met:
            self._held.append(message)
            return
        for process in self.processes:
            process.send(message)

    def _receive_all(self) -> tuple[list[Any], list[RunProcess]]:
        """Return the answers of rank 0, and the ranks that have died."""
        answers: list[Any] = []
        dead = []
        for process in self.processes:
            messages, has_died = process.receive()
            for message in messages:
                if isinstance(message, Rendezvous):
                    self._introduce(message)
                else:
                    answers.append(message)
            if has_died:
                dead.append(process)
        return answers, dead

    def _introduce(self, rendezvous: Rendezvous) -> None:
        """Send the ranks the address of rank 0, then the messages that waited for it."""
        self._have_met = True
        for message in (rendezvous, *self._held):
            for process in self.processes:
                process.send(message)
        self._held.clear()

    def _end_if_silent(self) -> None:
        """End silent ranks: if any hangs in a step, rank 0 is silent; at the start, each is."""
        first, *others = self.processes
        first.end_if_silent(is_busy=bool(self._expected) or self._is_fetching)
        for process in others:
            process.end_if_silent(is_busy=False)
