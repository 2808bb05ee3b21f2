"""A router in this process, and rollout workers that follow a script, all over real gRPC on loopback."""

import asyncio
import contextlib

from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService

from headwater.common.v1.reward_pb2 import RewardScore
from headwater.common.v1.sample_pb2 import Media, Sample, SampleId, WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.rollout.v1 import rollout_pb2 as rollout
from headwater.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer, add_RolloutServiceServicer_to_server
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub, add_RouterServiceServicer_to_server
from headwater.rpc.channel import aio_channel
from headwater.rpc.server import Server

DEADLINE_S = 20.0
READY = rollout.WorkerState.WORKER_STATE_READY


def prompt(text="a red circle", n=1, **fields):
    sampling = SamplingParams(steps=4, height_px=64, width_px=64)
    return pb.Prompt(text=text, sample_count=n, sampling=sampling, return_media=True, **fields)


class ScriptedWorker(RolloutServiceServicer):
    """A real RolloutService whose next answers are the steps of `script`; without one it finishes the group."""

    def __init__(self, worker_id, *script, capacity=1, step=0, media=b"png"):
        self.worker_id, self.capacity, self.media = worker_id, capacity, media
        self.version = WeightVersion(run_id="run", step=step)
        self.state = READY
        self.script = list(script)
        self.calls = []
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.server = Server("127.0.0.1:0", name=worker_id)
        self.address = self.lease_id = ""

    async def GenerateGroup(self, request, context):
        self.calls.append(request)
        self.called.set()
        step = self.script.pop(0) if self.script else finish
        async for response in step(self, request):
            yield response

    def sample(self, request, index):
        return rollout.GenerateGroupResponse(
            sample=Sample(
                id=SampleId(run_id=request.run_id, group_id=request.group_id, index=index),
                seed=request.seeds[index], last_step_version=self.version, total_reward=0.5,
                media=Media(mime_type="image/png", data=self.media),
                rewards=[RewardScore(name=spec.name, value=0.5) for spec in request.rewards],
            )
        )  # fmt: skip

    def outcome(self, request):
        return rollout.GenerateGroupResponse(
            outcome=rollout.GroupOutcome(
                group_id=request.group_id, worker_id=self.worker_id, weight_version=self.version
            )
        )

    def report(self):
        return pb.WorkerReport(state=self.state, weight_version=self.version)

    async def start(self):
        self.server.add(add_RolloutServiceServicer_to_server, self, "headwater.rollout.v1.RolloutService")
        self.address = await self.server.start()

    async def die(self):
        """Stop as abruptly as a server in this process can: no grace, connections closed."""
        await self.server.stop(0)


async def finish(worker, request):
    """Every sample, then the outcome."""
    for index in range(len(request.seeds)):
        yield worker.sample(request, index)
    yield worker.outcome(request)


async def die_after_one_sample(worker, request):
    """Send one sample, then take the whole server down, and never answer."""
    yield worker.sample(request, 0)
    death = asyncio.ensure_future(worker.die())
    await asyncio.wait({death}, timeout=DEADLINE_S)


async def wait_for_gate(worker, request):
    """Stall until the test opens the gate; note a cancellation."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await worker.gate.wait()
    except asyncio.CancelledError:
        worker.cancelled.set()
        raise
    async for response in finish(worker, request):
        yield response


def fail_with(error):
    """Raise one of our errors."""

    async def step(worker, request):
        raise error
        yield

    return step


async def forget_the_outcome(worker, request):
    """End the stream one message early."""
    for index in range(len(request.seeds)):
        yield worker.sample(request, index)


async def forget_the_first_sample(worker, request):
    """Send an outcome for a group that is not complete."""
    for index in range(1, len(request.seeds)):
        yield worker.sample(request, index)
    yield worker.outcome(request)


class Fleet:
    """The router's stub, plus what a worker does towards the router."""

    def __init__(self, service, stub, address):
        self.service, self.stub, self.address = service, stub, address
        self.workers = []

    async def add(self, worker):
        await worker.start()
        self.workers.append(worker)
        await self.register(worker)
        return worker

    async def register(self, worker):
        info = rollout.GetWorkerInfoResponse(worker_id=worker.worker_id, max_group_size=16, size_multiple_px=16)
        response = await self.stub.RegisterWorker(
            pb.RegisterWorkerRequest(
                worker_id=worker.worker_id, address=worker.address, info=info, report=worker.report(),
                capacity_groups=worker.capacity,
            ),
            timeout=DEADLINE_S,
        )  # fmt: skip
        worker.lease_id = response.lease_id

    async def beat(self, worker):
        request = pb.HeartbeatRequest(lease_id=worker.lease_id, report=worker.report())
        return await self.stub.Heartbeat(request, timeout=DEADLINE_S)

    async def submit(self, prompt):
        return await self.stub.SubmitPrompt(pb.SubmitPromptRequest(prompt=prompt), timeout=DEADLINE_S)

    def stream(self, *prompts):
        """Submit prompts over one stream that is half-closed after them."""
        return self.stub.SubmitPrompts(
            iter([pb.SubmitPromptsRequest(prompt=prompt) for prompt in prompts]), timeout=DEADLINE_S
        )

    async def status(self):
        return await self.stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)

    async def wait_for(self, condition):
        """The first status that meets a condition."""
        request = pb.WatchStatusRequest()
        request.interval.FromMilliseconds(50)
        watch = self.stub.WatchStatus(request, timeout=DEADLINE_S)
        try:
            async for response in watch:
                if condition(response.status):
                    return response.status
        finally:
            watch.cancel()
        raise AssertionError("the status stream ended")


@contextlib.asynccontextmanager
async def fleet(*workers, **settings):
    """A router with these workers registered; leases last long unless told otherwise."""
    config = RouterConfig(**({"bind": "127.0.0.1:0", "expiry_s": 600.0} | settings))
    server, service = Server(config.bind, name="router"), RouterService(config)
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    address = await server.start()
    await service.open()
    async with aio_channel(address) as channel:
        fleet = Fleet(service, RouterServiceStub(channel), address)
        try:
            for worker in workers:
                await fleet.add(worker)
            yield fleet
        finally:
            await server.stop(0)
            await service.close()
            for worker in fleet.workers:
                await worker.die()


def by_kind(events):
    """Names of the events, in order: "accepted", "sample", "outcome" or "error"."""
    return [event.WhichOneof("event") for event in events]
