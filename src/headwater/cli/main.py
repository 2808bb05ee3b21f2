"""Entry point of `headwater`: parse, run one command, and turn errors into one clear line and an exit code."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from headwater import __version__
from headwater.cli import output, parity

COMMANDS = ("quickstart", "up", "train", "eval", "submit", "status", "reward", "certs", "parity")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 (it failed), 2 (the caller's mistake) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["parity"]:  # has a parser of its own, in the rollout service
        return parity.run(words[1:])
    args = build_parser().parse_args(words)
    try:
        if hasattr(args, "tls_ca"):
            _identify(args)
        return int(args.run(args))
    except KeyboardInterrupt:
        print("headwater: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        return output.report_error(error, as_json=getattr(args, "json", False))


def _identify(args: argparse.Namespace) -> None:
    from headwater.rpc import credentials
    from headwater.rpc.security import Security

    credentials.use(Security.take(vars(args)))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each module of this package adds its own."""
    parser = argparse.ArgumentParser(
        prog="headwater",
        description="Reinforcement-learning post-training of image and video diffusion models.",
        epilog="Start with: headwater quickstart",
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"headwater.cli.{name}").add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
