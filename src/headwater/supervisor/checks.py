"""Questions to a machine and its services, each with a deadline: is a port free, does a service or Redis answer."""

import socket
from collections.abc import Mapping

import redis

from headwater.errors import InvalidArgument, Unavailable
from headwater.stream.address import split_password
from headwater.stream.connection import address_of, explain

PING_TIMEOUT_S = 3.0


def check_ports_free(ports: Mapping[str, int], port_base: int) -> None:
    """Raise `InvalidArgument` naming --port-base when a needed port is taken. `ports` are by service name."""
    for name, port in ports.items():
        if not 1024 <= port <= 65535:
            raise InvalidArgument(
                f"--port-base {port_base} puts {name} on port {port}; use a base between 1024 and 65000",
                field="port_base",
            )
        if not _is_free(port):
            raise InvalidArgument(
                f"port {port} ({name}) is in use on 127.0.0.1: is another Headwater running? Stop it, or choose "
                f"other ports, e.g. --port-base {port_base + 100}",
                field="port_base",
                reason="PORT_IN_USE",
            )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def redis_answers(url: str, timeout_s: float = 1.0) -> bool:
    """Whether Redis answers a PING; False also while it loads its data."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def check_redis(url: str) -> None:
    """Raise `InvalidArgument` for a malformed URL and `Unavailable` when nothing answers there within seconds."""
    address_of(url)
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=PING_TIMEOUT_S, socket_timeout=PING_TIMEOUT_S) as client:
            client.ping()
    except redis.AuthenticationError as e:
        raise explain(e, url) from None
    except redis.RedisError as e:
        raise Unavailable(
            f"Redis at {split_password(url)[0]} does not answer: {e}. Start it, correct REDIS_URL or --redis, or give "
            "neither to use the embedded Valkey",
            field="redis",
            reason="REDIS_UNREACHABLE",
        ) from e
