"""`headwater-reward`: serve rewards until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from headwater_reward.config import RewardConfig, parse_args

CONNECTION_AGE_S = 10.0
"""How soon rollout workers notice reward servers that were added under the same name."""


async def serve(config: RewardConfig) -> None:
    """Start, load the rewards, serve, drain."""
    from headwater.reward.v1 import reward_pb2, reward_pb2_grpc
    from headwater.rpc.server import Server, serve_until_signal
    from headwater.telemetry.metrics import serve_metrics
    from headwater_reward import registry, settings
    from headwater_reward.service import RewardService

    tables = settings.read(config.reward_config)
    service = RewardService(registry.create(config.rewards, tables), config, tables)
    server = Server(config.bind, name="reward", insecure=config.insecure, connection_age_s=CONNECTION_AGE_S)
    full_name = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, service, full_name)
    await server.start()
    await service.load()
    await service.check()
    serve_metrics(config.metrics_bind, service.figures)
    await server.set_serving(True)
    await serve_until_signal(server, drain=service.drain, grace_s=config.drain_grace_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. A configuration that cannot work ends the process with status 1 and says why."""
    config = parse_args(argv)
    from headwater.errors import HeadwaterError
    from headwater.rpc import credentials
    from headwater.telemetry import setup_logging

    setup_logging("reward")
    try:
        credentials.use(config.security)
        asyncio.run(serve(config))
    except HeadwaterError as error:
        sys.exit(f"headwater-reward: {error.message}")


if __name__ == "__main__":
    main()
