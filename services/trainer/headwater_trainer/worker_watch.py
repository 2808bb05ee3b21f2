"""What a person should know of router and workers while a run waits: told once when it begins and once when it ends."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc.aio

from headwater.router.v1.router_pb2 import GetStatusRequest, WorkerStatus
from headwater.rpc.errors import from_rpc_error

if TYPE_CHECKING:  # exists in the type stubs only
    from headwater.router.v1.router_pb2_grpc import RouterServiceAsyncStub

log = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_CALL_TIMEOUT_S = 10.0


class Conditions:
    """Conditions that hold at this moment."""

    def __init__(self, notice: Callable[[str, str], None]) -> None:
        """`notice(reason, message)` tells a person; the end of a condition has the reason `…_CLEARED`."""
        self._notice = notice
        self._reasons: dict[str, str] = {}  # by key

    def begin(self, reason: str, message: str, key: str = "") -> None:
        """A condition holds; `key` tells apart those of one reason."""
        if (key or reason) not in self._reasons:
            self._reasons[key or reason] = reason
            self._notice(reason, message)

    def end(self, key: str) -> None:
        """A condition is over."""
        reason = self._reasons.pop(key, None)
        if reason is not None:
            self._notice(f"{reason}_CLEARED", f"{key}: over")

    def workers(self, workers: Sequence[WorkerStatus]) -> None:
        """Begin and end the conditions of the workers, as they have reported them."""
        present = {
            f"{condition.reason} of {worker.worker_id}": (condition.reason, f"{worker.worker_id}: {condition.message}")
            for worker in workers
            for condition in worker.report.conditions
        }
        if not workers:
            present["NO_WORKERS"] = ("NO_WORKERS", "no rollout worker is registered at the router; start one")
        for key, (reason, message) in present.items():
            self.begin(reason, message, key)
        for key in [key for key in self._reasons if key not in present and key != "ROUTER_UNAVAILABLE"]:
            self.end(key)


async def watch_workers(stub: "RouterServiceAsyncStub", conditions: Conditions) -> None:
    """Follow the workers until cancelled."""
    while True:
        try:
            status = await stub.GetStatus(GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
            conditions.workers(status.workers)
        except grpc.aio.AioRpcError as error:
            log.info("status of the router: %s", from_rpc_error(error))
        await asyncio.sleep(_INTERVAL_S)
