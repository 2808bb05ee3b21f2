"""Being known at the router: register, send heartbeats, register again when the router forgot, deregister."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from headwater.errors import HeadwaterError, NotFound
from headwater.rollout.v1.rollout_pb2 import GetWorkerInfoResponse
from headwater.router.v1.router_pb2 import DeregisterWorkerRequest, HeartbeatRequest, RegisterWorkerRequest
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.address import reachable_address
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater_rollout.status import WorkerStatus

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 5.0


class Registration:
    """Keeps one worker registered for as long as `run` runs."""

    def __init__(
        self,
        *,
        router: str,
        worker_id: str,
        address: str,
        capacity_groups: int,
        info: Callable[[], GetWorkerInfoResponse],
        status: WorkerStatus,
    ) -> None:
        self._router = router
        self._worker_id = worker_id
        self._address = address
        self._capacity_groups = capacity_groups
        self._info = info
        self._status = status
        self._channel = aio_channel(router)
        self._stub = RouterServiceStub(self._channel)
        self._lease_id = ""
        self._interval_s = 1.0
        self._failing = False

    async def run(self) -> None:
        """Register and send heartbeats until cancelled; a router that is away is waited for."""
        backoff_s = 0.2
        while True:
            self._status.changed.clear()
            try:
                if self._lease_id:
                    await self._heartbeat()
                else:
                    await self._register()
                backoff_s = 0.2
                self._recovered()
            except NotFound:
                log.info("the router does not know this worker any more; it registers again")
                self._lease_id = ""
                continue
            except HeadwaterError as error:
                self._failed(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                continue
            with contextlib.suppress(TimeoutError):  # sooner when there is news
                await asyncio.wait_for(self._status.changed.wait(), self._interval_s)

    async def stop(self) -> None:
        """Deregister, when registered, and close the channel."""
        if self._lease_id:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the lease expires by itself
                await self._stub.DeregisterWorker(
                    DeregisterWorkerRequest(lease_id=self._lease_id), timeout=CALL_TIMEOUT_S
                )
        await self._channel.close(None)

    async def _register(self) -> None:
        address = await asyncio.to_thread(reachable_address, self._address, self._router)
        request = RegisterWorkerRequest(
            worker_id=self._worker_id,
            address=address,
            info=self._info(),
            report=self._status.report(),
            capacity_groups=self._capacity_groups,
        )
        try:
            response = await self._stub.RegisterWorker(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._lease_id = response.lease_id
        self._interval_s = max(0.05, response.heartbeat_interval.ToTimedelta().total_seconds())
        log.info("registered worker=%s router=%s address=%s", self._worker_id, self._router, address)

    async def _heartbeat(self) -> None:
        request = HeartbeatRequest(lease_id=self._lease_id, report=self._status.report())
        try:
            response = await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if response.drain != self._status.drained_by_operator:
            log.info("the router asks this worker to %s", "drain" if response.drain else "serve again")
            self._status.drained_by_operator = response.drain
            self._status.changed.set()

    def _failed(self, error: HeadwaterError) -> None:
        if not self._failing:
            log.warning(
                "router %s does not answer (%s); start it or correct --router. This worker keeps trying",
                self._router,
                error.message,
            )
        self._failing = True

    def _recovered(self) -> None:
        if self._failing:
            log.info("router %s answers again", self._router)
        self._failing = False
