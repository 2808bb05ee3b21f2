"""`remote`: one reward server behind another, over real gRPC."""

import asyncio

import numpy as np
import pytest
from headwater_reward import registry
from headwater_reward.rewards.color_shape import ColorShapeReward, draw
from headwater_reward.settings import RewardSettings
from test_reward_service import ForgetfulReward, GatedReward, failure, group, png, serving

from headwater.common.v1.sample_pb2 import Media
from headwater.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from headwater.reward.v1 import reward_pb2 as pb


def remote(address, reward="color_shape", name="far", **options):
    chosen = {"address": address, "reward": reward, **options}
    return registry.create([], {name: RewardSettings("remote", options=chosen)})[0]


async def test_scores_parameters_and_errors_are_those_of_the_other_server():
    media = [png(draw("red", "circle")), Media(mime_type="image/png", data=b"no"), png(draw("blue", "square"))]
    async with serving(ColorShapeReward(), address=True) as (there, stub), serving(remote(there)) as here:
        direct = await stub.ScoreGroup(group(*media, color_weight=1.0), timeout=20)
        passed_on = await here.ScoreGroup(group(*media, rewards=("far",), color_weight=1.0), timeout=20)
        wrong = await failure(here.ScoreGroup(group(rewards=("far",), colour=1), timeout=20))
        (info,) = (await here.ListRewards(pb.ListRewardsRequest(), timeout=20)).rewards
    values = [[sample.scores[0].value for sample in answer.samples] for answer in (direct, passed_on)]
    assert values[0] == values[1]
    assert passed_on.samples[1].scores[0].error.reason == "MEDIA_INVALID"
    assert "did you mean 'color'" in wrong.message
    assert (info.name, info.maximum, info.default_params["color_weight"]) == ("far", 1.0, 0.5)


async def test_a_group_too_large_for_one_message_goes_in_parts():
    big = png(np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8))  # 3 MB
    async with serving(ColorShapeReward(), address=True) as (there, _), serving(remote(there), max_wait_ms=200) as here:
        calls = [here.ScoreGroup(group(*[big] * 2, rewards=("far",)), timeout=30) for _ in range(2)]
        answers = await asyncio.gather(*calls)
    assert all(s.scores[0].WhichOneof("outcome") == "value" for answer in answers for s in answer.samples)


async def test_the_self_test_is_made_there():
    async with (
        serving(ColorShapeReward(), ForgetfulReward(), address=True) as (there, _),
        serving(remote(there), remote(there, "forgetful", "bad")) as here,
    ):
        checks = (await here.CheckRewards(pb.CheckRewardsRequest(), timeout=60)).checks
    assert [(check.name, check.passed) for check in checks] == [("bad", False), ("far", True)]


async def test_a_slow_or_absent_server_is_an_error_of_each_sample():
    gated = GatedReward()
    async with serving(gated, address=True) as (there, _), serving(remote(there, "gated", timeout_s=0.5)) as here:
        answer = await here.ScoreGroup(group(rewards=("far",)), timeout=20)
        gated.gate.set()
    assert answer.samples[0].scores[0].error.code == 4  # DEADLINE_EXCEEDED
    with pytest.raises((Unavailable, DeadlineExceeded)):
        await asyncio.to_thread(remote(there, timeout_s=1.0).load, 1)


async def test_a_reward_that_is_not_there_stops_the_start():
    async with serving(ColorShapeReward(), address=True) as (there, _):
        with pytest.raises(FailedPrecondition, match="hosts no reward 'ocr', but color_shape"):
            await asyncio.to_thread(remote(there, "ocr").load, 1)
