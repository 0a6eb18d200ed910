"""Addresses of this machine at which processes of a run reach one another."""

import socket
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether an IP address is reached from this machine alone."""
    return ip_address(host).is_loopback


def listener_at(host: str) -> socket.socket:
    """A socket that listens on a free port of one address.

    Raises:
        OSError: it is none of this machine's.

    Example: `listener_at("127.0.0.1").getsockname()` is `("127.0.0.1", 40123)`.
    """
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
