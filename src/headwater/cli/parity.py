"""`headwater parity MODEL`: compare engine and trainer on the same latents."""

import argparse
import os
import sys


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; everything behind `parity` goes to `python -m headwater_rollout.parity`."""
    parser = commands.add_parser("parity", help="compare engine and trainer on the same latents", add_help=False)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Become the parity program, which prints its own help, figures and errors."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "headwater_rollout.parity", *args.arguments]
    os.execv(command[0], command)
