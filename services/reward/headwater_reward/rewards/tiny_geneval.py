"""`tiny-geneval`: does the image show the objects, colours, count and positions that the prompt asks for? OpenCV only.

What is asked comes from the prompt's metadata, in the form of `headwater.synthetic`, else from its words. Up to four
requirements are checked, in the spirit of GenEval (arXiv 2310.11513), each in [0, 1] and 1 exactly when it holds:

- object: each object asked for is there in its shape. Objects asked for are matched one to one with objects found.
- color: each of them has its colour (only when the prompt names colours).
- count: there are as many objects as asked for, and no others.
- relation: the first lies left of, right of, above or below the second (only when the prompt says so; GenEval's rule).

mode "strict": 1 if all hold, else 0. mode "partial": their mean, where what does not hold (per object for shape and
colour) counts at most `FAILED_SHARE` times how close it is, so that 1 still means that everything is right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import cv2
import numpy as np

from headwater.errors import HeadwaterError, InvalidArgument
from headwater.synthetic import Placed, Requirements, Scene, Wanted, draw, parse
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem
from headwater_reward.rewards.shape_finder import Found, find

FAILED_SHARE = 0.8
SHAPE_ZERO, SHAPE_MIN = 0.5, 0.82  # overlap with the shape: from where it counts, and what makes it one
MIN_LEAD, LEAD_RANGE = 0.02, 0.15  # how far it must lie above every other shape's, and for closeness
COLOR_MAX, COLOR_ZERO = 40.0, 140.0  # CIELAB distance of an accepted colour, and from where closeness is 0
NEAR_SHARE, MIN_COSINE = 0.1, 0.5  # GenEval's rule of positions: free share of the sizes, smallest part of the way


class TinyGenevalParams(RewardParams):
    """Parameters of `tiny-geneval`."""

    mode: Literal["strict", "partial"] = "strict"  # partial: to train on


class TinyGenevalReward:
    """Coloured shapes, their number and their positions, as asked."""

    name: ClassVar[str] = "tiny-geneval"
    description: ClassVar[str] = "Whether the image shows the shapes, colors, count and positions that the prompt asks."
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = 1.0
    accepts_video: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("cv2",)
    params_model: ClassVar[type[RewardParams]] = TinyGenevalParams

    def load(self, threads: int) -> None:
        """Nothing to load; OpenCV is told to stay on `threads` threads."""
        cv2.setNumThreads(threads)

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """Scores in [0, 1]. Details: each requirement; `correct`, the strict score, also as `tag_<prompt's tag>`."""
        return [_score_or_error(item) for item in batch]

    def golden_images(self) -> list[GoldenImage]:
        """One right image per tag, and what is wrong in shape, colour, number or position."""
        return golden_images()


def requirements(prompt: str, metadata: Mapping[str, Any]) -> Requirements:
    """What is asked for. Raises `InvalidArgument` when it cannot be verified here."""
    field = "metadata" if "objects" in metadata or "text" in metadata else "prompt"
    try:
        wanted = Requirements.from_metadata(metadata) if field == "metadata" else parse(prompt)
    except ValueError as error:
        raise InvalidArgument(f"tiny-geneval: {error}", field=field, reason="PROMPT_NOT_VERIFIABLE") from None
    if wanted.text:
        raise InvalidArgument(
            f"prompt {prompt!r} asks for text, which tiny-geneval does not read; score it with the reward 'ocr'",
            field=field,
            reason="PROMPT_NEEDS_OCR",
        )
    return wanted


def evaluate(image_HWC: np.ndarray, wanted: Requirements) -> dict[str, float]:
    """Each requirement that applies, in [0, 1]; 1 exactly when it holds. `image_HWC` is RGB uint8 [H, W, 3]."""
    found, found_count = find(image_HWC)
    slots = [one for one in wanted.objects for _ in range(one.count)]
    matched = _match(slots, found)
    parts = {"object": _mean([_shape(slot, one) for slot, one in zip(slots, matched, strict=True)])}
    if colored := [_color(slot, one) for slot, one in zip(slots, matched, strict=True) if slot.color]:
        parts["color"] = _mean(colored)
    parts["count"] = _part(found_count == len(slots), 1 - abs(found_count - len(slots)) / len(slots))
    if wanted.relation:
        parts["relation"] = _relation(wanted.relation, matched[0], matched[-1])
    return parts


def _score_or_error(item: ScoreItem) -> Score | HeadwaterError:
    params = item.params
    assert isinstance(params, TinyGenevalParams)
    try:
        wanted = requirements(item.prompt, item.metadata)
    except InvalidArgument as error:
        return error
    parts = evaluate(item.frames_FHWC[0], wanted)
    correct = float(all(value == 1.0 for value in parts.values()))
    value = correct if params.mode == "strict" else _mean(list(parts.values()))
    return Score(value, parts | {"correct": correct, f"tag_{wanted.tag}": correct})


def _match(slots: Sequence[Wanted], found: Sequence[Found]) -> list[Found | None]:
    """One object, or none, for each slot: the best pair first."""
    credits = [
        (_shape(slot, one) + (_color(slot, one) if slot.color else 0.5), -s, -f)
        for s, slot in enumerate(slots)
        for f, one in enumerate(found)
    ]
    matched: dict[int, int] = {}
    for _, s, f in sorted(credits, reverse=True):
        if -s not in matched and -f not in matched.values():
            matched[-s] = -f
    return [found[matched[s]] if s in matched else None for s in range(len(slots))]


def _shape(slot: Wanted, one: Found | None) -> float:
    if one is None:
        return 0.0
    own = one.likeness[slot.shape]
    lead = own - max(value for shape, value in one.likeness.items() if shape != slot.shape)
    closeness = _ramp(own, SHAPE_ZERO, SHAPE_MIN) * _ramp(lead, -LEAD_RANGE, LEAD_RANGE)
    return _part(own >= SHAPE_MIN and lead >= MIN_LEAD, closeness)


def _color(slot: Wanted, one: Found | None) -> float:
    if one is None or slot.color is None:
        return 0.0
    distance = one.color_distance[slot.color]
    return _part(one.color == slot.color and distance <= COLOR_MAX, _ramp(-distance, -COLOR_ZERO, -COLOR_MAX))


def _relation(relation: str, first: Found | None, second: Found | None) -> float:
    """GenEval: the way between the centres, less a share of the sizes, must point mostly in the direction."""
    if first is None or second is None:
        return 0.0
    dx = _shorten(first.x - second.x, NEAR_SHARE * (first.width + second.width))
    dy = _shorten(first.y - second.y, NEAR_SHARE * (first.height + second.height))
    way = {"left_of": -dx, "right_of": dx, "above": -dy, "below": dy}[relation]
    length = float(np.hypot(dx, dy))
    cosine = way / length if length > 0 else 0.0
    return _part(cosine > MIN_COSINE, (cosine + 1) / (MIN_COSINE + 1))


def _shorten(way: float, by: float) -> float:
    return float(np.sign(way)) * max(0.0, abs(way) - by)


def _part(holds: bool, closeness: float) -> float:
    return 1.0 if holds else FAILED_SHARE * max(0.0, closeness)


def _ramp(value: float, zero: float, one: float) -> float:
    """0 up to `zero`, 1 from `one`, linear between."""
    return min(1.0, max(0.0, (value - zero) / (one - zero)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def golden_images() -> list[GoldenImage]:
    """Drawn scenes with their prompts."""
    left, right = (0.27, 0.5, 0.19), (0.73, 0.5, 0.19)
    star, one = [("star", "yellow", 0.5, 0.5, 0.3)], [("circle", "red", 0.5, 0.5, 0.3)]
    two = [("triangle", "green", *left), ("square", "blue", *right)]
    three = [("square", "pink", x, y, 0.16) for x, y in ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75))]
    partial = {"mode": "partial"}
    return [
        _golden("a star", star, "black", 1.0),
        _golden("a triangle and a square", two, "white", 1.0),
        _golden("three pink squares", three, "dark gray", 1.0),
        _golden("a red circle", one, "light gradient", 1.0),
        _golden("a green triangle left of a blue square", two, "cream", 1.0),
        _golden("a blue square and a green triangle", two, "navy", 1.0),
        _golden("a red square", one, "white", 0.0),
        _golden("a blue circle", one, "white", 0.0),
        _golden("two pink squares", three, "white", 0.0),
        _golden("a green triangle right of a blue square", two, "white", 0.0),
        _golden("three pink squares", three, "white", 1.0, partial),
        _golden("four pink squares", three, "white", 0.7, partial),
        _golden("a green triangle right of a blue square", two, "white", 0.75, partial),
        _golden("a red circle", [], "white", 0.0, partial),
    ]


def _golden(
    prompt: str, objects: Sequence[tuple[str, str, float, float, float]], background: str, score: float,
    params: Mapping[str, Any] | None = None,
) -> GoldenImage:  # fmt: skip
    scene = Scene(parse(prompt), tuple(Placed(*o) for o in objects), background)
    name = f"{len(objects)} objects on {background} for {prompt!r}{' (partial)' if params else ''}"
    return GoldenImage(name, np.asarray(draw(scene)), prompt, score, params=params or {})
