"""Addresses at which others reach this machine."""

import contextlib
import ipaddress
import socket

from headwater.errors import Unavailable

_EVERY_ADDRESS = ("0.0.0.0", "[::]")


def host_of(address: str) -> str:
    """The host of host:port or dns:///host:port."""
    return address.rpartition(":")[0].rpartition("/")[2]


def is_loopback(address: str) -> bool:
    """Whether the host of host:port is this machine for whoever says it."""
    host = host_of(address).strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(peer: str) -> str:
    """The address of this machine that `peer` (host name or address) is reached from; loopback for loopback."""
    if peer == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(peer).is_loopback:
            return peer
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # no packet leaves: a UDP connect only chooses the route
        return str(probe.getsockname()[0])


def reachable_address(bound: str, peer: str) -> str:
    """`bound` (host:port) as `peer` (host:port) can reach it: a bind to every address becomes the one towards `peer`.

    Raises `Unavailable` when the name of `peer` cannot be resolved.
    """
    host, _, port = bound.rpartition(":")
    if host not in _EVERY_ADDRESS:
        return bound
    try:
        return f"{local_address(host_of(peer))}:{port}"
    except OSError as error:
        raise Unavailable(f"the host of {peer} cannot be found: {error}", reason="NO_SUCH_HOST") from error
