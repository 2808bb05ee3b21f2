"""The command line of `headwater-trainer`. No torch here: `--help` must be quick."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.rpc.security import PLAIN, Security, add_arguments, add_insecure
from headwater.stream import address
from headwater.telemetry import metrics


@dataclass(frozen=True)
class TrainerConfig:
    """What one trainer process is started with; all ranks are started with the same."""

    bind: str
    router: str
    redis: str = field(repr=False)  # with its password
    blob_root: str
    output_dir: Path
    consumer: str = "trainer"
    device: str = "auto"
    wait_limit_s: float = 1800.0
    collective_timeout_s: float = 1800.0
    metrics_bind: str = ""
    weight_host: str = ""
    allow_hooks: tuple[str, ...] = ()
    insecure: bool = False
    security: Security = PLAIN


def parse_args(argv: Sequence[str] | None = None) -> TrainerConfig:
    """Read the command line; a wrong value ends the process with status 2 and says what would be right."""
    parser = argparse.ArgumentParser(
        prog="headwater-trainer",
        description="Train on scored groups from the stream. Start it under torchrun for several ranks; "
        "a run begins with StartRun (`headwater train RECIPE`).",
    )
    parser.add_argument("--bind", default="127.0.0.1:7402", help="host:port of rank 0 (default %(default)s)")
    parser.add_argument(
        "--router", default=os.environ.get("HEADWATER_ROUTER", "127.0.0.1:7400"), help="router, host:port"
    )
    address.add_arguments(parser, default="redis://127.0.0.1:7409/0", text="Redis URL (default $REDIS_URL)")
    parser.add_argument("--blob-root", required=True, help="folder or fsspec URL that the rollout workers write to")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder of run folders")
    parser.add_argument("--consumer", default="trainer", help="name in the stream, stable over restarts")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda when present")
    parser.add_argument(
        "--wait-limit-s",
        type=float,
        default=1800.0,
        help="a run without groups for so long fails (default %(default)s)",
    )
    parser.add_argument(
        "--collective-timeout-s", type=float, default=1800.0, help="longest wait for another rank (default %(default)s)"
    )
    metrics.add_argument(parser)
    parser.add_argument(
        "--weight-host",
        metavar="HOST",
        default="",
        help="address of this machine at which workers join a weight update (default: the one that reaches the router)",
    )
    parser.add_argument(
        "--allow-hooks",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="installed package whose code recipes may name in [hooks]; may be given several times (default: none)",
    )
    add_insecure(parser)
    add_arguments(parser, server=True)
    values = vars(parser.parse_args(argv))
    values["allow_hooks"] = tuple(values["allow_hooks"])
    for name in ("wait_limit_s", "collective_timeout_s"):
        if not 0 < values[name] <= 10**6:
            parser.error(f"--{name.replace('_', '-')} is {values[name]}; it must be above 0 and at most 1e6")
    try:
        return TrainerConfig(redis=address.take(values), security=Security.take(values), **values)
    except ValueError as error:
        parser.error(str(error))
