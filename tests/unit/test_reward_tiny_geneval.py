"""The tiny-geneval reward on drawings, on damaged ones, on wrong ones and on near misses."""

import importlib.util
import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
from headwater_reward import checks, registry
from headwater_reward.registry import ScoreItem
from headwater_reward.rewards.ocr import OcrReward
from headwater_reward.rewards.tiny_geneval import TinyGenevalParams, TinyGenevalReward

from headwater.errors import InvalidArgument
from headwater.synthetic import Placed, Scene, draw, parse, sample
from headwater.synthetic.scene import COLORS, SHAPE_TAGS, SHAPES

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tiny_geneval_calibration.py"


def score(image_HWC, prompt, metadata=None, **params):
    item = ScoreItem(image_HWC[np.newaxis], prompt, metadata or {}, TinyGenevalParams(**params))
    return TinyGenevalReward().score([item])[0]


def picture(*objects, background="white", size_px=64):
    """Objects are (shape, color, x, y, radius)."""
    placed = tuple(Placed(*one) for one in objects)
    return np.array(draw(Scene(parse("a circle"), placed, background), size_px))


def blank():
    return np.full((64, 64, 3), 255, np.uint8)


@pytest.fixture(scope="module")
def calibration():
    spec = importlib.util.spec_from_file_location("tiny_geneval_calibration", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure(count=150, seed=7, damages=("drawn", "blur 1.0"))


def test_true_drawings_are_accepted(calibration):
    for damage, least in (("drawn", 0.99), ("blur 1.0", 0.98)):
        by_tag = calibration["accepts"][damage]
        assert set(by_tag) == set(SHAPE_TAGS)
        for tag, (share, number) in by_tag.items():
            assert share >= least, (damage, tag, share)
            assert number > 15


def test_wrong_drawings_are_rejected(calibration):
    for damage, by_what in calibration["rejects"].items():
        assert set(by_what) == {"color", "count", "one more", "position", "shape", "swapped colors"}
        for what, (share, _) in by_what.items():
            assert share >= 0.99, (damage, what, share)


def test_every_shape_in_every_colour_at_every_size():
    for size_px in (32, 64, 256):
        for color in COLORS:
            for shape in SHAPES:
                image = picture((shape, color, 0.45, 0.55, 0.3), background="dark gray", size_px=size_px)
                assert score(image, f"a {color} {shape}").value == 1.0, (size_px, color, shape)


def test_a_wide_image_is_judged_like_a_square_one():
    image = np.hstack([picture(("star", "red", 0.5, 0.5, 0.3)), picture(("square", "blue", 0.5, 0.5, 0.3))])
    assert score(image, "a red star left of a blue square").value == 1.0
    assert score(image, "a red star").value == 0.0


def test_partial_is_one_exactly_when_strict_is_one_and_grades_the_rest():
    for index in range(60):
        pair, other = (sample(9, k, tags=SHAPE_TAGS) for k in (index, index + 1))
        for image in (pair.image_HWC, other.image_HWC):
            strict = score(image, pair.caption)
            partial = score(image, pair.caption, mode="partial")
            assert (partial.value == 1.0) == (strict.value == 1.0)
            assert 0 <= partial.value <= 1
            assert partial.details == strict.details


def test_partial_credit_rises_with_every_requirement():
    prompt = "a red circle left of a blue square"
    circle, square = ("circle", "red", 0.27, 0.5, 0.18), ("square", "blue", 0.73, 0.5, 0.18)
    images = [
        blank(),
        picture(("star", "green", 0.27, 0.5, 0.18)),
        picture(circle),
        picture(("circle", "red", 0.73, 0.5, 0.18), ("star", "green", 0.27, 0.5, 0.18)),
        picture(("circle", "red", 0.73, 0.5, 0.18), ("square", "green", 0.27, 0.5, 0.18)),
        picture(("circle", "red", 0.73, 0.5, 0.18), ("square", "blue", 0.27, 0.5, 0.18)),
        picture(circle, square),
    ]
    values = [score(image, prompt, mode="partial").value for image in images]
    assert values[0] == 0.0
    assert values[-1] == 1.0
    assert all(low < high for low, high in itertools.pairwise(values)), values


def test_partial_credit_is_smooth_in_position_and_colour():
    def with_square_at(y):
        return picture(("circle", "red", 0.3, 0.3, 0.15), ("square", "blue", 0.3 + (0.7 - y), y, 0.15))

    prompt = "a red circle above a blue square"
    values = [score(with_square_at(y), prompt, mode="partial").value for y in (0.3, 0.4, 0.5, 0.7)]
    assert values[0] < values[1] < values[2] <= values[3] == 1.0
    mixes = [(np.array(COLORS["red"]) * t + np.array(COLORS["blue"]) * (1 - t)).astype(int) for t in (0, 0.3, 0.6, 1)]
    discs = [cv2.circle(blank(), (32, 32), 15, tuple(mix.tolist()), cv2.FILLED) for mix in mixes]
    values = [score(disc, "a red circle", mode="partial").value for disc in discs]
    assert values[0] < values[1] < values[2] < values[3] == 1.0


def near_misses():
    red = COLORS["red"]
    yield "ring", cv2.circle(blank(), (32, 32), 16, red, 6, cv2.LINE_AA), "a red circle"
    yield "oval", cv2.ellipse(blank(), (32, 32), (22, 15), 0, 0, 360, red, cv2.FILLED, cv2.LINE_AA), "a red circle"
    yield "half disc", cv2.ellipse(blank(), (32, 36), (16, 16), 0, 180, 360, red, -1, cv2.LINE_AA), "a red circle"
    yield "bar", cv2.rectangle(blank(), (12, 22), (52, 42), red, cv2.FILLED), "a red square"
    diamond = np.array([(32, 10), (54, 32), (32, 54), (10, 32)])
    yield "diamond", cv2.fillPoly(blank(), [diamond], red, cv2.LINE_AA), "a red square"
    yield "upside down", picture(("triangle", "red", 0.5, 0.5, 0.3))[::-1].copy(), "a red triangle"
    cross = cv2.rectangle(cv2.rectangle(blank(), (26, 10), (38, 54), red, -1), (10, 26), (54, 38), red, -1)
    yield "cross", cross, "a red star"
    two_tone = picture(("circle", "red", 0.5, 0.5, 0.3))
    two_tone[:, 32:] = picture(("circle", "blue", 0.5, 0.5, 0.3))[:, 32:]
    yield "half of another colour", two_tone, "a red circle"
    striped = picture(("circle", "red", 0.5, 0.5, 0.3))
    for column in range(0, 64, 5):
        striped[:, column : column + 2] = picture(("circle", "blue", 0.5, 0.5, 0.3))[:, column : column + 2]
    yield "striped", striped, "a red circle"
    touching = cv2.circle(cv2.circle(blank(), (20, 32), 12, red, -1), (43, 32), 12, red, -1)
    yield "two that touch", touching, "a red circle"
    yield "everything red", np.full((64, 64, 3), red, np.uint8), "a red square"
    yield "gray", cv2.circle(blank(), (32, 32), 16, (128, 128, 128), -1), "a circle and a square"
    yield "noise", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "a red circle"


@pytest.mark.parametrize(("image", "prompt"), [pytest.param(*rest, id=name) for name, *rest in near_misses()])
def test_near_misses_are_rejected(image, prompt):
    result = score(image, prompt)
    assert result.value == 0.0, result
    assert score(image, prompt, mode="partial").value < 0.95


def test_objects_of_different_colours_may_touch():
    for background in ("white", "navy"):
        image = picture(("circle", "red", 0.3, 0.5, 0.2), ("square", "blue", 0.65, 0.5, 0.2), background=background)
        assert score(image, "a red circle left of a blue square").value == 1.0
        image = picture(
            ("triangle", "yellow", 0.5, 0.3, 0.2), ("star", "purple", 0.5, 0.65, 0.2), background=background
        )
        assert score(image, "a yellow triangle above a purple star").value == 1.0


def test_more_objects_than_asked_for_are_wrong_but_specks_are_not():
    image = picture(("circle", "red", 0.3, 0.3, 0.2))
    assert score(image, "a red circle").value == 1.0
    speck = cv2.circle(image.copy(), (50, 50), 1, COLORS["blue"], cv2.FILLED)
    assert score(speck, "a red circle").value == 1.0
    extra = cv2.circle(image.copy(), (50, 50), 6, COLORS["blue"], cv2.FILLED)
    assert score(extra, "a red circle").details["count"] == 0.0
    assert score(extra, "a red circle").value == 0.0


def test_objects_near_the_edge_do_not_disturb_the_background():
    image = picture(("square", "blue", 0.18, 0.5, 0.2), ("star", "yellow", 0.7, 0.5, 0.2), background="dark gradient")
    assert score(image, "a blue square left of a yellow star").value == 1.0


def test_details_hold_what_an_aggregator_needs():
    image = picture(("star", "cyan", 0.5, 0.5, 0.3))
    right, wrong = (score(image, f"a {color} star", mode="partial") for color in ("cyan", "red"))
    assert right.details == {"object": 1.0, "color": 1.0, "count": 1.0, "correct": 1.0, "tag_colors": 1.0}
    assert set(wrong.details) == set(right.details)
    assert wrong.details["tag_colors"] == wrong.details["correct"] == 0.0


def test_metadata_comes_before_the_words_of_the_prompt():
    image = picture(*[("square", "pink", x, 0.5, 0.15) for x in (0.2, 0.5, 0.8)])
    metadata = {"tag": "counting", "objects": [{"shape": "square", "color": "pink", "count": 3.0}]}
    assert score(image, "a red circle", metadata).value == 1.0
    assert score(image, "three pink squares", {"note": "not ours"}).value == 1.0


@pytest.mark.parametrize(
    ("prompt", "metadata", "reason", "words"),
    [
        ('a sign with the word "HI"', {}, "PROMPT_NEEDS_OCR", "reward 'ocr'"),
        ("a sign", {"tag": "text", "text": "HI"}, "PROMPT_NEEDS_OCR", "reward 'ocr'"),
        ("a red dog", {}, "PROMPT_NOT_VERIFIABLE", "names no shape"),
        ("x", {"tag": "colors", "objects": [{"shape": "cube"}]}, "PROMPT_NOT_VERIFIABLE", "'cube'"),
    ],
)
def test_what_cannot_be_verified_is_an_error_never_zero(prompt, metadata, reason, words):
    error = score(blank(), prompt, metadata)
    assert isinstance(error, InvalidArgument)
    assert error.reason == reason
    assert words in error.message


def test_golden_images_score_as_recorded():
    (reward,) = registry.create(["tiny-geneval"])
    golden = reward.golden_images()
    check = checks.compare(reward.name, golden, [score(g.image_HWC, g.prompt, **g.params) for g in golden])
    assert check.passed, check.detail
    assert check.image_count >= 10


def test_drawn_words_can_be_read_by_the_ocr_reward():
    reward = OcrReward()
    reward.load(1)
    pairs = [sample(4, index, tags=("text",)) for index in range(6)]
    for pair in pairs:
        read = reward.recognise(pair.image_HWC, 0.5)
        assert read.lower() == pair.metadata["text"].lower()
