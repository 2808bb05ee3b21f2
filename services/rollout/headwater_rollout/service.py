"""RolloutService: requests in, groups out, weights in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from headwater.rollout.v1 import rollout_pb2, weights_pb2
from headwater.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine.base import Engine
from headwater_rollout.group import GroupPipeline
from headwater_rollout.status import WorkerStatus
from headwater_rollout.weight_receiver import WeightReceiver


class RolloutServicer(RolloutServiceServicer):
    """Binds the RPCs to the parts that do the work. Errors are raised as `HeadwaterError`."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        engine: Engine,
        executor: ThreadPoolExecutor,
        generation_lock: asyncio.Lock,
        receiver: WeightReceiver,
        pipeline: GroupPipeline,
        status: WorkerStatus,
    ) -> None:
        self._config = config
        self._engine = engine
        self._executor = executor
        self._lock = generation_lock
        self._receiver = receiver
        self._pipeline = pipeline
        self._status = status

    async def GenerateGroup(
        self, request: rollout_pb2.GenerateGroupRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateGroupResponse]:
        """Generate, score, filter and publish one group."""
        remaining_s = context.time_remaining()
        timeout_s = min(remaining_s, self._config.timeout_s) if remaining_s is not None else self._config.timeout_s
        async for response in self._pipeline.run(request, timeout_s):
            yield response

    async def GetWorkerInfo(
        self, request: rollout_pb2.GetWorkerInfoRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetWorkerInfoResponse:
        """Describe the worker."""
        return self.info()

    def info(self) -> rollout_pb2.GetWorkerInfoResponse:
        """The description that GetWorkerInfo and registration give."""
        info = self._engine.info
        return rollout_pb2.GetWorkerInfoResponse(
            worker_id=self._config.name,
            state=self._status.state,
            engine=info.engine,
            engine_version=info.engine_version,
            model=info.model,
            family=info.family,
            weight_version=self._receiver.version,
            components=info.components,
            max_group_size=self._config.max_group_size,
            size_multiple_px=info.size_multiple_px,
            device=info.device,
            engine_rank_count=info.rank_count,
            weight_epoch=self._receiver.epoch,
        )

    async def BeginWeightUpdate(
        self, request: weights_pb2.BeginWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.BeginWeightUpdateResponse:
        """Open an update."""
        return await self._receiver.begin(request)

    async def ReceiveWeights(
        self, request_iterator: AsyncIterator[weights_pb2.ReceiveWeightsRequest], context: grpc.aio.ServicerContext
    ) -> weights_pb2.ReceiveWeightsResponse:
        """Receive one bucket."""
        return await self._receiver.receive(request_iterator)

    async def CommitWeightUpdate(
        self, request: weights_pb2.CommitWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.CommitWeightUpdateResponse:
        """Make the staged weights live, verified. The router hears of the outcome at once."""
        try:
            return await self._receiver.commit(request)
        finally:
            self._status.changed.set()

    async def AbortWeightUpdate(
        self, request: weights_pb2.AbortWeightUpdateRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.AbortWeightUpdateResponse:
        """Drop an update."""
        return await self._receiver.abort(request)

    async def GetWeights(
        self, request: rollout_pb2.GetWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetWeightsResponse:
        """Fingerprints of live tensors, all of one version; names and shapes alone wait for nothing."""
        if request.specs_only:
            return self._receiver.get_weights(request)
        async with self._lock:
            return await asyncio.to_thread(self._receiver.get_weights, request)

    async def ReleaseMemory(
        self, request: rollout_pb2.ReleaseMemoryRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ReleaseMemoryResponse:
        """Move the weights off the device, after the running group."""
        async with self._lock:
            freed = 0
            if not self._status.sleeping:
                freed = await self._in_engine_thread(self._engine.release_memory)
            self._status.sleeping = True
        self._status.changed.set()
        return rollout_pb2.ReleaseMemoryResponse(freed_bytes=freed)

    async def ResumeMemory(
        self, request: rollout_pb2.ResumeMemoryRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ResumeMemoryResponse:
        """Bring the weights back."""
        async with self._lock:
            taken = 0
            if self._status.sleeping:
                taken = await self._in_engine_thread(self._engine.resume_memory)
            self._status.sleeping = False
        self._status.changed.set()
        return rollout_pb2.ResumeMemoryResponse(taken_bytes=taken)

    async def _in_engine_thread(self, work: Callable[[], int]) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
