"""`headwater-dashboard`: serve the page until SIGTERM."""

import argparse
import os
import sys
from collections.abc import Sequence

from headwater.rpc.security import PLAIN, Security, add_arguments


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; services default to $HEADWATER_ROUTER and $HEADWATER_TRAINER."""
    parser = argparse.ArgumentParser(prog="headwater-dashboard", description="One page on workers, queue and run.")
    env = os.environ.get
    parser.add_argument("--bind", default="127.0.0.1:7403", help="host:port to listen on (default %(default)s)")
    parser.add_argument("--router", default=env("HEADWATER_ROUTER", "127.0.0.1:7400"), help="default %(default)s")
    parser.add_argument("--trainer", default=env("HEADWATER_TRAINER", "127.0.0.1:7402"), help="default %(default)s")
    parser.add_argument("--insecure", action="store_true", help="allow a bind that other machines can reach")
    add_arguments(parser, server=False)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status 1 when the address cannot be used."""
    config = parse_args(argv)
    import uvicorn

    from headwater.errors import HeadwaterError
    from headwater.rpc import credentials
    from headwater.rpc.server import check_bind
    from headwater.telemetry import setup_logging
    from headwater_dashboard.app import create_app

    setup_logging("dashboard")
    try:
        credentials.use(Security.take(vars(config)))
        check_bind(
            config.bind, PLAIN, insecure=config.insecure, lacking="has no login",
            remedy="bind 127.0.0.1 and reach it by a tunnel or a proxy with a login, or say --insecure inside a "
            "network that you trust",
        )  # fmt: skip
    except HeadwaterError as error:
        sys.exit(f"headwater-dashboard: {error.message}")
    host, _, port = config.bind.rpartition(":")
    app = create_app(config.router, config.trainer)
    uvicorn.run(app, host=host.strip("[]"), port=int(port), log_config=None, access_log=False)


if __name__ == "__main__":
    main()
