"""What `up` and `quickstart` share: the model, the stack, and stopping by signal."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from headwater import assets
from headwater.errors import InvalidArgument, Unavailable
from headwater.rpc import credentials
from headwater.stream import address
from headwater.supervisor.stack import Stack, StackOptions

_BUILD_TIMEOUT_S = 180.0
TINY_MODEL = "tiny-stable-diffusion-3-medium"  # the engine recognises the family by the folder's name


def say(line: str) -> None:
    """A line for a person, on standard error."""
    print(line, file=sys.stderr, flush=True)


def make_stack(args: argparse.Namespace, run_dir: Path, model: Path | None = None) -> Stack:
    """The stack that the options ask for; when they name no model it serves `model`, or the one in the box."""
    return Stack(
        StackOptions(
            model=Path(args.model).resolve() if args.model else model or assets.model_in_the_box(),
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


def tiny_model(run_dir: Path) -> Path:
    """A tiny SD3 pipeline with random weights in the run folder. Raises `Unavailable` when it cannot be made."""
    folder = run_dir / TINY_MODEL
    if (folder / "model_index.json").is_file():
        return folder
    run_dir.mkdir(parents=True, exist_ok=True)
    say(f"making a tiny SD3 model in {folder}")
    command = [sys.executable, "-m", "headwater.diffusion.tiny_sd3", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the tiny model was not made within {_BUILD_TIMEOUT_S:.0f} s", field="model") from None
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise Unavailable(f"the tiny model could not be made; {' '.join(command)} said:\n{tail}", field="model")
    return folder


def stop_on_sigterm() -> None:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, so that services are stopped in order."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
