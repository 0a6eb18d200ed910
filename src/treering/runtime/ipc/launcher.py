"""The protocols of what starts processes: a launcher, the processes that it starts, and what each builds for itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Literal, Protocol, TypeAlias

from torch import nn

from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.rl.tasks.task import Task
from treering.runtime.ipc.weight_store import WeightStore

Kind: TypeAlias = Literal["rollout_worker", "reward_worker", "trainer"]
"""Kinds of processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a launcher reserves for one process.

    Example: `Resources(num_gpus=0.5)` lets two processes share a GPU.
    """

    num_cpus: float = 1.0
    """Logical CPUs: they are counted, not enforced."""
    num_gpus: float = 0.0
    """GPUs that the process sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process has ended."""

    status: int | None
    """Its exit status, or minus the signal that killed it; None if that is unknown."""
    cause: str
    """In words, for an error."""


class Transport(Protocol):
    """The messages to and from a process, as `multiprocessing.connection.Connection` has them."""

    def fileno(self) -> int:
        """A file descriptor that becomes readable when `poll` should be called."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Sends a message; OSError if the process is gone."""

    def poll(self) -> bool:
        """Whether a message has arrived, or the end of them; does not wait."""

    def recv_bytes(self) -> bytes:
        """The next message; EOFError or OSError if the process is gone."""

    def close(self) -> None:
        """Closes this end."""


class Process(Protocol):
    """A process that was started, perhaps on another host; it may still be on its way."""

    @property
    def pid(self) -> int | None:
        """Its process id on its host; None while it is not known."""

    @property
    def transport(self) -> Transport:
        """Its messages. What is sent before it runs reaches it then."""

    def is_alive(self) -> bool:
        """Whether it runs or is on its way."""

    def offer(self, version: int, slot: int | None) -> None:
        """Lets it read these weights of the `WeightStore`."""

    def kill(self) -> None:
        """Kills it, without waiting for its end."""

    def end(self, *, with_group: bool) -> Ended:
        """Kills it if it lives, with its process group or alone, and frees what it had."""


class Recipe(Protocol):
    """Builds a model, a task and engines, the same in every process.

    The weights of the model do not matter: each process loads those of the run first.
    """

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine of `make_engine` runs at a time; of an environment, episodes in flight."""

    def make_model(self) -> nn.Module:
        """The model, with any weights."""

    def make_task(self) -> Task:
        """Prompts and rewards."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> Engine:
        """An engine with the model's current weights, which have this policy version."""


class Launcher(Protocol):
    """Starts the processes of one run.

    Example: `launcher.open(recipe, model, 2)` returns the store of the weights; `launcher.start("trainer", "trainer")`
    a process that runs `treering.runtime.ipc.child.run_role`.
    """

    @property
    def copies_environment(self) -> bool:
        """Whether processes get the controller's environment variables."""

    @property
    def shares_host(self) -> bool:
        """Whether all processes see the controller's files; if so, they run in its working directory."""

    def open(self, recipe: Recipe, model: nn.Module, num_slots: int) -> WeightStore:
        """Prepares for processes that unpickle `recipe`; returns the store of `num_slots` versions of their weights.

        Raises:
            ConfigError, StateError: there is no room for the processes or the weights.
        """

    def start(self, name: str, kind: Kind) -> Process:
        """Starts a process, without waiting until it runs.

        Raises:
            StateError: it cannot be started.
        """

    def close(self) -> None:
        """Frees what `open` has taken, after the end of all processes."""


def wait_for_any(transports: Iterable[Transport], timeout_s: float) -> None:
    """Waits until one of the transports should be polled, or for `timeout_s` seconds."""
    wait([transport.fileno() for transport in transports], timeout_s)


def resources_by_kind(
    *,
    rollout_worker: Resources | None = None,
    reward_worker: Resources | None = None,
    trainer: Resources | None = None,
) -> Mapping[Kind, Resources]:
    """Resources of each kind of process; by default a CPU, and none for reward workers, half of which are spare."""
    return {
        "rollout_worker": rollout_worker or Resources(),
        "reward_worker": reward_worker or Resources(num_cpus=0.0),
        "trainer": trainer or Resources(),
    }
