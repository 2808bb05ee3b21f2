"""`headwater parity MODEL`: compare engine and trainer on the same latents."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """List the command in the help; its arguments are those of `python -m headwater_rollout.parity`."""
    commands.add_parser("parity", help="compare engine and trainer on the same latents", add_help=False)


def run(arguments: Sequence[str]) -> NoReturn:
    """Become the parity program, which prints its own help, figures and errors."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "headwater_rollout.parity", *arguments])
