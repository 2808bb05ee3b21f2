"""`python -m headwater.rpc.health HOST:PORT`: whether a service serves, for health checks of containers.

Exit status 0 when the gRPC server at HOST:PORT says SERVING, 1 when it says something else or does not answer.
"""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.rpc.channel import sync_channel


def serves(address: str, timeout_s: float = 1.0) -> bool:
    """Whether a gRPC server at host:port says SERVING."""
    return state(address, timeout_s) == "SERVING"


def state(address: str, timeout_s: float) -> str:
    """SERVING, NOT_SERVING, …, or why there is no answer."""
    with sync_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m headwater.rpc.health", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="e.g. 127.0.0.1:7400")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="longest wait (default %(default)s)")
    args = parser.parse_args(argv)
    said = state(args.address, args.timeout_s)
    print(f"{args.address}: {said}")
    return 0 if said == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
