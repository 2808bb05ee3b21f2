"""Client channels with the limits and keepalive that every service of Headwater expects."""

import json

import grpc
import grpc.aio

from headwater.rpc.credentials import channel_credentials, current
from headwater.rpc.security import Security

MAX_MESSAGE_BYTES = 8 * 1024 * 1024

WORKER_NAME = "rollout"
"""The name in a rollout worker's certificate. Workers come and go at any address, so they are known by this name."""

OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.dns_min_time_between_resolutions_ms", 3_000),
    ("grpc.enable_retries", 0),  # each caller decides what may be repeated
    ("grpc.lb_policy_name", "round_robin"),
)


def aio_channel(
    address: str, *, server_name: str = "", security: Security | None = None, health_service: str = ""
) -> grpc.aio.Channel:
    """An asyncio channel to host:port or dns:///name:port, with the credentials of this process.

    With `health_service` only servers whose health for that service is SERVING get calls.

    Over TLS the server's certificate must be for the host in `address`, or for `server_name` where one is given.
    `security` is another identity than the process's own.
    """
    credentials = channel_credentials(current() if security is None else security)
    options = (*_options(server_name if credentials else ""), *_health(health_service))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def sync_channel(address: str, *, server_name: str = "", security: Security | None = None) -> grpc.Channel:
    """A blocking channel, otherwise like `aio_channel`."""
    credentials = channel_credentials(current() if security is None else security)
    if credentials is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, credentials, options=_options(server_name))


def _options(server_name: str) -> tuple[tuple[str, int | str], ...]:
    return (*OPTIONS, ("grpc.ssl_target_name_override", server_name)) if server_name else OPTIONS


def _health(service: str) -> tuple[tuple[str, str], ...]:
    if not service:
        return ()
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return (("grpc.service_config", json.dumps(config)),)
