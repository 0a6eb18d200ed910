"""Start the processes of a run as Ray actors, with weights in Ray's object store.

Ray places the processes, reports their deaths, ends the processes that they start, and brings weights to their hosts.
It restarts nothing (`max_restarts=0`): the controller does that and keeps the account.
"""

import io
import math
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from treering.errors import ConfigError, StateError, TreeringError
from treering.extras import require
from treering.runtime.messages import Ready, Recipe, WithWeights
from treering.runtime.process import Actor, ActorDied, Kind, Role

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_CAUSE_CHARS = 200
_TO_ACTOR, _FROM_ACTOR = "to_actor", "from_actor"
"""Concurrency groups of `LoopingActor`, so that messages come and go while its role works."""

_Answer: TypeAlias = tuple[list[Any], Any]
"""Messages, and the weights of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """Message from an actor whose role has raised an error."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that an actor shares with the controller."""

    folder: str
    """Working directory."""
    num_threads: int
    """Torch threads; Ray would give an actor only as many as the CPUs that it reserves."""

    def apply(self) -> None:
        """Change to the controller's folder, if it exists here, and redirect stdout to stderr.

        Ray would copy stdout to the controller's, which must have nothing but the run's result.
        """
        torch.set_num_threads(self.num_threads)
        with suppress(OSError):
            os.chdir(self.folder)
        with suppress(OSError):
            os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)


class SteppingActor:
    """Actor that answers messages one by one in its main thread, the only one that may set signal handlers.

    Example: a reward worker, or a trainer.
    """

    def begin(self, role: Callable[[Any], Role], settings: Any, weights: Any, setup: Setup) -> _Answer:
        """Make the role; return its first messages."""
        setup.apply()
        try:
            self._role = role(_joined(settings, weights))
        except Exception as error:
            return [Failed(error=_picklable(error))], None
        return self._answer()

    def do(self, message: Any, weights: Any) -> _Answer:
        """Pass a message to the role and run it until it is idle; return its messages."""
        try:
            self._role.do(_joined(message, weights))
        except Exception as error:
            return [Failed(error=_picklable(error))], None
        return self._answer()

    def _answer(self) -> _Answer:
        messages: list[Any] = []
        try:
            while self._role.is_busy:
                messages += self._role.advance()
        except Exception as error:
            messages.append(Failed(error=_picklable(error)))
        last, weights = _parted(messages[-1] if messages else None)
        return [*messages[:-1], *([] if last is None else [last])], weights


class LoopingActor:
    """Actor whose role works in its own thread while messages come and go.

    Example: a rollout worker.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self, role: Callable[[Any], Role], settings: Any, weights: Any, setup: Setup) -> _Answer:
        """Make the role and start its thread."""
        setup.apply()
        threading.Thread(target=self._work, args=(role, _joined(settings, weights)), daemon=True).start()
        return [], None

    def post(self, message: Any, weights: Any) -> None:
        """Receive a message."""
        self._inbox.put(_joined(message, weights))

    def take(self) -> _Answer:
        """Wait for messages of the role; return all that are there."""
        messages = [self._outbox.get()]
        while not self._outbox.empty():
            messages.append(self._outbox.get())
        return messages, None

    def _work(self, role: Callable[[Any], Role], settings: Any) -> None:
        try:
            worker = role(settings)
            while True:
                # Block for a message if there is nothing else to do.
                if not worker.is_busy:
                    worker.do(self._inbox.get())
                while not self._inbox.empty():
                    worker.do(self._inbox.get())
                for message in worker.advance():
                    self._outbox.put(message)
        except Exception as error:
            self._outbox.put(Failed(error=_picklable(error)))


class RayActor:
    """Handle of an actor in the controller."""

    def __init__(self, handle: "ActorHandle[Any]", *, is_looping: bool, is_on_this_host: bool) -> None:
        """Wrap an actor; call `begin` next."""
        self._handle = handle
        self._is_on_this_host = is_on_this_host
        self._pid: int | None = None
        self._is_looping = is_looping
        self._calls: deque[tuple[ObjectRef[Any], ObjectRef[Any]]] = deque()
        self.has_answer = False
        """Whether the oldest call has an answer; set by `RayActors.wait`."""

    def begin(self, role: Callable[[Any], Role], settings: Any) -> None:
        """Start the role."""
        message, weights = _parted(settings)
        started = self._handle.begin.options(num_returns=2)
        self._calls.append(
            started.remote(role, message, weights, Setup(folder=os.getcwd(), num_threads=torch.get_num_threads()))
        )
        if self._is_looping:
            self._take()

    @property
    def oldest(self) -> "ObjectRef[Any]":
        """Answer of the oldest open call; requires an open call."""
        return self._calls[0][0]

    @property
    def is_asked(self) -> bool:
        """Whether a call is open."""
        return bool(self._calls)

    def send(self, message: object) -> None:
        """Send a message; it waits if the process does not run yet."""
        sent, weights = _parted(message)
        if self._is_looping:
            self._handle.post.options(concurrency_group=_TO_ACTOR).remote(sent, weights)
        else:
            self._calls.append(self._handle.do.options(num_returns=2).remote(sent, weights))

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting."""
        import ray

        found: list[Any] = []
        while self.has_answer:
            try:
                found += self._answer()
            except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as death:
                if found:
                    return found
                raise ActorDied(_cause(death)) from None
            self._calls.popleft()
            if self._is_looping and not self._calls:
                self._take()
            self.has_answer = self.is_asked and bool(ray.wait([self.oldest], timeout=0)[0])
        return found

    def kill(self) -> None:
        """Kill the process by signal too, since one with forks or threads of a reward may ignore Ray's request."""
        import ray

        if self._is_on_this_host and self._pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        self._pid = None
        ray.kill(self._handle, no_restart=True)

    def _take(self) -> None:
        taking = self._handle.take.options(concurrency_group=_FROM_ACTOR, num_returns=2)
        self._calls.append(taking.remote())

    def _answer(self) -> list[Any]:
        import ray

        messages: list[Any] = ray.get(self.oldest)
        for message in messages:
            if isinstance(message, Failed):
                raise message.error
            if isinstance(message, Ready):
                self._pid = message.pid
        if messages and isinstance(messages[-1], WithWeights):
            messages[-1] = replace(messages[-1], weights=self._calls[0][1])
        return messages


class RayActors:
    """`Actors` of a run on Ray.

    Uses Ray if the program has initialised it, else the cluster in `RAY_ADDRESS`, else its own Ray on this machine,
    which ends with the run.

    Example: `PipelineLoop(model, task, PipelineSpec(..., actors=RayActors(num_rollout_workers=2)))`.
    """

    def __init__(
        self,
        *,
        num_rollout_workers: int,
        num_trainer_ranks: int = 1,
        worker_cpus: int = 1,
    ) -> None:
        """Set up without starting anything.

        Args:
            num_rollout_workers: number of the run's rollout workers.
            num_trainer_ranks: number of its trainer's ranks.
            worker_cpus: logical CPUs of a rollout worker; a trainer rank takes one, a reward worker none.

        Raises:
            MissingExtraError: if Ray is not installed.
        """
        require(f"runtime.workers = {num_rollout_workers}", "ray")
        self._counts: Mapping[Kind, int] = {
            "rollout_worker": num_rollout_workers,
            "reward_worker": 1,
            "trainer": num_trainer_ranks,
        }
        self._cpus: Mapping[Kind, float] = {"rollout_worker": worker_cpus, "reward_worker": 0.0, "trainer": 1.0}
        self._owns_ray = False
        self._classes: dict[Kind, Any] = {}
        self.is_one_host = True

    def open(self, recipe: Recipe) -> None:
        """Connect to Ray or start it, and check that the cluster has room for all processes."""
        import ray

        if type(recipe).__module__ == "__main__":
            raise ConfigError(
                f"actors must be able to import the recipe's class, but {type(recipe).__name__} is defined in the main "
                "program; move it into a module"
            )
        if not ray.is_initialized():
            # `ray.shutdown` ends only what this program has started, even on a cluster.
            self._owns_ray = True
            self._start_ray()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.is_one_host = len({node["NodeManagerAddress"] for node in nodes}) == 1
        gpus = self._gpus_by_kind(sum(float(node["Resources"].get("GPU", 0.0)) for node in nodes))
        try:
            check_room([node["Resources"].get("CPU", 0.0) for node in nodes], self._cpus, self._counts)
        except ConfigError:
            self.close()
            raise
        # One class per kind, because Ray keeps every class for good.
        self._classes = {kind: _actor_class(kind, self._cpus[kind], gpus[kind]) for kind in self._counts}

    def start(self, kind: Kind, role: Callable[[Any], Role], settings: Any) -> RayActor:
        """Start a process, without waiting until it runs."""
        actor = RayActor(self._classes[kind].remote(), is_looping=_is_looping(kind), is_on_this_host=self.is_one_host)
        actor.begin(role, settings)
        return actor

    def put(self, weights: Any) -> Any:
        """Put weights into Ray's object store; return their reference."""
        import ray

        return ray.put(weights)

    def get(self, ref: Any) -> Any:
        """Return the weights of a reference.

        Raises:
            StateError: if the host that had the weights is gone.
        """
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.ObjectLostError as error:
            raise StateError(
                "a host of the cluster is gone, and with it the weights of a step; start again from the last checkpoint"
            ) from error

    def wait(self, actors: Iterable[Actor], timeout_s: float) -> None:
        """Wait until one of the processes has sent something or died, or for `timeout_s` seconds."""
        import ray

        asked = {each.oldest: each for each in actors if isinstance(each, RayActor) and each.is_asked}
        if not asked:
            return
        if ray.wait(list(asked), timeout=timeout_s)[0]:
            for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                asked[ref].has_answer = True

    def close(self) -> None:
        """Shut down the Ray that `open` started or connected to."""
        import ray

        if self._owns_ray:
            ray.shutdown()
        self._owns_ray = False

    def _start_ray(self) -> None:
        """Connect to the cluster in RAY_ADDRESS, or start a Ray on this machine without usage reports."""
        import ray

        address = os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, logging_level="warning")
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # When an actor ends, so do the processes that a reward or an environment has started.
        os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
        # Ray gives actors a low priority by default, so that any other program would slow a run down.
        os.environ.setdefault("RAY_worker_niceness", "0")
        needed = sum(number * self._cpus[kind] for kind, number in self._counts.items())
        # Logical CPUs: a laptop can run more workers than it has cores.
        num_cpus = max(os.cpu_count() or 1, math.ceil(needed))
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, logging_level="warning")
        except Exception as error:
            self.close()
            raise StateError(
                f"Ray did not start within half a minute ({str(error)[:_CAUSE_CHARS]}); start again when the machine "
                "is less busy, or run `ray start --head` and set RAY_ADDRESS=auto"
            ) from error

    def _gpus_by_kind(self, num_gpus: float) -> dict[Kind, float]:
        """Return the GPUs of a process of each kind: an equal share, at most one; a reward worker has none."""
        num_takers = self._counts["rollout_worker"] + self._counts["trainer"]
        share = 1.0 / max(1, math.ceil(num_takers / num_gpus)) if num_gpus else 0.0
        return {"rollout_worker": share, "reward_worker": 0.0, "trainer": share}


def check_room(free: Sequence[float], needs: Mapping[Kind, float], counts: Mapping[Kind, int]) -> None:
    """Check that the CPUs of every process fit a node, and those of all of them fit the cluster.

    Raises:
        ConfigError: if they do not.
    """
    total = sum(counts[kind] * need for kind, need in needs.items())
    if total > sum(free):
        raise ConfigError(
            f"{counts['rollout_worker']} rollout workers and {counts['trainer']} trainer ranks need {total:g} "
            f"CPUs, but the cluster has {sum(free):g}; lower engine.num_threads, runtime.workers or "
            "runtime.trainer_ranks"
        )
    if max(needs.values()) > max(free, default=0.0):
        raise ConfigError(
            f"a process must fit on one node, but one needs {max(needs.values()):g} CPUs and no node has more "
            f"than {max(free, default=0.0):g}; lower engine.num_threads"
        )


def _actor_class(kind: Kind, num_cpus: float, num_gpus: float) -> Any:
    import ray

    groups = {"concurrency_groups": {_TO_ACTOR: 1, _FROM_ACTOR: 1}} if _is_looping(kind) else {}
    kinds = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, max_task_retries=0, **groups)
    return kinds(LoopingActor if _is_looping(kind) else SteppingActor)


def _is_looping(kind: Kind) -> bool:
    return kind == "rollout_worker"


def _parted(message: Any) -> tuple[Any, Any]:
    """Return a message without its weights, and the weights: Ray resolves references only in top-level arguments."""
    if isinstance(message, WithWeights) and message.weights is not None:
        return replace(message, weights=None), message.weights
    return message, None


def _joined(message: Any, weights: Any) -> Any:
    return message if weights is None else replace(message, weights=weights)


def _cause(death: Exception) -> str:
    """Return Ray's message about an actor that has ended, as one line."""
    lines = [line.strip() for line in str(death).splitlines() if line.strip()]
    return f"Ray's message: {lines[-1][:_CAUSE_CHARS] if lines else type(death).__name__}"


def _picklable(error: Exception) -> Exception:
    """Return the error with its traceback as a note, or a StateError with its text if it cannot be pickled."""
    error.add_note(f"raised in a worker:\n{''.join(traceback.format_exception(error))}")
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if type(copied) is type(error) and str(copied) == str(error):
        return error
    text = str(error) if isinstance(error, TreeringError) else f"{type(error).__name__}: {error}"
    return StateError(f"{text} (raised in a worker)")
