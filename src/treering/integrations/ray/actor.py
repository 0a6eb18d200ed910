"""The code of the actors: each runs one role, as a local child process does."""

from typing import Any

from treering.integrations.ray.actor_connection import Address, connect, own_host
from treering.integrations.ray.object_store import ObjectAccess, Offers
from treering.runtime.ipc.child import run_role

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
