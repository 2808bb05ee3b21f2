"""ScoreGroup under requests made by chance: HEADWATER_FUZZ_REQUESTS of them (300), the same for the same number.

Whatever comes, the call is answered within its deadline with scores or a status that blames the request, and the server
then still scores a good group.
"""

import os
import random

import grpc
import pytest
from google.protobuf.message import DecodeError
from headwater_reward.rewards.color_shape import ColorShapeReward, draw
from test_reward_service import group, png, serving

from headwater.common.v1.sample_pb2 import Media
from headwater.common.v1.tensor_pb2 import DType
from headwater.reward.v1 import reward_pb2 as pb

REQUESTS = int(os.environ.get("HEADWATER_FUZZ_REQUESTS", "300"))
METHOD = "/headwater.reward.v1.RewardService/ScoreGroup"
BLAMES_THE_REQUEST = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}


def random_bytes(rng):
    return rng.randbytes(rng.randrange(2000))


def mutated(rng):
    whole = bytearray(group().SerializeToString())
    for _ in range(rng.randint(1, 20)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole)


def truncated_image(rng):
    medium = png(draw("red", "circle"))
    medium.data = medium.data[: rng.randrange(len(medium.data))] + rng.randbytes(rng.choice((0, 9)))
    medium.mime_type = rng.choice(("image/png", "image/jpeg", "image/webp", "text/html", ""))
    return group(medium, png(draw("red", "circle"))).SerializeToString()


def huge_claim(rng):
    medium = png(draw("red", "circle"))
    medium.height_px, medium.width_px, medium.frame_count = (rng.choice((0, 64, 2**31, 2**32 - 1)) for _ in range(3))
    return group(medium, prompt="a red circle" * rng.choice((1, 10_000))).SerializeToString()


def wrong_shape(rng):
    medium = Media(mime_type="application/x-tensor")
    medium.tensor.spec.dtype = rng.choice((DType.D_TYPE_UINT8, DType.D_TYPE_FLOAT32, 0))
    medium.tensor.spec.shape.extend(rng.choice((0, 1, 3, 64, 2**40, 2**62)) for _ in range(rng.randrange(6)))
    medium.tensor.inline = rng.randbytes(rng.choice((0, 3, 64 * 3)))
    return group(medium, color_weight=rng.choice((-1, 0.5, float("inf"), "x"))).SerializeToString()


def blames_the_request(payload, code):
    try:
        pb.ScoreGroupRequest.FromString(payload)
    except DecodeError:
        return True  # gRPC itself refuses what is no message
    return code in BLAMES_THE_REQUEST


@pytest.mark.timeout(300 + REQUESTS)
async def test_no_request_crashes_or_hangs_the_server():
    rng, answered = random.Random(REQUESTS), 0
    async with serving(ColorShapeReward()) as stub:
        raw = stub.channel.unary_unary(METHOD)  # bytes in, bytes out
        for _ in range(REQUESTS):
            payload = rng.choice((random_bytes, mutated, truncated_image, huge_claim, wrong_shape))(rng)
            try:
                answer = pb.ScoreGroupResponse.FromString(await raw(payload, timeout=20))
                outcomes = [score for sample in answer.samples for score in sample.scores]
                assert outcomes
                assert all(score.WhichOneof("outcome") for score in outcomes)
                assert all(score.error.code != grpc.StatusCode.INTERNAL.value[0] for score in outcomes)
                answered += 1
            except grpc.aio.AioRpcError as error:
                if not blames_the_request(payload, error.code().name):
                    raise AssertionError(f"{payload!r} gave {error}") from error
        assert 0 < answered < REQUESTS
        assert (await stub.ScoreGroup(group(), timeout=20)).samples[0].scores[0].value > 0.95
