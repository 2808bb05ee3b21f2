"""The reward server over real gRPC: in this process for load and failures, as a process of its own for draining."""

import asyncio
import contextlib
import io
import re
import signal
import sys
import threading

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headwater_reward.config import RewardConfig
from headwater_reward.registry import Score
from headwater_reward.rewards.color_shape import ColorShapeReward, draw
from headwater_reward.rewards.ocr import OcrReward
from headwater_reward.service import RewardService
from PIL import Image, ImageDraw, ImageFont

from headwater.common.v1.reward_pb2 import RewardSpec
from headwater.common.v1.sample_pb2 import Media
from headwater.common.v1.tensor_pb2 import Tensor
from headwater.errors import DeadlineExceeded, InvalidArgument, NotFound, OutOfBudget, from_item_error
from headwater.reward.v1 import reward_pb2 as pb
from headwater.reward.v1 import reward_pb2_grpc as rpc
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.server import Server
from headwater.tensors import codec
from headwater.tensors.blobs import BlobStore


class GatedReward(ColorShapeReward):
    """`color_shape` under another name that scores only while its gate is open, and counts."""

    def __init__(self, name="gated"):
        self.name = name
        self.gate, self.entered, self.seen = threading.Event(), threading.Event(), 0

    def score(self, batch):
        self.entered.set()
        assert self.gate.wait(20)
        self.seen += len(batch)
        return super().score(batch)


class ForgetfulReward(ColorShapeReward):
    """Installs, loads, and returns zeros."""

    name = "forgetful"

    def score(self, batch):
        return [Score(0.0)] * len(batch)


@contextlib.asynccontextmanager
async def serving(*rewards, address=False, **settings):
    service = RewardService(rewards, RewardConfig(**settings))
    server = Server("127.0.0.1:0", name="reward")
    server.add(rpc.add_RewardServiceServicer_to_server, service, "headwater.reward.v1.RewardService")
    where = await server.start()
    await service.load()
    try:
        async with aio_channel(where) as channel:
            stub = rpc.RewardServiceStub(channel)
            yield (where, stub) if address else stub
    finally:
        for reward in rewards:
            if isinstance(reward, GatedReward):
                reward.gate.set()
        await service.drain()
        await server.stop(0)


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return Media(mime_type="image/png", data=buffer.getvalue())


def group(*media, prompt="a red circle", rewards=("color_shape",), **params):
    request = pb.ScoreGroupRequest(prompt=prompt, media=media or [png(draw("red", "circle"))])
    for name in rewards:
        request.rewards.add(name=name).params.update(params)
    return request


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_the_list_names_rewards_with_their_ranges_and_defaults():
    async with serving(ColorShapeReward(), OcrReward()) as stub:
        rewards = (await stub.ListRewards(pb.ListRewardsRequest(), timeout=10)).rewards
    assert [reward.name for reward in rewards] == ["color_shape", "ocr"]
    assert (rewards[0].minimum, rewards[0].maximum) == (0.0, 1.0)
    assert rewards[0].default_params["color_weight"] == 0.5
    assert not rewards[0].accepts_video


async def test_two_rewards_on_one_group_answer_in_the_order_of_the_request():
    image = Image.fromarray(draw("red", "square", 256))
    ImageDraw.Draw(image).text((60, 100), "HELLO", fill="white", font=ImageFont.load_default(size=44))
    request = group(
        png(np.asarray(image)),
        png(draw("red", "square")),
        prompt='a red square "hello"',
        rewards=("ocr", "color_shape"),
    )
    async with serving(ColorShapeReward(), OcrReward()) as stub:
        response = await stub.ScoreGroup(request, timeout=30)
    assert [[score.name for score in sample.scores] for sample in response.samples] == [["ocr", "color_shape"]] * 2
    assert [sample.scores[0].value for sample in response.samples] == [1.0, 0.0]
    assert response.samples[1].scores[1].value >= 0.95
    assert set(response.samples[1].scores[1].details) == {"color", "shape"}
    assert response.scoring_time.ToTimedelta().total_seconds() > 0


async def test_many_clients_at_once_each_get_their_own_scores():
    colors = ["red", "green", "blue", "yellow"]
    async with serving(ColorShapeReward(), max_batch=8, max_wait_ms=20) as stub:
        calls = [
            stub.ScoreGroup(
                group(*(png(draw(drawn, "circle")) for drawn in colors), prompt=f"a {asked} circle"), timeout=30
            )
            for asked in colors * 4
        ]
        for asked, response in zip(colors * 4, await asyncio.gather(*calls), strict=True):
            values = [sample.scores[0].value for sample in response.samples]
            assert [value >= 0.95 for value in values] == [color == asked for color in colors]


def bad_media():
    whole = png(draw("red", "circle"))
    huge = io.BytesIO()
    Image.new("L", (9000, 2)).save(huge, "PNG")
    bomb = io.BytesIO()
    Image.new("1", (8192, 8192)).save(bomb, "PNG")
    one_pixel = codec.encode(np.zeros((1, 1, 1, 3), np.uint8))
    not_finite = codec.encode(np.full((1, 1, 1, 3), np.nan, np.float32))
    two_frames = codec.encode(np.zeros((2, 8, 8, 3), np.uint8))
    return {
        "truncated": (Media(mime_type="image/png", data=whole.data[:-60]), "media[1]", "not a readable image/png"),
        "garbage": (Media(mime_type="image/jpeg", data=b"no image at all"), "media[1]", "not a readable image/jpeg"),
        "another format": (Media(mime_type="image/jpeg", data=whole.data), "media[1]", "not a readable"),
        "empty": (Media(mime_type="image/png", data=b""), "media[1].data", "0 bytes"),
        "nothing": (Media(mime_type="image/png"), "media[1]", "set data or blob"),
        "too wide": (Media(mime_type="image/png", data=huge.getvalue()), "media[1]", "9000x2"),
        "too many pixels": (Media(mime_type="image/png", data=bomb.getvalue()), "media[1]", "8192x8192"),
        "unknown type": (Media(mime_type="image/gif", data=b"GIF89a"), "media[1].mime_type", "image/png"),
        "a lie about size": (Media(mime_type="image/png", data=whole.data, width_px=32), "media[1].width_px", "has 64"),
        "not finite": (Media(mime_type="application/x-tensor", tensor=not_finite), "media[1].tensor", "not finite"),
        "video": (Media(mime_type="application/x-tensor", tensor=two_frames), "media[1]", "2 frames"),
        "flat tensor": (
            Media(mime_type="application/x-tensor", tensor=Tensor(spec=codec.make_spec(7, [3]), inline=b"abc")),
            "media[1].tensor.spec",
            "[F, H, W, 3]",
        ),
        "frames lie": (
            Media(mime_type="application/x-tensor", tensor=one_pixel, frame_count=2),
            "media[1].frame_count",
            "1",
        ),
    }


@pytest.mark.parametrize("case", sorted(bad_media()))
async def test_a_bad_image_in_the_middle_fails_alone(case):
    bad, field, words = bad_media()[case]
    good = png(draw("red", "circle"))
    async with serving(ColorShapeReward()) as stub:
        samples = (await stub.ScoreGroup(group(good, bad, good), timeout=20)).samples
    assert [sample.scores[0].WhichOneof("outcome") for sample in samples] == ["value", "error", "value"]
    assert samples[0].scores[0].value == samples[2].scores[0].value >= 0.95
    error = from_item_error(samples[1].scores[0].error)
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert words in error.message


async def test_jpeg_and_tensors_are_read_like_png():
    image = draw("red", "circle")
    jpeg = io.BytesIO()
    Image.fromarray(image).save(jpeg, "JPEG", quality=95)
    media = [
        Media(mime_type="image/jpeg", data=jpeg.getvalue()),
        Media(mime_type="application/x-tensor", tensor=codec.encode(image[np.newaxis])),
        Media(mime_type="application/x-tensor", tensor=codec.encode((image[np.newaxis] / 255).astype(np.float32))),
    ]
    async with serving(ColorShapeReward()) as stub:
        samples = (await stub.ScoreGroup(group(*media), timeout=20)).samples
    assert all(sample.scores[0].value >= 0.95 for sample in samples)


async def test_images_come_from_the_blob_store_when_it_is_configured(tmp_path):
    ref = BlobStore(str(tmp_path)).put("run/groups/g.bin", [png(draw("red", "circle")).data])[0]
    broken = type(ref)()
    broken.CopyFrom(ref)
    broken.checksum = "xxh3_128:" + "0" * 32
    media = [Media(mime_type="image/png", blob=ref), Media(mime_type="image/png", blob=broken)]
    async with serving(ColorShapeReward(), blob_root=str(tmp_path)) as stub:
        good, bad = (await stub.ScoreGroup(group(*media), timeout=20)).samples
    assert good.scores[0].value >= 0.95
    assert bad.scores[0].error.code == grpc.StatusCode.DATA_LOSS.value[0]
    async with serving(ColorShapeReward()) as stub:
        without_root = (await stub.ScoreGroup(group(media[0]), timeout=20)).samples[0]
    assert "--blob-root" in without_root.scores[0].error.message


async def test_an_unknown_reward_is_not_found_and_the_hosted_ones_are_named():
    async with serving(ColorShapeReward()) as stub:
        error = await failure(stub.ScoreGroup(group(rewards=("colour_shape",)), timeout=10))
        check = await failure(stub.CheckRewards(pb.CheckRewardsRequest(names=["ocr"]), timeout=10))
    assert (type(error), error.field, error.reason) == (NotFound, "rewards[0].name", "REWARD_UNKNOWN")
    assert "did you mean 'color_shape'" in error.message
    assert type(check) is NotFound


async def test_an_unknown_parameter_names_the_nearest_one():
    async with serving(ColorShapeReward()) as stub:
        error = await failure(stub.ScoreGroup(group(colour_weight=1.0), timeout=10))
        negative = await failure(stub.ScoreGroup(group(color_weight=-1.0), timeout=10))
    assert (type(error), error.field) == (InvalidArgument, "rewards[0].params.colour_weight")
    assert "did you mean 'color_weight'" in error.message
    assert negative.field == "rewards[0].params.color_weight"
    assert "-1.0" in negative.message


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ScoreGroupRequest(prompt="a red circle", rewards=[RewardSpec(name="color_shape")]), "media"),
        (group(rewards=()), "rewards"),
        (group(rewards=("color_shape", "color_shape")), "rewards[1].name"),
        (group(prompt="x" * 20_000), "prompt"),
    ],
)
async def test_a_request_that_cannot_be_tried_names_its_field(request_, field):
    async with serving(ColorShapeReward()) as stub:
        error = await failure(stub.ScoreGroup(request_, timeout=10))
    assert (type(error), error.field) == (InvalidArgument, field)


async def test_a_prompt_that_one_reward_cannot_use_leaves_the_other_reward_its_score():
    async with serving(ColorShapeReward(), OcrReward()) as stub:
        response = await stub.ScoreGroup(group(rewards=("ocr", "color_shape")), timeout=20)
    ocr, color_shape = response.samples[0].scores
    assert ocr.error.reason == "PROMPT_WITHOUT_TEXT"
    assert color_shape.value >= 0.95


async def test_a_full_queue_refuses_the_group_as_a_whole_with_a_time_to_retry():
    gated, other, image = GatedReward(), GatedReward("another"), png(draw("red", "circle"))
    other.gate.set()
    async with serving(gated, other, queue_limit=2) as stub:
        first = asyncio.ensure_future(stub.ScoreGroup(group(image, rewards=("gated",)), timeout=20))
        assert await asyncio.to_thread(gated.entered.wait, 10)
        second = asyncio.ensure_future(stub.ScoreGroup(group(image, image, rewards=("gated",)), timeout=20))
        await stub.ListRewards(pb.ListRewardsRequest(), timeout=10)  # sent later: the second call is in the queue
        refused = await failure(stub.ScoreGroup(group(image, rewards=("another", "gated")), timeout=20))
        assert isinstance(refused, OutOfBudget)
        assert refused.retry_after_s > 0
        gated.gate.set()
        assert len((await first).samples) == 1
        assert len((await second).samples) == 2
        await stub.ScoreGroup(group(image, rewards=("another",)), timeout=20)
        assert other.seen == 1  # nothing of the refused groups was queued


async def test_a_call_ends_at_its_deadline_and_what_waited_is_not_scored():
    gated, image = GatedReward(), png(draw("red", "circle"))
    async with serving(gated, max_batch=1) as stub:
        error = await failure(stub.ScoreGroup(group(image, image, image, rewards=("gated",)), timeout=0.5))
        assert isinstance(error, DeadlineExceeded)
        gated.gate.set()
        await stub.ScoreGroup(group(image, rewards=("gated",)), timeout=20)
        assert gated.seen == 2  # the one that was being scored, and the later call


async def test_a_call_without_a_deadline_gets_the_servers():
    gated = GatedReward()
    async with serving(gated, default_timeout_s=0.2) as stub:
        error = await failure(stub.ScoreGroup(group(rewards=("gated",))))
        gated.gate.set()
    assert isinstance(error, DeadlineExceeded)
    assert "allow more time" in error.message


async def test_a_slow_reward_does_not_hold_up_a_fast_one():
    gated = GatedReward()
    async with serving(gated, ColorShapeReward()) as stub:
        slow = asyncio.ensure_future(stub.ScoreGroup(group(rewards=("gated",)), timeout=20))
        assert await asyncio.to_thread(gated.entered.wait, 10)
        assert (await stub.ScoreGroup(group(), timeout=20)).samples[0].scores[0].value >= 0.95
        assert not slow.done()
        gated.gate.set()
        await slow


async def test_check_rewards_passes_for_good_ones_and_catches_one_that_returns_zeros():
    async with serving(ColorShapeReward(), OcrReward(), ForgetfulReward()) as stub:
        response = await stub.CheckRewards(pb.CheckRewardsRequest(), timeout=60)
        only = await stub.CheckRewards(pb.CheckRewardsRequest(names=["ocr"]), timeout=60)
    assert [(check.name, check.passed) for check in response.checks] == [
        ("color_shape", True), ("forgetful", False), ("ocr", True),
    ]  # fmt: skip
    assert response.checks[1].worst_error == pytest.approx(1.0)
    assert "red circle: scored 0.0000, recorded 1.0000" in response.checks[1].detail
    assert [check.name for check in only.checks] == ["ocr"]


async def test_the_list_tells_the_last_self_test():
    async with serving(ColorShapeReward(), ForgetfulReward()) as stub:
        before = (await stub.ListRewards(pb.ListRewardsRequest(), timeout=10)).rewards
        await stub.CheckRewards(pb.CheckRewardsRequest(), timeout=60)
        after = (await stub.ListRewards(pb.ListRewardsRequest(), timeout=10)).rewards
    assert [info.HasField("check") for info in before] == [False, False]
    assert [(info.name, info.check.passed) for info in after] == [("color_shape", True), ("forgetful", False)]


async def start_process(*flags):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_reward", "--bind", "127.0.0.1:0", *flags, stderr=asyncio.subprocess.PIPE
    )  # fmt: skip
    return process


async def log_line(process, pattern):
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if match := re.search(pattern, line):
                return match
    raise AssertionError(f"the log ended without {pattern}")


async def test_sigterm_lets_running_groups_finish_and_then_ends_the_process():
    process = await start_process("--rewards", "ocr")
    address = (await log_line(process, r"listens on (\S+)"))[1]
    await log_line(process, "checked rewards=ocr")
    async with aio_channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="headwater.reward.v1.RewardService"), timeout=5
        )
        (info,) = (await rpc.RewardServiceStub(channel).ListRewards(pb.ListRewardsRequest(), timeout=5)).rewards
        assert info.check.passed  # golden images come before SERVING
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = rpc.RewardServiceStub(channel)
        image = png(np.full((64, 64, 3), 255, np.uint8))
        request = group(*[image] * 20, prompt='"hello"', rewards=("ocr",))
        running = asyncio.ensure_future(stub.ScoreGroup(request, timeout=60))
        await stub.ListRewards(pb.ListRewardsRequest(), timeout=5)  # sent later: the group has arrived
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        await log_line(process, "drains")
        refused = await failure(stub.ScoreGroup(request, timeout=10))
        assert refused.code == grpc.StatusCode.UNAVAILABLE
        response = await running
    assert [sample.scores[0].value for sample in response.samples] == [0.0] * 20
    async with asyncio.timeout(20):
        await process.stderr.read()
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--rewards", "orc"], 1, "did you mean 'ocr'"),
        (["--max-batch", "0"], 2, "--max-batch is 0; it must be at least 1"),
        (["--bind", "0.0.0.0:0"], 1, "--insecure"),
    ],
)
async def test_a_configuration_that_cannot_work_ends_the_process_with_a_remedy(flags, status, words):
    process = await start_process(*flags)
    async with asyncio.timeout(60):
        stderr = (await process.stderr.read()).decode()
        assert await process.wait() == status
    assert words in stderr
    assert "Traceback" not in stderr
