"""The ocr reward with the real RapidOCR models."""

from pathlib import Path

import numpy as np
import pytest
from headwater_reward import checks
from headwater_reward.registry import ScoreItem
from headwater_reward.rewards import ocr
from PIL import Image, ImageDraw, ImageFont

from headwater.errors import FailedPrecondition, InvalidArgument


@pytest.fixture(scope="module")
def reward():
    reward = ocr.OcrReward()
    reward.load(threads=1)
    return reward


def picture(*lines, size_px=256, background="white", ink="black"):
    image = Image.new("RGB", (size_px, size_px), background)
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((16, 40 + 80 * i), line, fill=ink, font=ImageFont.load_default(size=44))
    return np.asarray(image)


def score(reward, image, prompt, **params):
    return reward.score([ScoreItem(image[np.newaxis], prompt, {}, ocr.OcrParams(**params))])[0]


def test_readable_text_scores_one_whatever_its_case_and_lines(reward):
    assert score(reward, picture("Hello"), 'a sign that says "HELLO"').value == 1.0
    assert score(reward, picture("OPEN", "LATE"), 'a sign that says "Open Late"').value == 1.0
    assert score(reward, picture("Hello", background="navy", ink="yellow"), 'neon "hello"').value == 1.0


def test_a_misspelt_word_gets_partial_credit(reward):
    assert score(reward, picture("HELPO"), 'a sign that says "HELLO"').value == pytest.approx(0.8)


def test_an_image_without_text_scores_zero_and_is_no_error(reward):
    result = score(reward, np.full((64, 64, 3), 200, np.uint8), 'a sign that says "HELLO"')
    assert result.value == 0.0
    assert result.details == {"characters_read": 0.0}


@pytest.mark.parametrize("prompt", ["a sign", 'a sign "open', 'a sign " "'])
def test_a_prompt_without_quoted_text_is_an_error_with_a_remedy(reward, prompt):
    error = score(reward, picture("Hello"), prompt)
    assert isinstance(error, InvalidArgument)
    assert error.reason == "PROMPT_WITHOUT_TEXT"
    assert "quote" in error.message


def test_the_text_may_come_as_a_parameter(reward):
    assert score(reward, picture("Hello"), "a sign", text="hello").value == 1.0


def test_golden_images_score_as_recorded(reward):
    golden = reward.golden_images()
    check = checks.compare(reward.name, golden, [score(reward, g.image_HWC, g.prompt) for g in golden])
    assert check.passed, check.detail
    assert check.image_count == 3


def test_missing_models_are_reported_instead_of_downloaded(tmp_path: Path):
    with pytest.raises(FailedPrecondition, match="det model is missing"):
        ocr._check_models(tmp_path)
