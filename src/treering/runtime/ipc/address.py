"""Addresses of this machine at which processes of a run reach one another."""

import socket
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether an IP address is reached from this machine alone."""
    return ip_address(host).is_loopback


def listener_at(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens at one address.

    Args:
        host: IP address.
        port: 0 is a free one.
        backlog: connections that wait to be accepted; None: the system's.

    Raises:
        OSError: it is none of this machine's.

    Example: `listener_at("127.0.0.1").getsockname()` is `("127.0.0.1", 40123)`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
