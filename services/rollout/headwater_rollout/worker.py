"""One worker process: engine, server, registration, and an orderly end."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from headwater.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from headwater.rpc.server import Server, serve_until_signal
from headwater.stream.publisher import ScoredPublisher
from headwater.telemetry.metrics import serve_metrics
from headwater.tensors.blobs import BlobStore
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import Engine
from headwater_rollout.group import GroupPipeline
from headwater_rollout.publisher import GroupPublisher
from headwater_rollout.registration import Registration
from headwater_rollout.reward_client import RewardClient
from headwater_rollout.service import RolloutServicer
from headwater_rollout.status import WorkerStatus
from headwater_rollout.weight_receiver import WeightReceiver

log = logging.getLogger(__name__)

SERVICE = "headwater.rollout.v1.RolloutService"


class Worker:
    """The parts of one worker around a loaded engine. Tests run it in their own event loop."""

    def __init__(self, config: RolloutConfig, engine: Engine, executor: ThreadPoolExecutor) -> None:
        self.config = config
        self.engine = engine
        self.generation_lock = asyncio.Lock()
        self.receiver = WeightReceiver(engine, self.generation_lock)
        self.status = WorkerStatus(self.receiver)
        self.rewards = RewardClient(config.rewards, self.status)
        self._stream = ScoredPublisher(config.redis) if config.can_publish else None
        self._executor = executor
        self._publisher = GroupPublisher(BlobStore(config.blob_root), self._stream) if self._stream else None
        pipeline = GroupPipeline(
            worker_id=config.name,
            engine=engine,
            executor=executor,
            generation_lock=self.generation_lock,
            receiver=self.receiver,
            rewards=self.rewards,
            status=self.status,
            publisher=self._publisher,
            max_group_size=config.max_group_size,
        )
        self.servicer = RolloutServicer(
            config=config,
            engine=engine,
            executor=executor,
            generation_lock=self.generation_lock,
            receiver=self.receiver,
            pipeline=pipeline,
            status=self.status,
        )
        self.server = Server(config.bind, name="rollout", insecure=config.insecure)
        self.server.add(add_RolloutServiceServicer_to_server, self.servicer, SERVICE)
        self._tasks: list[asyncio.Task[None]] = []
        self._registration: Registration | None = None

    async def start(self) -> str:
        """Listen and register; returns the address."""
        address = await self.server.start()
        serve_metrics(self.config.metrics_bind, self.status.figures, asyncio.get_running_loop())
        await self.server.set_serving(True)
        self._tasks.append(asyncio.create_task(self.rewards.watch()))
        if self.config.router:
            self._registration = Registration(
                router=self.config.router,
                worker_id=self.config.name,
                address=self.config.advertise or address,
                capacity_groups=self.config.capacity_groups,
                info=self.servicer.info,
                status=self.status,
            )
            self._tasks.append(asyncio.create_task(self._registration.run()))
        return address

    async def drain(self) -> None:
        """Take no new groups and wait for the running ones."""
        self.status.draining = True
        self.status.changed.set()
        await self.status.idle()

    async def close(self) -> None:
        """Deregister and free everything but the engine."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a background task had failed", exc_info=outcome)
        if self._registration is not None:
            await self._registration.stop()
        await self.rewards.close()
        if self._stream is not None:
            await self._stream.close()


async def run(config: RolloutConfig) -> None:
    """Load the engine, serve until SIGTERM or SIGINT, end in order."""
    await _check_redis(config)
    executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
    loop = asyncio.get_running_loop()
    log.info("loading model=%s engine=%s precision=%s", config.model, config.engine, config.precision)
    engine = await loop.run_in_executor(
        executor, load_engine, config.engine, config.model, config.precision, config.device or _default_device()
    )
    try:
        worker = Worker(config, engine, executor)
        try:
            await worker.start()
            await serve_until_signal(worker.server, drain=worker.drain, grace_s=config.drain_grace_s)
        finally:
            await worker.close()
    finally:
        with contextlib.suppress(RuntimeError):
            await loop.run_in_executor(executor, engine.close)
        executor.shutdown(wait=False)


def _default_device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


async def _check_redis(config: RolloutConfig) -> None:
    """Fail at the start, not at the first group."""
    if not config.can_publish:
        log.info("this worker cannot publish: --redis and --blob-root are not both given")
        return
    stream = ScoredPublisher(config.redis)
    try:
        await stream.ping()
    finally:
        await stream.close()
