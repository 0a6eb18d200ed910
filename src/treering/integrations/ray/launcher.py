"""Starts the processes of a run as Ray actors."""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from torch import nn

from treering.errors import ConfigError, StateError
from treering.extras import require
from treering.integrations.ray.actor import WEIGHTS, Actor, ActorProcess
from treering.integrations.ray.actor_connection import ActorConnection
from treering.integrations.ray.object_store import ObjectStore
from treering.integrations.ray.placement import check_hosts, check_resources, numbers_by_kind
from treering.runtime.ipc.address import is_loopback
from treering.runtime.ipc.launcher import Kind, Recipe, Resources, resources_by_kind

_READS_WEIGHTS = ("rollout_worker", "trainer")


class RayLauncher:
    """The `Launcher` of actors.

    Uses Ray as the program has initialised it, else the cluster that `RAY_ADDRESS` names, else a Ray of its own on this
    machine, which ends with the run. Ray restarts nothing (`max_restarts=0`): the controller does, and keeps the
    account.

    Example: `PipelineLoop(..., launcher=RayLauncher(num_rollout_workers=2))`.
    """

    copies_environment = False

    def __init__(
        self,
        *,
        num_rollout_workers: int,
        num_trainer_ranks: int = 1,
        resources: Mapping[Kind, Resources] | None = None,
        listen: str = "127.0.0.1",
    ) -> None:
        """Starts nothing yet.

        Args:
            num_rollout_workers: of the run, to check that there is room for all.
            num_trainer_ranks: of its trainer, likewise.
            resources: of a process of each kind; None: those of `resources_by_kind`.
            listen: this machine's address at which actors reach the controller; loopback: all are on this machine.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: `listen` is no address that others can connect to.
        """
        require('runtime.launcher = "ray"', "ray")
        _check_address(listen)
        self._numbers = numbers_by_kind(num_rollout_workers=num_rollout_workers, num_trainer_ranks=num_trainer_ranks)
        self._resources = resources_by_kind() if resources is None else resources
        self._listen = listen
        self._owns_ray = False
        self._classes: dict[Kind, Any] = {}
        self._store: ObjectStore | None = None

    @property
    def shares_host(self) -> bool:
        """See `Launcher`."""
        return is_loopback(self._listen)

    def open(self, recipe: Recipe, model: nn.Module, num_slots: int) -> ObjectStore:
        """See `Launcher`."""
        import ray

        if type(recipe).__module__ == "__main__":
            raise ConfigError(
                f"actors import the recipe's class, and {type(recipe).__name__} is defined in the program that was "
                "started, which they cannot import; move it into a module"
            )
        if not ray.is_initialized():
            self._owns_ray = True
            _init()
        try:
            check_hosts(ray.nodes(), listen=self._listen)
            check_resources(ray.nodes(), self._resources, self._numbers)
        except ConfigError:
            self.close()
            raise
        # One class for all actors of a kind, as Ray keeps each for good.
        self._classes = {kind: _actor_class(kind, needs) for kind, needs in self._resources.items()}
        self._store = ObjectStore(model, num_slots)
        return self._store

    def start(self, name: str, kind: Kind) -> ActorProcess:
        """See `Launcher`."""
        assert self._store is not None, "a launcher is opened before it starts processes"
        try:
            connection = ActorConnection(self._listen)
        except OSError as error:
            raise StateError(
                f"the controller listens on an address of its machine, and {self._listen} did not work ({error}); "
                "correct runtime.listen"
            ) from error
        return ActorProcess(self._classes[kind].remote(), connection, self._store)

    def close(self) -> None:
        """See `Launcher`."""
        import ray

        self._store = None
        if self._owns_ray:
            ray.shutdown()
        self._owns_ray = False


def _init() -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts a Ray on this machine, which reports nothing to its makers."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, logging_level="warning")
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, logging_level="warning")


def _actor_class(kind: Kind, needs: Resources) -> Any:
    import ray

    # A second group makes Ray run every method in a thread of its own. Rewards get the main thread: it alone may set
    # signal handlers.
    groups = {"concurrency_groups": {WEIGHTS: 1}} if kind in _READS_WEIGHTS else {}
    return ray.remote(num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, max_restarts=0, max_task_retries=0, **groups)(
        Actor
    )


def _check_address(listen: str) -> None:
    try:
        is_usable = not ip_address(listen).is_unspecified
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f'runtime.listen is one IP address of this machine, which others connect to, got "{listen}"; give that of '
            "the network that the hosts share"
        )
