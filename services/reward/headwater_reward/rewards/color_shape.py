"""`color_shape`: does the image show the named shape in the named colour? Computed with OpenCV, no model.

score = (color_weight * color + shape_weight * shape) / (color_weight + shape_weight), all parts in [0, 1].

- color is dense: pixels score 1 up to a small colour difference from the target, then fall linearly with CIELAB
  distance; the part is the mean over the closest tenth of the pixels. Noise scores between 0 and 1, and moving any of
  those pixels towards the target raises it.
- shape fits the largest region of the target colour: its area relative to the smallest enclosing circle, square or
  triangle, rescaled so that a perfect other shape gives 0; times how well the region alone explains the mask (holes and
  clutter lower it), times whether it has a sensible size.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import cv2
import numpy as np
from pydantic import Field

from headwater.errors import HeadwaterError, InvalidArgument
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem
from headwater_reward.rewards import palette

SHAPES = ("circle", "square", "triangle")
SHAPE_SYNONYMS: Mapping[str, str] = {"disc": "circle", "disk": "circle", "dot": "circle"}
WORK_SIDE_PX = 128  # larger images are shrunk to this: the score does not need more
NEAREST_SHARE = 0.1
FULL_SCORE_DISTANCE = 10.0
ZERO_SCORE_DISTANCE = 200.0
MASK_DISTANCE = 60.0
MIN_AREA, MAX_AREA = 0.02, 0.9  # share of the image
# Area of the best other shape relative to the smallest enclosing one (in the limit of a perfect square in a circle,
# circle in a square, circle in a triangle): the zero of the fit. Its one is below 1, since pixels have corners.
ZERO_FIT: Mapping[str, float] = {"circle": 0.637, "square": 0.785, "triangle": 0.605}
FULL_FIT = 0.92


class ColorShapeParams(RewardParams):
    """Parameters of `color_shape`. Weights are relative."""

    color: str = ""  # empty: metadata "color", else the first colour the prompt names
    shape: str = ""  # empty: metadata "shape", else the first shape the prompt names
    color_weight: float = Field(0.5, ge=0, allow_inf_nan=False)
    shape_weight: float = Field(0.5, ge=0, allow_inf_nan=False)


class ColorShapeReward:
    """Coloured shapes, verified by colour distance and contour features."""

    name: ClassVar[str] = "color_shape"
    description: ClassVar[str] = (
        "How well the image shows the named shape (circle, square, triangle) in the named color."
    )
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = 1.0
    accepts_video: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("cv2",)
    params_model: ClassVar[type[RewardParams]] = ColorShapeParams

    def load(self, threads: int) -> None:
        """Nothing to load; OpenCV is told to stay on `threads` threads."""
        cv2.setNumThreads(threads)

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """Scores in [0, 1] with details `color` and `shape`."""
        return [_score_or_error(item) for item in batch]

    def golden_images(self) -> list[GoldenImage]:
        """A right image, a wrong colour, a wrong shape, and an empty one."""
        return [
            GoldenImage("red circle", draw("red", "circle"), "a red circle", 1.0),
            GoldenImage("blue triangle", draw("blue", "triangle"), "a blue triangle", 1.0),
            GoldenImage("blue circle for red", draw("blue", "circle"), "a red circle", 0.294),
            GoldenImage("red square for circle", draw("red", "square"), "a red circle", 0.5),
            GoldenImage("nothing", np.zeros((64, 64, 3), np.uint8), "a white square", 0.263),
        ]


def _score_or_error(item: ScoreItem) -> Score | HeadwaterError:
    params = item.params
    assert isinstance(params, ColorShapeParams)
    try:
        color, shape = target(item.prompt, item.metadata, params)
    except InvalidArgument as error:
        return error
    total_weight = params.color_weight + params.shape_weight
    if total_weight == 0:
        return InvalidArgument(
            "color_weight and shape_weight are both 0; make one positive", field="params", reason="REWARD_PARAM_INVALID"
        )
    lab_HWC = palette.to_lab(_shrink(item.frames_FHWC[0]))
    parts = {"color": color_part(lab_HWC, color), "shape": shape_part(lab_HWC, color, shape)}
    value = (params.color_weight * parts["color"] + params.shape_weight * parts["shape"]) / total_weight
    return Score(value, parts)


def target(prompt: str, metadata: Mapping[str, Any], params: ColorShapeParams) -> tuple[str, str]:
    """(color, shape) from the parameters, else the metadata, else the prompt. Raises `InvalidArgument`."""
    colors = {name: name for name in palette.PALETTE} | dict(palette.SYNONYMS)
    shapes = {name: name for name in SHAPES} | dict(SHAPE_SYNONYMS)
    color = _choose("color", params.color or metadata.get("color"), prompt, colors)
    return color, _choose("shape", params.shape or metadata.get("shape"), prompt, shapes)


def _choose(what: str, given: Any, prompt: str, names: Mapping[str, str]) -> str:
    words = [str(given).strip().lower()] if given else re.findall(r"[a-z]+", prompt.lower())
    for word in words:
        if word in names:
            return names[word]
    found = f"{what} {given!r} is not supported" if given else f"prompt {prompt!r} names no supported {what}"
    raise InvalidArgument(
        f"{found}; supported: {', '.join(sorted(names))}. Name one in the prompt, in its metadata or in params.{what}",
        field=f"params.{what}" if given else "prompt",
        reason="REWARD_TARGET_UNKNOWN",
    )


def color_part(lab_HWC: np.ndarray, color: str) -> float:
    """Mean closeness to `color`, in [0, 1], of the closest tenth of the pixels."""
    reach = ZERO_SCORE_DISTANCE - FULL_SCORE_DISTANCE
    closeness = np.clip((ZERO_SCORE_DISTANCE - palette.distance(lab_HWC, color)) / reach, 0.0, 1.0).ravel()
    count = max(1, round(closeness.size * NEAREST_SHARE))
    return float(np.partition(closeness, closeness.size - count)[-count:].mean())


def shape_part(lab_HWC: np.ndarray, color: str, shape: str) -> float:
    """How well the largest region of `color` is a `shape`, in [0, 1]."""
    mask = color_mask(lab_HWC, color)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    if not contours:
        return 0.0
    largest = max(contours, key=cv2.contourArea)
    region = cv2.drawContours(np.zeros_like(mask), [largest], -1, 1, cv2.FILLED)
    alone = np.count_nonzero(mask & region) / np.count_nonzero(mask | region)
    area = np.count_nonzero(region) / region.size
    size = min(1.0, area / MIN_AREA) * float(np.clip((1.0 - area) / (1.0 - MAX_AREA), 0.0, 1.0))
    fit = (enclosing_fit(largest, shape) - ZERO_FIT[shape]) / (FULL_FIT - ZERO_FIT[shape])
    return float(np.clip(fit, 0.0, 1.0) * alone * size)


def color_mask(lab_HWC: np.ndarray, color: str) -> np.ndarray:
    """Pixels uint8 [H, W] in {0, 1} that are near `color` and nearer to it than to any other named colour."""
    others = np.min([palette.distance(lab_HWC, name) for name in palette.PALETTE if name != color], axis=0)
    own = palette.distance(lab_HWC, color)
    return ((own <= MASK_DISTANCE) & (own < others)).astype(np.uint8)


def enclosing_fit(contour: np.ndarray, shape: str) -> float:
    """Area of a contour relative to the smallest circle, square or triangle around it; 0 for a degenerate one."""
    area = cv2.contourArea(contour)
    if shape == "circle":
        enclosing = np.pi * cv2.minEnclosingCircle(contour)[1] ** 2
    elif shape == "square":
        enclosing = max(cv2.minAreaRect(contour)[1]) ** 2
    else:
        enclosing = cv2.minEnclosingTriangle(contour)[0] if area > 0 else 0.0
    return area / enclosing if enclosing > 0 else 0.0


def _shrink(image_HWC: np.ndarray) -> np.ndarray:
    height, width = image_HWC.shape[:2]
    scale = WORK_SIDE_PX / max(height, width)
    if scale >= 1:
        return image_HWC
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return cv2.resize(image_HWC, size, interpolation=cv2.INTER_AREA)


def draw(color: str, shape: str, side_px: int = 64, background: tuple[int, int, int] = (230, 230, 230)) -> np.ndarray:
    """An image uint8 [side, side, 3], RGB, of the shape in the pure colour, centred."""
    image = np.full((side_px, side_px, 3), background, np.uint8)
    rgb, middle, radius = palette.PALETTE[color][0], side_px // 2, side_px // 3
    if shape == "circle":
        return cv2.circle(image, (middle, middle), radius, rgb, cv2.FILLED)
    if shape == "square":
        low, high = middle - radius, middle + radius
        return cv2.rectangle(image, (low, low), (high, high), rgb, cv2.FILLED)
    corners = [(middle, middle - radius), (middle - radius, middle + radius), (middle + radius, middle + radius)]
    return cv2.fillPoly(image, [np.array(corners)], rgb)
