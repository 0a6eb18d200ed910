"""An authenticated socket between the controller and an actor that may still be on its way.

The controller listens, on loopback unless it is told another address, for one actor with a random key, and stops
listening when that actor has come. Nothing blocks meanwhile: what is sent waits.
"""

import os
import secrets
import socket
import struct
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeAlias

from treering.runtime.ipc.address import is_loopback, listener_at

Address: TypeAlias = tuple[str, int]
"""Host and port."""

_HANDSHAKE_S = 10
"""For each message of the handshake: a stranger that connects and says nothing holds the controller up no longer."""

_KEY_BYTES = 32


class ActorConnection:
    """The controller's end: a `Transport` that is readable first when the actor connects, then when messages come.

    Example: `send_bytes(b"a")` returns at once; an actor that calls `connect(address, key)` a minute later receives it.
    """

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`, an address of this machine.

        Raises:
            OSError: it is none.
        """
        self._listener = listener_at(host)
        self._listener.setblocking(False)
        self.key = secrets.token_bytes(_KEY_BYTES)
        self.address: Address = (host, self._listener.getsockname()[1])
        self.is_loopback = is_loopback(host)
        self._connection: Connection | None = None
        self._outbox: list[bytes] = []
        self.pid: int | None = None
        self.has_ended = False
        """Whether the other end has closed."""

    def fileno(self) -> int:
        """See `Transport`."""
        return self._listener.fileno() if self._connection is None else self._connection.fileno()

    def send_bytes(self, buf: bytes, /) -> None:
        """See `Transport`. Keeps the message until the actor has connected."""
        if self._connection is None:
            self._outbox.append(buf)
        else:
            self._connection.send_bytes(buf)

    def poll(self) -> bool:
        """See `Transport`. Lets the actor in if it is there."""
        if self._connection is None:
            self._accept()
        return self._connection is not None and self._connection.poll()

    def recv_bytes(self) -> bytes:
        """See `Transport`."""
        assert self._connection is not None, "a message is received after a poll"
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self.has_ended = True
            raise

    def close(self) -> None:
        """See `Transport`."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection = _with_time_limit(accepted)
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            self.pid = int(connection.recv_bytes())
        except (AuthenticationError, EOFError, OSError, ValueError):
            # Not the actor, or one that has died: the listener waits for the next.
            connection.close()
            return
        self._connection = _without_time_limit(connection)
        self._listener.close()
        for message in self._outbox:
            self._connection.send_bytes(message)
        self._outbox.clear()


def own_host(connection: Connection) -> str:
    """The address of this machine at one end of a connection.

    Example: "127.0.0.1" of one to a controller that listens on loopback.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        return str(same.getsockname()[0])


def connect(address: Address, key: bytes) -> Connection:
    """The actor's end.

    Raises:
        OSError: nothing listens there.
        AuthenticationError: something else does.
    """
    connection = _with_time_limit(socket.create_connection(address, timeout=_HANDSHAKE_S))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(str(os.getpid()).encode())
    return _without_time_limit(connection)


def _with_time_limit(connected: socket.socket) -> Connection:
    # A connection reads from its descriptor, which must block; the kernel ends a call that takes too long.
    connected.setblocking(True)
    # Else a large message's end waits for the other side to confirm its beginning.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit(connected, _HANDSHAKE_S)
    return Connection(connected.detach())


def _without_time_limit(connection: Connection) -> Connection:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _limit(same, 0)
    return connection


def _limit(connected: socket.socket, seconds: int) -> None:
    value = struct.pack("ll", seconds, 0)
    with suppress(OSError):
        # The actor may be gone already, which the next message tells.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
