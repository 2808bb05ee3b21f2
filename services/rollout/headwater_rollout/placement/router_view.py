"""What the router says of the workers, asked as often as one likes and at most every second."""

import logging
import time
from dataclasses import dataclass

import grpc

from headwater.router.v1.router_pb2 import GetStatusRequest
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Seen:
    """A registered worker: host:port, and when it was last heard of, in seconds of `time.monotonic`."""

    address: str
    heartbeat_at: float


class RouterView:
    """The registered workers by id, as of the last answer; none while the router is away."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._channel = sync_channel(router)
        self._stub = RouterServiceStub(self._channel)
        self._asked_at = 0.0
        self._failing = False
        self._seen: dict[str, Seen] = {}

    def workers(self) -> dict[str, Seen]:
        """Ask when the last answer is old."""
        if time.monotonic() - self._asked_at >= _INTERVAL_S:
            self._seen = self._ask()
            self._asked_at = time.monotonic()
        return self._seen

    def _ask(self) -> dict[str, Seen]:
        asked_at = time.monotonic()
        try:
            status = self._stub.GetStatus(GetStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if not self._failing:
                log.warning(
                    "router %s: %s; workers register when it is back", self._router, from_rpc_error(error).message
                )
            self._failing = True
            return {}
        self._failing = False
        return {
            worker.worker_id: Seen(worker.address, asked_at - worker.heartbeat_age.ToTimedelta().total_seconds())
            for worker in status.workers
        }

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
