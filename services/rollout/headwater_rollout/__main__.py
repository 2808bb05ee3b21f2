"""Entry point of `headwater-rollout`."""

import sys
from collections.abc import Sequence

from headwater_rollout.config import parse_args


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, then import what is heavy and run until a signal."""
    config = parse_args(argv)

    import asyncio

    from headwater.errors import HeadwaterError
    from headwater.rpc import credentials
    from headwater.rpc.server import check_bind
    from headwater.telemetry import setup_logging

    setup_logging("rollout" if config.placement is None else "placement")
    try:
        credentials.use(config.security)
        check_bind(config.bind, config.security, insecure=config.insecure)  # now, not after minutes of loading
        if config.placement is not None:
            from headwater_rollout.placement.cluster import import_ray

            import_ray()
            from headwater_rollout.placement.run import place

            place(config, config.placement)
        else:
            from headwater_rollout.worker import run

            asyncio.run(run(config))
    except HeadwaterError as error:
        sys.exit(f"headwater-rollout: {error.message}")


if __name__ == "__main__":
    main()
