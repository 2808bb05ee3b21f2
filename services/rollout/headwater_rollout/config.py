"""Command line of a rollout worker."""

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.rpc.security import PLAIN, Security, add_arguments, add_insecure
from headwater.stream import address
from headwater.telemetry import metrics
from headwater_rollout.placement import config as placements
from headwater_rollout.placement.config import Placement

ENGINES = ("sglang", "diffusers")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class RolloutConfig:
    """Every setting of a rollout worker."""

    model: str
    """Model folder (or, with the sglang engine, a hub id)."""
    bind: str = "127.0.0.1:7410"
    """host:port to listen on; port 0 takes any free one."""
    advertise: str = ""
    """host:port at which router and trainer reach this worker; empty: where it listens, and when it listens on every
    address, the one that the router is reached from."""
    router: str = ""
    """Router to register at; empty: stand alone."""
    rewards: tuple[str, ...] = ()
    """Addresses of reward servers."""
    engine: str = "sglang"
    """Engine that runs the model."""
    precision: str = "bf16"
    """Precision of the denoiser."""
    device: str = ""
    """Device of the engine; empty: a GPU when there is one, else the CPU."""
    redis: str = field(default="", repr=False)
    """Redis URL with its password; empty: this worker cannot publish."""
    blob_root: str = ""
    """Blob store; empty: this worker cannot publish."""
    worker_id: str = ""
    """Name at the router; stable across restarts."""
    max_group_size: int = 64
    """Largest accepted group."""
    capacity_groups: int = 2
    """Groups taken at once: one is generated while the other is scored."""
    timeout_s: float = 1800.0
    """Longest time for a group whose caller sets no deadline."""
    drain_grace_s: float = 120.0
    """After SIGTERM: how long running groups may take to finish."""
    metrics_bind: str = ""
    """host:port of figures for Prometheus; empty: none."""
    insecure: bool = False
    """Allow a bind that other machines can reach, without TLS and tokens."""
    security: Security = PLAIN
    """TLS files and tokens."""
    placement: Placement | None = None
    """Where workers with these settings run; None: this process is the one worker."""

    def __post_init__(self) -> None:
        for name in ("max_group_size", "capacity_groups", "timeout_s", "drain_grace_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")

    @property
    def can_publish(self) -> bool:
        """Entries of the stream refer to blobs, so publishing needs both."""
        return bool(self.redis and self.blob_root)

    @property
    def name(self) -> str:
        """The worker id, or one made of host and port."""
        return self.worker_id or f"{socket.gethostname()}-{self.bind.rpartition(':')[2]}"


def parse_args(argv: Sequence[str] | None = None) -> RolloutConfig:
    """Read the command line; a wrong value ends the process with status 2 and says what would be right."""
    default = RolloutConfig(model="")
    parser = argparse.ArgumentParser(prog="headwater-rollout", description="One rollout worker of Headwater.")
    text = parser.add_argument
    text("--model", required=True, help="folder of a diffusers pipeline")
    text("--bind", default="", help=f"host:port to listen on (default {default.bind}; with Ray, any free port)")
    text(
        "--advertise", default="", help="host:port at which the router reaches this worker (default: where it listens)"
    )
    text("--router", default=os.environ.get("HEADWATER_ROUTER", ""), help="router address (default $HEADWATER_ROUTER)")
    text("--reward", dest="rewards", type=_addresses, default=(), help="reward servers, ADDR[,ADDR…]")
    text("--engine", choices=ENGINES, default=default.engine, help="(default %(default)s)")
    text("--precision", choices=PRECISIONS, default=default.precision, help="of the denoiser (default %(default)s)")
    text("--device", default="", help='e.g. "cpu" or "cuda:0" (default: a GPU when there is one)')
    address.add_arguments(parser, default="", text="redis://host:port (default $REDIS_URL)")
    text("--blob-root", default="", help="folder or URL that this worker and the trainer share")
    text("--worker-id", default="", help="stable name at the router (default: host and port)")
    text("--max-group-size", type=int, default=default.max_group_size, help="(default %(default)s)")
    text("--capacity-groups", type=int, default=default.capacity_groups, help="groups at once (default %(default)s)")
    text("--timeout-s", type=float, default=default.timeout_s, help="of a group without deadline (default %(default)s)")
    text("--drain-grace-s", type=float, default=default.drain_grace_s, help="after SIGTERM (default %(default)s)")
    metrics.add_argument(parser)
    placements.add_arguments(parser)
    add_insecure(parser)
    add_arguments(parser, server=True)
    values = vars(parser.parse_args(argv))
    try:
        placement = Placement.take(values)
        values["bind"] = values["bind"] or default.bind
        return RolloutConfig(redis=address.take(values), security=Security.take(values), placement=placement, **values)
    except ValueError as error:
        parser.error(str(error))


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
