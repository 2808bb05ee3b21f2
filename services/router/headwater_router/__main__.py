"""`headwater-router`: start the router and serve until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from headwater_router.config import RouterConfig, parse_args


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status 0 after a drained stop, 1 when it cannot start, 2 for a wrong command line."""
    config = parse_args(argv)
    from headwater.errors import HeadwaterError  # after parsing, so that --help stays quick
    from headwater.rpc import credentials
    from headwater.telemetry.logging import setup_logging

    setup_logging("router")
    try:
        credentials.use(config.security)
        asyncio.run(serve(config))
    except HeadwaterError as error:
        sys.exit(f"headwater-router: {error.message}")


async def serve(config: RouterConfig) -> None:
    """Serve until a signal comes, then drain."""
    from headwater.router.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
    from headwater.rpc.server import Server, serve_until_signal
    from headwater.telemetry.metrics import serve_metrics
    from headwater_router.metrics import figures
    from headwater_router.service import SERVICE, RouterService

    server = Server(config.bind, name="router", insecure=config.insecure)
    service = RouterService(config)
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    await server.start()
    await service.open()
    serve_metrics(config.metrics_bind, lambda: figures(service.status()), asyncio.get_running_loop())
    await server.set_serving(True)
    await serve_until_signal(server, drain=service.drain, grace_s=config.drain_grace_s)
    await service.close()


if __name__ == "__main__":
    main()
