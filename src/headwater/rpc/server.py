"""A gRPC server with health, reflection, error mapping and draining."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from headwater.errors import InvalidArgument, Unavailable
from headwater.rpc.authorization import Authorization
from headwater.rpc.channel import MAX_MESSAGE_BYTES
from headwater.rpc.credentials import current, server_credentials
from headwater.rpc.interceptor import ErrorInterceptor
from headwater.rpc.security import Security
from headwater.rpc.tokens import TokenList

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on a taken port is an error, not a silent split of the traffic
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_LACKING = "does not have both TLS and tokens"
_REMEDY = (
    "give --tls-cert, --tls-key and --tokens (`headwater certs DIR` makes them), bind 127.0.0.1, or say --insecure "
    "inside a network that you trust"
)


class Server:
    """One grpc.aio server. Add servicers, start it, and set it serving once the process can do its work."""

    def __init__(
        self, bind: str, *, name: str, insecure: bool = False, security: Security | None = None,
        connection_age_s: float | None = None,
    ) -> None:  # fmt: skip
        """`bind` is host:port (port 0: any free one); `security` is another identity than the process's own.

        After `connection_age_s` a connection is closed once its calls have ended: clients that balance over the
        addresses of a name then look the name up again, and find servers that have come since.

        Raises `InvalidArgument` for a bind that other machines can reach without TLS, tokens or `insecure`, and for
        security settings that cannot be.
        """
        security = current() if security is None else security
        self._credentials = server_credentials(security)
        check_bind(bind, security, insecure=insecure)
        self.name = name
        self._bind = bind
        guards = [Authorization(TokenList(security.tokens))] if security.tokens else []
        age = (("grpc.max_connection_age_ms", int(connection_age_s * 1000)),) if connection_age_s else ()
        self._server = grpc.aio.server(interceptors=[*guards, ErrorInterceptor()], options=(*_OPTIONS, *age))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = ["", health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service: str) -> None:
        """Add a servicer by its generated add_…_to_server function; `service` is the full service name."""
        register(servicer, self._server)
        self._services.append(service)

    async def start(self) -> str:
        """Bind and start; returns the address as host:port. Health says NOT_SERVING until `set_serving(True)`."""
        reflection.enable_server_reflection([*self._services[1:], reflection.SERVICE_NAME], self._server)
        try:
            port = self._listen()
        except RuntimeError as error:
            raise Unavailable(
                f"{self.name}: cannot listen on {self._bind}; is the port taken? choose another with --bind",
                reason="BIND_FAILED",
            ) from error
        await self.set_serving(False)
        await self._server.start()
        address = f"{self._bind.rpartition(':')[0]}:{port}"
        log.info("%s listens on %s", self.name, address)
        return address

    def _listen(self) -> int:
        if self._credentials is None:
            return self._server.add_insecure_port(self._bind)
        return self._server.add_secure_port(self._bind, self._credentials)

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service."""
        states = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        await self.set_serving(False)
        await self._server.stop(grace_s)


async def serve_until_signal(
    server: Server, *, drain: Callable[[], Awaitable[None]] | None = None, grace_s: float = 30.0
) -> None:
    """Wait for SIGTERM or SIGINT, then drain: NOT_SERVING, `drain()` for at most `grace_s`, stop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    log.info("%s drains", server.name)
    await server.set_serving(False)
    if drain is not None:
        try:
            async with asyncio.timeout(grace_s):
                await drain()
        except TimeoutError:
            log.warning("%s: still busy after %.0f s; running work is cancelled", server.name, grace_s)
    await server.stop(grace_s=1.0)
    log.info("%s stopped", server.name)


def check_bind(
    bind: str, security: Security, *, insecure: bool, lacking: str = _LACKING, remedy: str = _REMEDY
) -> None:
    """Refuse a malformed address, and one that other machines can reach without TLS, tokens or `insecure`.

    Raises `InvalidArgument`, which says what the service is `lacking` and the `remedy`.
    """
    host, separator, port = bind.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"--bind {bind!r} is not host:port, e.g. 127.0.0.1:7400", field="bind")
    if insecure or host == "localhost" or (security.tls_cert and security.tls_key and security.tokens):
        return
    loopback = False
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    if not loopback:
        raise InvalidArgument(
            f"--bind {bind} is reachable from other machines, and the service {lacking}; {remedy}",
            field="bind",
            reason="INSECURE_BIND",
        )
