"""Configuration of the reward server, read from its command line."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from headwater.rpc.security import PLAIN, Security, add_arguments, add_insecure
from headwater.telemetry import metrics


@dataclass(frozen=True)
class RewardConfig:
    """Every setting of the reward server, with its default."""

    bind: str = "127.0.0.1:7401"
    """host:port to listen on; port 0 takes any free one."""
    rewards: tuple[str, ...] = ()
    """Rewards to host; none named: all whose packages are installed."""
    reward_config: str = ""
    """TOML file with a table per reward (`headwater_reward.settings`); empty: none."""
    max_batch: int = 16
    """Most items that a reward scores at once."""
    max_wait_ms: float = 5.0
    """How long an item may wait for others to be scored with it."""
    queue_limit: int = 1024
    """Most items that may wait for one reward."""
    threads: int = 1
    """CPU threads of each reward."""
    default_timeout_s: float = 600.0
    """Deadline of a call that sets none."""
    drain_grace_s: float = 30.0
    """After SIGTERM: how long waiting items may take to be scored."""
    blob_root: str = ""
    """Root of the blob store (a folder or an fsspec URL); empty: media come inline only."""
    metrics_bind: str = ""
    """host:port of figures for Prometheus; empty: none."""
    insecure: bool = False
    """Allow a bind that other machines can reach, without TLS and tokens."""
    security: Security = PLAIN
    """TLS files and tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("max_batch", "queue_limit", "threads") and value < 1:
                raise ValueError(f"{_flag(field.name)} is {value}; it must be at least 1")
            if field.name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{_flag(field.name)} is {value}; it must be a finite number above 0")
        if not (math.isfinite(self.max_wait_ms) and 0 <= self.max_wait_ms <= 60_000):
            raise ValueError(f"--max-wait-ms is {self.max_wait_ms}; it must be between 0 and 60000")


def parse_args(argv: Sequence[str] | None = None) -> RewardConfig:
    """Read the command line; a wrong value ends the process with status 2 and says what would be right."""
    parser = argparse.ArgumentParser(prog="headwater-reward", description="Scores images and videos over gRPC.")
    default = RewardConfig()
    parser.add_argument("--bind", default=default.bind, help="host:port to listen on (default %(default)s)")
    parser.add_argument("--rewards", type=_names, default=(), help="comma-separated names (default: all installed)")
    parser.add_argument(
        "--reward-config", metavar="FILE", default="", help="TOML file: models, devices and queues of single rewards"
    )
    numbers: tuple[tuple[str, type, str], ...] = (
        ("max_batch", int, "most items scored at once"),
        ("max_wait_ms", float, "how long an item may wait for company"),
        ("queue_limit", int, "most items that wait for one reward"),
        ("threads", int, "CPU threads of each reward"),
        ("default_timeout_s", float, "deadline of a call that sets none"),
        ("drain_grace_s", float, "time for waiting items after SIGTERM"),
    )
    for name, kind, text in numbers:
        parser.add_argument(
            _flag(name), type=kind, default=getattr(default, name), help=f"{text} (default %(default)s)"
        )
    parser.add_argument("--blob-root", default="", help="root of the blob store, for media that come by reference")
    metrics.add_argument(parser)
    add_insecure(parser)
    add_arguments(parser, server=True)
    values = vars(parser.parse_args(argv))
    try:
        return RewardConfig(security=Security.take(values), **values)
    except ValueError as error:
        parser.error(str(error))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
