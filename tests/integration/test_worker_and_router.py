"""A rollout worker at a real router: registration, news, restarts, draining, and a worker process from start to end."""

import asyncio
import contextlib
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine import load_engine
from headwater_rollout.worker import Worker
from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.diffusion import tiny_sd3
from headwater.rollout.v1 import rollout_pb2
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub, add_RouterServiceServicer_to_server
from headwater.rpc.channel import aio_channel
from headwater.rpc.server import Server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_sd3.build(tmp_path_factory.mktemp("models") / tiny_sd3.DEFAULT_NAME)


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(model, executor):
    return executor.submit(load_engine, "diffusers", model, "fp32", "cpu").result()


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextlib.asynccontextmanager
async def router_at(address):
    service = RouterService(RouterConfig(heartbeat_interval_s=0.2))
    server = Server(address, name="router")
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    await server.start()
    await service.open()
    try:
        async with aio_channel(address) as channel:
            yield RouterServiceStub(channel)
    finally:
        await server.stop(0)
        await service.close()


@contextlib.asynccontextmanager
async def worker_of(engine, executor, router):
    config = RolloutConfig(model="", bind="127.0.0.1:0", worker_id="w0", router=router)
    worker = Worker(config, engine, executor)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.server.stop(0)
        await worker.close()


async def workers(router):
    return list((await router.GetStatus(pb.GetStatusRequest(), timeout=10, wait_for_ready=True)).workers)


async def until(router, condition, timeout_s=20):
    """The first list of workers that meets the condition."""
    async with asyncio.timeout(timeout_s):
        while not condition(found := await workers(router)):
            await asyncio.sleep(0.05)
    return found


def submit(router, n=2, steps=4):
    sampling = SamplingParams(steps=steps, height_px=64, width_px=64)
    prompt = pb.Prompt(text="a red circle", sample_count=n, sampling=sampling, return_media=True)
    return router.SubmitPrompt(pb.SubmitPromptRequest(prompt=prompt), timeout=60, wait_for_ready=True)


async def test_a_worker_registers_serves_and_leaves(engine, executor, address):
    async with router_at(address) as router:
        async with worker_of(engine, executor, address):
            (worker,) = await until(router, lambda found: found)
            assert (worker.worker_id, worker.capacity_groups, worker.info.family) == ("w0", 2, "sd3")
            response = await submit(router)
            assert [sample.media.mime_type for sample in response.samples] == ["image/png"] * 2
            assert response.outcome.worker_id == "w0"
        assert await workers(router) == []  # at once, not when the lease runs out


async def test_a_restarted_router_gets_its_worker_back(engine, executor, address):
    async with worker_of(engine, executor, address):  # the worker may be first
        for _ in range(2):
            async with router_at(address) as router:
                await until(router, lambda found: found)
                await submit(router)


async def test_news_travel_before_the_next_heartbeat_is_due(engine, executor, address):
    async with router_at(address) as router, worker_of(engine, executor, address) as worker:
        await until(router, lambda found: found)
        worker.status.raise_condition("REWARD_UNAVAILABLE", "no reward server answers")
        (found,) = await until(router, lambda found: found[0].report.conditions)
        assert found.report.conditions[0].message == "no reward server answers"
        worker.receiver.version = WeightVersion(run_id="r", step=7)
        worker.status.changed.set()
        await until(router, lambda found: found[0].report.weight_version.step == 7)


async def test_an_operator_drains_a_worker(engine, executor, address):
    async with router_at(address) as router, worker_of(engine, executor, address):
        await until(router, lambda found: found)
        await router.DrainWorker(pb.DrainWorkerRequest(worker_id="w0"), timeout=5)
        draining = rollout_pb2.WorkerState.WORKER_STATE_DRAINING
        await until(router, lambda found: found[0].report.state == draining)


async def start_process(*arguments):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_rollout", *arguments, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diffusers", pytest.param("sglang", marks=pytest.mark.engine)])
async def test_a_worker_process_finishes_its_group_on_sigterm(model, address, kind):
    async with router_at(address) as router:
        process = await start_process(
            "--model", str(model), "--engine", kind, "--precision", "fp32", "--bind", "127.0.0.1:0",
            "--router", address, "--worker-id", "w1",
        )  # fmt: skip
        try:
            await until(router, lambda found: found, timeout_s=150)
            running = asyncio.ensure_future(submit(router, n=16, steps=40))
            await until(router, lambda found: found[0].report.active_groups == 1)
            process.send_signal(signal.SIGTERM)
            response = await running
            assert len(response.samples) == 16
            async with asyncio.timeout(30):
                _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        log = errors.decode()
        assert process.returncode == 0, log
        assert "group worker=w1" in log
        assert await workers(router) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "model_index.json"),
        (
            ["--model", "m", "--redis", "redis://127.0.0.1:1", "--blob-root", "b"],
            "Redis at 127.0.0.1:1 does not answer",
        ),
        (["--model", "m", "--capacity-groups", "0"], "--capacity-groups is 0"),
        (["--model", "m", "--engine", "other"], "invalid choice"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(arguments, message):
    process = await start_process(*arguments)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode in (1, 2)
    assert message in errors.decode()
    assert "Traceback" not in errors.decode()
