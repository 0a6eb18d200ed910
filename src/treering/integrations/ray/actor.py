"""An actor: its code, which runs one role as a local child process does, and the controller's side of it."""

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from treering.integrations.ray.actor_connection import ActorConnection, Address, connect, own_host
from treering.integrations.ray.object_store import ObjectAccess, ObjectStore, Offers
from treering.integrations.ray.placement import check_node
from treering.runtime.ipc.child import run_role
from treering.runtime.ipc.launcher import Ended

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_NOTICE_S = 0.5
"""Longest wait for Ray's word on how an actor ended; it takes about 15 ms."""

_ASK_S = 0.5
"""Between two questions to Ray whether an actor lives."""

_CAUSE_CHARS = 200

WEIGHTS = "weights"
"""The concurrency group in which weights arrive while a role runs."""


class Actor:
    """A process of a run. Its role runs until the controller is gone or the actor is killed."""

    def __init__(self) -> None:
        self._offers = Offers()

    def run(self, address: Address, key: bytes) -> None:
        """Connects to the controller and runs the role that it sends; never returns."""
        connection = connect(address, key)
        run_role(connection, ObjectAccess(self._offers, own_host(connection)))

    def offer(self, version: int, slot: int | None, weights: Any) -> None:
        """Receives weights: Ray has brought the object to this host before it calls this."""
        self._offers.add(version, slot, weights)


class ActorProcess:
    """A `Process` that is an actor, perhaps on another host.

    An end of its connection tells its death first, within a millisecond; Ray's notice tells that of its host too.
    """

    def __init__(self, actor: "ActorHandle[Any]", connection: ActorConnection, store: ObjectStore) -> None:
        """Starts the actor's role."""
        self._actor = actor
        self._connection = connection
        self._store = store
        self._running: ObjectRef[Any] = actor.run.remote(connection.address, connection.key)
        self._was_killed = False
        self._is_alive = True
        self._asked_s = time.monotonic()

    @property
    def pid(self) -> int | None:
        """See `Process`."""
        return self._connection.pid

    @property
    def transport(self) -> ActorConnection:
        """See `Process`."""
        return self._connection

    def is_alive(self) -> bool:
        """See `Process`. Asks Ray at most twice a second: a controller of many workers calls this all the time.

        Raises:
            StateError: it is on its way, and Ray can start nothing any more.
        """
        now_s = time.monotonic()
        if now_s >= self._asked_s + _ASK_S:
            self._asked_s = now_s
            self._is_alive = not self._has_ended(timeout_s=0)
            if self._is_alive and self.pid is None:
                self._check_ray()
        return self._is_alive

    def offer(self, version: int, slot: int | None) -> None:
        """See `Process`."""
        self._actor.offer.options(concurrency_group=WEIGHTS).remote(version, slot, self._store.ref(version, slot))

    def kill(self) -> None:
        """See `Process`. Ray ends a process that does not answer after about five seconds."""
        import ray

        self._was_killed = True
        ray.kill(self._actor, no_restart=True)

    def end(self, *, with_group: bool) -> Ended:
        """See `Process`. Kills a group on loopback only: on another host its id may be anyone's."""
        cause = self._cause()
        if with_group and self.pid is not None and self._connection.is_loopback:
            # Also after its death: what it started may live on.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        self._connection.close()
        return Ended(status=None, cause=cause)

    def _check_ray(self) -> None:
        import ray

        check_node(ray.nodes(), ray.get_runtime_context().get_node_id())

    def _has_ended(self, timeout_s: float) -> bool:
        import ray

        done, _ = ray.wait([self._running], timeout=timeout_s)
        return bool(done)

    def _cause(self) -> str:
        """What Ray says of an actor that has ended, in one line."""
        import ray

        timeout_s = _NOTICE_S if self._connection.has_ended else 0.0
        if self._was_killed or not self._has_ended(timeout_s):
            return "an unknown exit status"
        try:
            ray.get(self._running)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"Ray's message: {lines[-1][:_CAUSE_CHARS] if lines else type(error).__name__}"
        return "the end of its role"
