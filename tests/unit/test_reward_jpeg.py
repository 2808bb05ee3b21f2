"""`jpeg_compressibility` and `jpeg_incompressibility` against OpenCV's encoder and their golden images."""

import cv2
import numpy as np
import pytest
from headwater_reward import checks
from headwater_reward.registry import RewardParams, ScoreItem
from headwater_reward.rewards.jpeg import JpegCompressibilityReward, JpegIncompressibilityReward


def scores(reward, *images):
    return [score.value for score in reward.score([ScoreItem(i[None], "", {}, RewardParams()) for i in images])]


@pytest.mark.parametrize("reward", [JpegCompressibilityReward(), JpegIncompressibilityReward()])
def test_the_golden_images_score_as_recorded(reward):
    golden = reward.golden_images()
    assert checks.compare(reward.name, golden, reward.score(
        [ScoreItem(g.image_HWC[None], g.prompt, {}, RewardParams()) for g in golden]
    )).passed  # fmt: skip


def test_the_score_is_kilobytes_at_quality_95_as_another_encoder_counts_them():
    image = np.random.default_rng(1).integers(0, 256, (96, 64, 3), np.uint8)
    options = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
    _, encoded = cv2.imencode(".jpg", image[:, :, ::-1], options)
    assert scores(JpegIncompressibilityReward(), image)[0] == pytest.approx(len(encoded) / 1000, rel=0.01)


def test_one_is_minus_the_other_and_detail_makes_the_difference():
    flat, noise = (golden.image_HWC for golden in JpegIncompressibilityReward().golden_images())
    large, small = scores(JpegIncompressibilityReward(), noise, flat)
    assert large > 5 * small > 0
    assert scores(JpegCompressibilityReward(), noise, flat) == [-large, -small]
