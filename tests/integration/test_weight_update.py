"""Weight updates from the trainer's sender through a real router into real engines, over gloo and over gRPC."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from headwater_rollout import weight_receiver
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest
from headwater_rollout.worker import Worker
from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService
from headwater_trainer.weight_sender import WeightSender

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.diffusion import families, tiny_sd3
from headwater.errors import Aborted, Unavailable
from headwater.rollout.v1 import weights_pb2
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub, add_RouterServiceServicer_to_server
from headwater.rpc.channel import aio_channel
from headwater.rpc.server import Server
from headwater.sampling import resolve
from headwater.weights.fingerprint import fingerprint

RUN = "run-1"


class CorruptibleEngine:
    """A real engine whose loader can be made to damage a tensor, as a faulty engine would."""

    def __init__(self, engine):
        self.engine, self.corrupts = engine, ""

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def weights_changed(self):
        if self.corrupts:
            self.engine.weight_views("transformer")[self.corrupts][0].reshape(-1)[0] += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_sd3.build(tmp_path_factory.mktemp("models") / tiny_sd3.DEFAULT_NAME)


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def loaded(model):
    return [CorruptibleEngine(load_engine("diffusers", model, "fp32", "cpu")) for _ in range(2)]


@pytest.fixture
def engines(loaded, weights):
    for engine in loaded:  # every test starts from the model's own weights
        engine.corrupts = ""
        for name, (view,) in engine.weight_views("transformer").items():
            view.copy_(weights[name])
    return loaded


@pytest.fixture(scope="module")
def weights(model):
    module = families.resolve(model).load_component(model, "transformer", torch.float32)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.fixture
def changed(weights):
    return {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()}


class Fleet:
    """A router and its workers in this event loop; the sender runs in a thread, as in a trainer."""

    def __init__(self, router, address, executor):
        self.router, self.address, self.executor = router, address, executor
        self.workers: list[Worker] = []
        self.sender = WeightSender(address, RUN, "transformer", timeout_s=3, bucket_bytes=100_000)

    async def add(self, engine):
        config = RolloutConfig(model="", bind="127.0.0.1:0", worker_id=f"w{len(self.workers)}", router=self.address)
        worker = Worker(config, engine, self.executor)
        self.workers.append(worker)
        await worker.start()
        await self.until(lambda status: len(status.workers) == len(self.workers))
        return worker

    async def publish(self, tensors, step):
        return await asyncio.to_thread(self.sender.publish, tensors, step)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition(status := await self.router.GetStatus(pb.GetStatusRequest(), timeout=5)):
                await asyncio.sleep(0.05)
        return status


@contextlib.asynccontextmanager
async def fleet_of(engines, executor):
    service = RouterService(RouterConfig(heartbeat_interval_s=0.2, expiry_s=5))
    server = Server("127.0.0.1:0", name="router")
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    address = await server.start()
    await service.open()
    async with aio_channel(address) as channel:
        fleet = Fleet(RouterServiceStub(channel), address, executor)
        try:
            for engine in engines:
                await fleet.add(engine)
            yield fleet
        finally:
            for worker in fleet.workers:
                await worker.server.stop(0)
                await worker.close()
            fleet.sender.close()
            await server.stop(0)
            await service.close()


def live(engine):
    return {name: fingerprint(views) for name, views in engine.weight_views("transformer").items()}


def expected(tensors):
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def image(engine):
    sampling = resolve(SamplingParams(steps=2, height_px=64, width_px=64), group_seed=0)
    return engine.generate(GroupRequest("a red circle", (1,), sampling, record_trajectory=False)).media


async def test_an_update_reaches_every_worker_and_changes_what_it_makes(engines, executor, changed):
    async with fleet_of(engines, executor) as fleet:
        before = image(engines[1])
        report = await fleet.publish(changed, 3)
        assert (report.updated, report.lost, report.transport) == (["w0", "w1"], {}, "TRANSPORT_GLOO")
        assert report.tensor_count == len(changed)
        assert all(live(engine) == expected(changed) for engine in engines)
        assert not np.array_equal(before, image(engines[1]))
        version = WeightVersion(run_id=RUN, step=3)
        await fleet.until(lambda status: all(w.report.weight_version == version for w in status.workers))


async def test_an_update_right_after_another_misses_nobody(engines, executor, weights, changed):
    async with fleet_of(engines, executor) as fleet:
        await fleet.publish(weights, 0)
        assert (await fleet.publish(changed, 1)).updated == ["w0", "w1"]  # the router has not heard of step 0 yet


async def test_a_subset_of_the_tensors_leaves_the_others_alone(engines, executor, weights, changed):
    name = next(name for name in weights if name.endswith("to_q.weight"))
    async with fleet_of(engines[:1], executor) as fleet:
        report = await fleet.publish({name: changed[name]}, 1)
        assert report.tensor_count == 1
        assert live(engines[0]) == expected({**weights, name: changed[name]})


async def test_a_name_that_binds_nothing_is_an_error_and_changes_nothing(engines, executor, weights, changed):
    async with fleet_of(engines[:1], executor) as fleet:
        report = await fleet.publish({**changed, "transformer_blocks.99.attn.to_q.weight": torch.zeros(2)}, 1)
        assert report.updated == []
        assert "transformer_blocks.99.attn.to_q.weight binds nothing" in report.lost["w0"]
        assert live(engines[0]) == expected(weights)


async def test_a_tensor_of_another_shape_is_an_error(engines, executor, changed):
    name = next(iter(changed))
    async with fleet_of(engines[:1], executor) as fleet:
        report = await fleet.publish({name: torch.zeros(3, 5)}, 1)
        assert f"{name} is float32[3, 5] in the plan" in report.lost["w0"]


async def test_weights_that_differ_after_loading_quarantine_the_worker_until_an_update_succeeds(
    engines, executor, changed
):
    engines[1].corrupts = "proj_out.weight"
    async with fleet_of(engines, executor) as fleet:
        report = await fleet.publish(changed, 1)
        assert report.updated == ["w0"]
        assert "proj_out.weight" in report.lost["w1"]
        status = await fleet.until(lambda status: not status.workers[1].accepting)
        assert status.workers[1].report.weight_version == WeightVersion()
        engines[1].corrupts = ""
        caught_up = await asyncio.to_thread(fleet.sender.catch_up)
        assert caught_up.updated == ["w1"]
        await fleet.until(lambda status: status.workers[1].accepting)
        assert live(engines[1]) == expected(changed)


async def test_when_no_group_forms_the_bytes_travel_over_grpc(engines, executor, changed, monkeypatch):
    def no_group(rendezvous):
        raise Unavailable("a firewall stands between us")

    monkeypatch.setattr(weight_receiver, "_join", no_group)
    async with fleet_of(engines, executor) as fleet:
        report = await fleet.publish(changed, 1)
        assert (report.updated, report.transport) == (["w0", "w1"], "TRANSPORT_GRPC")
        assert all(live(engine) == expected(changed) for engine in engines)


async def test_a_dead_worker_does_not_hold_up_the_others(engines, executor, changed):
    async with fleet_of(engines, executor) as fleet:
        await fleet.workers[0].server.stop(0)  # registered still, but gone
        report = await fleet.publish(changed, 1)
        assert report.updated == ["w1"]
        assert "w0" in report.lost
        assert report.seconds < 20
        assert live(engines[1]) == expected(changed)


async def test_a_late_worker_catches_up(engines, executor, changed):
    async with fleet_of(engines[:1], executor) as fleet:
        await fleet.publish(changed, 5)
        await fleet.until(lambda status: status.workers[0].report.weight_version.step == 5)
        assert await asyncio.to_thread(fleet.sender.catch_up) is None
        await fleet.add(engines[1])
        report = await asyncio.to_thread(fleet.sender.catch_up)
        assert report.updated == ["w1"]
        assert live(engines[1]) == expected(changed)


async def test_a_worker_of_another_run_gets_every_tensor(engines, executor, weights, changed):
    name = next(name for name in weights if name.endswith("to_q.weight"))
    async with fleet_of(engines[:1], executor) as fleet:
        await fleet.publish(weights, 0)
        await fleet.until(lambda status: status.workers[0].report.weight_version.run_id == RUN)
        late = await fleet.add(engines[1])
        late.receiver.version = WeightVersion(run_id="an earlier run", step=9)
        engines[1].weight_views("transformer")["proj_out.weight"][0].zero_()
        assert (await fleet.publish({name: changed[name]}, 1)).updated == ["w0"]
        assert (await asyncio.to_thread(fleet.sender.catch_up)).updated == ["w1"]
        assert live(engines[0]) == live(engines[1]) == expected({**weights, name: changed[name]})


async def test_messages_of_an_old_epoch_are_refused(engines, executor, changed):
    async with fleet_of(engines[:1], executor) as fleet:
        report = await fleet.publish(changed, 1)
        receiver = fleet.workers[0].receiver
        plan = weights_pb2.WeightPlan(epoch=report.epoch)
        with pytest.raises(Aborted, match="not newer"):
            await receiver.begin(weights_pb2.BeginWeightUpdateRequest(plan=plan))
        with pytest.raises(Aborted, match="no update of epoch"):
            await receiver.commit(weights_pb2.CommitWeightUpdateRequest(epoch=report.epoch))


async def test_a_commit_waits_for_the_group_that_is_being_generated(engines, executor, changed):
    async with fleet_of(engines[:1], executor) as fleet:
        lock = fleet.workers[0].generation_lock
        await lock.acquire()
        update = asyncio.create_task(fleet.publish(changed, 1))
        await asyncio.sleep(1.0)
        assert not update.done()
        assert live(engines[0]) != expected(changed)
        lock.release()
        assert (await update).updated == ["w0"]
