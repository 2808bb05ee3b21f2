"""Configuration of the router, read from its command line."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from headwater.rpc.security import PLAIN, Security, add_arguments, add_insecure
from headwater.telemetry import metrics

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""Longest timeout that a prompt may ask for: one week."""


@dataclass(frozen=True)
class RouterConfig:
    """Every setting of the router, with its default."""

    bind: str = "127.0.0.1:7400"
    """host:port to listen on; port 0 takes any free one."""
    heartbeat_interval_s: float = 1.0
    """How often workers are asked to report."""
    expiry_s: float = 15.0
    """Silence after which a worker is given up and its groups go to others."""
    queue_capacity: int = 256
    """Prompts without a budget that may wait for a worker."""
    max_attempts: int = 3
    """Times that a group is tried on workers that fail."""
    default_timeout_s: float = 1800.0
    """From acceptance to outcome, for a prompt that sets no timeout."""
    drain_grace_s: float = 30.0
    """After SIGTERM: how long running groups may take to finish."""
    metrics_bind: str = ""
    """host:port of figures for Prometheus; empty: none."""
    insecure: bool = False
    """Allow a bind that other machines can reach, without TLS and tokens."""
    security: Security = PLAIN
    """TLS files and tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
                raise ValueError(f"{_flag(field.name)} is {value}; it must be above 0 and at most {MAX_TIMEOUT_S:.0f}")
            if field.name in ("queue_capacity", "max_attempts") and value < 1:
                raise ValueError(f"{_flag(field.name)} is {value}; it must be at least 1")
        if self.expiry_s <= self.heartbeat_interval_s:
            raise ValueError(
                f"--expiry-s {self.expiry_s} is not above --heartbeat-interval-s {self.heartbeat_interval_s}: "
                "every worker would expire between two heartbeats; three or more intervals are sensible"
            )


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """Read the command line; a wrong value ends the process with status 2 and says what would be right."""
    parser = argparse.ArgumentParser(prog="headwater-router", description=__doc__)
    default = RouterConfig()
    parser.add_argument("--bind", default=default.bind, help="host:port to listen on (default %(default)s)")
    numbers: tuple[tuple[str, type, str], ...] = (
        ("heartbeat_interval_s", float, "how often workers report"),
        ("expiry_s", float, "silence after which a worker is given up"),
        ("queue_capacity", int, "prompts without a budget that may wait"),
        ("max_attempts", int, "times that a group is tried on failing workers"),
        ("default_timeout_s", float, "timeout of a prompt that sets none"),
        ("drain_grace_s", float, "time for running groups after SIGTERM"),
    )
    for name, kind, text in numbers:
        parser.add_argument(
            _flag(name), type=kind, default=getattr(default, name), help=f"{text} (default %(default)s)"
        )
    metrics.add_argument(parser)
    add_insecure(parser)
    add_arguments(parser, server=True)
    values = vars(parser.parse_args(argv))
    try:
        return RouterConfig(security=Security.take(values), **values)
    except ValueError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
