"""What `up` and `quickstart` share: the model, the stack, and stopping by signal."""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from headwater import assets
from headwater.errors import InvalidArgument
from headwater.rpc import credentials
from headwater.stream import address
from headwater.supervisor.stack import Stack, StackOptions


def say(line: str) -> None:
    """A line for a person, on standard error."""
    print(line, file=sys.stderr, flush=True)


def make_stack(args: argparse.Namespace, run_dir: Path) -> Stack:
    """The stack that the options ask for; it serves the model in the box when they name none."""
    return Stack(
        StackOptions(
            model=Path(args.model).resolve() if args.model else assets.model_in_the_box(),
            engine=args.engine,
            precision=args.precision,
            rollout_workers=args.rollout_workers,
            trainer_ranks=args.trainer_ranks,
            redis_url=_redis_url(args),
            port_base=args.port_base,
            rewards=args.rewards,
            security=credentials.current(),
        ),
        run_dir,
    )


def _redis_url(args: argparse.Namespace) -> str | None:
    try:
        return address.take(vars(args)) or None
    except ValueError as error:
        raise InvalidArgument(str(error), field="redis_password_file") from error


def stop_on_sigterm() -> None:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, so that services are stopped in order."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
