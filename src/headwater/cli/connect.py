"""Channels of the commands: connected within seconds, or a clear error."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.errors import InvalidArgument, Unavailable
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error

CONNECT_TIMEOUT_S = 5.0


@contextmanager
def connected(address: str, service: str) -> Iterator[grpc.Channel]:
    """A channel to the router, the trainer or a reward server.

    Raises `Unavailable` with the remedy, and failed calls as our errors.
    """
    _check_address(address, service)
    with sync_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            _raise_refusal(channel)
            raise Unavailable(
                f"the {service} at {address} does not answer; start the services with `headwater up`, or say where it "
                f"is with --{service} HOST:PORT",
                field=service,
                reason="UNREACHABLE",
            ) from None
        try:
            yield channel
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _raise_refusal(channel: grpc.Channel) -> None:
    """Raise what is wrong when there is a server, but no TLS connection to it."""
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.RpcError as error:
        refusal = from_rpc_error(error)
        if refusal.reason.startswith("TLS_"):
            raise refusal from None


def _check_address(address: str, service: str) -> None:
    _, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidArgument(f"--{service} {address!r} is not HOST:PORT, e.g. 127.0.0.1:7400", field=service)
