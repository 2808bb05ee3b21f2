"""The color_shape reward on drawn images and on noise."""

import itertools

import cv2
import numpy as np
import pytest
from headwater_reward import checks
from headwater_reward.registry import ScoreItem
from headwater_reward.rewards.color_shape import SHAPES, ColorShapeParams, ColorShapeReward, draw
from headwater_reward.rewards.palette import PALETTE

from headwater.errors import InvalidArgument


def score(image, prompt="", metadata=None, **params):
    item = ScoreItem(image[np.newaxis], prompt, metadata or {}, ColorShapeParams(**params))
    return ColorShapeReward().score([item])[0]


def background_for(color):
    return (20, 20, 20) if color in ("white", "gray") else (230, 230, 230)


@pytest.mark.parametrize("side_px", [32, 64, 512])
def test_a_perfect_drawing_scores_high_for_every_colour_and_shape(side_px):
    for color in PALETTE:
        for shape in SHAPES:
            result = score(draw(color, shape, side_px, background_for(color)), f"a {color} {shape}")
            assert result.value >= 0.95, (color, shape, side_px, result)


def test_a_wrong_shape_gets_the_colour_half_only():
    for drawn in SHAPES:
        for asked in set(SHAPES) - {drawn}:
            result = score(draw("red", drawn), f"a red {asked}")
            assert result.details["color"] == 1.0
            assert result.details["shape"] < 0.1, (drawn, asked)


def test_a_wrong_colour_scores_clearly_lower():
    for drawn in set(PALETTE) - {"gray"}:
        for asked in set(PALETTE) - {drawn, "gray"}:
            value = score(draw(drawn, "circle", 64, (128, 128, 128)), f"a {asked} circle").value
            assert value < 0.55, (drawn, asked, value)


def test_the_score_rises_all_the_way_from_noise_to_the_target():
    noise = np.random.default_rng(0).normal(128, 25, (64, 64, 3))
    goal = draw("red", "circle", background=(255, 255, 255)).astype(np.float64)
    mixes = [(noise * (1 - t) + goal * t).clip(0, 255).astype(np.uint8) for t in np.linspace(0, 1, 9)]
    values = [score(image, "a red circle").value for image in mixes]
    assert all(low < high or low >= 0.98 for low, high in itertools.pairwise(values)), values
    assert values[-1] >= 0.95
    assert values[0] < 0.5


def test_noise_images_differ_in_score_and_a_small_tint_raises_it():
    noise = np.random.default_rng(1).normal(128, 20, (8, 64, 64, 3)).clip(0, 255).astype(np.uint8)
    values = [score(image, "a red circle").value for image in noise]
    assert len(set(values)) == len(values)
    for image, value in zip(noise, values, strict=True):
        tinted = image.copy()
        tinted[..., 0] = np.minimum(255, tinted[..., 0].astype(int) + 3)
        assert score(tinted, "a red circle").value > value


def test_filling_the_whole_image_is_no_square():
    full = np.zeros((64, 64, 3), np.uint8)
    full[:] = (255, 0, 0)
    result = score(full, "a red square")
    assert result.details["color"] == 1.0
    assert result.details["shape"] == 0.0


def test_an_oblong_a_hole_and_clutter_lower_the_shape_part():
    oblong = np.full((64, 64, 3), 230, np.uint8)
    oblong[24:40, 8:56] = (255, 0, 0)
    assert score(oblong, "a red square").details["shape"] < 0.1
    ring = cv2.circle(draw("red", "circle"), (32, 32), 15, (230, 230, 230), cv2.FILLED)
    assert 0.2 < score(ring, "a red circle").details["shape"] < 0.7
    two = cv2.circle(np.full((64, 64, 3), 230, np.uint8), (16, 32), 12, (255, 0, 0), cv2.FILLED)
    two = cv2.circle(two, (48, 32), 12, (255, 0, 0), cv2.FILLED)
    assert 0.4 < score(two, "a red circle").details["shape"] < 0.6


def test_a_turned_square_is_a_square():
    image = np.full((64, 64, 3), 230, np.uint8)
    corners = cv2.boxPoints(((32, 32), (28, 28), 30)).round().astype(np.int32)
    assert score(cv2.fillPoly(image, [corners], (0, 0, 255)), "a blue square").value >= 0.95


def test_parameters_come_before_metadata_and_metadata_before_the_prompt():
    image = draw("green", "triangle")
    assert score(image, "a red circle", {"color": "green", "shape": "triangle"}).value >= 0.95
    assert score(image, "a red circle", {"color": "blue"}, color="green", shape="triangle").value >= 0.95
    assert score(image, "A GREEN, triangle!").value >= 0.95


def test_weights_choose_between_the_parts():
    image = draw("red", "square")
    assert score(image, "a red circle", color_weight=1, shape_weight=0).value == 1.0
    assert score(image, "a red circle", color_weight=0, shape_weight=2).value < 0.1
    both_zero = score(image, "a red circle", color_weight=0, shape_weight=0)
    assert isinstance(both_zero, InvalidArgument)
    assert "both 0" in both_zero.message


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("a circle", {}, ["no supported color", "magenta", "red"]),
        ("a red dog", {}, ["no supported shape", "circle", "triangle"]),
        ("a red circle", {"color": "beige"}, ["'beige'", "orange"]),
    ],
)
def test_an_unknown_target_is_an_error_that_lists_what_is_supported(prompt, params, words):
    error = score(draw("red", "circle"), prompt, **params)
    assert isinstance(error, InvalidArgument)
    assert error.reason == "REWARD_TARGET_UNKNOWN"
    assert all(word in error.message for word in words), error.message


def test_golden_images_score_as_recorded():
    reward = ColorShapeReward()
    golden = reward.golden_images()
    check = checks.compare(reward.name, golden, [score(g.image_HWC, g.prompt) for g in golden])
    assert check.passed, check.detail
    assert check.image_count == 5
