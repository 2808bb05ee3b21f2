"""Client channels with the limits and keepalive that every service of Headwater expects."""

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 8 * 1024 * 1024

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


def aio_channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel to host:port or dns:///name:port."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def sync_channel(address: str) -> grpc.Channel:
    """A blocking channel to host:port or dns:///name:port."""
    return grpc.insecure_channel(address, options=OPTIONS)
