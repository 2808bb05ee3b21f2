"""The rollout worker over real gRPC: real engine on a tiny SD3, real reward server, real Valkey."""

import asyncio
import contextlib
import io
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.struct_pb2 import Struct
from headwater_reward.config import RewardConfig
from headwater_reward.registry import Score
from headwater_reward.rewards.color_shape import ColorShapeReward
from headwater_reward.service import RewardService
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest
from headwater_rollout.worker import Worker
from PIL import Image

from headwater.common.v1.reward_pb2 import RewardFailurePolicy, RewardRole, RewardSpec
from headwater.common.v1.sample_pb2 import FilterVerdict, WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams, StepWindow, TransitionParams
from headwater.diffusion import tiny_sd3
from headwater.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    from_item_error,
)
from headwater.reward.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from headwater.rollout.v1 import rollout_pb2 as pb
from headwater.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.server import Server
from headwater.sampling import resolve
from headwater.stream.scored import ScoredStream
from headwater.tensors import torch_codec
from headwater.tensors.blobs import BlobStore

STEPS = 4
DOWN = "127.0.0.1:1"  # nothing listens on port 1


class SlowableEngine:
    """A real engine that can be held up inside `generate`, and counts its groups."""

    def __init__(self, engine):
        self.engine, self.calls, self.gate, self.entered = engine, 0, threading.Event(), threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, request):
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(30)
        return self.engine.generate(request)


class GatedReward(ColorShapeReward):
    """`color_shape` under another name that can be held up."""

    name = "gated"

    def __init__(self):
        self.gate, self.entered = threading.Event(), threading.Event()

    def score(self, batch):
        self.entered.set()
        assert self.gate.wait(30)
        return super().score(batch)


class BrokenReward(ColorShapeReward):
    """Fails on everything."""

    name = "broken"

    def score(self, batch):
        raise RuntimeError("the scorer has no weights")


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def loaded_engine(tmp_path_factory, executor):
    model = tiny_sd3.build(tmp_path_factory.mktemp("models") / tiny_sd3.DEFAULT_NAME)
    engine = executor.submit(load_engine, "diffusers", model, "fp32", "cpu").result()
    yield engine
    executor.submit(engine.close).result()


@pytest.fixture
def engine(loaded_engine):
    return SlowableEngine(loaded_engine)


@contextlib.asynccontextmanager
async def reward_server(*rewards, bind="127.0.0.1:0", checked=False, stays=True):
    service = RewardService(rewards or (ColorShapeReward(),), RewardConfig())
    server = Server(bind, name="reward")
    server.add(add_RewardServiceServicer_to_server, service, "headwater.reward.v1.RewardService")
    address = await server.start()
    await service.load()
    if checked:
        await service.check()
    await server.set_serving(stays)
    try:
        yield address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def worker_at(engine, executor, *rewards, **settings):
    config = RolloutConfig(model="", bind="127.0.0.1:0", worker_id="w0", rewards=rewards, **settings)
    worker = Worker(config, engine, executor)
    address = await worker.start()
    try:
        async with aio_channel(address) as channel:
            yield worker, RolloutServiceStub(channel)
    finally:
        await worker.close()
        await worker.server.stop(0)


def request_for(n=2, **fields):
    values = {
        "run_id": "r",
        "group_id": "g",
        "prompt": "a red circle",
        "seeds": range(100, 100 + n),
        "sampling": SamplingParams(
            steps=STEPS,
            height_px=64,
            width_px=64,
            transition=TransitionParams(window=StepWindow(size=2)),
        ),
        "rewards": [RewardSpec(name="color_shape", params=params(color="red", shape="circle"))],
    }
    return pb.GenerateGroupRequest(**(values | fields))


def params(**values):
    struct = Struct()
    struct.update(values)
    return struct


async def generate(stub, request, timeout=60):
    """The samples and the outcome; raises the HeadwaterError of the call."""
    try:
        responses = [response async for response in stub.GenerateGroup(request, timeout=timeout)]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    assert [response.WhichOneof("event") for response in responses[:-1]] == ["sample"] * (len(responses) - 1)
    return [response.sample for response in responses[:-1]], responses[-1].outcome


async def eventually(condition, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_group_is_generated_scored_and_published(engine, executor, redis_url, run_id, tmp_path):
    request = request_for(4, run_id=run_id, publish=pb.PUBLISH_MODE_STREAM, return_media=True)
    request.rewards.add(name="color_shape_2").role = RewardRole.REWARD_ROLE_MONITOR

    class Second(ColorShapeReward):
        name = "color_shape_2"

    request.rewards[0].weight = 2.0
    request.rewards[1].params.update({"color": "blue", "shape": "square"})
    async with (
        reward_server() as first,
        reward_server(Second()) as second,  # each reward finds the server that hosts it
        worker_at(engine, executor, first, second, redis=redis_url, blob_root=str(tmp_path)) as (worker, stub),
    ):
        worker.receiver.version = WeightVersion(run_id=run_id, step=3)
        samples, outcome = await generate(stub, request)
    assert outcome.published
    assert outcome.worker_id == "w0"
    assert outcome.filter_decision.verdict == FilterVerdict.FILTER_VERDICT_KEPT
    assert outcome.weight_version == WeightVersion(run_id=run_id, step=3)
    assert [sample.id.index for sample in samples] == [0, 1, 2, 3]
    for sample in samples:
        assert [score.name for score in sample.rewards] == ["color_shape", "color_shape_2"]
        assert sample.total_reward == 2.0 * sample.rewards[0].value
        assert sample.first_step_version == sample.last_step_version == outcome.weight_version
        assert not sample.HasField("trajectory")

    stream = ScoredStream(redis_url, run_id)
    (entry,) = stream.read(10)
    group = entry.group
    assert (group.group_id, group.prompt, group.worker_id) == ("g", "a red circle", "w0")
    direct = engine.engine.generate(
        GroupRequest("a red circle", tuple(request.seeds), resolve(request.sampling, group_seed=request.seeds[0]))
    )
    fetch = BlobStore(str(tmp_path)).get
    conditioning = {item.name: torch_codec.decode(item.tensor, fetch) for item in group.conditionings[0].positive}
    assert all(torch.equal(conditioning[name], value) for name, value in direct.positive.items())
    for index, sample in enumerate(group.samples):
        trajectory = sample.trajectory
        assert torch.equal(torch_codec.decode(trajectory.latents, fetch), direct.latents[index])
        assert torch.equal(torch_codec.decode(trajectory.log_probs, fetch), direct.log_probs[index])
        assert torch.equal(torch_codec.decode(trajectory.sigmas, fetch), direct.sigmas)
        assert torch.equal(torch_codec.decode(trajectory.timesteps, fetch), direct.timesteps)
        assert tuple(trajectory.trained_steps) == direct.trained_steps
        assert tuple(trajectory.latent_positions) == direct.latent_positions
        assert trajectory.conditioning_id == group.conditionings[0].id
        assert sample.total_reward == samples[index].total_reward
        png = bytes(fetch(sample.media.blob))
        assert png == samples[index].media.data
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), direct.media[index, 0])


async def test_a_deterministic_group_publishes_its_final_latents_only(engine, executor, redis_url, run_id, tmp_path):
    sampling = SamplingParams(steps=STEPS, height_px=64, width_px=64)
    request = request_for(run_id=run_id, publish=pb.PUBLISH_MODE_STREAM, rewards=[], sampling=sampling)
    async with worker_at(engine, executor, redis=redis_url, blob_root=str(tmp_path)) as (_, stub):
        await generate(stub, request)
    (entry,) = ScoredStream(redis_url, run_id).read(10)
    direct = engine.engine.generate(
        GroupRequest(request.prompt, tuple(request.seeds), resolve(sampling, group_seed=request.seeds[0]))
    )
    fetch = BlobStore(str(tmp_path)).get
    for index, sample in enumerate(entry.group.samples):
        trajectory = sample.trajectory
        assert (list(trajectory.latent_positions), list(trajectory.trained_steps)) == ([STEPS], [])
        assert torch.equal(torch_codec.decode(trajectory.latents, fetch), direct.latents[index])
        assert torch_codec.decode(trajectory.log_probs, fetch).shape == (0,)
        assert torch.equal(torch_codec.decode(trajectory.sigmas, fetch), direct.sigmas)


async def test_publishing_a_group_twice_leaves_one_entry_and_one_blob(engine, executor, redis_url, run_id, tmp_path):
    request = request_for(run_id=run_id, publish=pb.PUBLISH_MODE_STREAM, rewards=[])
    async with worker_at(engine, executor, redis=redis_url, blob_root=str(tmp_path)) as (_, stub):
        outcomes = [(await generate(stub, request))[1] for _ in range(2)]
    assert [outcome.published for outcome in outcomes] == [True, True]
    stream = ScoredStream(redis_url, run_id)
    (entry,) = stream.read(10)
    (blob,) = (tmp_path / run_id / "groups").iterdir()
    assert entry.group.samples[0].media.blob.uri.endswith(blob.name)


@pytest.mark.parametrize("size", [64])
async def test_the_largest_group_fits_a_stream_entry(engine, executor, redis_url, run_id, tmp_path, size):
    request = request_for(size, run_id=run_id, group_id="g" * 64, publish=pb.PUBLISH_MODE_STREAM)
    request.sampling.transition.ClearField("window")
    async with (
        reward_server() as reward,
        worker_at(engine, executor, reward, redis=redis_url, blob_root=str(tmp_path)) as (_, stub),
    ):
        _, outcome = await generate(stub, request)
    assert outcome.published


async def test_a_group_without_variance_is_dropped(engine, executor, redis_url, run_id, tmp_path):
    request = request_for(1, run_id=run_id, publish=pb.PUBLISH_MODE_STREAM, filters=["zero_variance"])
    async with (
        reward_server() as reward,
        worker_at(engine, executor, reward, redis=redis_url, blob_root=str(tmp_path)) as (_, stub),
    ):
        samples, outcome = await generate(stub, request)
    assert len(samples) == 1
    assert outcome.filter_decision.verdict == FilterVerdict.FILTER_VERDICT_DROPPED
    assert outcome.filter_decision.filter == "zero_variance"
    assert not outcome.published
    assert ScoredStream(redis_url, run_id).read(1) == []
    assert list(tmp_path.rglob("*.bin")) == []


BAD = [
    ({"prompt": " "}, InvalidArgument, "prompt"),
    ({"seeds": []}, InvalidArgument, "seeds"),
    ({"seeds": range(65)}, InvalidArgument, "seeds"),
    ({"group_id": "../g"}, InvalidArgument, "group_id"),
    ({"sampling": SamplingParams(steps=4, height_px=60, width_px=64)}, InvalidArgument, "sampling.height_px"),
    (
        {
            "sampling": SamplingParams(
                steps=4, height_px=64, width_px=64, transition=TransitionParams(window=StepWindow(size=5))
            )
        },
        InvalidArgument,
        "sampling.transition.window",
    ),
    ({"filters": ["zero_varianse"]}, InvalidArgument, "filters[0]"),
    ({"filters": ["zero_variance"], "rewards": []}, InvalidArgument, "filters[0]"),
    ({"rewards": [RewardSpec(name="color_shape", weight=float("nan"))]}, InvalidArgument, "rewards[0].weight"),
    ({"rewards": [RewardSpec(name="color_shape")] * 2}, InvalidArgument, "rewards[1].name"),
    (
        {
            "rewards": [
                RewardSpec(name="color_shape", failure_policy=RewardFailurePolicy.REWARD_FAILURE_POLICY_DROP_REWARD)
            ]
        },
        InvalidArgument,
        "rewards[0].failure_policy",
    ),
    (
        {"rewards": [RewardSpec(name="color_shape", params=params(colour=1))]},
        InvalidArgument,
        "rewards[0].params.colour",
    ),
    ({"rewards": [RewardSpec(name="beauty")]}, NotFound, "rewards[0].name"),
    ({"publish": pb.PUBLISH_MODE_STREAM}, FailedPrecondition, "publish"),
    ({"min_weight_version": WeightVersion(run_id="r", step=1)}, FailedPrecondition, "min_weight_version"),
]


@pytest.mark.parametrize(("fields", "error", "field"), BAD, ids=[field for _, _, field in BAD])
async def test_bad_requests_are_refused_by_field_before_generating(engine, executor, fields, error, field):
    async with reward_server() as reward, worker_at(engine, executor, reward) as (_, stub):
        with pytest.raises(error) as caught:
            await generate(stub, request_for(**fields))
    assert caught.value.field == field
    assert engine.calls == 0


async def test_an_unknown_reward_names_the_known_ones(engine, executor):
    async with reward_server() as reward, worker_at(engine, executor, reward) as (_, stub):
        with pytest.raises(NotFound, match=r"beauty.*color_shape"):
            await generate(stub, request_for(rewards=[RewardSpec(name="beauty")]))


async def test_freshness_is_compared_within_a_run(engine, executor):
    async with worker_at(engine, executor) as (worker, stub):
        worker.receiver.version = WeightVersion(run_id="r", step=5)
        for version in (WeightVersion(run_id="r", step=5), WeightVersion()):
            await generate(stub, request_for(rewards=[], min_weight_version=version))
        for version in (WeightVersion(run_id="r", step=6), WeightVersion(run_id="other", step=0)):
            with pytest.raises(FailedPrecondition, match="run 'r' step 5"):
                await generate(stub, request_for(rewards=[], min_weight_version=version))


async def test_publishing_needs_a_run_id_and_a_redis_that_answers(engine, executor, redis_url, tmp_path):
    publish = {"publish": pb.PUBLISH_MODE_STREAM, "rewards": []}
    async with worker_at(engine, executor, redis=redis_url, blob_root=str(tmp_path)) as (_, stub):
        with pytest.raises(InvalidArgument, match="run_id is empty"):
            await generate(stub, request_for(run_id="", **publish))
    async with worker_at(engine, executor, redis=f"redis://{DOWN}", blob_root=str(tmp_path)) as (worker, stub):
        with pytest.raises(Unavailable, match=f"Redis at {DOWN}.*--redis"):
            await generate(stub, request_for(**publish))
        assert [c.reason for c in worker.status.report().conditions] == ["REDIS_UNAVAILABLE"]
    assert engine.calls == 0


async def test_a_group_waits_for_a_killed_reward_server_and_goes_on(engine, executor):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with worker_at(engine, executor, address) as (worker, stub):
        async with reward_server(bind=address):
            await generate(stub, request_for())
            assert list(worker.status.report().conditions) == []
        waiting = asyncio.create_task(generate(stub, request_for()))
        await eventually(lambda: worker.status.report().conditions)
        (condition,) = worker.status.report().conditions
        assert condition.reason == "REWARD_UNAVAILABLE"
        assert f"reward server {address} (color_shape) does not answer" in condition.message
        assert "headwater-reward --bind" in condition.message
        assert not waiting.done()
        async with reward_server(bind=address):
            samples, _ = await waiting
            assert all(sample.HasField("total_reward") for sample in samples)
            await eventually(lambda: not worker.status.report().conditions)
    assert engine.calls == 2  # the waiting group was not generated again


async def test_rewards_that_stay_away_end_the_group_with_a_clear_error(engine, executor):
    async with worker_at(engine, executor, DOWN) as (_, stub):
        started = time.monotonic()
        with pytest.raises(Unavailable, match=f"reward server {DOWN}.*headwater-reward") as caught:
            await generate(stub, request_for(), timeout=3)
        assert time.monotonic() - started < 3.5
    assert caught.value.reason == "REWARD_UNAVAILABLE"
    async with worker_at(engine, executor) as (_, stub):
        with pytest.raises(FailedPrecondition, match="--reward"):
            await generate(stub, request_for())


async def test_failure_policies(engine, executor):
    policy = RewardFailurePolicy
    monitor = RewardSpec(name="broken", role=RewardRole.REWARD_ROLE_MONITOR)
    drop = RewardSpec(name="broken", failure_policy=policy.REWARD_FAILURE_POLICY_DROP_GROUP)
    fail = RewardSpec(name="broken", failure_policy=policy.REWARD_FAILURE_POLICY_FAIL_RUN)
    async with (
        reward_server(ColorShapeReward(), BrokenReward()) as reward,
        worker_at(engine, executor, reward, DOWN) as (_, stub),
    ):
        kept = request_for()
        kept.rewards.append(monitor)
        samples, outcome = await generate(stub, kept)
        assert outcome.filter_decision.verdict == FilterVerdict.FILTER_VERDICT_KEPT
        assert all(sample.HasField("total_reward") for sample in samples)
        assert "no weights" in from_item_error(samples[0].rewards[1].error).message

        samples, outcome = await generate(stub, request_for(rewards=[drop]))
        assert outcome.filter_decision.filter == "reward:broken"
        assert not samples[0].HasField("total_reward")

        with pytest.raises(FailedPrecondition, match=r"fail the run.*no weights") as caught:
            await generate(stub, request_for(rewards=[fail]))
        assert caught.value.reason == "REWARD_FAILS_RUN"


async def test_a_monitor_whose_server_is_away_stops_nothing(engine, executor):
    request = request_for()
    request.rewards.add(name="elsewhere", role=RewardRole.REWARD_ROLE_MONITOR)
    async with reward_server() as reward, worker_at(engine, executor, reward, DOWN) as (worker, stub):
        samples, _ = await generate(stub, request)
        assert from_item_error(samples[0].rewards[1].error).reason == "REWARD_UNAVAILABLE"
        assert worker.status.report().conditions[0].reason == "REWARD_UNAVAILABLE"


class ForgetfulReward(ColorShapeReward):
    """Loads, and returns zeros."""

    name = "forgetful"

    def score(self, batch):
        return [Score(0.0)] * len(batch)


async def test_a_reward_that_fails_its_golden_images_is_refused_before_generating(engine, executor):
    async with (
        reward_server(ForgetfulReward(), checked=True) as reward,
        worker_at(engine, executor, reward) as (_, stub),
    ):
        with pytest.raises(FailedPrecondition, match=r"forgetful.*golden images.*scored 0\.0000") as caught:
            await generate(stub, request_for(rewards=[RewardSpec(name="forgetful")]))
        assert (caught.value.reason, caught.value.field) == ("REWARD_CHECK_FAILED", "rewards[0].name")
    assert engine.calls == 0


@pytest.mark.parametrize("name", ["forgetful", "no_such_reward"])
@pytest.mark.parametrize("policy", [0, RewardFailurePolicy.REWARD_FAILURE_POLICY_FAIL_RUN])
async def test_a_monitor_never_stops_a_run(engine, executor, name, policy):
    request = request_for()
    request.rewards.add(name=name, role=RewardRole.REWARD_ROLE_MONITOR, failure_policy=policy)
    async with (
        reward_server(ForgetfulReward(), ColorShapeReward(), checked=True) as reward,
        worker_at(engine, executor, reward) as (_, stub),
    ):
        samples, _ = await generate(stub, request)
    assert all(sample.HasField("total_reward") for sample in samples)


async def test_a_draining_server_gets_no_calls(engine, executor):
    async with reward_server(stays=False) as reward, worker_at(engine, executor, reward) as (_, stub):
        with pytest.raises(Unavailable, match=f"reward server {reward}"):
            await generate(stub, request_for(), timeout=2)


async def test_the_next_group_is_generated_while_one_is_scored(engine, executor):
    reward = GatedReward()
    async with reward_server(reward) as address, worker_at(engine, executor, address) as (worker, stub):
        groups = [
            asyncio.create_task(generate(stub, request_for(group_id=f"g{i}", rewards=[RewardSpec(name="gated")])))
            for i in range(2)
        ]
        await eventually(reward.entered.is_set)
        await eventually(lambda: engine.calls == 2)
        assert worker.status.report().active_groups == 2
        reward.gate.set()
        await asyncio.gather(*groups)
        assert worker.status.report().finished_groups == 2


async def test_weights_stay_put_until_an_abandoned_group_has_ended(engine, executor):
    engine.gate.clear()
    async with worker_at(engine, executor) as (worker, stub):
        call = stub.GenerateGroup(request_for(rewards=[]))
        reading = asyncio.ensure_future(call.read())
        await eventually(engine.entered.is_set)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await eventually(lambda: worker.status.active_groups == 0)
        assert worker.generation_lock.locked()  # the engine still denoises
        engine.gate.set()
        await eventually(lambda: not worker.generation_lock.locked())
        await generate(stub, request_for(rewards=[]))


async def test_a_deadline_during_generation(engine, executor):
    engine.gate.clear()
    async with worker_at(engine, executor) as (_, stub):
        with pytest.raises(DeadlineExceeded, match="was not generated in time"):
            await generate(stub, request_for(rewards=[]), timeout=1)
        engine.gate.set()
        await generate(stub, request_for(rewards=[]))


async def test_a_group_taken_before_the_drain_finishes_even_when_its_turn_comes_later(engine, executor):
    async with reward_server() as reward, worker_at(engine, executor, reward) as (worker, stub):
        await worker.generation_lock.acquire()  # another group, or a weight commit
        waiting = asyncio.create_task(generate(stub, request_for()))
        await eventually(lambda: worker.status.active_groups == 1)
        draining = asyncio.create_task(worker.drain())
        await asyncio.sleep(0.1)
        worker.generation_lock.release()
        samples, _ = await waiting
        assert len(samples) == 2
        await draining


async def test_states_refuse_new_groups(engine, executor):
    async with worker_at(engine, executor) as (worker, stub):
        worker.receiver.quarantined = "tensor x differs"
        assert (await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())).state == pb.WORKER_STATE_QUARANTINED
        with pytest.raises(Unavailable, match="tensor x differs"):
            await generate(stub, request_for(rewards=[]))
        worker.receiver.quarantined = None
        await stub.ReleaseMemory(pb.ReleaseMemoryRequest())
        await stub.ReleaseMemory(pb.ReleaseMemoryRequest())
        with pytest.raises(Unavailable, match="ResumeMemory"):
            await generate(stub, request_for(rewards=[]))
        await stub.ResumeMemory(pb.ResumeMemoryRequest())
        await generate(stub, request_for(rewards=[]))

        engine.gate.clear()
        engine.entered.clear()
        running = asyncio.create_task(generate(stub, request_for(rewards=[])))
        await eventually(engine.entered.is_set)
        draining = asyncio.create_task(worker.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="drains"):
            await generate(stub, request_for(rewards=[]))
        assert not draining.done()
        engine.gate.set()
        samples, _ = await running
        assert len(samples) == 2
        await draining


async def test_worker_info_and_weights(engine, executor):
    async with worker_at(engine, executor) as (_, stub):
        info = await stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        assert (info.worker_id, info.engine, info.family) == ("w0", "diffusers", "sd3")
        assert (info.size_multiple_px, info.max_group_size) == (16, 64)
        weights = await stub.GetWeights(pb.GetWeightsRequest(component="transformer"))
        assert len(weights.fingerprints) > 10
