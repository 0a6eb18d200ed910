"""The socket between the controller and an actor: nothing waits, nobody else gets in, nothing listens on."""

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from treering.errors import ConfigError
from treering.integrations.ray.actor_connection import ActorConnection, connect
from treering.runtime.ipc.launcher import wait_for_any

TIMEOUT_S = 60.0


def polled(ours: ActorConnection, until: Callable[[], bool]) -> None:
    """Polls as a controller does until something has happened."""
    end_s = time.monotonic() + TIMEOUT_S
    while not until():
        assert time.monotonic() < end_s, "it never happened"
        wait_for_any([ours], 0.1)
        ours.poll()


def connected(ours: ActorConnection, key: bytes | None = None) -> Connection:
    """The actor's end, made in a thread as in another process."""
    found: list[Connection] = []
    thread = threading.Thread(target=lambda: found.append(connect(ours.address, key or ours.key)))
    thread.start()
    polled(ours, lambda: ours.pid is not None)
    thread.join()
    return found[0]


def test_messages_sent_before_the_actor_comes_reach_it_in_order() -> None:
    ours = ActorConnection("127.0.0.1")
    for message in (b"first", b"second"):
        ours.send_bytes(message)
    assert not ours.poll()
    assert ours.pid is None
    theirs = connected(ours)
    assert [theirs.recv_bytes(), theirs.recv_bytes()] == [b"first", b"second"]
    theirs.send_bytes(b"answer")
    polled(ours, ours.poll)
    assert ours.recv_bytes() == b"answer"


def test_the_end_of_the_actor_is_the_end_of_the_messages() -> None:
    ours = ActorConnection("127.0.0.1")
    theirs = connected(ours)
    theirs.send_bytes(b"last")
    theirs.close()
    polled(ours, ours.poll)
    assert ours.recv_bytes() == b"last"
    polled(ours, ours.poll)
    with pytest.raises(EOFError):
        ours.recv_bytes()


def test_nothing_listens_once_the_actor_has_come() -> None:
    ours = ActorConnection("127.0.0.1")
    theirs = connected(ours)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(ours.address, timeout=TIMEOUT_S)
    theirs.close()


def test_a_stranger_is_turned_away_and_the_actor_let_in() -> None:
    ours = ActorConnection("127.0.0.1")
    ours.send_bytes(b"secret")
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            connect(ours.address, b"a guess")
        except (AuthenticationError, EOFError, OSError) as error:
            errors.append(error)

    stranger = threading.Thread(target=intrude)
    stranger.start()
    polled(ours, lambda: bool(errors))
    stranger.join()
    assert ours.pid is None
    mute = socket.create_connection(ours.address)
    mute.close()
    assert connected(ours).recv_bytes() == b"secret"


def test_the_end_of_a_message_does_not_wait_for_its_beginning_to_be_confirmed() -> None:
    ours = ActorConnection("127.0.0.1")
    theirs = connected(ours)
    with socket.socket(fileno=socket.dup(theirs.fileno())) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    with socket.socket(fileno=socket.dup(ours.fileno())) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "localhost", ""])
def test_an_address_that_names_no_interface_is_refused(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.integrations.ray import launcher

    monkeypatch.setattr(launcher, "require", lambda *_: None)
    with pytest.raises(ConfigError, match=r"runtime\.listen"):
        launcher.RayLauncher(num_rollout_workers=1, listen=listen)
