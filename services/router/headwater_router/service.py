"""RouterService over gRPC: reads requests, asks the parts, answers. No rules of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from headwater.common.v1.sample_pb2 import Sample
from headwater.errors import Cancelled, FailedPrecondition, HeadwaterError, InvalidArgument, Unavailable, duration
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceServicer
from headwater.rpc.channel import MAX_MESSAGE_BYTES
from headwater.stream.keys import check_id
from headwater_router.attempts import Attempts
from headwater_router.budget import Budgets
from headwater_router.config import RouterConfig
from headwater_router.dispatch import Dispatcher
from headwater_router.prompts import Prompts
from headwater_router.registry import Registry, Worker
from headwater_router.session import Session
from headwater_router.status import Change, build_status

SERVICE = "headwater.router.v1.RouterService"
MIN_WATCH_INTERVAL_S = 0.05
MAX_QUIET_S = 10.0
"""WatchStatus repeats itself after this long without a change, so that a watcher can tell silence from a dead peer."""


class RouterService(RouterServiceServicer):
    """The router. Call `open` on the event loop before serving, `drain` and `close` when leaving."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._change = Change()
        self._attempts = Attempts()
        self._registry = Registry(
            expiry_s=config.expiry_s, on_change=self._workers_changed, on_lost=self._attempts.forget
        )
        self._dispatcher = Dispatcher(self._registry)
        self._budgets = Budgets()
        self._prompts = Prompts(
            config, self._registry, self._dispatcher, self._budgets, self._attempts, self._change.notify
        )
        self._started_at = Timestamp()
        self._started_at.GetCurrentTime()
        self._expiring: asyncio.Task[None] | None = None

    def _workers_changed(self) -> None:
        self._dispatcher.pump()
        self._change.notify()

    async def open(self) -> None:
        """Start expiring silent workers."""
        self._expiring = asyncio.ensure_future(self._registry.expire_forever())

    async def drain(self) -> None:
        """Refuse new prompts and finish the running ones; those that last longer fail with UNAVAILABLE."""
        await self._prompts.drain(max(0.0, self.config.drain_grace_s - 2.0))

    async def close(self) -> None:
        """Stop background work and close the channels to workers."""
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
        await self._attempts.close()

    # Clients -------------------------------------------------------------------------------------------------------

    async def SubmitPrompts(  # noqa: D102
        self, request_iterator: AsyncIterator[pb.SubmitPromptsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SubmitPromptsResponse]:
        async with contextlib.aclosing(Session(self._prompts, request_iterator).events()) as events:
            async for event in events:
                yield event

    async def SubmitPrompt(  # noqa: D102
        self, request: pb.SubmitPromptRequest, context: grpc.aio.ServicerContext
    ) -> pb.SubmitPromptResponse:
        live = self._prompts.start(request.prompt)
        try:
            await asyncio.wait({live.task})
        finally:  # a no-op when it has ended
            live.stop(Cancelled("the client gave the prompt up", reason="CLIENT_GONE"))
        result = live.result()
        if isinstance(result, HeadwaterError):
            raise result
        _check_fits(result.samples)
        return pb.SubmitPromptResponse(request_id=live.request_id, samples=result.samples, outcome=result.outcome)

    async def CancelRequest(  # noqa: D102
        self, request: pb.CancelRequestRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelRequestResponse:
        return pb.CancelRequestResponse(cancelled=self._prompts.cancel(request.request_id))

    # Status --------------------------------------------------------------------------------------------------------

    def status(self) -> pb.GetStatusResponse:
        """The present status."""
        return build_status(
            workers=self._registry, now=self._registry.clock(), dispatcher=self._dispatcher, prompts=self._prompts,
            budgets=self._budgets, queue_capacity=self.config.queue_capacity, started_at=self._started_at,
        )  # fmt: skip

    async def GetStatus(  # noqa: D102
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusResponse:
        return self.status()

    async def WatchStatus(  # noqa: D102
        self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        interval_s = request.interval.ToTimedelta().total_seconds() if request.HasField("interval") else 1.0
        if interval_s < 0:
            raise InvalidArgument(f"interval is {interval_s} s; it must be at least 0", field="interval")
        while not self._prompts.draining.is_set():
            changed = self._change.next()
            yield pb.WatchStatusResponse(status=self.status())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._prompts.draining.wait(), max(MIN_WATCH_INTERVAL_S, interval_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), MAX_QUIET_S)
        raise Unavailable("the router is shutting down", reason="DRAINING")

    # Workers -------------------------------------------------------------------------------------------------------

    async def RegisterWorker(  # noqa: D102
        self, request: pb.RegisterWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.RegisterWorkerResponse:
        worker = self._registry.register(request)
        return pb.RegisterWorkerResponse(
            lease_id=worker.lease_id,
            heartbeat_interval=duration(self.config.heartbeat_interval_s),
            expiry=duration(self.config.expiry_s),
        )

    async def Heartbeat(  # noqa: D102
        self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> pb.HeartbeatResponse:
        worker = self._registry.heartbeat(request.lease_id, request.report)
        return pb.HeartbeatResponse(drain=bool(worker.drain_reason))

    async def DrainWorker(  # noqa: D102
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        worker: Worker = self._registry.drain(request)
        return pb.DrainWorkerResponse(active_groups=worker.assigned)

    async def DeregisterWorker(  # noqa: D102
        self, request: pb.DeregisterWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeregisterWorkerResponse:
        self._registry.deregister(request.lease_id)
        return pb.DeregisterWorkerResponse()

    # Trainer -------------------------------------------------------------------------------------------------------

    async def SetBudget(  # noqa: D102
        self, request: pb.SetBudgetRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetBudgetResponse:
        run_id = check_id(request.run_id, field="run_id")
        charged = self._budgets.set(run_id, request.capacity_groups, request.charged_group_ids)
        self._change.notify()
        return pb.SetBudgetResponse(charged_groups=charged)

    async def ReleaseGroups(  # noqa: D102
        self, request: pb.ReleaseGroupsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseGroupsResponse:
        run_id = check_id(request.run_id, field="run_id")
        charged = self._budgets.release(run_id, request.group_ids)
        self._change.notify()
        return pb.ReleaseGroupsResponse(charged_groups=charged)


def _check_fits(samples: list[Sample]) -> None:
    size_bytes = sum(sample.ByteSize() for sample in samples)
    if size_bytes > MAX_MESSAGE_BYTES - 64 * 1024:
        raise FailedPrecondition(
            f"the group has {size_bytes} bytes, more than one reply may carry; use the streaming form, SubmitPrompts",
            reason="GROUP_TOO_LARGE",
        )
