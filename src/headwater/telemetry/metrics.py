"""Figures of a service for Prometheus, on an HTTP port of their own: read when they are asked for, kept nowhere."""

import argparse
import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

ENVIRONMENT = "HEADWATER_METRICS_BIND"
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Figure:
    """One number with its labels. A name that ends in `_total` only ever grows; all others are gauges."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """--metrics-bind."""
    parser.add_argument(
        "--metrics-bind", metavar="HOST:PORT", default=os.environ.get(ENVIRONMENT, ""),
        help=f"serve figures for Prometheus here, e.g. 127.0.0.1:9400; they are in plain text (default ${ENVIRONMENT})",
    )  # fmt: skip


def serve_metrics(
    bind: str, read: Callable[[], Iterable[Figure]], loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Serve GET /metrics on host:port from a daemon thread; nothing when `bind` is "".

    Each request calls `read`: on the event loop `loop` where one is given, else on a thread of the server.

    Raises `InvalidArgument` for what is not host:port, `Unavailable` when the port is taken.
    """
    if not bind:
        return
    from headwater.errors import InvalidArgument, Unavailable  # not above: it brings grpc, and --help needs none of it

    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"--metrics-bind {bind!r} is not host:port, e.g. 127.0.0.1:9400", field="metrics_bind")
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(read if loop is None else lambda: _read_on(loop, read)))
    try:
        start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise Unavailable(
            f"cannot serve metrics on {bind}: {error}; choose another port with --metrics-bind", field="metrics_bind"
        ) from error


def _read_on(loop: asyncio.AbstractEventLoop, read: Callable[[], Iterable[Figure]]) -> list[Figure]:
    async def call() -> list[Figure]:
        return list(read())

    return asyncio.run_coroutine_threadsafe(call(), loop).result(_READ_TIMEOUT_S)


class _Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Figure]]) -> None:
        self._read = read

    def collect(self) -> "Iterator[Metric]":
        """Families of the figures, in the order of their first one."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for figure in self._read():
            if figure.name not in families:
                kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
                families[figure.name] = kind(figure.name, figure.help, labels=list(figure.labels))
            families[figure.name].add_metric(list(figure.labels.values()), figure.value)
        yield from families.values()

    def describe(self) -> "list[Metric]":
        """Nothing in advance."""
        return []
