"""Random scenes, each a function of (seed, split, index)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.synthetic import split as splits
from headwater.synthetic.captions import caption
from headwater.synthetic.drawing import draw
from headwater.synthetic.scene import (
    BACKGROUNDS,
    COLORS,
    MAX_COUNT,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    TAGS,
    Placed,
    Requirements,
    Scene,
    Wanted,
)  # fmt: skip
from headwater.synthetic.words import WORDS

NAMES_BACKGROUND = 0.25  # share of the captions that name the background; those of colourless prompts more often
MARGIN = 0.05  # free share of the side at the image's edge
HALF_GAP = 0.04  # objects keep at least twice this share of the side between them


@dataclass(frozen=True)
class Sample:
    """A picture, uint8 [H, W, 3] RGB, its caption and what the caption asks for (see `Requirements.to_metadata`)."""

    image_HWC: np.ndarray
    caption: str
    metadata: dict[str, Any]


def sample(seed: int, index: int, split: str = "train", *, size_px: int = 64, tags: Sequence[str] = TAGS) -> Sample:
    """Sample `index` of the endless data set `seed`; equal arguments give equal samples.

    Raises ValueError for an unknown split or tag.
    """
    scene, text = _scene_and_caption(seed, index, split, tags)
    return Sample(np.array(draw(scene, size_px)), text, scene.requirements.to_metadata())


def prompt(seed: int, index: int, split: str, tags: Sequence[str] = TAGS) -> tuple[str, dict[str, Any]]:
    """Caption and metadata of `sample` without its picture."""
    scene, text = _scene_and_caption(seed, index, split, tags)
    return text, scene.requirements.to_metadata()


def random_scene(rng: random.Random, split: str, tags: Sequence[str] = TAGS) -> Scene:
    """A scene of the split; every tag is equally likely."""
    tag = rng.choice(tags)
    while True:
        scene = _propose(rng, tag, split)
        if splits.is_for(split, scene):
            return scene


def _scene_and_caption(seed: int, index: int, split: str, tags: Sequence[str]) -> tuple[Scene, str]:
    if split not in splits.SPLITS:
        raise ValueError(f"split is {split!r}; supported: {', '.join(splits.SPLITS)}")
    if not tags or set(tags) - set(TAGS):
        raise ValueError(f"tags are {tuple(tags)!r}; supported: {', '.join(TAGS)}")
    rng = random.Random(f"{seed}/{split}/{index}")
    scene = random_scene(rng, split, tags)
    return scene, caption(scene, rng)


def _propose(rng: random.Random, tag: str, split: str) -> Scene:
    background = rng.choice(_BACKGROUNDS)
    if tag == "text":
        text = rng.choice(WORDS) if rng.random() < 0.6 else str(rng.randrange(10, rng.choice((100, 100, 1000))))
        x, y = rng.uniform(0.48, 0.52), rng.uniform(0.42, 0.58)
        return Scene(
            Requirements(tag, text=text), (), background, rng.random() < NAMES_BACKGROUND, rng.uniform(0.8, 1.0), x, y
        )
    colorless = tag in ("single_object", "two_object")
    names_background = rng.random() < (0.75 if colorless else NAMES_BACKGROUND) or (colorless and split == "eval")
    if tag == "counting":
        shape, color, count = rng.choice(SHAPES), rng.choice(_COLORS), rng.randint(2, MAX_COUNT)
        wanted = Requirements(tag, (Wanted(shape, color, count),))
        return Scene(wanted, _place_many(rng, shape, color, count), background, names_background)
    placed = _place(rng, tag)
    objects = tuple(Wanted(p.shape, None if colorless else p.color) for p in placed)
    relation = splits.seen_relation(placed[0], placed[1]) if tag == "position" else None
    return Scene(Requirements(tag, objects, relation), placed, background, names_background)


def _place(rng: random.Random, tag: str) -> tuple[Placed, ...]:
    if tag in ("single_object", "colors"):
        return (_place_one(rng),)
    return _place_two(rng, same_shape=tag != "two_object" and rng.random() < 0.25)


def _place_one(rng: random.Random) -> Placed:
    radius = rng.uniform(0.18, 0.36)
    x, y = (_between(rng, MARGIN + radius, 1 - MARGIN - radius) for _ in range(2))
    return Placed(rng.choice(SHAPES), rng.choice(_COLORS), x, y, radius)


def _place_two(rng: random.Random, *, same_shape: bool) -> tuple[Placed, Placed]:
    """Two objects that differ in shape, or else in colour, one on each side of the middle."""
    shapes = [rng.choice(SHAPES)] * 2 if same_shape else rng.sample(SHAPES, 2)
    colors = rng.sample(_COLORS, 2) if same_shape else rng.choices(_COLORS, k=2)
    relation = rng.choice(RELATIONS)
    placed = []
    for shape, color, side in zip(shapes, colors, (relation, OPPOSITE[relation]), strict=True):
        radius = rng.uniform(0.16, 0.2)
        along = _between(rng, MARGIN + radius, 0.5 - HALF_GAP - radius)
        along = along if side in ("left_of", "above") else 1 - along
        across = rng.uniform(0.43, 0.57)
        x, y = (along, across) if side in ("left_of", "right_of") else (across, along)
        placed.append(Placed(shape, color, x, y, radius))
    return placed[0], placed[1]


def _place_many(rng: random.Random, shape: str, color: str, count: int) -> tuple[Placed, ...]:
    """Equal objects in different quarters of the picture."""
    radius = rng.uniform(0.155, 0.19)
    placed = []
    for quarter in rng.sample(range(4), count):
        x, y = (_between(rng, MARGIN + radius, 0.5 - HALF_GAP - radius) for _ in range(2))
        placed.append(Placed(shape, color, x + 0.5 * (quarter % 2), y + 0.5 * (quarter // 2), radius))
    return tuple(placed)


def _between(rng: random.Random, low: float, high: float) -> float:
    return rng.uniform(low, high) if low < high else (low + high) / 2


_COLORS, _BACKGROUNDS = tuple(COLORS), tuple(BACKGROUNDS)
