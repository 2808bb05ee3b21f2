"""Command-line options that several commands share. Imports nothing heavy."""

import argparse
import os
import time
from pathlib import Path

from headwater.rpc import security
from headwater.stream import address

DEFAULT_ROUTER = "127.0.0.1:7400"
DEFAULT_TRAINER = "127.0.0.1:7402"


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, as the last line")


def add_router(parser: argparse.ArgumentParser) -> None:
    """--router."""
    parser.add_argument(
        "--router",
        metavar="HOST:PORT",
        default=os.environ.get("HEADWATER_ROUTER", DEFAULT_ROUTER),
        help="router (default: $HEADWATER_ROUTER, then %(default)s)",
    )
    security.add_arguments(parser, server=False)


def add_trainer(parser: argparse.ArgumentParser) -> None:
    """--trainer."""
    parser.add_argument(
        "--trainer",
        metavar="HOST:PORT",
        default=os.environ.get("HEADWATER_TRAINER", DEFAULT_TRAINER),
        help="trainer (default: $HEADWATER_TRAINER, then %(default)s)",
    )


def add_stack(parser: argparse.ArgumentParser) -> None:
    """The options of a stack of services on this machine."""
    group = parser.add_argument_group("services")
    group.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="pipeline folder (default: the model in the box; of quickstart, a tiny random SD3)",
    )
    group.add_argument("--engine", choices=("sglang", "diffusers"), default="sglang", help="rollout engine")
    group.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the rollout engine")
    group.add_argument("--rollout-workers", metavar="N", type=int, default=1, help="rollout processes (default 1)")
    group.add_argument("--trainer-ranks", metavar="N", type=int, default=1, help="trainer processes (default 1)")
    group.add_argument(
        "--rewards", metavar="NAMES", default="ocr,color_shape,tiny-geneval", help="rewards to host (%(default)s)"
    )
    address.add_arguments(group, default="", text="Redis or Valkey (default: $REDIS_URL, then an embedded Valkey)")
    group.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of logs and data (default runs/NAME-TIME)")
    group.add_argument("--port-base", metavar="PORT", type=int, default=7400, help="first port (default %(default)s)")
    security.add_arguments(parser, server=True)


def run_dir(args: argparse.Namespace, name: str) -> Path:
    """The absolute run folder: --run-dir, or a new one below runs/."""
    folder = args.run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(folder).resolve()
